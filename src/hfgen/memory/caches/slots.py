"""How the rows of one layer join, leave and lose columns, for each class of layer.

Of a layer of transformers' kinds, ``STATES`` lists what it keeps of a row. A layer of another class has
the methods of ``Slots``.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from ... import families
from ..buffers import moved
from .dynamic import KINDS, GrowingLayer, upstream_kind
from .growing import GrowableTensor, is_nothing, padded

#: The kinds of layers whose rows join and leave. A subclass of them may have more states than ``STATES``.
DECLARED = (*KINDS, LinearAttentionLayer, *families.EMPTY_LAYERS)


class Slots(Protocol):
    """The methods of a custom layer whose rows join and leave.

    It may also have ``form_of_rows() -> dict``: what it has to have in common with ``other``, such as
    sizes and dtypes. Layers that differ in it are refused.
    """

    def join_rows(self, other: Any) -> None:
        """Append the rows of ``other``, a layer of the same class, which stays as it is.

        All rows end in the same column; shorter rows have zeros before them, which masks hide.
        """

    def leave_row(self, row: int) -> None:
        """Remove ``row``: the last row takes its place."""

    def trim_tokens(self, n_tokens: int) -> None:
        """Drop the first ``n_tokens`` columns: lengths are those of a shorter batch from then on."""

    def bytes_of_row(self, n_tokens: int) -> int:
        """Bytes that one row of ``n_tokens`` takes."""


METHODS = ("join_rows", "leave_row", "trim_tokens", "bytes_of_row")


@dataclass(frozen=True, slots=True)
class Dims:
    """The dimension of the rows, and that of the tokens: ``None`` for a state of all tokens at once."""

    rows: int
    tokens: int | None


#: What a layer keeps of a row, by the name of the attribute: a tensor, or a dict of tensors.
STATES = {
    "keys": Dims(0, -2),
    "values": Dims(0, -2),
    "indexer_keys": Dims(0, -2),
    "indexer_position_ids": Dims(1, -1),
    "conv_states": Dims(0, -1),  # an earlier token is zero where there is none
    "recurrent_states": Dims(0, None),
}


class State:
    """One tensor of a layer: the attribute ``name``, or item ``index`` of it if it is a dict."""

    __slots__ = ("dims", "growable", "index", "layer", "name")

    def __init__(self, layer: Any, name: str, index: int | None) -> None:
        self.layer, self.name, self.index, self.dims = layer, name, index, STATES[name]
        growable = vars(layer).get(f"_{name}")
        #: The storage of the tensor, if it grows in place.
        self.growable = growable if isinstance(growable, GrowableTensor) else None

    @property
    def tensor(self) -> Tensor:
        held: Any = getattr(self.layer, self.name)
        return held if self.index is None else held[self.index]

    @tensor.setter
    def tensor(self, value: Tensor) -> None:
        if self.index is None:
            setattr(self.layer, self.name, value)
        else:
            getattr(self.layer, self.name)[self.index] = value

    def take(self, index: Tensor) -> None:
        """Row ``i`` becomes old row ``index[i]``: ``index (wanted,)``."""
        tensor = self.tensor
        self.tensor = tensor.index_select(self.dims.rows, index.to(tensor.device))


def states_of(layer: Any) -> list[State]:
    """The states that a layer of transformers' kinds holds."""
    states = []
    for name in STATES:
        held = getattr(layer, name, None)
        tensors = held if isinstance(held, dict) else {None: held}
        for index, tensor in tensors.items():
            if tensor is not None and not is_nothing(tensor):
                states.append(State(layer, name, index))
    return states


def has_methods(layer: Any) -> bool:
    """Whether the layer has the methods of ``Slots``."""
    return all(callable(getattr(layer, name, None)) for name in METHODS)


def is_declared(layer: Any) -> bool:
    """Whether it is known how rows join the layer and leave it."""
    return has_methods(layer) or upstream_kind(layer) in DECLARED


def form(layer: Any) -> dict[str, Any]:
    """What two layers have to have in common: sizes that are neither rows nor tokens."""
    if hasattr(layer, "form_of_rows"):
        return dict(layer.form_of_rows())
    if has_methods(layer):
        return {}
    common: dict[str, Any] = {"window": getattr(layer, "sliding_window", None)}
    for state in states_of(layer):
        tensor, dims = state.tensor, state.dims
        free = {dims.rows, range(tensor.ndim)[dims.tokens or dims.rows]}
        sizes = [size for dim, size in enumerate(tensor.shape) if dim not in free]
        name = state.name if state.index is None else f"{state.name}[{state.index}]"
        common[name] = (*sizes, tensor.dtype)
    return common


