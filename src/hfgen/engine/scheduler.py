"""Which requests prefill and decode next: admission by rows and bytes, chunks of prefill, policies."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import merge
from math import inf
from typing import Literal

from .errors import DoesNotFitError, QueueFullError

Policy = Literal["fcfs", "srpt", "priority"]
State = Literal["new", "waiting", "prefill", "decoding", "done"]

AGING = 0.125  # srpt: tokens that an item's key loses per token prefilled since it arrived
PRIORITY_SECONDS = 60.0  # priority: one level is worth so many seconds of waiting
MAX_OVERTAKEN = 32  # so many items may pass an item that does not fit; then all wait for it
LOOKAHEAD = 32  # items behind one that does not fit which are looked at in a step
RESERVED_SHARE = 0.25  # optimistic: the share of an item's growth that is reserved at entry


@dataclass(eq=False)
class Item:
    """One request, as far as its place in the order is concerned.

    ``n_bytes`` is what it needs at its longest (prompt and ``max_new_tokens``), ``n_bytes_now`` what it
    holds once its prompt is prefilled; the latter is only read by optimistic admission. ``n_done`` may
    be raised before ``add`` by what a prefix cache has. The scheduler writes the fields from
    ``arrived`` on; ``add`` fills in ``arrived`` where it is None.
    """

    n_tokens: int  # to prefill
    n_rows: int = 1
    n_bytes: float = 0.0
    priority: int = 0
    is_whole: bool = False  # its prefill cannot be cut into chunks
    arrived: float | None = None  # seconds
    n_done: int = 0  # tokens prefilled
    n_bytes_now: float | None = None
    admitted: float | None = field(default=None, init=False)  # when it first left the queue
    state: State = field(default="new", init=False)
    n_reserved: float = field(default=0.0, init=False)  # bytes
    n_overtaken: int = field(default=0, init=False)  # items that passed it while it did not fit
    was_taken_out: bool = field(default=False, init=False)
    started: float = field(default=0.0, init=False, repr=False)  # the scheduler's count of tokens
    key: tuple[float, int] = field(default=(0.0, 0), init=False, repr=False)

    @property
    def n_left(self) -> int:
        """Tokens that are left to prefill."""
        return self.n_tokens - self.n_done


@dataclass(frozen=True)
class Chunk:
    """The next ``n_tokens`` of an item's prefill; 0 where it only comes back after ``readmit``."""

    item: Item
    n_tokens: int


# The lesser key goes first. Each is the policy's key at time t, less what all items share at t, so
# that it stays the same while an item waits and the queue is sorted once, at entry.
POLICIES: dict[str, Callable[[Item], float]] = {
    "fcfs": lambda item: item.arrived or 0.0,
    "srpt": lambda item: item.n_left + AGING * item.started,
    "priority": lambda item: (item.arrived or 0.0) - PRIORITY_SECONDS * item.priority,
}


