"""What `hfgen.optimize` gains: ms per token of greedy decoding beside upstream, by kind of weights.

``python -m benchmarks.optimize`` writes ``optimize.{md,json,png}``. All ways to decode take turns on the
same prompts, in one process. Models share their weights, but for the one in bfloat16; these are values of
bfloat16 held in float32, as those of most checkpoints are.
"""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer

import hfgen
from benchmarks.models import PROMPT_LENGTH, SUBJECTS, Subject
from benchmarks.side_by_side import Call, Spread, call, frozen_garbage, machine, read_bandwidth

NEW_TOKENS = 32
ROWS = (1, 8)

#: Way to decode → library, and the arguments of ``hfgen.optimize`` (None: it is not called).
WAYS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "upstream, float32": ("upstream", None),
    "upstream, bfloat16": ("upstream", None),
    "hfgen": ("hfgen", None),
    "optimize": ("hfgen", {}),
    "optimize, bf16": ("hfgen", {"weights": "bf16"}),
    "optimize, int8": ("hfgen", {"weights": "int8"}),
    "optimize, int4": ("hfgen", {"weights": "int4"}),
}
UPSTREAM = [way for way in WAYS if way.startswith("upstream")]
REFERENCE = "upstream, float32"

#: Rounds per subject, if not said.
ROUNDS = {"small": 30, "135m": 8}
#: Target: 8 rows cost at most so many times one.
ROWS_TARGET = 1.6


@dataclass(slots=True)
class Times:
    """One way to decode one number of rows: seconds of each call."""

    way: str
    rows: int
    wall: list[float] = field(default_factory=list)
    equal: float = 0.0  # share of tokens that are those of the reference

    @property
    def per_token(self) -> float:
        """Milliseconds per token of a row, prompt included."""
        return 1e3 * statistics.median(self.wall) / NEW_TOKENS


@dataclass(frozen=True, slots=True)
class Result:
    """One subject: all times, the reports of ``optimize``, and the floor (ms per token)."""

    subject: Subject
    floor: float
    times: list[Times]
    reports: dict[str, str]

    def of(self, rows: int) -> list[Times]:
        return [times for times in self.times if times.rows == rows]


def as_checkpoint(subject: Subject) -> Subject:
    """With weights that are values of bfloat16."""
    with torch.no_grad():
        for weight in subject.model.parameters():
            weight.copy_(weight.bfloat16())
    return subject


def models(subject: Subject, ways: list[str]) -> dict[str, Any]:
    """A model for each way; all share the subject's weights, but for the one in bfloat16."""
    made: dict[str, Any] = {}
    for way in ways:
        _, options = WAYS[way]
        if way.endswith(", bfloat16"):
            made[way] = copy.deepcopy(subject.model).to(torch.bfloat16)
        elif options is None:
            made[way] = subject.model
        else:
            shared = {id(weight): weight for weight in subject.model.parameters()}
            made[way] = hfgen.optimize(copy.deepcopy(subject.model, shared), **options)
    return made


def measure(
    subject: Subject,
    n_rounds: int,
    bandwidth: float,
    ways: list[str] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Result:
    """All ways by turns, a warm-up and ``n_rounds``; ``bandwidth``: bytes per second."""
    ways = ways or list(WAYS)
    made = models(subject, ways)
    times = {(way, rows): Times(way, rows) for rows in ROWS for way in ways}
    with frozen_garbage():
        for turn in range(n_rounds + 1):
            for rows in ROWS:
                shift = turn % len(ways)
                tokens = {}
                for way in (*ways[shift:], *ways[:shift]):
                    done = _decode(WAYS[way][0], made[way], subject, rows)
                    tokens[way] = done.tokens[:, PROMPT_LENGTH:]
                    if turn:
                        times[way, rows].wall.append(done.wall)
                for way in ways:
                    same = tokens[way] == tokens[REFERENCE]
                    times[way, rows].equal = same.float().mean().item()
                advance()
    reports = {way: str(it.optimization) for way, it in made.items() if WAYS[way][1] is not None}
    floor = 1e3 * subject.bytes_per_token / bandwidth
    return Result(subject, floor, list(times.values()), reports)


def _decode(library: str, model: Any, subject: Subject, rows: int) -> Call:
    prompts = torch.cat([subject.prompt.roll(row, dims=1) for row in range(rows)])
    given = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
    length = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None}
    return call(library, model, {**given, **length, "do_sample": False}, seed=0)


# --- the report ---------------------------------------------------------------------------------


def gain(times: Times, all_times: list[Times]) -> Spread:
    """How many times faster than the faster one of upstream's, round by round."""
    best = min((t for t in all_times if t.way in UPSTREAM), key=lambda t: t.per_token)
    return Spread.of([a / b for a, b in zip(best.wall, times.wall, strict=True)])


