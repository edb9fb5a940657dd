"""Sliding windows that keep what leaves them, so that all tokens' keys and values can be stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from .. import quirks
from ..caches.dynamic import GrowingSlidingWindowLayer, grows_in_place
from ..caches.growing import GrowableTensor


class RecordingWindow(GrowingSlidingWindowLayer):
    """``keys`` and ``values`` hold all tokens; ``update`` returns those that the new ones may see."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        return self._record(self._keys, key_states), self._record(self._values, value_states)

    def _record(self, states: GrowableTensor, new: Tensor) -> Tensor:
        if grows_in_place(new):
            states.append(new, self._growth.spare)
        else:
            states.assign(torch.cat([states.view, new], dim=-2))  # type: ignore[list-item]
        full: Any = states.view
        return full[:, :, -(self.sliding_window - 1 + new.shape[-2]) :]

    def crop(self, tokens_to_remove: int) -> None:
        DynamicLayer.crop(self, tokens_to_remove)
        self.cumulative_length = self.keys.shape[-2] if self.is_initialized else 0


def attention_layers(cache: Any) -> list[Any]:
    """The layers that hold keys and values; those that share others' hold none."""
    return [layer for layer in cache.layers if not isinstance(layer, quirks.EMPTY_LAYERS)]


def start(cache: Any) -> None:
    """Let the windows of ``cache`` record from now on."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is GrowingSlidingWindowLayer:
            cache.layers[index] = _as(RecordingWindow, layer)


def stop(cache: Any) -> None:
    """Let the windows of ``cache`` be as if they had never recorded."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is not RecordingWindow:
            continue
        cache.layers[index] = window = _as(GrowingSlidingWindowLayer, layer)
        if window.is_initialized and (n_before := window.sliding_window - 1):
            spare = window._growth.behind_window(n_before)
            window._keys.keep_last(n_before, spare)
            window._values.keep_last(n_before, spare)


def _as(kind: Any, layer: Any) -> Any:
    twin = kind.__new__(kind)
    vars(twin).update(vars(layer))
    return twin
