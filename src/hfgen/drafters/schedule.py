"""How many tokens to draft in a round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from .base import DraftVerdict


class Schedule(Protocol):
    """Decides on the length of the next draft."""

    #: Tokens to draft in the next round; 0 to decode without a draft.
    n_tokens: int

    def observe(self, verdict: DraftVerdict, n_advanced: int, seconds: float) -> None:
        """Learn from a round: how many tokens all rows advanced by, in how much time."""

    def finish(self) -> None:
        """The call is over."""


class Constant:
    """Always the same. Upstream's ``num_assistant_tokens_schedule="constant"``."""

    def __init__(self, n_tokens: int, rows: int = 1) -> None:
        self.n_tokens = n_tokens

    def observe(self, verdict: DraftVerdict, n_advanced: int, seconds: float) -> None:
        pass

    def finish(self) -> None:
        pass


class Heuristic(Constant):
    """Two more after a draft that was accepted as a whole, one less after any other.

    Upstream's "heuristic" and "heuristic_transient"; the former writes the number to the assistant's
    generation config (``kept_in``) in the end, for its next call.
    """

    kept_in: Any = None

    def finish(self) -> None:
        if self.kept_in is not None:
            self.kept_in.num_assistant_tokens = self.n_tokens

    def observe(self, verdict: DraftVerdict, n_advanced: int, seconds: float) -> None:
        self.n_tokens = self.n_tokens + 2 if verdict.is_all_accepted else max(1, self.n_tokens - 1)


class Rate:
    """How often something goes on for one token more, from the lengths that it went on for.

    Newer lengths count more; without any, every second time.
    """

    def __init__(self) -> None:
        self.went_on, self.stopped = 0.5, 0.5

    def observe(self, length: int, limit: int, decay: float) -> None:
        """It went on for ``length`` tokens, where ``limit`` would have been possible."""
        self.went_on = decay * self.went_on + length
        self.stopped = decay * self.stopped + (length < limit)

    def expected(self, limit: int) -> float:
        """The mean length, if it may go on for ``limit`` tokens."""
        rate = min(self.went_on / (self.went_on + self.stopped), 0.999)
        return rate * (1 - rate**limit) / (1 - rate)


class Adaptive:
    """The length that made tokens fastest so far, by what was measured: hfgen's default.

    Of a draft of ``n`` tokens, as many are accepted as ``accepted`` says, and one more is gained
    (Leviathan et al. 2023, equation 1); as many are drafted as ``drafted`` says, since a drafter
    may stop early. A round takes ``base`` seconds and ``slope`` for each drafted token. All of this
    is fitted to the rounds, the newer ones counting more, and ``n`` maximises tokens per second.
    Where nothing gains ``MARGIN`` over decoding without a draft, none is made, and at longer and
    longer intervals one is tried again. With several rows, tokens count that all rows advance by.
    """

    #: Rounds to learn from before anything is adapted: of one row, and of several. One row starts as
    #: upstream does, with the longest draft; several with a short one, which costs all of them.
    WARM_UP, BATCH_WARM_UP, BATCH_START = 8, 3, 4
    #: How much a round weighs one round later.
    DECAY = 0.95
    #: By how much faster drafting has to be expected to be.
    MARGIN = 1.05
    #: Rounds without a draft before one is tried again: at first, and at most.
    FIRST_PAUSE, LONGEST_PAUSE = 8, 128
    #: The draft tried after a pause.
    PROBE = 3

    def __init__(self, max_tokens: int, rows: int = 1) -> None:
        self.max_tokens = max_tokens
        self.n_tokens = max_tokens if rows == 1 else min(max_tokens, self.BATCH_START)
        self.warm_up = self.WARM_UP if rows == 1 else self.BATCH_WARM_UP
        self.rounds = 0
        self.pause, self.paused = self.FIRST_PAUSE, 0
        self.accepted, self.drafted = Rate(), Rate()
        self.slope = 0.0
        # Decayed sums over rounds: weight, n, seconds, n * n, n * seconds.
        self.sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def observe(self, verdict: DraftVerdict, n_advanced: int, seconds: float) -> None:
        self.rounds += 1
        if self.rounds == 1:
            return  # the prompt was forwarded with it
        n = max(verdict.drafted, default=0)
        if self.n_tokens:
            self.accepted.observe(n_advanced - 1, self.n_tokens, self.DECAY)
            self.drafted.observe(n, self.n_tokens, self.DECAY)
        added = (1.0, n, seconds, n * n, n * seconds)
        self.sums = tuple(self.DECAY * old + new for old, new in zip(self.sums, added, strict=True))  # type: ignore[assignment]
        if self.rounds < self.warm_up:
            return
        if self.rounds == self.warm_up:
            self.n_tokens = 0  # once, to learn what a round without a draft costs
            return
        self._choose()

    def finish(self) -> None:
        pass

    def _choose(self) -> None:
        base, slope = self._cost()
        speeds = [
            (1 + self.accepted.expected(n)) / (base + slope * self.drafted.expected(n))
            for n in range(self.max_tokens + 1)
        ]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        if speeds[best] > self.MARGIN * speeds[0]:
            self.n_tokens, self.paused, self.pause = best, 0, self.FIRST_PAUSE
            return
        self.paused += 1
        self.n_tokens = 0
        if self.paused >= self.pause:
            self.n_tokens = min(self.PROBE, self.max_tokens)
            self.paused, self.pause = 0, min(2 * self.pause, self.LONGEST_PAUSE)

    def _cost(self) -> tuple[float, float]:
        """Seconds of a round without a draft, and of each drafted token: a least-squares line."""
        weight, n, seconds, nn, ns = self.sums
        variance = nn * weight - n * n
        if variance > 1e-3:  # else all recent rounds had the same length: the slope stays
            self.slope = max((ns * weight - n * seconds) / variance, 0.0)
        return max((seconds - self.slope * n) / weight, 1e-6), self.slope


#: By ``num_assistant_tokens_schedule``; made from the number of tokens and of rows.
SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "adaptive": Adaptive,
    "constant": Constant,
    "heuristic": Heuristic,
    "heuristic_transient": Heuristic,
}
