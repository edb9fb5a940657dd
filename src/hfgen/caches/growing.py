"""A tensor that grows along its length in place: what a layer's keys or values are kept in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Tokens that a full buffer is enlarged by, at least.
SMALLEST_BLOCK = 32


@dataclass(slots=True)
class Room:
    """How many tokens more than it holds a buffer is made for. One for all layers of a cache.

    Concatenating needs, for a moment, the memory of one more tensor. Here that much is shared
    among all tensors of the cache as their spare room, so that a long cache with its room is no
    larger than upstream's while it grows, and is copied once per block instead of once per token.
    """

    #: Tensors that grow together.
    n_tensors: int = 24
    #: Tokens at the end of the call, if that is known; a cache that is past it is in another call.
    max_length: int | None = None

    def block(self, length: int) -> int:
        """Spare tokens of a buffer with ``length`` tokens, if the call does not end before."""
        return max(SMALLEST_BLOCK, length // self.n_tensors)

    def spare(self, length: int, seen: int) -> int:
        """The same, where ``seen`` tokens of the call have gone into the ``length``."""
        block = self.block(length)
        if self.max_length is None or seen > self.max_length:
            return block
        return min(block, self.max_length - seen)


class Growing:
    """A tensor ``view (…, length, size)``, and the buffer that it is a part of, if there is one.

    ``buffer (…, capacity, size)`` belongs to this object alone; what lies behind ``view`` in it is
    free, up to the positions that were ``written`` before a crop. Those are written again only if
    no other tensor shares the memory, so whoever kept an earlier view keeps its values.
    """

    __slots__ = ("buffer", "end", "is_inference", "lead", "stride", "view", "written")

    def __init__(self, view: Tensor | None = None) -> None:
        self.view = view
        self.buffer: Tensor | None = None
        self.end = 0
        self.written = 0
        self.is_inference = False
        self.lead: torch.Size | None = None
        self.stride: tuple[int, ...] = ()

    # ------------------------------------------------------------ growing

    def append(self, new: Tensor, room: Room, seen: int | None = None) -> Tensor:
        """The tensor with ``new (…, n, size)`` behind it.

        ``seen``: tokens of the call with these, if they are not all here.
        """
        buffer, start, shape = self.buffer, self.end, new.shape
        end = start + shape[-2]
        if (
            buffer is None
            or end > buffer.shape[-2]
            or not self._takes(new)
            or (start < self.written and self._is_shared())
        ):
            return self._move_and_append(new, room, seen)
        size = shape[-1]
        buffer.as_strided(shape, self.stride, start * size).copy_(new)
        length = self.view.shape[-2] + shape[-2]  # type: ignore[union-attr]
        self.end = self.written = end
        # as_strided is a third of the cost of narrow(), which counts in a small model's step.
        self.view = buffer.as_strided(
            (*self.lead, length, size),  # type: ignore[misc]
            self.stride,
            (end - length) * size,
        )
        return self.view

    def keep_last(self, length: int, spare: int) -> None:
        """Forget all but the last ``length`` tokens; their memory too, if it is above ``spare``."""
        forgotten = self.view.shape[-2] - length  # type: ignore[union-attr]
        if forgotten <= 0:
            return
        self.view = self.view[..., forgotten:, :]  # type: ignore[index]
        if self.buffer is not None and self.end - length > spare:
            self._move(self.view, length, spare)

    def _takes(self, new: Tensor) -> bool:
        """Whether ``new`` has the buffer's kind of tokens, and the buffer may be written to."""
        buffer = self.buffer
        return (
            buffer is not None
            and new.shape[:-2] == self.lead
            and new.shape[-1] == buffer.shape[-1]
            and new.dtype is buffer.dtype
            and new.device == buffer.device
            and (not self.is_inference or torch.is_inference_mode_enabled())
        )

    def _is_shared(self) -> bool:
        """Whether a tensor other than ``view`` can see the buffer."""
        storage = self.buffer.untyped_storage()  # type: ignore[union-attr]
        owners = torch._C._storage_Use_Count(storage._cdata)
        return bool(owners > 3)  # buffer, view and storage

    def _move_and_append(self, new: Tensor, room: Room, seen: int | None) -> Tensor:
        view = self.view
        assert view is not None
        is_new = view.dim() == 1 and view.numel() == 0  # as upstream's layers start
        same = is_new or (view.shape[:-2], view.shape[-1]) == (new.shape[:-2], new.shape[-1])
        if not same or (view.dtype, view.device) != (new.dtype, new.device):
            self.assign(torch.cat([view, new], dim=-2))  # converts, or raises
            return self.view  # type: ignore[return-value]
        before, added = (0 if is_new else view.shape[-2]), new.shape[-2]
        length = before + added
        spare = room.spare(length, length if seen is None else seen)
        self._move(new[..., :0, :] if is_new else view, length, spare)
        assert self.buffer is not None
        self.buffer.narrow(-2, before, added).copy_(new)
        return self.view  # type: ignore[return-value]

    def _move(self, tokens: Tensor, length: int, spare: int) -> None:
        """Make a buffer for ``length`` tokens and more that begins with ``tokens``."""
        *lead, n_tokens, size = tokens.shape
        buffer = tokens.new_empty((*lead, length + spare, size))
        buffer.narrow(-2, 0, n_tokens).copy_(tokens)
        self._adopt(buffer, 0, length)

    def _adopt(self, buffer: Tensor, start: int, length: int) -> None:
        self.buffer = buffer
        self.lead = buffer.shape[:-2]
        self.stride = buffer.stride()
        self.is_inference = buffer.is_inference()
        self.end = self.written = start + length
        self.view = buffer.narrow(-2, start, length)

    # ------------------------------------------------------------ changing

    def assign(self, value: Tensor | None) -> None:
        """Become ``value``; the buffer stays only if ``value`` is a part of it."""
        start = self._position(value)
        self.view = value
        if value is None or start is None:
            self.buffer = None
        else:
            self.end = start + value.shape[-2]

    def _position(self, value: Tensor | None) -> int | None:
        """Where in the buffer ``value`` begins; ``None`` if it is not a part of it."""
        buffer = self.buffer
        if (
            buffer is None
            or type(value) is not Tensor
            or torch.compiler.is_compiling()
            or (value.dtype, value.stride()) != (buffer.dtype, self.stride)
            or (value.shape[:-2], value.shape[-1]) != (self.lead, buffer.shape[-1])
            or value.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()
        ):
            return None
        start, rest = divmod(int(value.storage_offset()), value.shape[-1])
        return start if rest == 0 else None

    def map_rows(self, take: Callable[[Tensor], Tensor]) -> None:
        """Let ``take`` choose or repeat rows, with their spare room.

        The place for whoever knows that rows share their beginning, and need not copy it.
        """
        if self.view is None:
            return
        if self.buffer is None:
            self.view = take(self.view)
            return
        length = self.view.shape[-2]
        self._adopt(take(self.buffer), self.end - length, length)

    # ------------------------------------------------------------ copying: of the view alone

    def __copy__(self) -> Growing:
        return Growing(self.view)

    def __deepcopy__(self, memo: dict[int, Any]) -> Growing:
        return Growing(copy.deepcopy(self.view, memo) if self.buffer is None else self._compact())

    def __reduce__(self) -> tuple[type[Growing], tuple[Tensor | None]]:
        return Growing, (self._compact(),)

    def _compact(self) -> Tensor | None:
        if self.view is None or self.buffer is None:
            return self.view
        return self.view.clone(memory_format=torch.contiguous_format)
