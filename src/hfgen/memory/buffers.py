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


class TokenBuffer:
    """Token ids ``(rows, length)`` with room for the tokens to come, about ``limit`` in all.

    With ``is_copied``, ``ids`` is contiguous and never written to, at the price of a copy per token.
    """

    def __init__(self, ids: torch.Tensor, limit: int, is_copied: bool = False) -> None:
        rows, self.length = ids.shape
        self.is_copied = is_copied
        # A limit can be a caller's "practically endless": start small, grow as it fills.
        spare = 0 if self.is_copied else min(max(limit - self.length, 0), 1024)
        self._buffer = ids.new_empty((rows, self.length + spare), dtype=torch.long)
        self._buffer[:, : self.length] = ids

    @property
    def ids(self) -> torch.Tensor:
        return self._buffer[:, : self.length]

    def append(self, tokens: torch.Tensor) -> torch.Tensor:
        """Add ``tokens (rows, n_new)``; returns all ids so far."""
        rows, capacity = self._buffer.shape
        end = self.length + tokens.shape[1]
        if end > capacity:
            n_more = tokens.shape[1] if self.is_copied else max(end, capacity)
            self._buffer = torch.cat([self._buffer, self._buffer.new_empty((rows, n_more))], dim=1)
        self._buffer[:, self.length : end] = tokens
        self.length = end
        return self.ids


def may_write_to(tensor: torch.Tensor) -> bool:
    """Whether a tensor may be written in place: one of inference mode only there."""
    return not tensor.is_inference() or torch.is_inference_mode_enabled()
