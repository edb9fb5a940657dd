"""Sliding windows that keep all tokens during a call, so that their states can be stored."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import DynamicLayer

from ... import families
from ...memory.caches.dynamic import GrowingCache, GrowingSlidingWindowLayer
from .radix import KeyValues


class RecordingWindow(GrowingSlidingWindowLayer):
    """``keys`` and ``values`` hold all tokens, also after ``crop``, which upstream's cuts to a window."""

    def crop(self, tokens_to_remove: int) -> None:
        DynamicLayer.crop(self, tokens_to_remove)
        self.cumulative_length = self.keys.shape[-2] if self.is_initialized else 0


def attention_layers(cache: Any) -> list[Any]:
    """The layers that hold keys and values; those that share others' hold none."""
    return [layer for layer in cache.layers if not isinstance(layer, families.EMPTY_LAYERS)]


def key_values(layers: list[Any]) -> KeyValues:
    """Keys and values of each layer in turn, ``(rows, heads, length, size)``."""
    return tuple(states for layer in layers for states in (layer.keys, layer.values))


def recording_cache(model: Any, max_length: int) -> GrowingCache:
    """An empty cache for up to ``max_length`` tokens whose windows keep all tokens."""
    cache = GrowingCache(config=model.config.get_text_config(decoder=True), max_length=max_length)
    start(cache)
    return cache


def start(cache: Any) -> None:
    """Make the windows of ``cache`` keep all tokens, from now on."""
    for layer in cache.layers:
        if type(layer) is GrowingSlidingWindowLayer:
            layer.__class__ = RecordingWindow
            layer.activate_past_recording()


def stop(cache: Any) -> None:
    """Cut the windows of ``cache`` to the tokens that they would hold without ``start``."""
    for layer in cache.layers:
        if type(layer) is not RecordingWindow:
            continue
        layer.__class__, layer.record_past = GrowingSlidingWindowLayer, False
        if layer.is_initialized and (n_before := layer.sliding_window - 1):
            for states in (layer._keys, layer._values):
                states.keep_last(n_before, layer._growth.behind_window(n_before))
