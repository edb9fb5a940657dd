"""A tensor that grows in place, by tokens and by rows: the storage of a layer's keys or values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: Up to this many numbers are concatenated: quicker than writing and viewing (``benchmarks/caches.py``).
CONCATENATED = 2**15

#: Tokens that a full buffer is enlarged by, at least.
SMALLEST_BLOCK = 32

#: A buffer that is full is replaced by a smaller one if it has this many times what is in use.
MUCH_ROOM = 4


@dataclass(slots=True)
class GrowthPolicy:
    """How many spare tokens a new buffer gets: in all layers of a cache, the memory of one tensor."""

    n_tensors: int = 24  # tensors that grow together
    #: Tokens at the end of the call, if known. A longer cache belongs to another call.
    max_length: int | None = None

    def spare(self, length: int) -> int:
        """Spare tokens behind the ``length`` tokens of a sequence that grows until the call ends."""
        block = max(SMALLEST_BLOCK, length // self.n_tensors)
        if self.max_length is not None and length <= self.max_length:
            block = min(block, self.max_length - length)
        return block

    def behind_window(self, length: int) -> int:
        """Spare tokens behind a window of ``length`` tokens, which moves through its buffer."""
        return length // self.n_tensors + 1


#: How many objects hold a storage. Where torch does not tell, layers copy before they overwrite.
use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda storage: 4)

#: From the length of a sequence to the room behind it.
Spare = Callable[[int], int]


class GrowableTensor:
    """A tensor ``view (…, length, size)``, and the buffer that it is a part of, if there is one.

    ``buffer (…, capacity, size)`` belongs to this object alone. ``view`` ends at token ``end`` of it. Up to
    ``written``, tokens that a crop removed are overwritten only if no other tensor shares the memory. The
    first ``shared`` tokens of ``view`` are equal in all rows of a prompt. After rows have joined, the buffer
    has room for more of them, and for tokens before ``view``. ``ahead``: a view, and a longer one that ``prepare``
    made to follow it.
    """

    __slots__ = ("ahead", "buffer", "end", "shared", "stride", "view", "written")

    def __init__(self, view: Tensor | None = None) -> None:
        self.view: Any = view
        self.buffer: Any = None
        self.ahead: tuple[Tensor, Tensor] | None = None
        self.end = self.written = self.shared = 0
        self.stride: tuple[int, ...] = ()

    def append(self, new: Tensor, spare: Spare) -> Tensor:
        """Append ``new (…, n, size)`` and return the longer view."""
        if self.buffer is None and self.view.numel() + new.numel() <= CONCATENATED:
            self.view = torch.cat([self.view, new], dim=-2)
            return self.view
        shape = new.shape
        added, size = shape[-2:]
        if not (self._takes(new) and self._has_room(added)):
            if not self._can_follow(new):
                self.assign(torch.cat([self.view, new], dim=-2))
                return self.view  # converted, or raised
            self._make_room(new, spare)
        self.buffer.as_strided(shape, self.stride, self.end * size).copy_(new)
        return self._extend(self._longer(added))

    def prepare(self, n: int, spare: Spare) -> Tensor:
        """Make the view that ``reserve(n)`` will return, and room for it."""
        self.ahead = None
        if self.buffer is None or not (may_write_to(self.buffer) and self._has_room(n + 1)):
            *rest, _, size = self.view.shape
            self._make_room(self.view.new_empty((*rest, n + 1, size)), spare)
        longer = self._longer(n)
        self.ahead = self.view, longer
        return longer

    def reserve(self, n: int, spare: Spare) -> Tensor:
        """Append ``n`` tokens that the caller writes; return the view, never contiguous, for graphs."""
        length = self.view.shape[-2] + n
        view, longer = self.ahead or (None, self.view)
        if view is not self.view or longer.shape[-2] != length:
            longer = self.prepare(n, spare)
        return self._extend(longer)

    def _longer(self, n: int) -> Tensor:
        """``view`` with ``n`` tokens more of the buffer, which has room for them."""
        shape = self.view.shape
        length, size = shape[-2] + n, shape[-1]
        # as_strided is a third of the cost of narrow(), which counts in a small model's step.
        start = (self.end + n - length) * size
        longer: Tensor = self.buffer.as_strided((*shape[:-2], length, size), self.stride, start)
        return longer

    def _extend(self, longer: Tensor) -> Tensor:
        """Set ``view`` to one that begins where it does."""
        self.ahead = None
        self.end += longer.shape[-2] - self.view.shape[-2]
        self.written = max(self.written, self.end)
        self.view = longer
        return longer

    def drop_first(self, n_tokens: int) -> None:
        """Drop the first ``n_tokens``; nothing is copied."""
        if n_tokens > 0:
            self.view = self.view[..., n_tokens:, :]
            self.shared = max(self.shared - n_tokens, 0)

    def keep_last(self, length: int, spare: int) -> None:
        """Drop all but the last ``length`` tokens; free memory if less than half of it is needed."""
        self.drop_first(self.view.shape[-2] - length)
        if self.buffer is not None and self.buffer.shape[-2] >= 2 * (length + spare):
            self._move(self.view, length + spare)

    def _takes(self, new: Tensor) -> bool:
        """Whether ``new`` has the buffer's kind of tokens, and the buffer may be written to."""
        buffer = self.buffer
        return (
            buffer is not None
            and new.shape[:-2] == self.view.shape[:-2]
            and new.shape[-1] == buffer.shape[-1]
            and new.dtype is buffer.dtype
            and new.device == buffer.device
            and may_write_to(buffer)
        )

    def _has_room(self, added: int) -> bool:
        is_free = self.end == self.written or not self._is_shared()
        return self.end + added <= self.buffer.shape[-2] and is_free

    def _is_shared(self) -> bool:
        """Whether a tensor that is not this object's own can see the buffer."""
        self.ahead = None
        self.view = self.view[...]  # so that other holders of the former view are counted
        storage = self.buffer.untyped_storage()
        return bool(use_count(storage._cdata) > 3)  # buffer, view and storage

    def _can_follow(self, new: Tensor) -> bool:
        shapes = [(*states.shape[:-2], states.shape[-1]) for states in (self.view, new)]
        fits = is_nothing(self.view) or shapes[0] == shapes[1]
        return fits and (self.view.dtype, self.view.device) == (new.dtype, new.device)

    def _make_room(self, new: Tensor, spare: Spare) -> None:
        """Make room for ``new`` behind ``view``: in the same buffer if that lasts, or in another."""
        before = 0 if is_nothing(self.view) else self.view.shape[-2]
        length = before + new.shape[-2]
        if not before:  # the activations of the prompt need memory too: no room beyond its length
            self._move(new[..., :0, :], length)
            return
        n_spare, step = spare(length), self.end - before
        is_fitting = (
            self._takes(new)
            and length <= self.buffer.shape[-2] <= MUCH_ROOM * (length + n_spare)
            and len(self.buffer) < MUCH_ROOM * len(self.view)
        )
        if is_fitting and 2 * step >= n_spare and not self._is_shared():
            # Tokens move in steps that do not overlap.
            tokens = self.buffer[: len(self.view)]
            for start in range(0, before, max(step, 1)):
                count = min(step, before - start)
                tokens.narrow(-2, start, count).copy_(tokens.narrow(-2, start + step, count))
            self._adopt(self.buffer, 0, before, len(tokens))
        else:
            self._move(self.view, length + n_spare)

    def _move(
        self, tokens: Tensor, capacity: int, before: int = 0, room: int | None = None
    ) -> None:
        """Make a buffer with ``tokens`` behind ``before`` free tokens, and ``room`` for that many rows."""
        n_rows, *heads, length, size = tokens.shape
        if room is None:
            former = n_rows if self.buffer is None else len(self.buffer)
            room = former if n_rows <= former < MUCH_ROOM * n_rows else n_rows
        buffer = self._empty((room, *heads, capacity, size), tokens)
        buffer[:n_rows].narrow(-2, before, length).copy_(tokens)
        self._adopt(buffer, before, length, n_rows)

    def _empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A new buffer, of ``shape`` or with more room."""
        return like.new_empty(shape)

    def _adopt(self, buffer: Tensor, start: int, length: int, n_rows: int | None = None) -> None:
        """Set ``view`` to ``length`` tokens of the first ``n_rows`` rows of ``buffer``, or of all rows."""
        self.ahead, self.end = None, start + length
        self.written = max(self.written, self.end) if buffer is self.buffer else self.end
        self.buffer, self.stride = buffer, buffer.stride()
        rows = buffer if n_rows in (None, len(buffer)) else buffer[:n_rows]
        self.view = rows.narrow(-2, start, length)

    def assign(self, value: Tensor | None) -> None:
        """Become ``value``; the buffer stays only if ``value`` is a part of it."""
        self.ahead = None
        if value is None or (start := self._position(value)) is None:
            self.buffer, self.shared = None, 0
        else:
            n_dropped = start - (self.end - self.view.shape[-2])
            self.end = start + value.shape[-2]
            self.shared = min(max(self.shared - n_dropped, 0), value.shape[-2])
        self.view = value

    def _position(self, value: Tensor) -> int | None:
        """Where in the buffer ``value`` begins; ``None`` if it is not a part of it."""
        buffer = self.buffer
        if (
            buffer is None
            or type(value) is not Tensor
            or torch.compiler.is_compiling()
            or (value.dtype, value.stride()) != (buffer.dtype, self.stride)
            or (value.shape[:-2], value.shape[-1]) != (self.view.shape[:-2], buffer.shape[-1])
            or value.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()
        ):
            return None
        start, rest = divmod(int(value.storage_offset()), value.shape[-1])
        return start if rest == 0 else None

    def take(self, rows: Tensor) -> None:
        """Row ``i`` becomes old row ``rows[i]``, with its spare room; there may be more or fewer rows."""
        rows, self.shared = rows.to(self.view.device), 0
        if self.buffer is None:
            self.view = self.view.index_select(0, rows)
            return
        n_rows, length, written = len(self.view), self.view.shape[-2], self.written
        used = self.buffer if n_rows == len(self.buffer) else self.buffer[:n_rows]
        self._adopt(used.index_select(0, rows), self.end - length, length)
        self.written = max(written, self.end)

    def reorder_beams(self, rows: Tensor) -> None:
        """``take`` of rows of the same prompt: the tokens that they share stay."""
        shared = self.shared
        if shared and self._may_write():
            generated = self.view[..., shared:, :]
            generated.copy_(generated.index_select(0, rows.to(generated.device)))
        else:
            self.take(rows)
            self.shared = shared

    # ---------------------------------------------------------------- rows that join and leave

    def join(self, added: Tensor, spare: Spare) -> None:
        """Append the rows ``added (n, …, length, size)``; shorter rows get zeros before them.

        Only new rows and columns are written. A full buffer moves to one of twice the rows, with ``spare``
        tokens on both sides.
        """
        may_write, self.shared = self._may_write(), 0
        view = self.view
        length, n_rows = max(view.shape[-2], added.shape[-2]), len(view) + len(added)
        n_numbers = math.prod((n_rows, *view.shape[1:-2], length, view.shape[-1]))
        if torch.is_grad_enabled() or (self.buffer is None and n_numbers <= CONCATENATED):
            rows = [padded(states, -2, length) for states in (view, added.to(view.device))]
            self.assign(torch.cat(rows))
            return
        capacity = 0 if self.buffer is None else len(self.buffer)
        if not may_write or n_rows > capacity or length > self.end:
            room = capacity if capacity >= n_rows else max(n_rows, 2 * len(view))
            n_spare = spare(length)
            before = n_spare + length - view.shape[-2]
            self._move(view, length + 2 * n_spare, before, room)
        n_before, start = len(self.view), self.end - length
        joined = self.buffer[:n_rows].narrow(-2, start, length)
        joined[:n_before, ..., : length - view.shape[-2], :].zero_()  # whatever is masked is finite
        joined[n_before:, ..., : length - added.shape[-2], :].zero_()
        joined[n_before:, ..., length - added.shape[-2] :, :].copy_(added)
        self._adopt(self.buffer, start, length, n_rows)

    def move(self, index: Tensor, changed: Tensor) -> None:
        """Row ``i`` becomes old row ``index[i]``, of no more rows; only the rows ``changed`` are written."""
        if not self._may_write():
            self.take(index)
            return
        view, length, self.shared = self.view, self.view.shape[-2], 0
        if len(changed):
            index, changed = index.to(view.device), changed.to(view.device)
            view.index_copy_(0, changed, view.index_select(0, index[changed]))
        self._adopt(self.buffer, self.end - length, length, len(index))

    def arrange(self, columns: Tensor) -> None:
        """Token ``j`` of row ``i`` becomes its old token ``columns[i, j]``; ``view`` has four dimensions."""
        may_write, self.shared = self._may_write(), 0
        index = columns.to(self.view.device)[:, None, :, None].expand_as(self.view)
        arranged = self.view.gather(2, index)
        if may_write:
            self.view.copy_(arranged)
        else:
            self.assign(arranged)

    def _may_write(self) -> bool:
        """Whether there is a buffer that may be written to, and that no other tensor sees."""
        return self.buffer is not None and may_write_to(self.buffer) and not self._is_shared()

    def __copy__(self) -> GrowableTensor:
        return GrowableTensor(self.view)

    def __reduce__(self) -> tuple[type[GrowableTensor], tuple[Tensor | None]]:
        view = self.view
        if view is not None and self.buffer is not None:
            view = view.clone(memory_format=torch.contiguous_format)
        return GrowableTensor, (view,)


def n_writes(tensor: Tensor) -> int | None:
    """How often the tensor, or one that shares its memory, was written to; inference mode forgets."""
    return None if tensor.is_inference() else tensor._version


def may_write_to(tensor: Tensor) -> bool:
    """Whether a tensor may be written in place: one of inference mode only there."""
    return not tensor.is_inference() or torch.is_inference_mode_enabled()


def is_nothing(view: Tensor | None) -> bool:
    """Whether ``view`` is the empty tensor ``(0,)`` that upstream's layers begin with."""
    return view is not None and view.dim() == 1 and view.numel() == 0


def padded(states: Tensor, dim: int, length: int) -> Tensor:
    """``states`` with zeros before them along ``dim``, which is negative, up to ``length``."""
    n_more = length - states.shape[dim]
    return F.pad(states, [*([0, 0] * (-dim - 1)), n_more, 0]) if n_more > 0 else states
