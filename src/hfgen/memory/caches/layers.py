"""Operations on the layers of a cache: one function per operation, for every class of layer.

A cache is any ``Cache``; of an encoder-decoder's, the functions act on the decoder's part unless they
say otherwise. What layers of no ``KNOWN`` kind do to rows and tokens is not guessed: see ``check_rolls_back``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicLayer, EncoderDecoderCache, StaticLayer
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    StaticSlidingWindowLayer,
)

from ... import families
from .dynamic import KINDS, UPSTREAM_KINDS, GrowingLayer, upstream_kind
from .static_layers import SlicedStaticLayer

#: The base classes of layers whose operations are known.
KNOWN = (DynamicLayer, StaticLayer, LinearAttentionCacheLayerMixin, *families.EMPTY_LAYERS)


def decoder_cache(cache: Any) -> Any:
    """The part that grows: of an encoder-decoder's cache, that of self-attention."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def parts_of(cache: Any) -> list[Any]:
    """The caches that have rows: of an encoder-decoder's, those of self-attention and of the encoder."""
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def layers_of(cache: Any) -> list[Any]:
    """The decoder's layers; none for ``None`` and for caches that are no ``Cache``."""
    return getattr(decoder_cache(cache), "layers", [])


# ---------------------------------------------------------------- which layers


def counts_tokens(cache: Any) -> bool:
    """Whether a cache tells how many tokens it has seen; recurrent states alone do not."""
    layers = getattr(decoder_cache(cache), "layers", None)
    return layers is None or not all(
        isinstance(layer, LinearAttentionCacheLayerMixin) and not isinstance(layer, CacheLayerMixin)
        for layer in layers
    )


def is_foreign(cache: Any) -> bool:
    """Whether the cache, or a layer of it, is of a class outside of transformers' caches and hfgen."""
    decoder = decoder_cache(cache)
    return any(is_foreign_part(part) for part in (decoder, *decoder.layers))


def is_foreign_part(part: Any) -> bool:
    """``is_foreign`` of a cache by itself, or of one layer."""
    module = type(part).__module__
    return module != Cache.__module__ and not module.startswith("hfgen.")


def is_offloading(cache: Any) -> bool:
    """Whether a part moves its layers between devices by itself, with a stream that cannot be copied."""
    return any(getattr(part, "offloading", False) for part in parts_of(cache))


def is_static(cache: Any) -> bool:
    """Whether some layers have a fixed number of rows and tokens."""
    return any(isinstance(layer, StaticLayer) for layer in layers_of(cache))


def check_rolls_back(cache: Any) -> None:
    """Raise ``ValueError`` for layers of an unknown kind, which cannot be told to ``roll_back``."""
    for layer in layers_of(cache):
        if not isinstance(layer, KNOWN):
            raise ValueError(
                f"It is not known how to take tokens back out of a {type(layer).__name__}, a layer of "
                f"{type(decoder_cache(cache)).__name__}. Derive it from transformers' DynamicLayer or "
                "StaticLayer, or register the cache in `hfgen.memory.caches.CACHES` as a CacheKind that "
                "declares what it can."
            )


# ---------------------------------------------------------------- lengths


def capacity(cache: Any) -> float:
    """How many tokens a row of a static cache holds; infinity for caches that grow."""
    whole = [e for e in layers_of(cache) if isinstance(e, StaticLayer) and not e.is_sliding]
    return min((layer.max_cache_len for layer in whole), default=math.inf)


def windows(cache: Any) -> list[float | None] | None:
    """How many keys a position sees in each attention layer; ``None`` if static, or another layer's."""
    if is_static(cache):
        return None
    return [
        None if layer.keys is None else getattr(layer, "sliding_window", None) or math.inf
        for layer in layers_of(cache)
        if hasattr(layer, "keys")  # a convolution alone has none
    ]


def keeps_all_tokens(cache: Any) -> bool:
    """Whether any number of tokens can be taken back: layers of full attention only."""
    layers = getattr(decoder_cache(cache), "layers", [None])
    return all(upstream_kind(layer) is DynamicLayer for layer in layers)


def newest_column(layer: Any) -> Tensor | None:
    """Where in its keys a layer has the token that was forwarded last ``(1,)``; ``None`` if not known."""
    kind = upstream_kind(layer)
    if kind in (DynamicLayer, DynamicSlidingWindowLayer) and layer.get_seq_length() > 0:
        return torch.full((1,), layer.keys.shape[-2] - 1, device=layer.keys.device)
    if kind is StaticLayer and layer.is_initialized:
        return layer.cumulative_length.view(1) - 1
    return None


# ---------------------------------------------------------------- rows


def count(cache: Any) -> int | None:
    """How many sequences a cache holds; ``None`` if it is empty or does not say."""
    for layer in layers_of(cache):
        keys = getattr(layer, "keys", None)
        if keys is not None and keys.ndim == 4 and keys.numel() > 0:
            return int(keys.shape[0])
    return None


def take(cache: Any, rows: Tensor) -> None:
    """Row ``i`` becomes old row ``rows[i]``, in both parts; there may be more or fewer rows."""
    for layer in (layer for part in parts_of(cache) for layer in part.layers):
        if getattr(layer, "is_initialized", True):
            layer.reorder_cache(rows)
        if isinstance(layer, StaticLayer) and layer.is_initialized:
            layer.batch_size = len(rows)


def repeat(cache: Any, rows: Tensor) -> None:
    """``take`` where ``rows`` repeats each prompt; the rows of a prompt then share its tokens."""
    take(cache, rows)
    for layer in layers_of(cache):
        if isinstance(layer, GrowingLayer):
            for states in (layer._keys, layer._values):
                states.shared = layer.get_seq_length() and states.view.shape[-2]


