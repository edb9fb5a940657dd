"""The number of tokens to draft in a round: a function of accepted drafts, so that a seed fixes a call.

Costs of forward passes of several tokens are constants: no clock is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ...families import modules_of
from .base import Acceptance

DEFAULT_TOKENS = 20  # of a draft, where neither the call nor an assistant's config says; upstream's

#: The time of a forward of ``n`` tokens more than one in each row, in forwards of one: 1 + FIRST for the first of them,
#: and FIRST_ROW for each further row; NEXT for each after it in all rows, by the time of a forward of
#: one, which grows by ROW a row. Fitted to 1 to 21 tokens of 1 and 8 rows of the built-in model on a busy
#: two-core EPYC, on hfgen's own cache, 384 tokens in it.
FIRST, FIRST_ROW, NEXT, ROW = 0.35, 0.03, 0.037, 0.12
MANY_ROWS = 8  # rows beyond which the first token costs no more
#: The parameters that take as long as what a layer does besides: fitted to the cost ratios of a draft of
#: 2 layers and 0.6M parameters for a model of 5 and 4.2M (0.38), and of 1 to 15 layers of a 135M model
#: (0.20 to 0.56). The built-in draft has 0.22 by it.
LAYER = 2e6


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of a call of ``rows``, in forwards of the target that take one token of each row."""

    rows: int = 1
    drafter: float = 0.0  # of a drafted token

    def forward(self, n: float) -> float:
        """Of a forward of ``n`` tokens more than one, in each row."""
        first = FIRST + FIRST_ROW * (min(self.rows, MANY_ROWS) - 1)
        more = NEXT * self.rows * max(n - 1, 0.0) / (1 + ROW * (self.rows - 1))
        return 1 + first * min(max(n, 0.0), 1.0) + more


def relative_cost(draft: Any, target: Any) -> float:
    """The time of a forward of the model ``draft``, in forwards of ``target``."""

    def size(model: Any) -> float:
        if hasattr(model, "num_parameters"):
            count = model.num_parameters()
        else:
            count = sum(w.numel() for part in modules_of(model) for w in part.parameters(False))
        config = model.config.get_text_config(decoder=True)
        return float(count + LAYER * int(getattr(config, "num_hidden_layers", 0)))

    return size(draft) / (size(target) or 1.0)


class Schedule:
    """Decides on the length of the next draft; this one never changes it. Upstream's "constant"."""

    needs_all = False  # whether ``width`` is 0 where a row can fill no column

    def __init__(self, n_tokens: int, costs: Costs | None = None) -> None:
        self.n_tokens = n_tokens  # to draft in the next round; 0 to decode without a draft

    def width(self, filled: Sequence[int]) -> int:
        """How many columns to feed, of those that each row can fill: with known tokens, then drafted ones."""
        return max(filled)

    def observe(self, verdict: Acceptance, n_advanced: int, n_fed: int) -> None:
        """Learn from a round that fed ``n_fed`` drafts a row, and brought all rows on by ``n_advanced``."""

    def finish(self) -> None:
        """The call is over."""


class Heuristic(Schedule):
    """Two more after a draft that was accepted as a whole, one less after any other.

    Upstream's "heuristic_transient"; "heuristic" writes the number to ``kept_in``, the assistant's config.
    """

    kept_in: Any = None

    def finish(self) -> None:
        if self.kept_in is not None:
            self.kept_in.num_assistant_tokens = self.n_tokens

    def observe(self, verdict: Acceptance, n_advanced: int, n_fed: int) -> None:
        are_all_accepted = verdict.accepted == verdict.drafted
        self.n_tokens = self.n_tokens + 2 if are_all_accepted else max(1, self.n_tokens - 1)


class Depths:
    """How likely something goes on for one token more, by how many went before; newer rounds count more.

    Neighbours share a rate; one that was hardly seen is close to that of the tokens before.
    """

    BORDERS = (1, 2, 4, 8, 16)  # tokens, from 1 on, at which another rate begins
    DECAY, FIRST_GUESS = 0.98, 0.5  # weight of a round one later; the rate before anything was seen

    def __init__(self) -> None:
        self.went_on, self.stopped = [0.0] * len(self.BORDERS), [0.0] * len(self.BORDERS)

    def observe(self, length: int, limit: int) -> None:
        """It went on for ``length`` tokens, where ``limit`` would have been possible."""
        for index, (first, end) in enumerate(pairwise((*self.BORDERS, limit + 1))):
            went_on = max(min(length + 1, end) - first, 0)
            has_stopped = first <= length + 1 < end and length < limit
            self.went_on[index] = self.DECAY * self.went_on[index] + went_on
            self.stopped[index] = self.DECAY * self.stopped[index] + has_stopped

    def rates(self, limit: int) -> list[float]:
        rates, rate = list[float](), self.FIRST_GUESS
        for index, (first, end) in enumerate(pairwise((*self.BORDERS, limit + 1))):
            seen = self.went_on[index] + self.stopped[index]
            rate = (self.went_on[index] + rate) / (seen + 1)
            rates += [min(rate, 0.99)] * max(min(end, limit + 1) - first, 0)
        return rates


class Adaptive(Schedule):
    """The length that should make tokens fastest, by what was accepted so far: hfgen's default.

    A round gains the accepted tokens and one more (Leviathan et al. 2023, equation 1); of several rows, those
    that all advance by. Nothing is drafted where nothing gains ``MARGIN`` over decoding without a draft, but for
    trials. An account pays for what drafts cost: it starts with ``START`` forwards, gets what rounds gain
    and ``SHARE`` per round, and holds at most ``MOST``. So a call loses no more than ``START`` and
    ``SHARE`` of its time.
    """

    needs_all = True
    MARGIN = 1.05  # by how much faster drafting has to be expected to be
    START, SHARE, MOST = 1.5, 0.005, 8.0  # in forwards of the target: see above
    ASKED = 0.01  # a call of the drafter, in forwards: a search on the host
    TRIAL = 3  # the draft of a trial
    LONGEST = 64  # longer drafts are not made

    def __init__(self, n_tokens: int, costs: Costs | None = None) -> None:
        self.max_tokens, self.costs = min(n_tokens, self.LONGEST), costs or Costs()
        self.filled, self.accepted = Depths(), Depths()
        self.n_drafted = 0  # columns that the longest draft of the round fills
        n_trial = range(min(self.TRIAL, self.max_tokens) + 1)
        self.trial_costs = [self.costs.forward(n) - 1 for n in n_trial]  # by tokens
        self.account = self.START
        self.ahead = self._ahead()
        super().__init__(self._length())

    def width(self, filled: Sequence[int]) -> int:
        self.n_drafted = max(filled)
        limit = min(min(filled), self.n_tokens)
        self.filled.observe(limit, self.n_tokens)
        if not limit:
            return 0
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
        while n and self.trial_costs[n] + drafter * n > self.account:
            n -= 1
        return n

    def _best(self, limit: int, is_drafted: bool) -> tuple[int, float]:
        """The best of up to ``limit`` tokens, and how many times faster it should be; what ``is_drafted`` is free."""
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
    "constant": Schedule,
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
