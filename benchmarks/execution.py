"""How a step is run, measured: ms per token of greedy decoding beside upstream, by kind of weights.

A call of one new token is timed as well, and taken off: what is left are the steps.

``python -m benchmarks.execution`` writes ``execution.{md,json,png}``. All ways to decode take turns on the
same prompts, in one process. Models share their weights, but for the one in bfloat16; these are values of
bfloat16 held in float32, as those of most checkpoints are.
"""

from __future__ import annotations

import copy
import ftplib
import inspect
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from torch import nn
from transformers import CompileConfig

import hfgen
from benchmarks import models, output
from benchmarks.models import PROMPT_LENGTH, Subject
from benchmarks.output import RESULTS, OutOption, ThreadsOption, set_threads
from benchmarks.plots import save, subplots
from benchmarks.side_by_side import (
    Call,
    Spread,
    call,
    described,
    frozen_garbage,
    machine,
    read_bandwidth,
)
from hfgen.tools.evaluate import perplexity

#: Of the largest, half the layers: the packed copies of all ways have to fit into memory.
SUBJECTS = models.SUBJECTS | {"1b": partial(models.random_1b, 8)}


@dataclass(frozen=True, slots=True)
class Way:
    """A way to decode. ``options``: of ``hfgen.optimize``, which is not called without; ``call``: of ``generate``."""

    side: str
    options: dict[str, Any] | None = None
    dtype: torch.dtype = torch.float32
    call: dict[str, Any] = field(default_factory=dict)
    only: tuple[str, ...] = ()  # subjects; all if empty


_COMPILE = CompileConfig()
_COMPILE._compile_all_devices = True  # else upstream does not compile on a CPU
COMPILED = {"cache_implementation": "static", "compile_config": _COMPILE}
WAYS: dict[str, Way] = {
    "upstream, float32": Way("upstream"),
    "upstream, bfloat16": Way("upstream", dtype=torch.bfloat16),
    "upstream, static and compiled": Way("upstream", call=COMPILED, only=("small", "135m")),
    "upstream, bfloat16, static and compiled": Way(
        "upstream", dtype=torch.bfloat16, call=COMPILED, only=("small", "135m")
    ),
    "hfgen": Way("hfgen"),
    "optimize": Way("hfgen", {}),
    "optimize, bfloat16 model": Way("hfgen", {}, torch.bfloat16),
    "optimize, compiled": Way("hfgen", {"compile": True}, only=("small", "135m", "1b")),
    "optimize, compiled, int8": Way(
        "hfgen", {"compile": True, "weights": "int8"}, only=("small", "135m", "1b")
    ),
    "optimize, int8": Way("hfgen", {"weights": "int8"}),
    "optimize, int4": Way("hfgen", {"weights": "int4"}),
}
UPSTREAM = [name for name, way in WAYS.items() if way.side == "upstream"]
#: What the targets are set over.
PLAIN = [name for name in UPSTREAM if not WAYS[name].call]
REFERENCE = "upstream, float32"

#: By subject: rounds, numbers of rows, new tokens.
SIZES = {
    "small": (20, (1, 4, 8, 16), 32),
    "135m": (6, (1, 4, 8, 16), 16),
    "1b": (3, (1, 8), 9),
}
#: Targets: times the best of ``PLAIN``; 8 rows in times of one.
TARGETS = {"optimize": 1.5, "optimize, compiled": 2.0, "optimize, compiled, int8": 3.0}
ROWS_TARGET = 1.6


@dataclass(slots=True)
class Times:
    """One way to decode one number of rows: seconds of each call of ``new_tokens``, and of one token."""

    way: str
    rows: int
    new_tokens: int
    wall: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    equal: float = 0.0  # share of tokens that are those of the reference
    products: float = 0.0  # ms of a step's linear layers by themselves; 0: not measured

    @property
    def steps(self) -> list[float]:
        """Milliseconds of a step that follows the prompt's, round by round."""
        n = self.new_tokens - 1
        pairs = zip(self.wall, self.first, strict=True)
        return [1e3 * (wall - first) / n for wall, first in pairs]

    @property
    def per_token(self) -> float:
        return statistics.median(self.steps)

    @property
    def first_token(self) -> float:
        """Milliseconds of a call of one token."""
        return 1e3 * statistics.median(self.first)


@dataclass(frozen=True, slots=True)
class Result:
    """One subject: all times, the reports of ``optimize``, and floors: ms to read the weights once.

    ``floor``: in float32; ``floors``: as each way reads them.
    """

    subject: str
    title: str
    n_parameters: int
    floor: float
    times: list[Times]
    reports: dict[str, str]
    megabytes: dict[str, float]  # of weights, packed ones included, by way
    perplexity: dict[str, float]  # by way; of the built-in model alone
    floors: dict[str, float]

    @property
    def ways(self) -> list[str]:
        return list(self.megabytes)

    @property
    def rows(self) -> list[int]:
        return sorted({times.rows for times in self.times})

    def of(self, rows: int) -> list[Times]:
        return [times for times in self.times if times.rows == rows]


