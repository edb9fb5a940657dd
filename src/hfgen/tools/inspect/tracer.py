"""The observer that records a call for a trace: scores after each processor, forward passes and drafting."""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from ...decoding.strategies import Beam as Search
from ...decoding.strategies import Dola, Sample
from ...decoding.strategies.assisted import Assisted
from ...logits.grammar.processor import GrammarProcessor, NoTokenLeft
from ...logits.processors.lists import LogitsProcessorList, name_of
from ...state.run import Observer, Run, all_equal
from ...state.run import Step as LoopStep
from .beams import Tree
from .records import Candidate, Draft, Stage, Step, Token

#: Parts of a class's name that say what it is, and not what it does.
KIND = re.compile(r"(Logits(Warper|Processor)|Processor|Logits)(?=$|[A-Z])")
WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z]|$)|[A-Z][a-z]+|[a-z]+|\d+")

#: The end of a field's name that says what its value is: "xtc_probability" is the stage "xtc".
UNIT = re.compile("_(cutoff|factor|probability|range|scale|target)$")

#: Attributes that say nothing about what was asked for.
TECHNICAL = re.compile(
    r"_.*|filter_value|min_tokens_to_keep|.*(length.*|size)|vocab|hash_key|is_.*"
)

SHOWN = 8  # prompts whose settings are shown, where they differ


class Watched(LogitsProcessorList):
    """The processors of a call. What they return is as before; ``notes`` has the scores in between.

    ``notes[length]``, of the newest call with ids of that length: ``(rows, vocab)`` as they come, and
    after each processor.
    """

    def __init__(self, processors: Any) -> None:
        super().__init__(processors)
        self.kind = type(processors)
        self.notes: dict[int, list[Tensor]] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        n_rows, length = input_ids.shape
        notes = [scores[:n_rows].clone()]  # a model with guidance of its own scores each row twice
        for processor in self:
            scores = self.kind([processor])(input_ids, scores, **kwargs)
            if not isinstance(processor, NoTokenLeft):  # it only looks whether there is an error
                notes.append(scores[:n_rows].clone())
        self.notes[length] = notes
        return scores

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Without the notes: a copy is for something else, such as drafting.
        return self.kind(copy.deepcopy(list(self), memo))


def stage_of(processor: Any, configs: Sequence[Any]) -> Stage:
    """The column for a processor: of fields of the ``configs``, or of an object of the caller's."""
    if hasattr(processor, "asked_by"):
        own, *others = processor.asked_by
        name, values = UNIT.sub("", own).replace("_", " "), {}
        for field in [own, *(each for each in others if "token_id" not in each)]:
            of_prompts = [getattr(config, field, None) for config in configs]
            values[field] = of_prompts[0] if all_equal(of_prompts) else of_prompts[:SHOWN]
        values = {n: v for n, v in values.items() if isinstance(v, int | float | list | tuple)}
    else:
        name = spelled(KIND.sub("", name_of(processor))) or spelled(name_of(processor))
        values = {
            name: value
            for name, value in getattr(processor, "__dict__", {}).items()
            if isinstance(value, int | float) and not TECHNICAL.fullmatch(name)
        }
    return Stage(name, values, isinstance(processor, GrammarProcessor))


def spelled(name: str) -> str:
    """``"TopK"`` as "top k"."""
    return " ".join(WORDS.findall(name)).lower()


LOWEST = -1e29  # a token is ruled out below this score; grammars give it to beams that have ended


