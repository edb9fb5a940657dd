"""Memory of static caches that is kept between calls: a pool for each model, a lease for each cache.

A lease ends when its cache is gone, and no sooner: a cache that a caller got, a callable kept, another
thread or an outer call decodes with, has its memory for itself as long as it lives. Nobody has to give
anything back, so an exception cannot prevent it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .growing import use_count

#: By how much a cache that has got too short is lengthened beyond its length, at least.
GROWTH = 1.5

#: Which buffer: kind of layer, its number, ``"keys"`` or ``"values"``.
Place = tuple[str, int, str]

#: Kinds of layers: full attention, which fills up; sliding windows; cross-attention.
FILLED, WINDOW, CROSS = "filled", "window", "cross"


@dataclass(frozen=True, slots=True)
class Size:
    """What the caches of one call need: rows, tokens per row, tokens of the encoder's per row."""

    rows: int
    length: int
    source_length: int = 0

    def holds(self, asked: Size) -> bool:
        """Whether a cache of this size is enough."""
        return (
            asked.rows <= self.rows
            and asked.length <= self.length
            and asked.source_length <= self.source_length
        )

    def enlarged(self, asked: Size, longest: int | None) -> Size:
        """The size of what replaces a cache of this size, which was not enough.

        Lengths grow in steps, so that calls of slowly growing length are not each given a new cache;
        beyond ``longest`` they are only what is asked for. Rows and lengths that different calls needed
        are combined unless that takes more than twice what one of them did.
        """

        def step(had: int, wanted: int) -> int:
            if wanted <= had:
                return had
            grown = int(had * GROWTH)
            return max(wanted, grown if longest is None else min(grown, longest))

        both = Size(
            max(self.rows, asked.rows),
            step(self.length, asked.length),
            step(self.source_length, asked.source_length),
        )
        return both if both._area <= 2 * max(self._area, asked._area) else asked

    @property
    def _area(self) -> int:
        return self.rows * (self.length + self.source_length)