class Scheduler:
    """Items wait, prefill, decode and leave; rows and bytes are reserved from admission to ``leave``.

    Policies: ``"fcfs"``, first come first served; ``"srpt"``, shortest remaining prefill first, with
    aging; ``"priority"``, the higher number first. All times are seconds of one clock, passed in. Not
    safe for use by several threads at once.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_bytes: float = inf,
        prefill_tokens: int = 2048,
        policy: Policy = "fcfs",
        max_queue: int | None = None,
        optimistic: bool = False,
    ) -> None:
        limits = {"max_rows": max_rows, "max_bytes": max_bytes, "prefill_tokens": prefill_tokens}
        if max_queue is not None:
            limits["max_queue"] = max_queue
        for name, value in limits.items():
            if not value > 0:
                raise ValueError(f"`{name}` is {value}; it has to be positive")
        if policy not in POLICIES:
            raise ValueError(f"`policy` is {policy!r}; the policies are {', '.join(POLICIES)}")
        self.max_rows = max_rows
        self.max_bytes = max_bytes
        self.prefill_tokens = prefill_tokens
        self.max_queue = max_queue
        self.optimistic = optimistic
        self.waiting: list[Item] = []  # in policy order
        self.prefilling: list[Item] = []
        self.decoding: list[Item] = []
        self.n_rows = 0  # in use
        self.n_bytes = 0.0  # reserved
        self._policy = POLICIES[policy]
        self._n_added = 0
        self._n_prefilled = 0  # tokens, of all items

    def add(self, item: Item, now: float) -> None:
        """Put a new item into the queue.

        Raises:
            DoesNotFitError: it needs more rows or bytes than there are in all.
            QueueFullError: ``max_queue`` items wait already.
        """
        if not self.could_fit(item):
            raise DoesNotFitError(
                f"the request needs {item.n_rows} rows and {item.n_bytes:,.0f} bytes; there are "
                f"{self.max_rows} rows and {self.max_bytes:,.0f} bytes in all"
            )
        if self.max_queue is not None and len(self.waiting) >= self.max_queue:
            raise QueueFullError(
                f"{len(self.waiting)} requests wait already; max_queue is {self.max_queue}"
            )
        if item.arrived is None:
            item.arrived = now
        self._n_added += 1
        item.started = self._n_prefilled
        item.key = (self._policy(item), self._n_added)
        self._enqueue(item)

    def plan(self, now: float) -> list[Chunk]:
        """The chunks of this step, ``prefill_tokens`` at most; admits the items that begin with it.

        Items are dealt with in policy order, those that prefill already among those that wait. One that
        is whole and longer than the budget gets a step of its own. An item that does not fit is passed
        by ``MAX_OVERTAKEN`` others at most; then nothing else is admitted until it fits.
        """
        chunks: list[Chunk] = []
        budget = self.prefill_tokens
        blocked: Item | None = None
        for item in self._in_order():
            if budget <= 0:
                break
            if item.state == "waiting":
                if blocked is not None and blocked.n_overtaken >= MAX_OVERTAKEN:
                    continue
                if not self._fits_now(item):
                    blocked = blocked or (item if self.could_fit(item) else None)
                    continue
                self._admit(item, now)
                if blocked is not None:
                    blocked.n_overtaken += 1
            n_tokens = min(item.n_left, budget)
            if item.is_whole and n_tokens < item.n_left:
                if chunks or item.n_left <= self.prefill_tokens:
                    continue  # its turn comes in a later step, at the front
                n_tokens = item.n_left
            chunks.append(Chunk(item, n_tokens))
            budget -= n_tokens
        return sorted(chunks, key=lambda chunk: (chunk.item.key[0], chunk.n_tokens))

    def advance(self, item: Item, n_tokens: int) -> None:
        """So many more of its tokens have been prefilled; with the last one it decodes."""
        if item.state != "prefill" or not 0 <= n_tokens <= item.n_left:
            raise ValueError(
                f"`n_tokens` is {n_tokens}; the item is {item.state!r} with {item.n_left} left"
            )
        item.n_done += n_tokens
        self._n_prefilled += n_tokens
        item.key = (self._policy(item), item.key[1])
        if item.n_left == 0:
            self.prefilling.remove(item)
            self.decoding.append(item)
            item.state = "decoding"

    def leave(self, item: Item) -> None:
        """It ended, was cancelled or failed, in any state: free its rows and bytes; twice is no error."""
        self._remove(item)
        item.state = "done"

    # ------------------------------------------------------------- bytes that change

    def could_fit(self, item: Item) -> bool:
        """Whether it fits when nothing else is there."""
        return item.n_rows <= self.max_rows and item.n_bytes <= self.max_bytes

    def never_fit(self) -> list[Item]:
        """The waiting items that ``plan`` passes over since they need more than there is in all.

        To be asked, and each to be let ``leave``, after ``max_bytes`` or an item's bytes changed.
        """
        return [item for item in self.waiting if not self.could_fit(item)]

    def resize(self, item: Item, n_bytes: float, n_bytes_now: float | None = None) -> None:
        """Correct the bytes of an item: at its longest, and as it is now (for optimistic admission)."""
        item.n_bytes = n_bytes
        item.n_bytes_now = item.n_bytes_now if n_bytes_now is None else n_bytes_now
        if item.state in ("prefill", "decoding"):
            self.n_bytes -= item.n_reserved
            item.n_reserved = self._to_reserve(item)
            self.n_bytes += item.n_reserved

    # ------------------------------------------------------------- inside

    def _in_order(self) -> Iterator[Item]:
        in_prefill = sorted(self.prefilling, key=lambda item: item.key)
        n_free = self.max_rows - self.n_rows
        queue = self.waiting[: n_free + LOOKAHEAD] if n_free > 0 else []
        return merge(in_prefill, queue, key=lambda item: item.key)

    def _to_reserve(self, item: Item) -> float:
        if not self.optimistic or item.was_taken_out or item.n_bytes_now is None:
            return item.n_bytes
        growth = max(0.0, item.n_bytes - item.n_bytes_now)
        return max(item.n_reserved, item.n_bytes_now + RESERVED_SHARE * growth)

    def _fits_now(self, item: Item) -> bool:
        return (
            self.n_rows + item.n_rows <= self.max_rows
            and self.n_bytes + self._to_reserve(item) <= self.max_bytes
            and self.could_fit(item)
        )

    def _enqueue(self, item: Item) -> None:
        insort(self.waiting, item, key=lambda item: item.key)
        item.state = "waiting"

    def _admit(self, item: Item, now: float) -> None:
        self._remove(item)
        self.prefilling.append(item)
        item.state = "prefill"
        item.admitted = now if item.admitted is None else item.admitted
        item.n_reserved = self._to_reserve(item)
        self.n_rows += item.n_rows
        self.n_bytes += item.n_reserved

    def _remove(self, item: Item) -> None:
        if item.state == "waiting":
            del self.waiting[bisect_left(self.waiting, item.key, key=lambda item: item.key)]
        elif item.state in ("prefill", "decoding"):
            (self.prefilling if item.state == "prefill" else self.decoding).remove(item)
            self.n_rows -= item.n_rows
            self.n_bytes -= item.n_reserved
            item.n_reserved = 0.0