def reorder_beams(cache: Any, rows: Tensor, is_encoder_decoder: bool) -> None:
    """Row ``i`` becomes old row ``rows[i]`` of the same prompt; what its rows share stays."""
    layers = layers_of(cache)
    if isinstance(cache, EncoderDecoderCache) and not is_encoder_decoder:  # BLT: it grows too
        layers = [*layers, *cache.cross_attention_cache.layers]
    for layer in layers:
        if isinstance(layer, GrowingLayer):
            layer.reorder_beams(rows)
        else:
            layer.reorder_cache(rows)


# ---------------------------------------------------------------- taking tokens back


def record_past(cache: Any) -> None:
    """Make windows and convolutions keep what ``roll_back`` needs, from now on."""
    cache.activate_past_recording()
    for layer in layers_of(cache):
        if isinstance(layer, StaticSlidingWindowLayer) and not _recorder(layer):
            layer.update = _Recorder(layer)


@contextmanager
def recording(cache: Any) -> Iterator[None]:
    """``record_past`` within the block; static windows stop recording at its end."""
    record_past(cache)
    try:
        yield
    finally:
        for layer in layers_of(cache):
            if _recorder(layer):
                del layer.update


def n_keys(cache: Any) -> list[int]:
    """How many tokens each layer holds keys of; 0 if it is empty, or drops or rewrites keys by itself."""
    return [
        layer.keys.shape[-2]
        if UPSTREAM_KINDS.get(kind := type(layer), kind) in KINDS
        and layer.is_initialized
        and (not layer.is_sliding or layer.record_past)
        else 0
        for layer in layers_of(cache)
    ]


def check_growth(cache: Any, before: Sequence[int], n_tokens: int, model: Any) -> None:
    """Raise ``ValueError`` if a layer lacks keys of the ``n_tokens`` forwarded since ``n_keys`` was ``before``.

    Layers of the ``model`` that hold images do not grow.
    """
    after = n_keys(cache)
    if len(set(after)) == 1 and after == [old + n_tokens for old in before]:  # most steps
        return
    layers, of_images = layers_of(cache), families.layers_of_images(model)
    first: Any = next((layer for layer in layers if isinstance(layer, DynamicLayer)), None)
    for index, (old, new) in enumerate(zip(before, after, strict=False)):
        is_short = 0 < new < old + n_tokens
        is_uneven = 0 < old < new and layers[index].get_seq_length() != first.get_seq_length()
        if (is_short or is_uneven) and index not in of_images:
            raise ValueError(
                f"Layer {index} of the cache had keys of {old} tokens, was fed {n_tokens}, and has {new}"
                + (", another number than the first" if is_uneven else "")
                + ": code outside of hfgen, such as a forward hook, drops keys. Drafts and candidates cannot "
                "be taken back out of such a cache: decode without them."
            )


def roll_back(cache: Any, n_tokens: int, of_images: Sequence[int] = ()) -> None:
    """Remove the last ``n_tokens`` of every row; layers ``of_images``, which do not grow, stay."""
    cache = decoder_cache(cache)
    if not hasattr(cache, "layers"):
        cache.crop(-n_tokens)
        return
    lengths = [layer.get_seq_length() for layer in cache.layers if isinstance(layer, DynamicLayer)]
    for index, layer in enumerate(cache.layers):
        if index in of_images:
            continue
        if isinstance(layer, StaticLayer):
            _roll_back_static(layer, n_tokens)
        # A dynamic layer of another length is empty, or has keys of an image, which do not grow.
        elif not isinstance(layer, DynamicLayer) or (
            layer.is_initialized and layer.get_seq_length() == lengths[0]
        ):
            layer.crop(-n_tokens)


def _roll_back_static(layer: StaticLayer, n_tokens: int) -> None:
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        layer.crop(-n_tokens)
    if not n_tokens or not layer.is_initialized:
        return
    if recorder := _recorder(layer):
        recorder.take_back(n_tokens)
    elif isinstance(layer, SlicedStaticLayer):
        layer.take_back(n_tokens)
    else:  # what lies behind the length is overwritten
        layer.cumulative_length.sub_(n_tokens)
        if getattr(layer, "is_indexer_initialized", False):
            layer.indexer_cumulative_length.sub_(n_tokens)


def _recorder(layer: Any) -> _Recorder | None:
    update = vars(layer).get("update")
    return update if isinstance(update, _Recorder) else None


class _Recorder:
    """``update`` of one static sliding window; ``take_back`` undoes a part of the last call."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        #: Copies of the window and its length, the length, and what the last update added.
        self.before: Any = None

    def __call__(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer, length = self.layer, self.layer.cumulative_length_int
        window = ("keys", "values") if layer.is_initialized and length else ()
        copies = {name: getattr(layer, name).clone() for name in (*window, "cumulative_length")}
        self.before = (copies, length, key_states, value_states)
        return type(layer).update(layer, key_states, value_states, *args, **kwargs)

    def take_back(self, n_tokens: int) -> None:
        if self.before is None:
            return
        layer = self.layer
        copies, layer.cumulative_length_int, key_states, value_states = self.before
        for name, copied in copies.items():
            getattr(layer, name).copy_(copied)
        n_kept = key_states.shape[-2] - n_tokens
        if n_kept > 0:
            type(layer).update(layer, key_states[:, :, :n_kept], value_states[:, :, :n_kept])
        self.before = None