def as_checkpoint(subject: Subject) -> Subject:
    """With weights that are values of bfloat16."""
    with torch.no_grad():
        for weight in subject.model.parameters():
            weight.copy_(weight.bfloat16())
    return subject


def made(subject: Subject, ways: list[str]) -> dict[str, Any]:
    """A model for each way; those of one type share the subject's weights."""
    found: dict[str, Any] = {}
    of_type = {torch.float32: subject.model}
    for name in ways:
        way = WAYS[name]
        if way.dtype not in of_type:
            of_type[way.dtype] = copy.deepcopy(subject.model).to(way.dtype)
        model = of_type[way.dtype]
        if way.options is not None or way.call:  # what is compiled stays with a model, too
            shared = {id(weight): weight for weight in model.parameters()}
            model = copy.deepcopy(model, shared)
        found[name] = model if way.options is None else hfgen.optimize(model, **way.options)
    return found


def measure(
    subject: Subject,
    bandwidth: float,
    n_rounds: int,
    rows: tuple[int, ...],
    new_tokens: int,
    advance: Callable[[], None] = lambda: None,
) -> Result:
    """All ways by turns, a warm-up and ``n_rounds``; ``bandwidth``: bytes per second."""
    ways = [name for name, way in WAYS.items() if not way.only or subject.name in way.only]
    found = made(subject, ways)
    times = {(way, n): Times(way, n, new_tokens) for n in rows for way in ways}
    with frozen_garbage():
        for turn in range(n_rounds + 1):
            for n in rows:
                shift = turn % len(ways)
                tokens = {}
                for way in (*ways[shift:], *ways[:shift]):
                    first = _decode(WAYS[way], found[way], subject, n, 1)
                    done = _decode(WAYS[way], found[way], subject, n, new_tokens)
                    tokens[way] = done.tokens[:, PROMPT_LENGTH:]
                    if turn:
                        times[way, n].wall.append(done.wall)
                        times[way, n].first.append(first.wall)
                for way in ways:
                    same = tokens[way] == tokens[REFERENCE]
                    times[way, n].equal = same.float().mean().item()
                advance()
        optimised = [way for way in ways if WAYS[way].options is not None]
        for n in rows:
            for way in optimised:
                times[way, n].products = products(found[way], n)
    return Result(
        subject.name,
        subject.title,
        subject.n_parameters,
        1e3 * subject.bytes_per_token / bandwidth,
        list(times.values()),
        {way: str(found[way].optimization) for way in optimised},
        {way: _megabytes(model) for way, model in found.items()},
        {
            way: quality(found[way])
            for way in ways
            if subject.name == "small" and not WAYS[way].call
        },
        {way: 1e3 * read_bytes(model) / bandwidth for way, model in found.items()},
    )


def _decode(way: Way, model: Any, subject: Subject, rows: int, new_tokens: int) -> Call:
    prompts = torch.cat([subject.prompt.roll(row, dims=1) for row in range(rows)])
    given = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts), **way.call}
    length = {"max_new_tokens": new_tokens, "eos_token_id": None}
    return call(way.side, model, {**given, **length, "do_sample": False}, seed=0)


