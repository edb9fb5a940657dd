"""The rows of a cache: how many there are, and how they are repeated, chosen and reordered.

A cache is any ``Cache`` of full or sliding attention, of an encoder-decoder also both of its parts.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import EncoderDecoderCache, StaticCache
from transformers.cache_utils import Cache, StaticLayer

from .dynamic import GrowingLayer


def decoder_cache(cache: Any) -> Any:
    """The part that grows: of an encoder-decoder's cache, that of self-attention."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def count(cache: Any) -> int | None:
    """How many sequences a cache holds; ``None`` if it is empty or does not say."""
    for layer in getattr(decoder_cache(cache), "layers", ()):
        keys = getattr(layer, "keys", None)
        if keys is not None and keys.ndim == 4 and keys.numel() > 0:
            return int(keys.shape[0])
    return None


def fit(cache: Cache, batch_size: int, wanted: int, will_fan_out: bool) -> Cache:
    """The caller's cache, for the ``wanted`` rows that ``batch_size`` prompts are expanded to.

    Expanded caches are copies: the caller's stays as it is. If the call fans out after its prefill,
    the copy is expanded then. A static cache that was emptied by ``reset()`` takes any number of
    rows again. Raises ``ValueError`` for another number of rows.
    """
    rows = count(cache)
    if rows is None or rows == wanted:
        return cache
    if isinstance(cache, StaticCache) and int(cache.get_seq_length()) == 0:
        for layer in cache.layers:
            layer.is_initialized = False  # allocated anew by the next update
        return cache
    if rows == batch_size and hasattr(cache, "batch_repeat_interleave"):
        cache = copy.deepcopy(cache)
        if not will_fan_out:
            take(cache, torch.arange(rows).repeat_interleave(wanted // batch_size))
        return cache
    raise ValueError(
        f"`past_key_values` holds {rows} sequences, but the call has {batch_size} prompts"
        + (f", expanded to {wanted} rows." if wanted != batch_size else ".")
    )


def take(cache: Any, rows: torch.Tensor) -> None:
    """Let row ``i`` become what row ``rows[i]`` was: ``rows (wanted,)``, more or fewer than before."""
    if isinstance(cache, EncoderDecoderCache):
        take(cache.self_attention_cache, rows)
        take(cache.cross_attention_cache, rows)
        return
    for layer in cache.layers:
        if getattr(layer, "is_initialized", True):
            layer.reorder_cache(rows)
        if isinstance(layer, StaticLayer) and layer.is_initialized:
            layer.batch_size = len(rows)


def repeat(cache: Any, rows: torch.Tensor) -> None:
    """``take`` for ``rows`` that repeat each prompt, which their rows then share."""
    take(cache, rows)
    for layer in decoder_cache(cache).layers:
        if isinstance(layer, GrowingLayer):
            layer.share_prompt()


def reorder_beams(cache: Any, rows: torch.Tensor, is_encoder_decoder: bool) -> None:
    """Let row ``i`` of a repeated cache go on as row ``rows[i]``, which is of the same prompt.

    What its rows share stays where it is: the prompt's part, and what comes from an encoder. (A
    decoder-only model may have cross-attention too, BLT's grows.)
    """
    layers = list(decoder_cache(cache).layers)
    if isinstance(cache, EncoderDecoderCache) and not is_encoder_decoder:
        layers += cache.cross_attention_cache.layers
    for layer in layers:
        if isinstance(layer, GrowingLayer):
            layer.reorder_beams(rows)
        else:
            layer.reorder_cache(rows)
