"""The dynamic cache: like transformers', but its layers grow in place.

Upstream copies the whole cache to append a token. Here a layer writes the token into the spare
capacity of a buffer and returns a view of the filled part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, cache_utils

from .growing import GrowableTensor, GrowthPolicy


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """What the factory of a cache is told about the call."""

    model: Any
    config: GenerationConfig
    model_kwargs: dict[str, Any]
    rows: int  # sequences that the cache will hold
    max_length: int  # tokens per sequence, at most

    @property
    def decoder_config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)


def _growing(name: str) -> Any:
    """An attribute that is the view of the ``GrowableTensor`` behind it."""
    hidden = f"_{name}"
    return property(
        lambda layer: vars(layer)[hidden].view,
        lambda layer, value: vars(layer)[hidden].assign(value),
    )


def grows_in_place(keys: Tensor, values: Tensor) -> bool:
    """Whether these may be written into buffers: not with gradients, subclasses, or tracers."""
    # Gradients need the tensors of earlier steps unchanged; the others know only upstream's operations.
    is_recorded = torch.is_grad_enabled() or torch.compiler.is_compiling()
    return type(keys) is type(values) is Tensor and not is_recorded


#: Which of upstream's classes a layer of hfgen's stands for.
UPSTREAM_KINDS: dict[type, type] = {}


def stands_for(upstream: type) -> Callable[[type], Any]:
    """Register a layer for a class of upstream's, and give it the name, by which some code asks."""

    def register(kind: type) -> type:
        UPSTREAM_KINDS[kind] = upstream
        kind.__name__ = upstream.__name__
        return kind

    return register


def upstream_kind(layer: Any) -> type:
    """The class of upstream's that a layer is one of, or stands for."""
    return UPSTREAM_KINDS.get(type(layer), type(layer))


class TakesRows:
    """The methods of a layer that choose rows, by one ``_take(rows)`` of its keys and values."""

    keys: Any
    get_seq_length: Callable[[], int]
    _take: Callable[[Tensor], None]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``i`` becomes old row ``beam_idx[i]``; there may be more or fewer rows than before."""
        if self.get_seq_length() > 0:
            self._take(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.get_seq_length() > 0:
            self._take(torch.arange(len(self.keys)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the rows ``indices``: numbers or a mask."""
        if self.get_seq_length() > 0:
            device = getattr(indices, "device", None)
            self._take(torch.arange(len(self.keys), device=device)[indices])


@stands_for(cache_utils.DynamicLayer)
class GrowingLayer(TakesRows, cache_utils.DynamicLayer):
    """Full attention: ``keys (rows, heads, length, size)``, ``values`` alike; sizes may differ."""

    keys: Any = _growing("keys")
    values: Any = _growing("values")
    #: What grows, by the names of the attributes that hold it.
    _names: tuple[str, ...] = ("_keys", "_values")

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        layer = super().__new__(cls)
        layer._growth = GrowthPolicy()
        for name in cls._names:
            setattr(layer, name, GrowableTensor())
        return layer

    def __copy__(self) -> Any:
        twin = type(self).__new__(type(self))
        for name, value in vars(self).items():
            vars(twin)[name] = value.__copy__() if isinstance(value, GrowableTensor) else value
        return twin

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The keys and values of all tokens so far, with those of the new ones."""
        if not grows_in_place(key_states, value_states):
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        spare = self._growth.spare
        return self._keys.append(key_states, spare), self._values.append(value_states, spare)

    def prepare(self, n: int) -> None:
        """Make the room that ``reserve(n)`` returns."""
        for name in ("_keys", "_values"):
            vars(self)[name].prepare(n, self._growth.spare)

    def reserve(self, n: int) -> tuple[Tensor, Tensor, int]:
        """Room for ``n`` more tokens, which the caller writes: keys, values, and where in them it begins."""
        start, spare = self._keys.view.shape[-2], self._growth.spare
        return self._keys.reserve(n, spare), self._values.reserve(n, spare), start

    def reorder_beams(self, rows: Tensor) -> None:
        """``reorder_cache`` within the rows of a prompt: only the part that they do not share moves."""
        if self.get_seq_length() > 0:
            for name in self._names:
                vars(self)[name].reorder_beams(rows)

    def _take(self, rows: Tensor) -> None:
        self._keys.take(rows)
        self._values.take(rows)


@stands_for(cache_utils.DynamicSlidingWindowLayer)
class GrowingSlidingWindowLayer(cache_utils.DynamicSlidingWindowLayer, GrowingLayer):
    """Sliding-window and chunked attention: the last ``sliding_window - 1`` tokens are kept."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The keys and values that the new tokens may see, and theirs."""
        if not grows_in_place(key_states, value_states):
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        return self._slide(self._keys, key_states), self._slide(self._values, value_states)

    def _slide(self, states: GrowableTensor, new: Tensor) -> Tensor:
        n_before = self.sliding_window - 1
        if self.record_past:
            return states.append(new, self._growth.spare)[:, :, -(n_before + new.shape[-2]) :]
        full = states.append(new, self._spare)
        # A window of one token keeps them all, as upstream's does.
        states.keep_last(n_before or full.shape[-2], self._growth.behind_window(n_before))
        return full

    def _spare(self, length: int) -> int:
        """Spare tokens behind ``length`` tokens, of which no more than a window will be kept."""
        n_before = self.sliding_window - 1
        most = n_before + self._growth.behind_window(n_before)
        return min(self._growth.spare(length), max(most - length, 0))