@torch.no_grad()
def products(model: nn.Module, rows: int, repeat: int = 7) -> float:
    """Milliseconds of all linear layers of a model, one after the other, each once with ``rows`` rows."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    given = {
        (layer.in_features, layer.weight.dtype): torch.randn(rows, 1, layer.in_features).to(
            layer.weight.dtype
        )
        for layer in layers
    }
    seconds = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        for layer in layers:
            layer(given[layer.in_features, layer.weight.dtype])
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds[1:])


def read_bytes(model: Any) -> int:
    """Bytes of weights that a step reads, by the report of an optimised model."""
    report = getattr(model, "optimization", None)
    return report.read_bytes if report else Subject("", "", model, torch.empty(0)).bytes_per_token


def _megabytes(model: Any) -> float:
    own = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    report = getattr(model, "optimization", None)
    return (own + (report.extra_bytes if report else 0)) / 1e6


def quality(model: nn.Module) -> float:
    """Perplexity of a held-out text by the kernels that were chosen."""
    tokenizer, text = hfgen.builtin_model()[1], inspect.getsource(ftplib)
    window, stride = perplexity.sizes(model)
    score = perplexity.score(model, tokenizer, "text", text, window=window, stride=stride)
    return math.exp(sum(score.nats) / sum(score.counts))


# --- the report ---------------------------------------------------------------------------------


def gain(times: Times, all_times: list[Times], over: Sequence[str] = UPSTREAM) -> Spread:
    """How many times faster a step is than by the fastest way of ``over``, round by round."""
    best = min((t for t in all_times if t.way in over), key=lambda t: t.per_token)
    return Spread.of([a / b for a, b in zip(best.steps, times.steps, strict=True)])


def report(results: list[Result], facts: dict[str, Any]) -> str:
    """The page."""
    lines = [
        "# Execution: linear layers by other kernels, and compiled steps",
        "",
        f"Greedy, prompts of {PROMPT_LENGTH} tokens. All ways take turns. *First*: ms of a call of one new token; *ms per token*: of "
        "the steps that follow; *products*: of these, the linear layers by themselves. *Gain*: of these steps over upstream's best way, the median of the rounds (quartiles). *Bandwidth*: the time to read once the bytes of weights that this way "
        "reads, by the time. *MB*: weights, packed copies included. *Equal*: tokens that are those of upstream in float32; after one that "
        "differs, a row is another text. *Perplexity*: of a held-out file of Python. Weights are values of bfloat16.",
        "",
        f"{described(facts)}, Python {facts['python']}.",
    ]
    for result in results:
        size = f"{result.n_parameters / 1e6:.4g}M parameters"
        lines += ["", f"## {result.title}, {size}; floor of float32 {result.floor:.2f} ms", ""]
        lines += [
            "| way | rows | first | ms per token | products | bandwidth | gain | equal | MB | perplexity |"
        ]
        lines += ["|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"]
        for rows in result.rows:
            for times in result.of(rows):
                quality = result.perplexity.get(times.way)
                lines.append(
                    f"| {times.way} | {rows} | {times.first_token:.1f} | {times.per_token:.2f} | "
                    f"{f'{times.products:.2f}' if times.products else ''} | "
                    f"{result.floors[times.way] / times.per_token:.0%} | {gain(times, result.of(rows))} | "
                    f"{times.equal:.0%} | {result.megabytes[times.way]:.0f} | "
                    f"{'' if quality is None else f'{quality:.2f}'} |"
                )
        lines += ["", targets_text(result)]
        for way, text in result.reports.items():
            lines += ["", f"`{way}` chose:", "", "```", text, "```"]
    return "\n".join(lines) + "\n"


def targets_text(result: Result) -> str:
    """What was to be reached, and what was."""
    lines = []
    for way, target in TARGETS.items():
        if way not in result.ways:
            continue
        for rows in (1, 8):
            every = result.of(rows)
            times = next(each for each in every if each.way == way)
            plain, best = (gain(times, every, over).median for over in (PLAIN, UPSTREAM))
            floor = min(each.per_token for each in every if each.way in PLAIN) / times.products
            lines.append(
                f"* `{way}`, {rows} row(s): {plain:.2f} times as fast as upstream's best of float32 and bfloat16 (target "
                f"{target}: {'met' if plain >= target else f'**missed**; {floor:.2f} if all but the products were free'}), "
                f"{best:.2f} times its best way of all."
            )
    one, eight = ({times.way: times.per_token for times in result.of(rows)} for rows in (1, 8))
    ratios = "; ".join(f"{way} {eight[way] / one[way]:.2f}" for way in one)
    lines.append(f"* A step of 8 rows by one of 1 (target: at most {ROWS_TARGET}): {ratios}.")
    return "\n".join(lines)


def plot(results: list[Result], path: Path) -> None:
    """Milliseconds per token at 1 and 8 rows, a line of panels per subject, and the floor."""
    figure, panels = subplots(
        len(results), 2, figsize=(12, 0.8 + 2.8 * len(results)), squeeze=False, layout="constrained"
    )
    for line, result in zip(panels, results, strict=True):
        for panel, rows in zip(line, (1, 8), strict=True):
            found = result.of(rows)
            colours = ["0.6" if times.way in UPSTREAM else "tab:blue" for times in found]
            ways = [times.way for times in found]
            bars = panel.barh(ways, [times.per_token for times in found], color=colours)
            panel.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
            panel.margins(x=0.12)
            panel.axvline(result.floor, color="tab:red", linestyle="--")
            panel.invert_yaxis()
            panel.set_title(f"{result.title},\n{rows} row{'s' if rows > 1 else ''}", fontsize=9)
            panel.set_xlabel("ms per token; dashed: float32 weights read once", fontsize=8)
    save(figure, path, dpi=120)


def write(results: list[Result], facts: dict[str, Any], folder: Path) -> str:
    """Write the page, the raw data and the plot to ``folder``; returns the page."""
    text = report(results, facts)
    raw = {result.subject: asdict(result) for result in results}
    content = {"machine": facts, "subjects": raw}
    return output.write(folder, "execution", text, content, lambda path: plot(results, path))


def main(
    model: Annotated[str, typer.Option(help=f"{', '.join(SUBJECTS)} or all.")] = "all",
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Turns of all ways. Default: by model.")
    ] = None,
    threads: ThreadsOption = None,
    out: OutOption = RESULTS,
) -> None:
    """Measure the ways to run a step."""
    if model != "all" and model not in SUBJECTS:
        raise typer.BadParameter(f"{model!r}: choose from {', '.join(SUBJECTS)}, all")
    set_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    facts, bandwidth = machine(), read_bandwidth()
    results = []
    for name in SUBJECTS if model == "all" else (model,):
        n_rounds, rows, new_tokens = SIZES[name]
        subject = as_checkpoint(SUBJECTS[name]())
        results.append(measure(subject, bandwidth, rounds or n_rounds, rows, new_tokens))
        typer.echo(f"{name} is done", err=True)
    print(write(results, facts, out))


if __name__ == "__main__":
    typer.run(main)
