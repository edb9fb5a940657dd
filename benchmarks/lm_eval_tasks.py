"""What lm_eval's model types are measured on: answers of very different lengths, and choices among continuations."""

from __future__ import annotations

import json
import random
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hfgen
from benchmarks.edits import EDITS
from benchmarks.models import SUBJECTS
from benchmarks.stopping import build


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(ABC):
    """Requests, and the batch sizes of ``hf`` that are tried."""

    name: str
    title: str
    model: Any
    tokenizer: Any
    batch_sizes: Sequence[int | str]
    n_rounds: int
    #: How many times as fast as ``hf`` at its best ``hfgen`` is to be.
    target: float

    @abstractmethod
    def run(self, harness: Any, warms_up: bool = False) -> list[Any]:
        """The results by a model of lm_eval; ``warms_up``: of few short requests."""

    @abstractmethod
    def are_equal(self, result: Any, expected: Any) -> bool:
        """Whether two results of a request are the same."""

    @abstractmethod
    def n_tokens(self) -> int:
        """Tokens by which speed is told."""

    @abstractmethod
    def longest(self) -> int:
        """Tokens of the longest row. With "auto", ``hf`` tries rows of `max_length`."""

    @abstractmethod
    def facts(self) -> str:
        """A sentence about the requests."""

    def _n(self, text: str) -> int:
        return len(self.tokenizer(text).input_ids)


