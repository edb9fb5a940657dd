"""Does hfgen cost time? hfgen against upstream in every mode, with short prompts and defaults.

``python -m benchmarks.overhead`` writes ``overhead.md``, ``overhead.json`` and ``overhead.png``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import transformers
import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn

from . import output
from .models import PROMPT_LENGTH, SUBJECTS, Subject
from .output import RESULTS, OutOption, ThreadsOption, set_threads
from .plots import save, subplots
from .side_by_side import (
    LIBRARIES,
    Comparison,
    UnequalTokensError,
    compare,
    machine,
    read_bandwidth,
)

NEW_TOKENS = 32

#: hfgen should never take longer than this times upstream.
TARGET = 1.02

#: The mode whose time per token is held against the floor: no EOS ends it early.
FLOOR_MODE = "greedy, no EOS"

BATCH_MODE = "padded batch of 4"

#: Name of a mode -> what it asks of ``generate``.
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    FLOOR_MODE: {"eos_token_id": None},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "beam 4": {"num_beams": 4},
    "beam sample 4": {"num_beams": 4, "do_sample": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 10},
    "processors": {
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[7], [11, 12]],
        "suppress_tokens": [8, 9],
        "min_new_tokens": 8,
        "renormalize_logits": True,
    },
    BATCH_MODE: {},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "dict with scores": {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    },
}

#: Pairs of calls per mode, if not said; a call of the 135M model takes two seconds and more.
PAIRS = {"small": 100, "135m": 12}
_DEFAULT_PAIRS = ", ".join(f"{count} ({name})" for name, count in PAIRS.items())


@dataclass(frozen=True, slots=True)
class Result:
    """All modes of one model, and how fast this machine reads memory, in bytes per second."""

    subject: Subject
    bandwidth: float
    comparisons: list[Comparison]

    @property
    def floor(self) -> float:
        """Milliseconds in which the weights are read once: no token can come faster."""
        return 1e3 * self.subject.bytes_per_token / self.bandwidth

    def per_token(self, library: str) -> float | None:
        """Milliseconds per token of greedy decoding, prompt included; ``None`` if not measured."""
        for comparison in self.comparisons:
            if comparison.name == FLOOR_MODE:
                return comparison.milliseconds(library) / comparison.new_tokens
        return None


def measure(
    subject: Subject,
    modes: list[str],
    n_pairs: int,
    bandwidth: float,
    advance: Callable[[str], None] = lambda mode: None,
) -> Result:
    """Both libraries in the given modes; ``advance`` is told the mode of each pair that is done.

    ``bandwidth``: bytes per second that this machine reads from memory. Raises
    ``UnequalTokensError`` if they do not generate the same tokens.
    """
    calls = {mode: arguments(subject, mode) for mode in modes}
    return Result(subject, bandwidth, compare(subject.model, calls, n_pairs, advance=advance))


def arguments(subject: Subject, mode: str) -> dict[str, Any]:
    """The arguments of ``generate`` for a mode."""
    inputs = subject.batch() if mode == BATCH_MODE else subject.alone()
    return {**inputs, "max_new_tokens": NEW_TOKENS, "do_sample": False, **MODES[mode]}


# --- the report ---------------------------------------------------------------------------------


def report(results: list[Result], facts: dict[str, Any]) -> str:
    """All tables in Markdown, and what they were measured on."""
    parts = [
        "# hfgen against upstream, mode by mode",
        f"Prompts of {PROMPT_LENGTH} tokens, {NEW_TOKENS} new ones. Both libraries run in one process on the "
        "same weights with the same seed, by turns, and every pair of calls gave the same tokens. The ratio is "
        "hfgen's time by upstream's: the median of all pairs, with quartiles; below 1, hfgen is faster. The "
        "CPU ratio is the same of processor time.",
        f"{facts['processor']}, {plural(facts['cores'], 'core')}, {plural(facts['threads'], 'thread')}. torch {facts['torch']}, "
        f"transformers {facts['transformers']}, hfgen {facts['hfgen']}, Python {facts['python']}.",
    ]
    for result in results:
        parts += [f"## {title(result.subject)}", table(result), floor_text(result)]
    return "\n\n".join(parts) + "\n"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def title(subject: Subject) -> str:
    return f"{subject.title}, {subject.n_parameters / 1e6:.3g}M parameters"


def table(result: Result) -> str:
    """One row per mode, times in milliseconds per call."""
    rows = [
        "| mode | upstream, ms | hfgen, ms | ratio | quartiles | CPU ratio | pairs |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for comparison in result.comparisons:
        theirs, ours = (f"{comparison.milliseconds(library):.1f}" for library in LIBRARIES)
        wall, cpu = comparison.ratio, comparison.cpu_ratio
        rows.append(
            f"| {comparison.name} | {theirs} | {ours} | **{wall.median:.3f}** "
            f"| {wall.low:.3f} to {wall.high:.3f} | {cpu.median:.3f} | {comparison.n_pairs} |"
        )
    return "\n".join(rows)


def floor_text(result: Result) -> str:
    """How far greedy decoding is from reading the weights once per token."""
    text = (
        f"Floor: a token reads {result.subject.bytes_per_token / 1e6:.0f} MB of weights, which come from "
        f"memory in {result.floor:.2f} ms at the {result.bandwidth / 1e9:.1f} GB/s of `tensor.sum()`."
    )
    times = {library: result.per_token(library) for library in LIBRARIES}
    shares = [
        f"{library} {ms:.2f} ms, {ms / result.floor:.1f} times the floor"
        for library, ms in times.items()
        if ms is not None
    ]
    return f"{text} Greedy decoding takes, per token: {'; '.join(shares)}." if shares else text


def as_object(results: list[Result], facts: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured; times in seconds, in the order of the pairs."""
    return {
        "machine": facts,
        "prompt_tokens": PROMPT_LENGTH,
        "max_new_tokens": NEW_TOKENS,
        "models": {
            result.subject.name: {
                "parameters": result.subject.n_parameters,
                "bytes_per_token": result.subject.bytes_per_token,
                "read_bandwidth_bytes_per_second": result.bandwidth,
                "modes": {c.name: asdict(c) for c in result.comparisons},
            }
            for result in results
        },
    }