@stands_for(cache_utils.DynamicIndexedLayer)
class GrowingIndexedLayer(cache_utils.DynamicIndexedLayer, GrowingLayer):
    """Full attention with an indexer's keys ``(rows, length, size)`` besides."""

    indexer_keys: Any = _growing("indexer_keys")
    _names = ("_keys", "_values", "_indexer_keys")

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """The indexer's keys of all tokens so far, with those of the new ones."""
        if not grows_in_place(indexer_key_states, indexer_key_states):
            return super().update_indexer(indexer_key_states)
        if not self.is_indexer_initialized:
            self.lazy_initialization_indexer(indexer_key_states)
        return self._indexer_keys.append(indexer_key_states, self._growth.spare)


class _WithLinearStates:
    """States of linear attention, which do not grow, beside a layer that does."""

    def reorder_cache(self: Any, beam_idx: Tensor) -> None:
        cache_utils.LinearAttentionLayer.reorder_cache(self, beam_idx)
        GrowingLayer.reorder_cache(self, beam_idx)

    def reorder_beams(self: Any, rows: Tensor) -> None:
        cache_utils.LinearAttentionLayer.reorder_cache(self, rows)
        GrowingLayer.reorder_beams(self, rows)


@stands_for(cache_utils.LinearAttentionAndFullAttentionLayer)
class GrowingHybridLayer(
    _WithLinearStates, cache_utils.LinearAttentionAndFullAttentionLayer, GrowingLayer
):
    """Full attention beside linear attention."""


@stands_for(cache_utils.LinearAttentionAndSlidingWindowAttentionLayer)
class GrowingHybridSlidingLayer(
    _WithLinearStates,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
    GrowingSlidingWindowLayer,
):
    """Sliding-window attention beside linear attention."""


#: Which layer stands for which of upstream's; other kinds, models' own among them, stay.
KINDS = {upstream: kind for kind, upstream in UPSTREAM_KINDS.items()}


def replaced_method() -> str | None:
    """The name of a method of transformers' layers that a library has replaced, and that is to be called."""
    for kind in KINDS:
        for name in ("update", "reorder_cache"):
            if getattr(getattr(kind, name), "__globals__", None) is not vars(cache_utils):
                return f"{kind.__name__}.{name}"
    return None


def as_growing(layer: Any, growth: GrowthPolicy) -> Any:
    """The layer, with its states, as one that grows in place, if there is such a kind."""
    kind: Any = KINDS.get(type(layer))
    if kind is None:
        return layer
    twin = kind.__new__(kind)
    twin._growth = growth
    for name, value in vars(layer).items():
        if value is not None or not isinstance(getattr(kind, name, None), property):
            setattr(twin, name, value)
    return twin


class GrowingCache(DynamicCache):
    """``DynamicCache`` of layers that grow in place; upstream's, unchanged, if ``offloading`` or patched.

    ``max_length``: tokens at the end of the call; buffers get no capacity beyond it.
    """

    layers: list[Any]
    layer_class_to_replicate: Any

    def __init__(self, *args: Any, max_length: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._growth = growth = GrowthPolicy(max_length=max_length)
        if self.offloading or replaced_method() is not None:
            return
        growth.n_tensors = 2 * len(self.layers) or growth.n_tensors
        self.layers = list(map(partial(as_growing, growth=growth), self.layers))
        if self.layer_class_to_replicate is not None:
            self.layer_class_to_replicate = partial(as_growing, cache_utils.DynamicLayer(), growth)

    def expect(self, max_length: int) -> None:
        """From now on, buffers get capacity for a call that ends with ``max_length`` tokens."""
        self._growth.max_length = max_length


# Code that asks for a cache by its name finds upstream's.
GrowingCache.__name__ = DynamicCache.__name__
