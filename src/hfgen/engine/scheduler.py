"""Decides which requests prefill and decode next: admission by rows and bytes, and chunked prefill."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import merge
from math import inf
from operator import attrgetter
from typing import Any, Literal

from .errors import DoesNotFitError, QueueFullError

MAX_OVERTAKEN = 32  # items that may pass one that does not fit; then none passes it
LOOKAHEAD = 32  # items behind one that does not fit that a step looks at
RESERVED_SHARE = 0.25  # optimistic admission: the share of an item's growth reserved at entry

#: ``srpt``: tokens that a request is moved ahead by, per token prefilled since it arrived; see
#: ``benchmarks/results/scheduler.md``: with less, the mean hardly gains, and the longest wait grows.
AGING = 1 / 32
#: Tokens that a request counts for besides its prompt when it begins, so that many tiny prompts do not pass a
#: short one: it is moved ahead by a token for each.
PER_REQUEST = 32

#: ``priority``: one level is worth so many seconds of waiting.
SECONDS_PER_LEVEL = 60.0

_key = attrgetter("key")

State = Literal["new", "waiting", "prefill", "decoding", "done"]


@dataclass(eq=False)
class Item:
    """A request as the scheduler sees it; an engine's are ``EngineRequest``s."""

    n_tokens: int = 0  # to prefill
    n_rows: int = 1
    n_bytes: float = 0  # at its longest
    priority: int = 0
    is_whole: bool = False  # its prefill cannot be cut into chunks
    n_done: int = 0  # tokens prefilled, or found in a prefix cache
    n_bytes_now: float | None = None  # without growth, if `optimistic`; None: `n_bytes` is reserved
    stays: bool = False  # beside the batches: it cannot be taken out

    # Written by the scheduler.
    arrived: float = field(default=0.0, init=False)  # seconds
    admitted: float | None = field(default=None, init=False)  # seconds; the first time
    state: State = field(default="new", init=False)
    n_reserved: float = field(default=0, init=False)  # bytes, in prefill and decoding
    was_taken_out: bool = field(default=False, init=False)
    n_overtaken: int = field(default=0, init=False)  # items that passed it when it did not fit
    clock_at_arrival: int = field(default=0, init=False)  # of the scheduler
    key: tuple[float, int] = field(default=(0.0, 0), init=False)  # of the policy, then by arrival

    @property
    def n_left(self) -> int:
        return self.n_tokens - self.n_done

    @property
    def n_held(self) -> float:
        """Bytes that it takes now, as far as that is known."""
        return self.n_bytes if self.n_bytes_now is None else self.n_bytes_now


@dataclass(frozen=True)
class Chunk:
    """The next ``n_tokens`` of an item's prefill; 0 if all of them were done when it came (back) in."""

    item: Any  # an ``Item``
    n_tokens: int


def fcfs(item: Item) -> float:
    """First come, first served: the time of arrival."""
    return item.arrived


def srpt(item: Item) -> float:
    """Shortest remaining prefill first, with aging: ``n_left + AGING * clock_at_arrival``.

    The order is that of ``n_left - AGING * (clock - clock_at_arrival)`` at any moment. The clock counts the tokens
    prefilled for all requests, and ``PER_REQUEST`` for each that began, and no measured times. A request is overtaken
    only by shorter ones that arrive while ``n_left / AGING`` more tokens are prefilled (64,000 for a prompt of 2,000)
    and ``n_left`` more requests begin. The idea is that of arXiv 2606.09061, the formula hfgen's own.
    """
    return item.n_left + AGING * item.clock_at_arrival


def priority(item: Item) -> float:
    """The higher number first, with aging: ``arrived - SECONDS_PER_LEVEL * priority``.

    The order is that of ``priority + waiting_seconds / SECONDS_PER_LEVEL`` at any moment, highest first.
    """
    return item.arrived - SECONDS_PER_LEVEL * item.priority


#: The lesser key is served first. What all requests gain at the same rate while they wait is left out:
#: keys then stay as they are, and a queue is sorted once, when a request enters.
POLICIES: dict[str, Callable[[Item], float]] = {"fcfs": fcfs, "srpt": srpt, "priority": priority}


