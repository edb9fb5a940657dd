"""A request as the scheduler sees it, and a part of its prefill."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

State = Literal["new", "waiting", "prefill", "decoding", "done"]


@dataclass(eq=False)
class Item:
    """One request, as the scheduler sees it.

    ``n_bytes`` is what it takes at its longest, with ``max_new_tokens``; ``n_bytes_now`` what it takes
    without growth, first its prompt and then what it has become (see ``resize``); only optimistic
    admission reads it. ``n_done`` may be raised by what a prefix cache has, before ``add`` or in prefill.
    """

    n_tokens: int  # to prefill
    n_rows: int = 1
    n_bytes: float = 0
    priority: int = 0
    is_whole: bool = False  # its prefill cannot be cut into chunks
    n_done: int = 0  # tokens prefilled
    n_bytes_now: float | None = None  # not known: all of `n_bytes` is reserved
    stays: bool = False  # it cannot be taken out

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
        """Tokens that are left to prefill."""
        return self.n_tokens - self.n_done

    @property
    def n_held(self) -> float:
        """Bytes that it takes now, as far as that is known."""
        return self.n_bytes if self.n_bytes_now is None else self.n_bytes_now


@dataclass(frozen=True)
class Chunk:
    """The next ``n_tokens`` of an item's prefill; 0 if all of them were done when it came (back) in."""

    item: Item
    n_tokens: int
