"""Taking tokens back out of a cache: what was drafted and not accepted."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers.cache_utils import (
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    StaticIndexedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .rows import decoder_cache
from .static_layers import FilledLayer


def record_past(cache: Any) -> None:
    """Let ``cache`` keep what ``roll_back`` needs, from now on.

    Sliding windows forget what leaves them, and convolutions what they have mixed in, unless told
    to keep it until they are rolled back.
    """
    cache.activate_past_recording()
    cache = decoder_cache(cache)
    layers = getattr(cache, "layers", [])
    for index, layer in enumerate(layers):
        if isinstance(layer, StaticSlidingWindowLayer) and not isinstance(layer, _Recording):
            layers[index] = _recording(layer)


def roll_back(cache: Any, n_tokens: int) -> None:
    """Take the last ``n_tokens`` of every row out, and forget what was recorded before them."""
    cache = decoder_cache(cache)
    if not hasattr(cache, "layers"):
        cache.crop(-n_tokens)
        return
    lengths = [layer.get_seq_length() for layer in cache.layers if isinstance(layer, DynamicLayer)]
    for layer in cache.layers:
        if isinstance(layer, StaticLayer):
            _roll_back_static(layer, n_tokens)
        elif not isinstance(layer, DynamicLayer) or layer.get_seq_length() == lengths[0]:
            layer.crop(-n_tokens)  # other lengths: keys of an image, which does not grow


def _roll_back_static(layer: StaticLayer, n_tokens: int) -> None:
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        layer.crop(-n_tokens)
    if isinstance(layer, _Recording) or (
        isinstance(layer, FilledLayer) and layer.is_initialized and n_tokens
    ):
        layer.take_back(n_tokens)
    elif layer.is_initialized and n_tokens:  # what lies after the length is overwritten
        layer.cumulative_length.sub_(n_tokens)
        if isinstance(layer, StaticIndexedLayer) and layer.is_indexer_initialized:
            layer.indexer_cumulative_length.sub_(n_tokens)


def windows(cache: Any) -> list[float] | None:
    """How many keys each layer lets a position attend to, itself included; ``None`` if static."""
    cache = decoder_cache(cache)
    layers = getattr(cache, "layers", [])
    if any(isinstance(layer, StaticLayer) for layer in layers):
        return None
    return [getattr(layer, "sliding_window", None) or math.inf for layer in layers]


class _Recording:
    """A static sliding-window layer that can take tokens of its last update back.

    ``before``: window, its length, and the update ``(keys, values)``; ``None`` if there is none.
    """

    def update(
        self: Any, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        window = None
        if self.is_initialized and self.cumulative_length_int:
            window = (self.keys.clone(), self.values.clone())
        lengths = (self.cumulative_length.clone(), self.cumulative_length_int)
        self.before = (window, lengths, key_states, value_states)
        return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]

    def take_back(self: Any, n_tokens: int) -> None:
        if self.before is None or not n_tokens:
            return
        window, (length, length_int), key_states, value_states = self.before
        if window is not None:
            self.keys.copy_(window[0])
            self.values.copy_(window[1])
        self.cumulative_length.copy_(length)
        self.cumulative_length_int = length_int
        kept = key_states.shape[-2] - n_tokens
        if kept > 0:
            super().update(key_states[:, :, :kept], value_states[:, :, :kept])  # type: ignore[misc]
        self.before = None


def _recording(layer: StaticSlidingWindowLayer) -> Any:
    """The layer, with its states, as one that records."""
    kind = type(layer)
    recording_kind: Any = type(kind.__name__, (_Recording, kind), {})
    recording = recording_kind.__new__(recording_kind)
    recording.__dict__.update(layer.__dict__, before=None)
    return recording