def plot(results: list[Result], path: Path) -> None:
    """The ratios of all modes, quartiles as bars, one panel per model."""
    from matplotlib.ticker import MaxNLocator

    modes = [comparison.name for comparison in results[0].comparisons]
    figure, panels = subplots(
        ncols=len(results),
        figsize=(1.8 + 4.2 * len(results), 1.6 + 0.42 * len(modes)),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for panel, result in zip(panels[0], results, strict=True):
        spreads = [comparison.ratio for comparison in result.comparisons]
        medians = [spread.median for spread in spreads]
        bars = [
            [spread.median - spread.low for spread in spreads],
            [spread.high - spread.median for spread in spreads],
        ]
        panel.axvline(1, color="0.35", linewidth=1, label="1.00: as upstream")
        panel.axvline(
            TARGET, color="tab:red", linewidth=1, linestyle="--", label=f"{TARGET}: the limit"
        )
        panel.errorbar(
            medians,
            range(len(modes)),
            xerr=bars,
            fmt="o",
            color="tab:blue",
            capsize=4,
            label="median of pairs, quartiles",
        )
        for row, median in enumerate(medians):
            panel.annotate(
                f"{median:.3f}",
                (median, row),
                xytext=(0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )
        panel.set_yticks(range(len(modes)), modes)
        panel.set_ylim(len(modes) - 0.5, -0.7)
        panel.set_title(title(result.subject).replace(", ", "\n", 1), fontsize=10)
        panel.xaxis.set_major_formatter("{x:.2f}")
        panel.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
        panel.set_xlabel("time of hfgen / time of upstream")
        panel.grid(axis="x", color="0.9")
        panel.set_axisbelow(True)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    save(figure, path, dpi=150)


def write(results: list[Result], facts: dict[str, Any], folder: Path) -> str:
    """Write report, raw data and plot to ``folder``; returns the report."""
    text = report(results, facts)
    return output.write(
        folder, "overhead", text, as_object(results, facts), lambda path: plot(results, path)
    )


def main(
    model: Annotated[str, typer.Option(help=f"{', '.join(SUBJECTS)} or all.")] = "all",
    pairs: Annotated[
        int | None, typer.Option(min=1, help=f"Pairs of calls per mode. Default: {_DEFAULT_PAIRS}.")
    ] = None,
    threads: ThreadsOption = None,
    modes: Annotated[
        list[str] | None, typer.Option(help=f"One of: {'; '.join(MODES)}. Repeat for several.")
    ] = None,
    out: OutOption = RESULTS,
) -> None:
    """Measure hfgen against upstream; exit code 1 if their tokens differ."""
    chosen_models, chosen_modes = list(SUBJECTS) if model == "all" else [model], modes or [*MODES]
    if unknown := [name for name in chosen_models if name not in SUBJECTS]:
        raise typer.BadParameter(f"{unknown}: choose from {', '.join(SUBJECTS)}, all")
    if unknown := [name for name in chosen_modes if name not in MODES]:
        raise typer.BadParameter(f"{unknown}: choose from {'; '.join(MODES)}")
    set_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    console, facts, bandwidth = Console(), machine(), read_bandwidth()
    results = []
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    # Drawn between the calls, not during them.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        for name in chosen_models:
            n_pairs = pairs or PAIRS[name]
            task = progress.add_task(name, total=(n_pairs + 1) * len(chosen_modes))

            def advance(mode: str, task: TaskID = task, name: str = name) -> None:
                progress.update(task, advance=1, description=f"{name}, {mode}", refresh=True)

            try:
                results.append(measure(SUBJECTS[name](), chosen_modes, n_pairs, bandwidth, advance))
            except UnequalTokensError as error:
                console.print(f"[red]{name}:[/] {escape(str(error))}")
                raise typer.Exit(1) from None
    console.print(Markdown(write(results, facts, out)))
    console.print(f"Written to {out}: overhead.md, overhead.json, overhead.png.")


if __name__ == "__main__":
    typer.run(main)
