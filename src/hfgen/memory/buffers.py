"""Tensors that grow by one column per token without a copy per token.

A grown tensor is a view of a buffer, whose spare columns hold their final values already. All views
of a buffer stay valid. A view that was written to gets a new buffer when it grows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

#: Spare columns of a new buffer, at least; a buffer doubles when it is full.
SPARE_COLUMNS = 128

#: ``fill(tensor, n)``: the ``n`` columns after ``tensor``, the same at once or one after the other.
Fill = Callable[[torch.Tensor, int], torch.Tensor]

_BUFFER = "_hfgen_buffer"


def grow(tensor: torch.Tensor, count: int, fill: Fill) -> torch.Tensor:
    """``tensor`` with ``count`` more columns in its last dimension."""
    length = tensor.shape[-1] + count
    buffer, version = getattr(tensor, _BUFFER, (None, None))
    if buffer is None or buffer.shape[-1] < length or version != n_writes(tensor):
        spare = count + max(SPARE_COLUMNS, tensor.shape[-1])
        buffer = torch.cat([tensor, fill(tensor, spare)], dim=-1)
    view = buffer[..., :length]
    setattr(view, _BUFFER, (buffer, n_writes(view)))
    return view


def n_writes(tensor: torch.Tensor) -> int | None:
    """How often the tensor, or one that shares its memory, was written to; inference mode forgets."""
    return None if tensor.is_inference() else tensor._version


def ones(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of ones, for attention masks ``(rows, length)``."""
    return tensor.new_ones((tensor.shape[0], count))


def zeros(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of zeros, for multimodal token types ``(rows, length)``."""
    return tensor.new_zeros((tensor.shape[0], count))


def repeat_last(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The last column again, for token types."""
    return tensor[..., -1:].expand(*tensor.shape[:-1], count)


def count_on(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Consecutive numbers after the last column, for positions."""
    steps = torch.arange(1, count + 1, dtype=tensor.dtype, device=tensor.device)
    return tensor[..., -1:] + steps


def may_write_to(tensor: torch.Tensor) -> bool:
    """Whether a tensor may be written in place: one of inference mode only there."""
    return not tensor.is_inference() or torch.is_inference_mode_enabled()
