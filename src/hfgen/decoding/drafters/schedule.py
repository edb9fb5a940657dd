"""The number of tokens to draft in a round: a function of accepted drafts, so that a seed fixes a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .base import Acceptance
from .costs import Costs

#: Tokens of a draft where neither the call nor an assistant's config says; upstream's default.
DEFAULT_TOKENS = 20


class Schedule:
    """Decides on the length of the next draft."""

    #: Tokens to draft in the next round; 0 to decode without a draft.
    n_tokens: int
    #: Whether ``width`` is 0 where a row can fill no column.
    needs_all = False

    def width(self, filled: Sequence[int]) -> int:
        """How many columns to feed, of those that each row can fill: with known tokens, then drafted ones."""
        return max(filled)

    def observe(self, verdict: Acceptance, n_advanced: int, n_fed: int) -> None:
        """Learn from a round that fed ``n_fed`` drafts a row, and brought all rows on by ``n_advanced``."""

    def finish(self) -> None:
        """The call is over."""


class Constant(Schedule):
    """Always the same. Upstream's "constant"."""

    def __init__(self, n_tokens: int, costs: Costs | None = None) -> None:
        self.n_tokens = n_tokens


class Heuristic(Constant):
    """Two more after a draft that was accepted as a whole, one less after any other.

    Upstream's "heuristic" (writes the number to the assistant's config in the end, for its next
    call) and "heuristic_transient".
    """

    kept_in: Any = None

    def finish(self) -> None:
        if self.kept_in is not None:
            self.kept_in.num_assistant_tokens = self.n_tokens

    def observe(self, verdict: Acceptance, n_advanced: int, n_fed: int) -> None:
        self.n_tokens = self.n_tokens + 2 if verdict.is_all_accepted else max(1, self.n_tokens - 1)


class Depths:
    """How likely something goes on for one token more, by how many went before; newer rounds count more.

    Later tokens of a draft are accepted more often than its first: neighbours share a rate, and a rate
    that was hardly seen is close to that of the tokens before.
    """

    #: Tokens, from 1 on, at which another rate begins.
    BORDERS = (1, 2, 4, 8, 16)
    #: How much a round weighs one round later; the rate before anything was seen.
    DECAY, FIRST_GUESS = 0.98, 0.5

    def __init__(self) -> None:
        self.went_on, self.stopped = [0.0] * len(self.BORDERS), [0.0] * len(self.BORDERS)

    def observe(self, length: int, limit: int) -> None:
        """It went on for ``length`` tokens, where ``limit`` would have been possible."""
        for index, first in enumerate(self.BORDERS):
            end = self.BORDERS[index + 1] if index + 1 < len(self.BORDERS) else limit + 1
            went_on = max(min(length + 1, end) - first, 0)
            has_stopped = first <= length + 1 < end and length < limit
            self.went_on[index] = self.DECAY * self.went_on[index] + went_on
            self.stopped[index] = self.DECAY * self.stopped[index] + has_stopped

    def rates(self, limit: int) -> list[float]:
        """Of the first ``limit`` tokens."""
        found: list[float] = []
        rate = self.FIRST_GUESS
        for index, first in enumerate(self.BORDERS):
            seen = self.went_on[index] + self.stopped[index]
            rate = (self.went_on[index] + rate) / (seen + 1)
            is_last = index + 1 == len(self.BORDERS)
            n = limit + 1 - first if is_last else self.BORDERS[index + 1] - first
            found += [min(rate, 0.99)] * max(min(n, limit + 1 - first), 0)
        return found