class Slab:
    """The buffers ``(rows, heads, capacity, size)`` of one cache; allocated when a layer takes them."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.buffers: dict[Place, Tensor] = {}
        #: The rows and tokens of a buffer that may be other than zero.
        self.written: dict[Place, tuple[int, int]] = {}
        #: Up to which token layers of full attention were written, as far as they told; and where they
        #: count what they hold, since a compiled graph does not tell.
        self.reached = 0
        self.count: Tensor | None = None

    @property
    def n_bytes(self) -> int:
        return sum(buffer.untyped_storage().nbytes() for buffer in self.buffers.values())

    def is_seen(self) -> bool:
        """Whether somebody kept a tensor of the last cache."""
        # The buffer and the storage object that is looked at are two.
        return any(
            use_count(buffer.untyped_storage()._cdata) > 2 for buffer in self.buffers.values()
        )

    def take(self, place: Place, states: Tensor, length: int, capacity: int) -> Tensor:
        """Zeros ``(rows, heads, length, size)`` for tokens such as ``states (rows, heads, n, size)``.

        A new buffer has ``capacity`` tokens.
        """
        rows, heads, _, size = states.shape
        buffer = self.buffers.get(place)
        if buffer is not None and not _fits(buffer, states, length):
            del self.buffers[place]  # freed first
            buffer = None
        if buffer is None:
            self.written.pop(place, None)
            shape = (max(rows, self.size.rows), heads, max(length, capacity), size)
            try:
                self.buffers[place] = buffer = states.new_zeros(shape)
            except (RuntimeError, MemoryError):  # whoever asks next gets memory of another size
                self.buffers.clear()
                self.written.clear()
                raise
        self._clear(place)
        self.written[place] = (rows, length)
        return buffer[:rows, :, :length]

    def with_rows(self, place: Place, rows: int, like: Tensor) -> Tensor | None:
        """The first ``rows`` rows of a buffer, as long as ``like``, a part of it; ``None`` if it has fewer."""
        buffer = self.buffers.get(place)
        if (
            buffer is None
            or len(buffer) < rows
            or buffer.untyped_storage().data_ptr() != like.untyped_storage().data_ptr()
        ):
            return None
        written, length = self.written[place]
        self.written[place] = (max(written, rows), length)
        return buffer[:rows, :, : like.shape[2]]

    def reach(self, length: int) -> None:
        """Layers of full attention have been written up to ``length`` tokens."""
        if length > self.reached:
            self.reached = length

    def clear(self) -> None:
        """Forget the values: a NaN of an earlier call is a NaN even where a mask hides it."""
        for place in list(self.written):
            self._clear(place)
        self.reached, self.count = 0, None

    def _clear(self, place: Place) -> None:
        rows, length = self.written.pop(place, (0, 0))
        if place[0] == FILLED and self.count is not None and self.count.is_cpu:
            length = min(length, max(self.reached, int(self.count)))
        if rows:
            self.buffers[place][:rows, :, :length].zero_()


def _fits(buffer: Tensor, states: Tensor, length: int) -> bool:
    rows, heads, _, size = states.shape
    return (
        rows <= buffer.shape[0]
        and length <= buffer.shape[2]
        and (heads, size) == (buffer.shape[1], buffer.shape[3])
        and (states.dtype, states.device) == (buffer.dtype, buffer.device)
        and (not buffer.is_inference() or torch.is_inference_mode_enabled())
    )


class Lease:
    """The right to a slab, held by the layers of one cache; the slab goes back when they are gone."""

    def __init__(self, pool: Pool, slab: Slab) -> None:
        self.pool, self.slab = pool, slab
        #: Tokens per row that the call can reach; ``max_cache_len`` may have asked for more.
        self.needed = 0

    def note_allocated(self) -> None:
        """The memory is there, so later caches may be as long as this call needed."""
        self.pool.needed = max(self.pool.needed, self.needed)

    def __del__(self) -> None:
        self.pool.idle.append(self.slab)


class Pool:
    """The slab that no cache has at present, if there is one. Safe under threads."""

    def __init__(self) -> None:
        # Adding to a deque and taking from it are atomic, which a lock in __del__ could not be.
        self.idle: deque[Slab] = deque(maxlen=1)
        #: How long the worst call is, if the caller said so.
        self.longest: int | None = None
        #: Tokens per row that the longest call so far needed, and got.
        self.needed = 0

    def lend(self, asked: Size) -> Lease:
        """Memory for a cache of the size ``asked`` or larger, all zeros."""
        slab = self._take_idle()
        if slab is None or not slab.buffers or slab.is_seen():
            slab = Slab(asked)
        elif not slab.size.holds(asked):
            size = slab.size.enlarged(asked, self.longest)
            del slab  # its memory first, the new one's then
            slab = Slab(size)
        else:
            slab.clear()
        return Lease(self, slab)

    def free(self) -> int:
        """Let go of the idle slab; returns its bytes."""
        slab = self._take_idle()
        return 0 if slab is None else slab.n_bytes

    def _take_idle(self) -> Slab | None:
        try:
            return self.idle.pop()
        except IndexError:
            return None


#: Beside the models and not on them, so that copying or saving a model leaves its caches out.
_POOLS: WeakKeyDictionary[Any, Pool] = WeakKeyDictionary()


def pool_of(model: Any) -> Pool:
    """The pool of a model; made at first use."""
    return _POOLS.setdefault(model, Pool())


def free_caches(model: nn.Module) -> int:
    """Give back the memory that static caches of ``model`` keep between calls.

    Returns the number of bytes. ``model`` may also be a wrapper (PEFT, ``torch.compile``): all models in
    it are meant. A cache that is still in use, by a running call or by whoever has it, stays. The next
    static cache is again no longer than its call needs.

    Raises:
        TypeError: ``model`` is not a model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"free_caches() takes a model, but got {type(model).__name__}.")
    n_bytes = 0
    for module in model.modules():
        if (pool := _POOLS.get(module)) is not None:
            n_bytes += pool.free()
            pool.needed = 0
    return n_bytes