def join(layer: Any, other: Any) -> None:
    """Append the rows of ``other``, whose ``form`` is the same."""
    if has_methods(layer):
        layer.join_rows(other)
        return
    has_keys = isinstance(layer, DynamicLayer) and layer.is_initialized
    longest = max(layer.get_seq_length(), other.get_seq_length()) if has_keys else 0
    n_kept = min(longest, getattr(layer, "sliding_window", longest + 1) - 1) or longest
    for added in states_of(other):
        state = State(layer, added.name, added.index)
        if state.growable is not None:
            # A window that records what leaves it holds more than it shows.
            state.growable.drop_first(state.growable.view.shape[-2] - n_kept)
            state.growable.join(added.tensor[..., -n_kept:, :], _spare(layer))
            continue
        both = [state.tensor, added.tensor.to(state.tensor.device)]
        if (dim := state.dims.tokens) is not None:
            length = max(tensor.shape[dim] for tensor in both)
            both = [padded(tensor, dim, length) for tensor in both]
        state.tensor = torch.cat(both, state.dims.rows)
    if has_keys and isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = longest


def leave(layer: Any, row: int) -> None:
    """Remove ``row``: the last row of ``layer`` takes its place."""
    if has_methods(layer):
        layer.leave_row(row)
        return
    for state in states_of(layer):
        if state.growable is not None:
            state.growable.leave(row)
        else:
            last = state.tensor.shape[state.dims.rows] - 1
            state.take(moved(row, last, state.tensor.device))


def extract(layer: Any, index: Tensor) -> Any:
    """A layer of the rows ``index (wanted,)`` alone, which shares no memory with ``layer``."""
    if has_methods(layer):
        twin = copy.deepcopy(layer)
        twin.reorder_cache(index)
        return twin
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):  # of tensors, which are replaced below
            setattr(twin, name, dict(value))
    for state in states_of(twin):
        state.take(index)
    return twin


def move_to(layer: Any, device: torch.device) -> None:
    """Move the states of ``layer`` to the host, or back to the device where they were made."""
    if has_methods(layer):
        layer.offload() if device.type == "cpu" else layer.prefetch()
        return
    for state in states_of(layer):
        state.tensor = state.tensor.to(device)


def move(layer: Any, index: Tensor, changed: Tensor) -> None:
    """Row ``i`` becomes old row ``index[i]``; ``changed`` lists the rows that differ then."""
    if has_methods(layer):
        layer.reorder_cache(index)
        return
    for state in states_of(layer):
        if state.growable is not None:
            state.growable.move(index, changed)
        else:
            state.take(index)


def trim(layer: Any, n_tokens: int, length: int) -> None:
    """Drop the first ``n_tokens`` of the ``length`` columns that the rows of a cache have."""
    if has_methods(layer):
        layer.trim_tokens(n_tokens)
        return
    # Another length: keys of an image, which have columns of their own.
    if not isinstance(layer, DynamicLayer) or layer.get_seq_length() != length:
        return
    if layer.keys is None:  # the model does not use its cache
        return
    n_held = layer.keys.shape[-2]
    n_dropped = n_held - min(n_held, length - n_tokens)  # a window may have dropped some already
    for state in states_of(layer):
        if state.growable is not None:
            state.growable.drop_first(n_dropped)
    if getattr(layer, "indexer_position_ids", None) is not None:
        layer.indexer_position_ids = layer.indexer_position_ids[..., n_tokens:]
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = length - n_tokens


def bytes_of_row(layer: Any, n_tokens: int, length: int) -> int:
    """Bytes that a row of ``n_tokens`` takes, extrapolated from the rows of ``length`` tokens.

    Spare room of buffers does not count. A window counts its tokens only.
    """
    if hasattr(layer, "bytes_of_row"):
        return int(layer.bytes_of_row(n_tokens))
    total = 0
    grows = isinstance(layer, DynamicLayer) and layer.get_seq_length() == length
    most = getattr(layer, "sliding_window", n_tokens + 1) - 1 or n_tokens
    for state in states_of(layer):
        tensor, dims = state.tensor, state.dims
        of_row = tensor.nbytes // max(tensor.shape[dims.rows], 1)
        if grows and state.index is None and dims.tokens is not None:
            of_row = of_row // max(tensor.shape[dims.tokens], 1) * min(n_tokens, most)
        total += of_row
    return total


def _spare(layer: GrowingLayer) -> Any:
    """How many spare tokens a buffer of the layer gets: ``spare(length)``."""
    return getattr(layer, "_spare", layer._growth.spare)