def report(results: list[Result], facts: dict[str, Any]) -> str:
    """The page."""
    lines = [
        "# `hfgen.optimize`: linear layers by the fastest kernels",
        "",
        f"Greedy, prompts of {PROMPT_LENGTH} tokens, {NEW_TOKENS} new ones, the prompt's time included. All ways take turns. "
        "*Gain*: over upstream's better one of float32 and bfloat16, the median of the rounds (quartiles). *Floor*: the time in "
        "which the float32 weights are read once. *Equal*: tokens that are those of upstream in float32; after one that "
        "differs, a row is another text. Weights are values of bfloat16.",
        "",
        f"{facts['processor']}, {facts['cores']} cores, {facts['threads']} thread(s), load "
        f"{facts['load']}. torch {facts['torch']}, transformers {facts['transformers']}, hfgen "
        f"{facts['hfgen']}, Python {facts['python']}.",
    ]
    for result in results:
        subject = result.subject
        size = f"{subject.n_parameters / 1e6:.3g}M parameters"
        lines += ["", f"## {subject.title}, {size}; floor {result.floor:.2f} ms", ""]
        lines += ["| way | rows | ms per token | times the floor | gain | equal |"]
        lines += ["|---|--:|--:|--:|--:|--:|"]
        for rows in ROWS:
            for times in result.of(rows):
                lines.append(
                    f"| {times.way} | {rows} | {times.per_token:.2f} | "
                    f"{times.per_token / result.floor:.1f} | {gain(times, result.of(rows))} | "
                    f"{times.equal:.0%} |"
                )
        lines += ["", rows_text(result)]
        for way, text in result.reports.items():
            lines += ["", f"`{way}` chose:", "", "```", text, "```"]
    return "\n".join(lines) + "\n"


def rows_text(result: Result) -> str:
    """What the larger number of rows costs in terms of one."""
    one, many = ({times.way: times.per_token for times in result.of(rows)} for rows in ROWS)
    ratios = (f"{way} {many[way] / one[way]:.2f}" for way in one)
    return f"A step of {ROWS[-1]} rows by one of 1 (at most {ROWS_TARGET}): {'; '.join(ratios)}."


def plot(results: list[Result], path: Path) -> None:
    """Milliseconds per token, a panel per subject and number of rows, and the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(results),
        len(ROWS),
        figsize=(5.5 * len(ROWS), 0.8 + 2.6 * len(results)),
        squeeze=False,
        layout="constrained",
    )
    for line, result in zip(panels, results, strict=True):
        for panel, rows in zip(line, ROWS, strict=True):
            found = result.of(rows)
            colours = ["0.6" if times.way in UPSTREAM else "tab:blue" for times in found]
            ways = [times.way for times in found]
            bars = panel.barh(ways, [times.per_token for times in found], color=colours)
            panel.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
            panel.margins(x=0.12)
            label = "float32 weights read once"
            panel.axvline(result.floor, color="tab:red", linestyle="--", label=label)
            panel.invert_yaxis()
            panel.set_title(f"{result.subject.title}, {rows} row(s)", fontsize=10)
            panel.set_xlabel("ms per token")
    labels = panels[0][0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def write(results: list[Result], facts: dict[str, Any], folder: Path) -> str:
    """Write the page, the raw data and the plot to ``folder``; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    text = report(results, facts)
    (folder / "optimize.md").write_text(text)
    raw = {
        result.subject.name: {
            "floor": result.floor,
            "reports": result.reports,
            "seconds": {f"{t.way}, {t.rows} rows": t.wall for t in result.times},
            "equal": {f"{t.way}, {t.rows} rows": t.equal for t in result.times},
        }
        for result in results
    }
    content = {"machine": facts, "new_tokens": NEW_TOKENS, "subjects": raw}
    (folder / "optimize.json").write_text(json.dumps(content, indent=1) + "\n")
    plot(results, folder / "optimize.png")
    return text


def main(
    model: Annotated[str, typer.Option(help=f"{', '.join(SUBJECTS)} or all.")] = "all",
    rounds: Annotated[
        int | None, typer.Option(min=1, help=f"Turns of all ways. Default: {ROUNDS}.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: torch's.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of what is written.")] = Path(
        "benchmarks/results"
    ),
) -> None:
    """Measure what optimised models gain."""
    if model != "all" and model not in SUBJECTS:
        raise typer.BadParameter(f"{model!r}: choose from {', '.join(SUBJECTS)}, all")
    if threads is not None:
        torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    facts, bandwidth = machine(), read_bandwidth()
    names = list(SUBJECTS) if model == "all" else [model]
    results = [
        measure(as_checkpoint(SUBJECTS[name]()), rounds or ROUNDS[name], bandwidth)
        for name in names
    ]
    print(write(results, facts, out))


if __name__ == "__main__":
    typer.run(main)