def instances(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Requests of lm_eval."""
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers(Task):
    """``generate_until``: answers end at strings, or are as long as is allowed."""

    prompts: list[str]
    until: list[str]
    max_new: int
    target: float = 1.5

    def run(self, harness: Any, warms_up: bool = False) -> list[Any]:
        prompts, max_new = (self.prompts[:2], 4) if warms_up else (self.prompts, self.max_new)
        asked = {"until": self.until, "max_gen_toks": max_new, "do_sample": False}
        requests = instances("generate_until", [(prompt, asked) for prompt in prompts])
        return list(harness.generate_until(requests, disable_tqdm=True))

    def are_equal(self, result: Any, expected: Any) -> bool:
        return bool(result == expected)

    def lengths(self) -> list[int]:
        """New tokens of each answer, a stop string included."""
        outputs = hfgen.generate_many(
            self.model,
            [self.tokenizer(prompt).input_ids for prompt in self.prompts],
            self.tokenizer,
            max_new_tokens=self.max_new,
            do_sample=False,
            stop=self.until,
            on_error="raise",
        )
        return [len(output.token_ids) for output in outputs]

    def n_tokens(self) -> int:
        return sum(self.lengths())

    def longest(self) -> int:
        return max(map(self._n, self.prompts)) + self.max_new

    def facts(self) -> str:
        lengths = self.lengths()
        longest = sum(length >= self.max_new for length in lengths)
        return (
            f"{len(lengths)} requests, `until={json.dumps(self.until)}`, `max_gen_toks={self.max_new}`: "
            f"{sum(lengths):,} tokens, the median answer has {statistics.median(lengths):g}, {longest} "
            f"answers have {self.max_new}."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices(Task):
    """``loglikelihood``: pairs of a context and a continuation."""

    pairs: list[tuple[str, str]]

    def run(self, harness: Any, warms_up: bool = False) -> list[Any]:
        requests = instances("loglikelihood", self.pairs[:2] if warms_up else self.pairs)
        return list(harness.loglikelihood(requests, disable_tqdm=True))

    def are_equal(self, result: Any, expected: Any) -> bool:
        (value, is_greedy), (known, was_greedy) = result, expected
        return abs(value - known) <= 1e-4 * abs(known) and is_greedy == was_greedy

    def n_tokens(self) -> int:
        return sum(self._n(context + continuation) for context, continuation in self.pairs)

    def longest(self) -> int:
        return max(self._n(context + continuation) for context, continuation in self.pairs)

    def facts(self) -> str:
        contexts = {context for context, _ in self.pairs}
        n_context = statistics.median(map(self._n, contexts))
        n_each = statistics.median(self._n(continuation) for _, continuation in self.pairs)
        return (
            f"{len(self.pairs)} requests, {len(contexts)} contexts; the median context has {n_context:g} "
            f"tokens, the median continuation {n_each:g}."
        )


# --- the tasks ----------------------------------------------------------------------------------


def small() -> Task:
    """The built-in model continues a line of code after each of some functions' lines."""
    model, tokenizer = hfgen.builtin_model()
    heads = [
        "".join(lines[:n])
        for edit in EDITS
        for lines in [edit.before.splitlines(keepends=True)]
        for n in range(2, len(lines), 2)
    ]
    return Answers(
        name="small",
        title="Built-in model, the next line of code",
        model=hfgen.mix_into(model),
        tokenizer=tokenizer,
        batch_sizes=(1, 4, 8, 16, 32, "auto"),
        n_rounds=3,
        prompts=heads,
        until=["\n"],
        max_new=256,
    )


def random_135m() -> Task:
    """The random model repeats a token, then another one; some letters end its answer."""
    subject = SUBJECTS["135m"]()
    tokenizer = build(subject.model.config.vocab_size)
    tokenizer.eos_token, tokenizer.pad_token = tokenizer.convert_ids_to_tokens([2, 0])
    draw = random.Random(0)
    words = tokenizer.convert_ids_to_tokens(range(300, 1000))
    return Answers(
        name="135m",
        title=subject.title,
        model=subject.model,
        tokenizer=tokenizer,
        batch_sizes=(1, 4, 8, 16),
        n_rounds=2,
        prompts=[" ".join(draw.choices(words, k=draw.randint(4, 16))) for _ in range(24)],
        until=["n", "t", "o"],
        max_new=128,
    )


def choices() -> Task:
    """Which of four lines follows some lines of a function."""
    return _choices("choices", "Built-in model, four lines to choose from", 1.0, _questions(60))


def examples() -> Task:
    """The same behind solved examples, which are the beginning of all contexts."""
    solved = "".join(lines[0] for _, lines in _questions(65)[60:])
    asked = [(solved + context, lines) for context, lines in _questions(20)]
    return _choices("examples", "Built-in model, the same behind common examples", 1.0, asked)


def letters() -> Task:
    """Choices of one token, of which ``hf`` forwards each context once as well."""
    asked = [(context + "#", [" a", " b", " c", " d"]) for context, _ in _questions(60)]
    return _choices("letters", "Built-in model, four tokens to choose from", 1 / 1.02, asked)


def alone() -> Task:
    """One continuation for each context: nothing is shared."""
    asked = [(context, lines[:1]) for context, lines in _questions(60)]
    return _choices("alone", "Built-in model, one line for each context", 1 / 1.02, asked)


def _choices(name: str, title: str, target: float, asked: list[tuple[str, list[str]]]) -> Task:
    model, tokenizer = hfgen.builtin_model()
    return Choices(
        name=name,
        title=title,
        model=hfgen.mix_into(model),
        tokenizer=tokenizer,
        batch_sizes=(1, 4, 8, 16) if name == "examples" else (1, 4, 8, 16, 32, "auto"),
        n_rounds=3,
        target=target,
        pairs=[(context, line) for context, lines in asked for line in lines],
    )


def _questions(n: int) -> list[tuple[str, list[str]]]:
    """Three to eight lines of a function, and the next line with three of other functions; the first ``n``."""
    draw = random.Random(0)
    functions = [edit.before.splitlines(keepends=True) for edit in EDITS]
    places = [(f, end) for f, lines in enumerate(functions) for end in range(4, len(lines))]
    draw.shuffle(places)
    found = []
    for f, end in places[:n]:
        others = [
            line for g, lines in enumerate(functions) if g != f for line in lines if line.strip()
        ]
        context = "".join(functions[f][max(0, end - draw.randint(3, 8)) : end]).rstrip("\n")
        lines = [functions[f][end], *draw.sample(others, 3)]
        found.append((context, ["\n" + line.rstrip("\n") for line in lines]))
    return found


TASKS: dict[str, Callable[[], Task]] = {
    "small": small,
    "135m": random_135m,
    "choices": choices,
    "examples": examples,
    "letters": letters,
    "alone": alone,
}
