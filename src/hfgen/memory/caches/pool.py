"""Memory of static caches that is kept between calls: one pool per model, one lease per cache.

A lease ends when its cache is garbage collected, and no other cache uses its buffers until then.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Hashable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import GenerationMixin

from ... import families
from .growing import may_write_to, use_count

#: By how much a cache that has got too short is lengthened beyond its length, at least.
GROWTH = 1.5

#: Which buffer: kind of layer, its number, ``"keys"`` or ``"values"``.
Place = tuple[str, int, str]

#: Kinds of layers: full attention, which fills up; sliding windows; cross-attention.
FILLED, WINDOW, CROSS = "filled", "window", "cross"


class Size(NamedTuple):
    """What the caches of one call need: rows, tokens per row, tokens of the encoder's per row."""

    rows: int
    length: int
    source_length: int = 0

    def holds(self, requested: Size) -> bool:
        """Whether a cache of this size is enough."""
        return all(map(operator.le, requested, self))

    def enlarged(self, requested: Size) -> Size:
        """The size of the cache that replaces one of this size, which was not enough: lengths grow in steps."""
        lengths = zip(self[1:], requested[1:], strict=True)
        steps = (max(new, int(old * GROWTH)) if new > old else new for old, new in lengths)
        return Size(requested.rows, *steps)


class CacheBuffers:
    """The buffers ``(rows, heads, capacity, size)`` of one cache; allocated when a layer takes them."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.tensors: dict[Place, Tensor] = {}
        #: On accelerators, the layers' counters of tokens; and what was recorded of steps on all these.
        self.counters: dict[Place, Tensor] = {}
        self.graphs: dict[Hashable, Any] = {}

    @property
    def n_bytes(self) -> int:
        return sum(buffer.untyped_storage().nbytes() for buffer in self.tensors.values())

    def is_seen(self) -> bool:
        """Whether a tensor outside of this object shares memory with a buffer."""
        storages = (buffer.untyped_storage() for buffer in self.tensors.values())
        return any(use_count(storage._cdata) > 2 for storage in storages)  # the buffer, and this

    def take(self, place: Place, states: Tensor, length: int, capacity: int) -> Tensor:
        """Zeros ``(rows, heads, length, size)`` for states; a new buffer has ``capacity`` tokens."""
        rows, heads, _, size = states.shape
        buffer = self.tensors.get(place)
        if (
            buffer is not None
            and rows <= buffer.shape[0]
            and length <= buffer.shape[2]
            and (heads, size) == (buffer.shape[1], buffer.shape[3])
            and (states.dtype, states.device) == (buffer.dtype, buffer.device)
            and may_write_to(buffer)
        ):
            # A NaN of an earlier call would be a NaN even where a mask hides it.
            return buffer[:rows, :, :length].zero_()
        self.tensors.pop(place, None)
        del buffer  # freed first
        self.graphs.clear()  # they hold the address of the one before
        shape = (max(rows, self.size.rows), heads, max(length, capacity), size)
        try:
            self.tensors[place] = states.new_zeros(shape)
        except (RuntimeError, MemoryError):  # the next call may ask for less
            self.tensors.clear()
            raise
        return self.tensors[place][:rows, :, :length]

    def counter(self, place: Place, layer: Any) -> Tensor:
        """A layer's counter of tokens, on its device, at an address that stays from cache to cache."""
        counter = self.counters.get(place)
        if counter is not None and counter.device == layer.device and may_write_to(counter):
            return counter.copy_(layer.cumulative_length)
        self.counters[place] = layer.cumulative_length.to(layer.device, copy=True)
        return self.counters[place]

    def with_rows(self, place: Place, rows: int, like: Tensor) -> Tensor | None:
        """The first ``rows`` rows of a buffer, as long as ``like``, a part of it; ``None`` if it has fewer."""
        buffer = self.tensors.get(place)
        if (
            buffer is None
            or len(buffer) < rows
            or buffer.untyped_storage().data_ptr() != like.untyped_storage().data_ptr()
        ):
            return None
        buffer[len(like) : rows, :, : like.shape[2]].zero_()
        return buffer[:rows, :, : like.shape[2]]


class Lease:
    """The right to use buffers, held by the layers of one cache. Buffers go back to the pool with them."""

    def __init__(self, pool: Pool, buffers: CacheBuffers, requested: Size) -> None:
        self.pool, self.buffers = pool, buffers
        self.requested = requested  # what the call asked for; ``buffers`` may be larger
        #: Tokens per row that the call can reach; ``max_cache_len`` may have asked for more.
        self.needed = 0

    def __del__(self) -> None:
        self.pool.idle.append(self.buffers)


class Pool:
    """The buffers that no cache uses at present, of one cache at most. Safe under threads."""

    def __init__(self) -> None:
        # Adding to a deque and taking from it are atomic, which a lock in __del__ could not be.
        self.idle: deque[CacheBuffers] = deque(maxlen=1)
        self.needed = 0  # tokens per row that the longest call so far needed, and got

    def lend(self, requested: Size) -> Lease:
        """Memory for a cache of the size ``requested`` or larger."""
        buffers = self.take_idle()
        if buffers is None or not buffers.tensors or buffers.is_seen():
            buffers = CacheBuffers(requested)
        elif not buffers.size.holds(requested):
            size = buffers.size.enlarged(requested)
            del buffers  # its memory first, the new one's then
            buffers = CacheBuffers(size)
        return Lease(self, buffers, requested)

    def take_idle(self) -> CacheBuffers | None:
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
    """Free the memory that static caches of ``model`` keep between calls; return its bytes.

    ``model`` may be a wrapper (PEFT, ``torch.compile``) of models. A cache that is still in use stays.
    The next static cache is again no longer than its call needs. Raises ``TypeError`` for no model.
    """
    if not isinstance(model, nn.Module | GenerationMixin):
        raise TypeError(f"free_caches() takes a model, but got {type(model).__name__}.")
    n_bytes = 0
    for module in families.modules_of(model) or [model]:
        if (pool := _POOLS.get(module)) is not None:
            pool.needed = 0
            n_bytes += 0 if (buffers := pool.take_idle()) is None else buffers.n_bytes
    return n_bytes
