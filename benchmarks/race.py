"""Several ways to generate the same tokens, taking turns, with a count of what was forwarded."""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from .side_by_side import Spread, UnequalTokensError, call


@dataclass(frozen=True, slots=True)
class Variant:
    """A library of ``LIBRARIES``, and what it is asked for besides the inputs."""

    name: str
    side: str = "hfgen"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Forwards:
    """How many tokens of each row the forwards of a call were given, in order."""

    target: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Result:
    """What one variant took, call by call; seconds."""

    variant: str
    rows: int
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)  # of the longest row
    forwards: list[Forwards] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    def as_object(self) -> dict[str, Any]:
        """All of it; of the forwards, their number and the sum of their widths, call by call."""
        sums = [
            {
                name: [len(widths), sum(widths)]
                for name, widths in (("target", f.target), ("draft", f.draft))
            }
            for f in self.forwards
        ]
        return asdict(replace(self, forwards=[])) | {"forwards": sums}

    @property
    def acceptance(self) -> float | None:
        """Accepted of the drafted tokens; ``None`` without drafts."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def n_forwards(self) -> int:
        """Of the target model, in all calls."""
        return sum(len(forwards.target) for forwards in self.forwards)

    @property
    def tokens_per_forward(self) -> float:
        """Tokens of the longest row by forwards of the target."""
        return sum(self.new_tokens) / self.n_forwards

    @property
    def width(self) -> float:
        """Tokens of one row that a forward of the target takes, those of the prompt left out."""
        widths = [width for forwards in self.forwards for width in forwards.target[1:]]
        return statistics.mean(widths) if widths else 1.0

    @property
    def milliseconds(self) -> float:
        return 1e3 * statistics.mean(self.wall)

    def gain(self, over: Result) -> Spread:
        """How many times faster than ``over``, call by call."""
        return Spread.of([a / b for a, b in zip(over.wall, self.wall, strict=True)])

    def cpu_gain(self, over: Result) -> Spread:
        """The same of processor time, which other work on the machine disturbs less."""
        return Spread.of([a / b for a, b in zip(over.cpu, self.cpu, strict=True)])


def race(
    model: Any,
    inputs: Sequence[dict[str, Any]],
    variants: Sequence[Variant],
    n_rounds: int,
    advance: Callable[[], None] = lambda: None,
) -> list[Result]:
    """All variants on each of ``inputs``, ``n_rounds`` times after a warm-up.

    On one input they run one directly after the other, another one first each time. ``advance`` is
    called after each input. Garbage is collected before each input, which is quick within
    ``frozen_garbage``. Raises ``UnequalTokensError`` if a variant's tokens are not the first's.
    """
    rows = len(inputs[0]["input_ids"])
    results = {variant.name: Result(variant.name, rows) for variant in variants}
    for turn in range(n_rounds + 1):
        for number, given in enumerate(inputs):
            gc.collect()
            shift = (turn + number) % len(variants)
            tokens = {}
            for variant in (*variants[shift:], *variants[:shift]):
                result = results[variant.name] if turn else Result(variant.name, rows)
                tokens[variant.name] = _run(model, given, variant, result)
            expected = tokens[variants[0].name]
            for name, found in tokens.items():
                if not torch.equal(found, expected):
                    raise UnequalTokensError(
                        f"{name!r} generated {found.tolist()}, and {variants[0].name!r} "
                        f"{expected.tolist()}."
                    )
            advance()
    return list(results.values())


def _run(model: Any, given: dict[str, Any], variant: Variant, result: Result) -> torch.Tensor:
    """One call, written to ``result``; returns its tokens ``(rows, length)``."""
    arguments = {"do_sample": False, **given, **variant.options, "return_dict_in_generate": True}
    is_ours = variant.side == "hfgen"
    if is_ours:
        arguments["output_speculation"] = True
    with counted(model, arguments.get("assistant_model")) as forwards:
        made = call(variant.side, model, arguments, seed=0)
    rows, prompt_length = given["input_ids"].shape
    n_new = made.tokens.shape[1] - prompt_length
    result.wall.append(made.wall)
    result.cpu.append(made.cpu)
    result.new_tokens.append(n_new)
    result.forwards.append(forwards)
    n_forwards = len(forwards.target)
    if made.speculation is not None:
        result.drafted += made.speculation.drafted
        result.accepted += made.speculation.accepted
    else:  # of one row, the widths tell the same
        result.drafted += rows * (sum(forwards.target) - prompt_length - (n_forwards - 1))
        result.accepted += rows * (n_new - n_forwards)
    return made.tokens


@contextmanager
def counted(target: Any, draft: Any = None) -> Iterator[Forwards]:
    """Within, the forwards of both are counted.

    Those of the target with fewer layers than it has are the draft's (early exit).
    """
    forwards = Forwards()
    n_layers = len(target.get_decoder().layers)

    def counting(forward: Any) -> Any:
        @functools.wraps(forward)
        def counted_forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            of_draft = model is draft or len(model.get_decoder().layers) < n_layers
            ids = kwargs["input_ids"]
            (forwards.draft if of_draft else forwards.target).append(ids.shape[1])
            return forward(model, *args, **kwargs)

        counted_forward.is_row_wise = True  # type: ignore[attr-defined]
        return counted_forward

    # No hooks: a model that has some decodes its prompt without drafts.
    with ExitStack() as stack:
        models = [model for model in (target, draft) if isinstance(model, torch.nn.Module)]
        # The class that has it: that of upstream's calls is another.
        for cls in {next(c for c in type(m).__mro__ if "forward" in vars(c)) for m in models}:
            stack.enter_context(mock.patch.object(cls, "forward", counting(cls.forward)))
        yield forwards
