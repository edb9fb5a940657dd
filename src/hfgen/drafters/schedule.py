"""How many tokens to draft in a round: a function of what was accepted, so that a seed fixes a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .base import Acceptance

#: Tokens of a draft where neither the call nor an assistant's config says; upstream's default.
DEFAULT_TOKENS = 20


class Schedule:
    """Decides on the length of the next draft."""

    #: Tokens to draft in the next round; 0 to decode without a draft.
    n_tokens: int

    def observe(self, verdict: Acceptance, n_advanced: int, n_fed: int) -> None:
        """Learn from a round that fed ``n_fed`` drafts a row, and brought all rows on by ``n_advanced``."""

    def finish(self) -> None:
        """The call is over."""


class Constant(Schedule):
    """Always the same. Upstream's "constant"."""

    def __init__(self, n_tokens: int, rows: int = 1, cost: float = 0.0) -> None:
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


class Rate:
    """How often something goes on for one token more, by the lengths seen, newer ones the more."""

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


#: The time of a forward of several tokens, in forwards of one: 1 + FIRST + NEXT * rows * tokens after
#: the first. Fitted to 1 to 16 tokens of 1 and 8 rows ("Floors" in benchmarks/results/speculation.md).
FIRST, NEXT = 0.4, 0.013

#: The parameters that take as long as what a layer does besides: fitted to the cost ratios of the
#: built-in draft (0.38) and of 1 to 15 layers of a 135M model (0.20 to 0.56), same page.
LAYER = 2e6


def relative_cost(draft: Any, target: Any) -> float:
    """The time of a forward of the model ``draft``, in forwards of ``target``."""

    def size(model: Any) -> float:
        config = model.config.get_text_config(decoder=True)
        return float(model.num_parameters() + LAYER * getattr(config, "num_hidden_layers", 0))

    return size(draft) / size(target)


class Adaptive(Constant):
    """The length that should make tokens fastest, by what was accepted so far: hfgen's default.

    A round gains the accepted tokens and one more (Leviathan et al. 2023, equation 1). Its cost
    follows from the tokens drafted and from constants, not from a clock. Where nothing gains
    ``MARGIN`` over decoding without a draft, none is made, and at longer and longer intervals one is
    tried again. With several rows, tokens count that all rows advance by.
    """

    #: Rounds to learn from before anything is adapted, and the length of their drafts.
    WARM_UP, START = 3, 4
    #: How much a round weighs one round later.
    DECAY = 0.95
    #: By how much faster drafting has to be expected to be.
    MARGIN = 1.05
    #: Rounds without a draft before one is tried again: at first, and at most.
    FIRST_PAUSE, LONGEST_PAUSE = 8, 128
    #: The draft tried after a pause.
    PROBE = 3

    def __init__(self, n_tokens: int, rows: int = 1, cost: float = 0.0) -> None:
        super().__init__(min(n_tokens, self.START))
        self.max_tokens, self.rows, self.cost = n_tokens, rows, cost
        self.pause, self.paused, self.rounds = self.FIRST_PAUSE, 0, 0
        self.accepted, self.drafted = Rate(), Rate()

    def observe(self, verdict: Acceptance, n_advanced: int, n_fed: int) -> None:
        self.rounds += 1
        if self.n_tokens:
            self.accepted.observe(n_advanced - 1, self.n_tokens, self.DECAY)
            self.drafted.observe(n_fed, self.n_tokens, self.DECAY)
        if self.rounds >= self.WARM_UP:
            self._choose()

    def _choose(self) -> None:
        best, speed = 0, 0.0
        for n in range(1, self.max_tokens + 1):  # as long as one more makes it faster
            if self._speed(n) <= speed:
                break
            best, speed = n, self._speed(n)
        if speed > self.MARGIN:
            self.n_tokens, self.paused, self.pause = best, 0, self.FIRST_PAUSE
            return
        self.paused, self.n_tokens = self.paused + 1, 0
        if self.paused >= self.pause:
            self.n_tokens = min(self.PROBE, self.max_tokens)
            self.paused, self.pause = 0, min(2 * self.pause, self.LONGEST_PAUSE)

    def _speed(self, n: int) -> float:
        """Tokens in the time of a plain forward, with drafts of ``n``."""
        width = self.drafted.expected(n)
        forward = 1 + FIRST * min(width, 1.0) + NEXT * self.rows * max(width - 1.0, 0.0)
        return (1 + self.accepted.expected(n)) / (forward + self.cost * width)


#: By ``num_assistant_tokens_schedule``; made from the numbers of tokens and rows, and the drafter's cost.
SCHEDULES: dict[str, Callable[[int, int, float], Schedule]] = {
    "adaptive": Adaptive,
    "constant": Constant,
    "heuristic": Heuristic,
    "heuristic_transient": Heuristic,
}


def schedule_named(name: str | None, default: str) -> Callable[[int, int, float], Schedule]:
    """Raises ``ValueError`` for a name that there is none of."""
    if name is not None and name not in SCHEDULES:
        raise ValueError(
            f"`num_assistant_tokens_schedule` has to be one of {sorted(SCHEDULES)}, but is {name!r}."
        )
    return SCHEDULES[name or default]
