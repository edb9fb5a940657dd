"""A cache of the caller's, ``past_key_values``: fitted to the call, or refused before the first forward."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import StaticCache
from transformers.cache_utils import Cache

from . import layers
from .dynamic import GrowingCache


def fit_rows(cache: Cache, batch_size: int, wanted: int, will_fan_out: bool) -> Cache:
    """The caller's cache, for the ``wanted`` rows that ``batch_size`` prompts are expanded to.

    Expanded caches are copies: the caller's stays as it is. If the call fans out after its prefill,
    the copy is expanded then. A static cache that was emptied by ``reset()`` takes any number of
    rows again. Raises ``ValueError`` for another number of rows.
    """
    rows = layers.count(cache)
    if rows is None or rows == wanted:
        return cache
    if isinstance(cache, StaticCache) and int(cache.get_seq_length()) == 0:
        layers.empty_rows(cache)
        return cache
    if rows == batch_size and hasattr(cache, "batch_repeat_interleave"):
        cache = copy.deepcopy(cache)
        if not will_fan_out:
            layers.take(cache, torch.arange(rows).repeat_interleave(wanted // batch_size))
        return cache
    raise ValueError(
        f"`past_key_values` holds {rows} sequences, but the call has {batch_size} prompts"
        + (f", expanded to {wanted} rows." if wanted != batch_size else ".")
    )


def expect(cache: Any, max_length: int) -> None:
    """Tell a cache that grows in place how far this call may go."""
    cache = layers.decoder_cache(cache)
    if isinstance(cache, GrowingCache):
        cache.expect(max_length)


def check_room(cache: Any, max_length: int, ids_length: int, may_end_early: bool) -> None:
    """Raise ``ValueError`` if a static cache is certainly shorter than the call gets.

    ``max_length`` counts the ``ids_length`` tokens that were passed, which may be new ones only. A
    call that ``may_end_early`` has to fit with its prompt alone.
    """
    held = layers.capacity(cache)
    past = int(cache.get_seq_length()) if held < float("inf") else 0
    before = past if ids_length <= past else 0
    longest, shortest = before + max_length, before + (ids_length if may_end_early else max_length)
    if held < shortest:
        raise ValueError(
            f"`past_key_values` is a static cache of {held} tokens, but the call needs "
            f"{shortest}"
            + (f", and may reach {longest}" if longest > shortest else "")
            + ". Make it "
            f"with `max_cache_len={longest}`, or lower `max_new_tokens`."
        )