@dataclass(eq=False, kw_only=True)
class Scheduler:
    """Items wait, prefill, decode and leave; their rows and bytes are theirs from admission on.

    With ``optimistic``, an item is admitted with only a share of its growth reserved, since most end before their
    longest. When the bytes held grow beyond ``max_bytes`` (``resize``), ``victims`` are taken out of the batch, and wait
    again (``readmit``). All is reserved for an item that comes back: it is taken out once at most.

    Times are seconds of any one clock. Threads have to take turns.

    Args:
        max_rows: Rows in prefill and decoding, at most.
        max_bytes: Reserved bytes, at most; may be changed later (then see ``never_fit``).
        prefill_tokens: Tokens of prefill in a step, at most.
        policy: ``"fcfs"``, ``"srpt"`` or ``"priority"``: the functions in ``POLICIES``.
        max_queue: Items that may wait, or None.
    """

    max_rows: int
    max_bytes: float = inf
    prefill_tokens: int = 2048
    policy: str = "fcfs"
    max_queue: int | None = None
    optimistic: bool = False

    def __post_init__(self) -> None:
        for name in ("max_rows", "prefill_tokens", "max_queue"):
            value = getattr(self, name)
            if name == "max_queue" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` has to be an integer of 1 or more, but is {value!r}.")
        if not self.max_bytes > 0:
            raise ValueError(f"`max_bytes` has to be positive, but is {self.max_bytes!r}.")
        if not isinstance(self.policy, str) or self.policy not in POLICIES:
            raise ValueError(f"`policy` has to be one of {[*POLICIES]}, but is {self.policy!r}.")
        self.one_at_a_time = False  # admit no item while another one is in prefill or decoding
        self.waiting: list[Any] = []  # items, in policy order
        self.prefilling: list[Any] = []
        self.decoding: list[Any] = []
        self.n_rows = 0
        self.n_bytes: float = 0
        self._policy = POLICIES[self.policy]
        self._n_added = 0
        self._clock = 0  # tokens prefilled for all items, and `PER_REQUEST` for each that began

    def add(self, item: Item, now: float) -> None:
        """Put a new item into the queue; ``now`` is when it arrived.

        Raises:
            DoesNotFitError: It needs more rows or bytes than there are in all.
            QueueFullError: ``max_queue`` items wait.
        """
        if not self._could_fit(item):
            raise DoesNotFitError(
                f"The request needs {item.n_rows:,} rows and {item.n_bytes:,.0f} bytes, but there are "
                f"{self.max_rows:,} rows and {self.max_bytes:,.0f} bytes in all."
            )
        if self.max_queue is not None and len(self.waiting) >= self.max_queue:
            raise QueueFullError(
                f"The queue is full: {len(self.waiting):,} requests wait, and `max_queue` is "
                f"{self.max_queue:,}."
            )
        self._n_added += 1
        item.arrived, item.clock_at_arrival = now, self._clock
        self._enqueue(item, self._n_added)

    def plan(self, now: float) -> list[Chunk]:
        """The chunks of this step, in policy order; admits the waiting items that begin with one.

        Items in prefill and waiting ones take turns in one order, so that a short prompt need not wait for all of a long
        one. A whole item longer than ``prefill_tokens`` gets a step of its own. An item that does not fit is passed by
        ``MAX_OVERTAKEN`` others at most. Chunks of equal keys are sorted by length.
        """
        chunks: list[Chunk] = []
        budget = self.prefill_tokens
        blocked: Item | None = None
        n_free = self.max_rows - self.n_rows
        queue = self.waiting[: n_free + LOOKAHEAD] if n_free > 0 else []
        for item in merge(sorted(self.prefilling, key=_key), queue, key=_key):
            if budget <= 0:
                break
            n_tokens = item.n_left if item.is_whole else min(item.n_left, budget)
            is_too_long = n_tokens > budget and bool(chunks)
            if item.state == "waiting":
                if blocked is not None and blocked.n_overtaken >= MAX_OVERTAKEN:
                    continue
                if is_too_long or not self._fits(item):
                    # Nothing waits for an item that can never fit.
                    blocked = blocked or (item if self._could_fit(item) else None)
                    continue
                self._admit(item, now)
                if blocked is not None:
                    blocked.n_overtaken += 1
            elif is_too_long:
                continue
            chunks.append(Chunk(item, n_tokens))
            budget -= n_tokens
        return sorted(chunks, key=lambda chunk: (chunk.item.key[0], chunk.n_tokens))

    def advance(self, item: Item, n_tokens: int) -> None:
        """``n_tokens`` more of an item in prefill are done; after the last one it decodes."""
        if item.state != "prefill" or not 0 <= n_tokens <= item.n_left:
            raise ValueError(
                f"`n_tokens` is {n_tokens}, but the item's state is {item.state!r}, with "
                f"{item.n_left} tokens left to prefill."
            )
        item.n_done += n_tokens
        self._clock += n_tokens
        item.key = (self._policy(item), item.key[1])
        if item.n_left == 0:
            self.prefilling.remove(item)
            self.decoding.append(item)
            item.state = "decoding"

    def leave(self, item: Item) -> None:
        """Free the rows and bytes of an item in any state, once."""
        self._remove(item)
        item.state = "done"

    def never_fit(self) -> list[Any]:
        """Waiting items that need more than there is in all, after bytes have changed. ``plan`` skips them."""
        return [item for item in self.waiting if not self._could_fit(item)]

    def resize(self, item: Item, n_bytes: float, n_bytes_now: float | None = None) -> None:
        """Correct the bytes of an item, in any state: at its longest, and now (None: not known)."""
        item.n_bytes, item.n_bytes_now = n_bytes, n_bytes_now
        if item.state in ("prefill", "decoding"):
            before, item.n_reserved = item.n_reserved, self._to_reserve(item)
            self.n_bytes += item.n_reserved - before

    def victims(self) -> list[Any]:
        """Items to take out of the batch until what is held is within ``max_bytes``.

        The last in policy order first; those that were taken out before only if the others do not do.
        """
        in_use = sorted(self.prefilling + self.decoding, key=_key, reverse=True)
        needed = sum(item.n_held for item in in_use) - self.max_bytes
        victims: list[Any] = []
        for item in sorted(in_use, key=attrgetter("was_taken_out")):
            if needed > 0 and not item.stays:
                victims.append(item)
                needed -= item.n_held
        return victims

    def readmit(self, item: Item) -> None:
        """Put an item that was taken out back into the queue, at its place in the order, with its ``n_done``.

        When it is admitted again it gets its next chunk, of 0 tokens if it decoded: its states have to be put back.
        """
        if item.state not in ("prefill", "decoding"):
            raise ValueError(f"`item` has to be in prefill or decoding, but is {item.state!r}.")
        self._remove(item)
        item.was_taken_out = True
        self._enqueue(item, item.key[1])

    def _could_fit(self, item: Item) -> bool:
        return item.n_rows <= self.max_rows and item.n_bytes <= self.max_bytes

    def _fits(self, item: Item) -> bool:
        if self.one_at_a_time and self.n_rows:
            return False
        n_rows, n_bytes = self.n_rows + item.n_rows, self.n_bytes + self._to_reserve(item)
        return n_rows <= self.max_rows and n_bytes <= self.max_bytes and self._could_fit(item)

    def _to_reserve(self, item: Item) -> float:
        if not self.optimistic or item.was_taken_out or item.n_bytes_now is None:
            return item.n_bytes
        if item.state == "waiting":
            return item.n_bytes_now + RESERVED_SHARE * (item.n_bytes - item.n_bytes_now)
        return max(item.n_bytes_now, min(item.n_reserved, item.n_bytes))

    def _admit(self, item: Item, now: float) -> None:
        self._remove(item)
        item.n_reserved = self._to_reserve(item)
        item.state = "prefill"
        if item.admitted is None:
            item.admitted = now
            self._clock += PER_REQUEST
        self.prefilling.append(item)
        self.n_rows += item.n_rows
        self.n_bytes += item.n_reserved

    def _enqueue(self, item: Item, number: int) -> None:
        item.key = (self._policy(item), number)
        item.state = "waiting"
        insort(self.waiting, item, key=_key)

    def _remove(self, item: Item) -> None:
        if item.state == "waiting":
            del self.waiting[bisect_left(self.waiting, item.key, key=_key)]
        elif item.state in ("prefill", "decoding"):
            (self.prefilling if item.state == "prefill" else self.decoding).remove(item)
            self.n_rows -= item.n_rows
            # Sums of fractions are inexact: without rows, the bytes are exactly zero.
            self.n_bytes = self.n_bytes - item.n_reserved if self.n_rows else 0
            item.n_reserved = 0
