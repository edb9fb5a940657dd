"""How the rows of one layer join, leave and lose columns, for each class of layer.

Of a layer of transformers' kinds, ``STATES`` says what it keeps of a row. A layer of another class says
it by its methods, those of ``Slots``.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from ... import families
from .dynamic import KINDS, GrowingLayer, as_growing, upstream_kind
from .growing import GrowableTensor, GrowthPolicy, is_nothing, moved, padded
from .quantized import QuantizedLayer
from .quantized_rows import QuantizedRows

#: The kinds of layers whose rows join and leave. Of transformers', a subclass may have more ``STATES``.
DECLARED = (*KINDS, LinearAttentionLayer, QuantizedLayer, *families.EMPTY_LAYERS)


class Slots(Protocol):
    """What a layer of somebody's own has to have if rows are to join and leave.

    Besides, it may have ``form_of_rows() -> dict``: what it has to have in common with ``other``, such as
    sizes and dtypes. Layers that differ in it are refused.
    """

    def join_rows(self, other: Any) -> None:
        """Put the rows of ``other``, a layer of the same class that stays as it is, behind the own ones.

        All end in the same column; shorter rows have zeros before them, which masks hide.
        """

    def leave_row(self, row: int) -> None:
        """Let the last row take the place of ``row``; there is one row less then."""

    def trim_tokens(self, n_tokens: int) -> None:
        """Forget the first ``n_tokens`` columns: lengths are those of a shorter batch from then on."""

    def bytes_of_row(self, n_tokens: int) -> int:
        """Bytes that one row of ``n_tokens`` takes."""


METHODS = ("join_rows", "leave_row", "trim_tokens", "bytes_of_row")


@dataclass(frozen=True, slots=True)
class Dims:
    """The dimension of the rows, and that of the tokens: ``None`` if states are of all at once."""

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

_BUFFER = "_hfgen_rows"


def with_room(layer: Any, growth: GrowthPolicy) -> Any:
    """The layer, or one with its states that rows can join in place."""
    if isinstance(layer, QuantizedLayer) and layer.is_initialized:
        return QuantizedRows(layer)
    return layer if is_declared_by_methods(layer) else as_growing(layer, growth)


def is_declared_by_methods(layer: Any) -> bool:
    """Whether the layer has the methods of ``Slots``."""
    return all(callable(getattr(layer, name, None)) for name in METHODS)


def is_declared(layer: Any) -> bool:
    """Whether it is known how rows join the layer and leave it."""
    return is_declared_by_methods(layer) or upstream_kind(layer) in DECLARED


def form(layer: Any) -> dict[str, Any]:
    """What two layers have to have in common: sizes that are neither rows nor tokens."""
    if hasattr(layer, "form_of_rows"):
        return dict(layer.form_of_rows())
    if is_declared_by_methods(layer):
        return {}
    found: dict[str, Any] = {"window": getattr(layer, "sliding_window", None)}
    for (name, index), states in _states(layer).items():
        dims = STATES[name]
        of_both = {dims.rows, range(states.ndim)[dims.tokens or dims.rows]}
        sizes = [size for dim, size in enumerate(states.shape) if dim not in of_both]
        found[name if index is None else f"{name}[{index}]"] = (*sizes, states.dtype)
    return found


def n_rows(layer: Any) -> int | None:
    """How many rows the layer holds; ``None`` if it holds none, or does not say."""
    if hasattr(layer, "n_rows"):
        return int(layer.n_rows)
    if is_declared_by_methods(layer):
        return None
    found = ((STATES[name].rows, states) for (name, _), states in _states(layer).items())
    return next((states.shape[dim] for dim, states in found), None)


def join(layer: Any, other: Any) -> None:
    """Put the rows of ``other``, whose ``form`` is the same, behind those of ``layer``."""
    if is_declared_by_methods(layer):
        layer.join_rows(other)
        return
    has_keys = isinstance(layer, DynamicLayer) and layer.is_initialized
    longest = max(layer.get_seq_length(), other.get_seq_length()) if has_keys else 0
    kept = min(longest, getattr(layer, "sliding_window", longest + 1) - 1) or longest
    for (name, index), added in _states(other).items():
        dims, growing = STATES[name], _growing(layer, name)
        if growing is not None:  # a window that records what leaves it holds more than it shows
            growing.trim(growing.view.shape[-2] - kept, _spare(layer))
            growing.join(added[..., -kept:, :], _spare(layer))
        else:
            _set(layer, name, index, _joined(_get(layer, name, index), added, dims))
    if has_keys and isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = longest


def leave(layer: Any, row: int) -> None:
    """Let the last row of ``layer`` take the place of ``row``."""
    if is_declared_by_methods(layer):
        layer.leave_row(row)
        return
    for name, index in list(_states(layer)):
        if (growing := _growing(layer, name)) is not None:
            growing.leave(row, _spare(layer))
        else:
            left = leave_row(_get(layer, name, index), row, STATES[name].rows)
            _set(layer, name, index, left)


def extract(layer: Any, index: Tensor) -> Any:
    """A layer of the rows ``index (wanted,)`` alone, which shares no memory with ``layer``."""
    if is_declared_by_methods(layer):
        twin = copy.copy(layer) if isinstance(layer, QuantizedRows) else copy.deepcopy(layer)
        twin.reorder_cache(index)
        return twin
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(twin, name, dict(value))
    for (name, number), states in _states(layer).items():
        own = states.index_select(STATES[name].rows, index.to(states.device))
        _set(twin, name, number, own)
    return twin


def move_to(layer: Any, device: torch.device) -> None:
    """Move the states of ``layer`` to the host, or back to the device where they were made."""
    if is_declared_by_methods(layer):
        layer.offload() if device.type == "cpu" else layer.prefetch()
        return
    for (name, number), states in _states(layer).items():
        _set(layer, name, number, states.to(device))


def move(layer: Any, index: Tensor, changed: Tensor) -> None:
    """Let row ``i`` go on as row ``index[i]``; ``changed``: the rows that are others then."""
    if is_declared_by_methods(layer):
        layer.reorder_cache(index)
        return
    for name, number in list(_states(layer)):
        if (growing := _growing(layer, name)) is not None:
            growing.move(index, changed)
        else:
            moved_rows = move_rows(_get(layer, name, number), index, changed, STATES[name].rows)
            _set(layer, name, number, moved_rows)


def trim(layer: Any, n_tokens: int, length: int) -> None:
    """Forget the first ``n_tokens`` of the ``length`` columns that the rows of a cache have."""
    if is_declared_by_methods(layer):
        layer.trim_tokens(n_tokens)
        return
    # Another length: keys of an image, which have columns of their own.
    if not isinstance(layer, DynamicLayer) or layer.get_seq_length() != length:
        return
    if layer.keys is None:  # the model does not use its cache
        return
    held = layer.keys.shape[-2]
    forgotten = held - min(held, length - n_tokens)  # a window may have forgotten them already
    for name, _ in list(_states(layer)):
        if (growing := _growing(layer, name)) is not None:
            growing.trim(forgotten, _spare(layer))
    if getattr(layer, "indexer_position_ids", None) is not None:
        layer.indexer_position_ids = layer.indexer_position_ids[..., n_tokens:]
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = length - n_tokens


def bytes_of_row(layer: Any, n_tokens: int, length: int) -> int:
    """Bytes that a row of ``n_tokens`` takes, from the rows of ``length`` tokens that are there.

    Without the spare room of buffers. A window counts its tokens only.
    """
    if hasattr(layer, "bytes_of_row"):
        return int(layer.bytes_of_row(n_tokens))
    total = 0
    grows = isinstance(layer, DynamicLayer) and layer.get_seq_length() == length
    most = getattr(layer, "sliding_window", n_tokens + 1) - 1 or n_tokens
    for (name, _), states in _states(layer).items():
        dims = STATES[name]
        of_row = states.nbytes // max(states.shape[dims.rows], 1)
        if grows and not isinstance(getattr(layer, name), dict) and dims.tokens is not None:
            of_row = of_row // max(states.shape[dims.tokens], 1) * min(n_tokens, most)
        total += of_row
    return total


# ---------------------------------------------------------------- states that do not grow


def join_rows(states: Tensor, added: Tensor, dim: int = 0) -> Tensor:
    """The rows of both, in a buffer with room for as many again; that of ``states`` if it has room.

    Shapes differ in the rows only. The buffer is written to only if ``states`` came from here.
    """
    before, n = states.shape[dim], states.shape[dim] + added.shape[dim]
    buffer = _buffer(states)
    if torch.is_grad_enabled():
        return torch.cat([states, added.to(states.device)], dim)
    if buffer is None or n > buffer.shape[dim]:
        shape = (
            *states.shape[:dim],
            2 * before if n <= 2 * before else n,
            *states.shape[dim + 1 :],
        )
        buffer = states.new_empty(shape)
        buffer.narrow(dim, 0, before).copy_(states)
    buffer.narrow(dim, before, n - before).copy_(added)
    return _part(buffer, dim, n)


def leave_row(states: Tensor, row: int, dim: int = 0) -> Tensor:
    """Without ``row``, whose place the last one has taken: in place if ``join_rows`` made ``states``."""
    buffer, last = _buffer(states), states.shape[dim] - 1
    if buffer is None or last <= buffer.shape[dim] // 4:
        return states.index_select(dim, moved(row, last, states.device))
    if row != last:
        buffer.select(dim, row).copy_(buffer.select(dim, last))
    return _part(buffer, dim, last)


def move_rows(states: Tensor, index: Tensor, changed: Tensor, dim: int = 0) -> Tensor:
    """Row ``i`` of the result is row ``index[i]``: in place if ``join_rows`` made ``states``."""
    index, changed = index.to(states.device), changed.to(states.device)
    if _buffer(states) is None:
        return states.index_select(dim, index)
    return states.index_copy_(dim, changed, states.index_select(dim, index[changed]))


def _buffer(states: Tensor) -> Tensor | None:
    """The buffer that ``states`` are the first rows of, if it may be written to."""
    buffer: Tensor | None = getattr(states, _BUFFER, None)
    is_part = buffer is not None and buffer.data_ptr() == states.data_ptr()  # not of a copy
    is_open = not states.is_inference() or torch.is_inference_mode_enabled()
    return buffer if is_part and is_open and not torch.is_grad_enabled() else None


def _part(buffer: Tensor, dim: int, n: int) -> Tensor:
    part = buffer.narrow(dim, 0, n)
    setattr(part, _BUFFER, buffer)
    return part


def _joined(states: Tensor, added: Tensor, dims: Dims) -> Tensor:
    if dims.tokens is not None:
        length = max(states.shape[dims.tokens], added.shape[dims.tokens])
        states, added = (padded(s, dims.tokens, length) for s in (states, added))
    return join_rows(states, added, dims.rows)


# ---------------------------------------------------------------- where a layer keeps what


def _states(layer: Any) -> dict[tuple[str, int | None], Tensor]:
    """The states of a layer, by attribute, and by number where the attribute is a dict."""
    found: dict[tuple[str, int | None], Tensor] = {}
    for name in STATES:
        states = getattr(layer, name, None)
        each = states if isinstance(states, dict) else {None: states}
        found |= {
            (name, index): state
            for index, state in each.items()
            if state is not None and not is_nothing(state)
        }
    return found


def _growing(layer: Any, name: str) -> GrowableTensor | None:
    growing = vars(layer).get(f"_{name}")
    return growing if isinstance(growing, GrowableTensor) else None


def _get(layer: Any, name: str, index: int | None) -> Tensor:
    states = getattr(layer, name)
    return states if index is None else states[index]


def _set(layer: Any, name: str, index: int | None, states: Tensor) -> None:
    if index is None:
        setattr(layer, name, states)
    else:
        getattr(layer, name)[index] = states


def _spare(layer: GrowingLayer) -> Any:
    return getattr(layer, "_spare", layer._growth.spare)