class Adaptive(Constant):
    """The length that should make tokens fastest, by what was accepted so far: hfgen's default.

    A round gains the accepted tokens and one more (Leviathan et al. 2023, equation 1). Its cost
    follows from the tokens drafted and from constants or what was measured before the call, not from a
    clock. Nothing is drafted where nothing gains ``MARGIN`` over decoding without a draft, but for
    trials. An account pays for what drafts cost: it starts with ``START`` forwards, gets what rounds gain
    and ``SHARE`` per round, and holds at most ``MOST``. So a call loses no more than ``START`` and
    ``SHARE`` of its time. With several rows, tokens count that all rows advance by; columns that one of
    them cannot fill bring none further, and are not fed.
    """

    needs_all = True
    #: By how much faster drafting has to be expected to be.
    MARGIN = 1.05
    #: In forwards of the target: see above.
    START, SHARE, MOST = 2.0, 0.01, 8.0
    #: What it costs to ask for a draft, in the same: a search on the host, in a batch of small models.
    ASKED = 0.02
    #: The draft of a trial.
    TRIAL = 3
    #: Longer drafts are not made.
    LONGEST = 64

    def __init__(self, n_tokens: int, costs: Costs | None = None) -> None:
        self.max_tokens, self.costs = min(n_tokens, self.LONGEST), costs or Costs()
        self.filled, self.accepted = Depths(), Depths()
        #: Columns that the longest draft of the round fills.
        self.n_drafted = 0
        self.account = self.START
        self.ahead = self._ahead()
        super().__init__(self._length())

    def width(self, filled: Sequence[int]) -> int:
        self.n_drafted = max(filled)
        limit = min(min(filled), self.n_tokens)
        self.filled.observe(limit, self.n_tokens)
        best, speed = self._best(limit, is_drafted=True)
        return best if speed > self.MARGIN else self._trial(limit)

    def observe(self, verdict: Acceptance, n_advanced: int, n_fed: int) -> None:
        spent = self.costs.forward(n_fed) + self.costs.drafter * self.n_drafted
        spent += self.ASKED * (self.n_tokens > 0)
        self.account = min(self.account + self.SHARE + n_advanced - spent, self.MOST)
        self.n_drafted = 0
        if n_fed:
            self.accepted.observe(n_advanced - 1, n_fed)
            self.ahead = self._ahead()
        self.n_tokens = self._length()

    def _ahead(self) -> int:
        """How many tokens should pay, 0 if none. Of drafts that cost nothing, ``width`` takes as many as pay."""
        is_free = not self.costs.drafter
        best, speed = self._best(self.max_tokens, is_drafted=is_free)
        if speed <= self.MARGIN:
            return 0
        return self.max_tokens if is_free else best

    def _length(self) -> int:
        if self.account < self.ASKED:
            return 0
        return self.ahead or self._trial(self.max_tokens, self.costs.drafter)

    def _trial(self, limit: int, drafter: float = 0.0) -> int:
        """The length of a trial: as far as the account can pay for it."""
        n = min(self.TRIAL, limit)
        while n and self.costs.forward(n) - 1 + drafter * n > self.account:
            n -= 1
        return n

    def _best(self, limit: int, is_drafted: bool) -> tuple[int, float]:
        """The best of up to ``limit`` tokens, and how many times faster it should be.

        ``is_drafted``: they are there already; else they cost, and drafts may end before.
        """
        tokens, width, reached, drafted = 1.0, 0.0, 1.0, 1.0
        best, speed = 0, 1.0
        fills = [1.0] * limit if is_drafted else self.filled.rates(limit)
        for n, (rate, fill) in enumerate(zip(self.accepted.rates(limit), fills, strict=True), 1):
            drafted *= fill
            reached *= rate * fill
            width, tokens = width + drafted, tokens + reached
            cost = self.costs.forward(width) + (0.0 if is_drafted else self.costs.drafter * width)
            if cost - 1 > self.account:
                break
            if tokens / cost > speed:
                best, speed = n, tokens / cost
        return best, speed


#: By ``num_assistant_tokens_schedule``; made from a number of tokens, and what they cost.
SCHEDULES: dict[str, Callable[[int, Costs], Schedule]] = {
    "adaptive": Adaptive,
    "constant": Constant,
    "heuristic": Heuristic,
    "heuristic_transient": Heuristic,
}


def schedule_named(name: str | None, default: str) -> Callable[[int, Costs], Schedule]:
    """Raises ``ValueError`` for a name that there is none of."""
    if name is not None and name not in SCHEDULES:
        raise ValueError(
            f"`num_assistant_tokens_schedule` has to be one of {sorted(SCHEDULES)}, but is {name!r}."
        )
    return SCHEDULES[name or default]