@dataclass(slots=True)
class Clock:
    """Adds up the seconds that a function takes, those of the device included."""

    device: torch.device
    seconds: float = 0.0
    depth: int = 0  # of its functions that run, one within the other: the outermost is timed

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.depth:
                return function(*args, **kwargs)
            started, self.depth = self.now(), 1
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds, self.depth = self.seconds + self.now() - started, 0

        return timed

    def take(self) -> float:
        """The seconds so far; begins again at 0."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Position:
    """The numbers of one generated position, on the host: of scored ``rows`` and ``m`` chosen tokens.

    Rows are those of the loop; of beams, those that the step began with.
    """

    def __init__(
        self, step: int, stages: list[Tensor], rows: Tensor, tokens: Tensor, top: int
    ) -> None:
        """Measure scores ``(rows, vocab)`` of each stage; ``tokens (m,)`` were chosen in ``rows (m,)``."""
        scores = torch.stack([stage.float() for stage in stages])
        logits, is_left = scores[0], scores > LOWEST
        both = scores[[0, -1]].softmax(dim=-1)  # the model's probabilities and the final ones
        top = min(top, logits.shape[-1])
        ids = torch.cat([logits.topk(top).indices, scores[-1].topk(top).indices], dim=1)
        of_chosen = logits[rows]
        pairs = zip(rows.tolist(), tokens.tolist(), strict=True)
        self.step = step
        self.ids = ids.cpu()  # (rows, c): likely tokens, some of them twice
        self.scores = scores.take_along_dim(ids[None], dim=-1).cpu()  # (stages, rows, c)
        self.probabilities = both.take_along_dim(ids[None], dim=-1).cpu()  # (2, rows, c)
        self.entropies = torch.special.entr(both).sum(dim=-1).cpu() / math.log(2)  # (2, rows): bits
        self.left = is_left.sum(dim=-1).cpu()  # (stages, rows)
        self.mass = both[0].masked_fill(~is_left, 0.0).sum(dim=-1).cpu()  # (stages, rows)
        #: (row, token) → its number among the chosen
        self.chosen = {pair: number for number, pair in enumerate(pairs)}
        self.ranks = (of_chosen > of_chosen.gather(1, tokens[:, None])).sum(dim=1).cpu() + 1  # (m,)
        self.chosen_scores = scores[:, rows, tokens].cpu()  # (stages, m)
        self.chosen_probabilities = both[:, rows, tokens].cpu()  # (2, m)

    def token(self, row: int, token: int, is_drafted: bool = False) -> Token:
        """The record of a token chosen in ``row``; NaN where it was never scored (a caller's processor wrote it)."""
        number = self.chosen.get((row, token))
        numbers: list[Any] = [math.nan, math.nan, (math.nan,) * len(self.scores), 0]
        if number is not None:
            both, scores = self.chosen_probabilities[:, number], self.chosen_scores[:, number]
            numbers = [*both.tolist(), tuple(scores.tolist()), int(self.ranks[number])]
        left, mass = (tuple(each[:, row].tolist()) for each in (self.left, self.mass))
        entropies, others = self.entropies[:, row].tolist(), tuple(self.candidates(row))
        return Token(token, *numbers, *entropies, *[left, mass, others, self.step, is_drafted])

    def candidates(self, row: int) -> Iterator[Candidate]:
        """The likely tokens of ``row``; of those that the processors favour, only what is left."""
        ids, top = self.ids[row].tolist(), self.ids.shape[1] // 2
        model, final = self.probabilities[:, row].tolist()
        scores = self.scores[:, row].T.tolist()
        seen = set[int]()
        for place, token in enumerate(ids):
            is_out = place >= top and final[place] == 0
            if token not in seen and not is_out:
                yield Candidate(token, model[place], final[place], tuple(scores[place]))
            seen.add(token)


class Tracer(Observer):
    """Keeps of each step what ``Trace`` holds of it; the tokens are those of a call without it."""

    def __init__(self, run: Run, strategy: Any, watched: Watched, top: int) -> None:
        self.watched, self.top = watched, top
        self.prompt_length = run.ids.shape[1]
        processors = [stage_of(p, run.configs) for p in watched if not isinstance(p, NoTokenLeft)]
        self.stages = Stage("logits"), *self.before(strategy), *processors
        self.positions: list[Position] = []
        #: ``(rows,)`` of each position: which rows have a token there, or ``None`` for all.
        self.is_token: list[list[bool] | None] = []
        self.steps: list[Step] = []
        self.search = strategy if isinstance(strategy, Search) else None
        self.tree = None if self.search is None else Tree(self.search)
        self.forward, self.draft = Clock(run.ids.device), Clock(run.ids.device)
        #: ``(rows, n)``: what was drafted in the newest round, -1 where nothing was.
        self.guesses: list[list[int]] = []
        self.patches = ExitStack()  # gives the watched methods back to their objects
        executor = strategy.executor
        for owner, name in (strategy, "prefill"), (executor, "forward"), (executor, "verify"):
            self.replace(owner, name, self.forward.around(getattr(owner, name)))
        if isinstance(strategy, Assisted):
            self.watch_drafts(strategy)
        self.since = self.forward.now()

    def replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace a method of one object by ``function``, until ``finish``."""
        setattr(owner, name, function)
        self.patches.callback(delattr, owner, name)

    def before(self, strategy: Any) -> list[Stage]:
        """The stages by which the strategy changes logits before the processors."""
        if isinstance(strategy, Search):
            return [Stage("log-probability")]
        if isinstance(strategy, Dola):
            return [Stage("contrast of layers")]
        is_own = getattr(type(strategy), "adjust", Sample.adjust) is not Sample.adjust
        return [Stage(type(strategy).__name__)] if is_own else []

    def add(self, run: Run, strategy: Any, step: LoopStep) -> None:
        seconds = self.forward.now() - self.since
        draft = self.draft.take()
        n_new = step.tokens.shape[1]
        if step.logits is None:
            name = type(strategy).__name__
            raise ValueError(f"A trace needs `Step.logits`, which {name} does not set.")
        is_token = strategy.is_token(run, step) if hasattr(strategy, "is_token") else None
        length = run.ids.shape[1] - n_new
        for place in range(n_new):
            tokens = step.tokens[:, place]
            rows = torch.arange(len(tokens), device=tokens.device)
            if self.tree is not None:
                rows, tokens = strategy.scored()
            stages = self.scores(length + place, step.logits[place], len(step.tokens))
            self.positions.append(Position(len(self.steps), stages, rows, tokens, self.top))
            self.is_token.append(None if is_token is None else is_token[:, place].tolist())
        drafts = self.drafts(strategy, length) if isinstance(strategy, Assisted) else ()
        self.steps.append(Step(n_new, seconds, self.forward.take(), draft, tuple(drafts)))
        if self.tree is not None:
            self.tree.add(run, strategy)
        self.since = self.forward.now()

    def scores(self, length: int, logits: Tensor, n_rows: int) -> list[Tensor]:
        """The scores ``(rows, vocab)`` of each stage, at the position behind ``length`` tokens."""
        notes, watched = self.watched.notes.get(length), self.watched
        watched.notes = {n: scores for n, scores in watched.notes.items() if n > length}
        if notes is None:  # there are no processors, and they were not asked
            return [logits[:n_rows]]
        has_before = len(self.stages) > len(notes)
        return [logits[:n_rows], *notes] if has_before else notes

    def watch_drafts(self, strategy: Assisted) -> None:
        """Time the making of drafts, and note them before they are verified, which writes over them."""
        make = self.draft.around(strategy.make_draft)

        def make_draft(run: Run, start: int) -> None:
            make(run, start)
            self.guesses = strategy.rows.guesses.tolist()

        self.replace(strategy, "make_draft", make_draft)

    def drafts(self, strategy: Assisted, start: int) -> Iterator[Draft]:
        """Yield the draft of each row, of a round that began behind ``start`` tokens."""
        rows = strategy.rows
        for row, guesses in enumerate(self.guesses):
            drafted = [(place, token) for place, token in enumerate(guesses, start) if token >= 0]
            if not drafted:
                continue
            known = rows.tokens[row, : rows.known[row]].tolist()
            is_right = (known[place : place + 1] == [token] for place, token in drafted)
            n_accepted = sum(1 for _ in takewhile(bool, is_right))
            tokens = tuple(token for _, token in drafted)
            yield Draft(row, drafted[0][0] - self.prompt_length, tokens, n_accepted)
        self.guesses = []

    def finish(self, run: Run, strategy: Any, result: dict[str, Any]) -> None:
        self.patches.close()  # what refers to itself would keep the cache in memory
