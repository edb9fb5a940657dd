"""What ``benchmarks.caches`` writes: tables, how the targets were met, and the plots."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import output
from .cache_cases import KINDS, Memory, Result
from .plots import apart, legend_below, save, subplots
from .side_by_side import LIBRARIES, Comparison

ABOUT = {
    "decoding": "Greedy decoding behind a context of random keys and values, which stand for a prompt: the time of a "
    "token does not depend on them.",
    "beams": "Beam search from one prompt of random tokens.",
    "samples": "Sampling (top-k 50) of several sequences from one prompt of random tokens.",
    "finished": "A batch of prompts of 64 tokens whose rows end after 8 to 256 tokens, evenly spread; hfgen with "
    "`drop_finished=True`.",
    "chat": "The second turn of a chat: the first turn of 1,024 tokens, its answer of 32, and 32 tokens more; hfgen "
    "with `prefix_cache`, which saw the first turn.",
}


@dataclass(frozen=True, slots=True)
class Target:
    """Upstream's time by hfgen's that is wanted of a part of a case, at the ``length`` (any: ``None``)."""

    case: str
    part: str
    speed: float
    length: int | None = None


TARGETS = (
    Target("decoding", "whole call", 1.4, 8192),
    Target("beams", "first token", 3.0, 1024),
    Target("beams", "whole call", 2.0, 1024),
    Target("samples", "first token", 5.0, 1024),
    Target("samples", "whole call", 2.0, 1024),
    Target("finished", "whole call", 1.5),
    Target("chat", "first token", 5.0),
)


def speed(comparison: Comparison) -> float:
    """Upstream's time by hfgen's, the median of all pairs."""
    return 1 / comparison.ratio.median


def quartiles(comparison: Comparison) -> str:
    return f"{1 / comparison.ratio.high:.2f} to {1 / comparison.ratio.low:.2f}"


def at_floor(comparison: Comparison, floor: float) -> float:
    """The speed of a library that does nothing but the forward passes of the floor."""
    return statistics.median(comparison.wall["upstream"]) / floor


# --- the report ---------------------------------------------------------------------------------


def report(results: Sequence[Result], memories: Sequence[Memory], facts: dict[str, Any]) -> str:
    """All tables in Markdown, and what they were measured on."""
    cores, threads = facts["cores"], facts["threads"]
    parts = [
        "# Caches: time and memory",
        f"{facts['processor']}, {cores} cores, {threads} thread{'s' * (threads != 1)}, load {facts['load']}. torch "
        f"{facts['torch']}, transformers {facts['transformers']}, hfgen {facts['hfgen']}, Python {facts['python']}.",
        "Both libraries in one process, on the same weights, by turns; every pair of calls gave the same tokens. Speed is "
        "upstream's time by hfgen's, the median of all pairs, with quartiles. *First token*: from the call to the first "
        "question whether to stop, in the same calls. *Peak*: bytes of all tensors that a call made and that were alive at "
        "once, a given cache included, weights not. *Floor*: the forward passes that the work cannot do without, timed "
        "by themselves, each with a cache that has room and is neither copied nor reordered; *at the floor* is the speed "
        "of a library that does nothing else.",
    ]
    if results:
        parts += ["## Targets", targets_table(results)]
    for case in dict.fromkeys(result.case for result in results):
        parts += [
            f"## {case.capitalize()}",
            ABOUT[case],
            table([result for result in results if result.case == case]),
        ]
    if memories:
        parts += [
            "## One token more",
            "The most bytes in memory while a token is decoded behind a context, in MB: cache, room and everything that "
            "the forward pass makes. The static cache has room for two tokens more. Tensors in mapped files are not "
            "counted.",
            memory_table(memories),
        ]
    return "\n\n".join(parts) + "\n"


def table(results: Sequence[Result]) -> str:
    """One row per work and part of it; times in milliseconds."""
    rows = [
        "| model | tokens | rows | new | | upstream, ms | hfgen, ms | speed | quartiles | floor, ms | at the floor "
        "| peak, MB: upstream · hfgen | kept, MB | pairs |",
        "|---|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in results:
        peak = " · ".join(f"{r.peak_bytes[library] / 1e6:.1f}" for library in LIBRARIES)
        kept = " · ".join(f"{r.kept_bytes[library] / 1e6:.1f}" for library in LIBRARIES)
        for part, (comparison, floor) in r.parts().items():
            theirs, ours = (f"{comparison.milliseconds(library):.1f}" for library in LIBRARIES)
            rows.append(
                f"| {r.model} | {r.length} | {r.rows} | {r.new_tokens} | {part} | {theirs} | {ours} "
                f"| **{speed(comparison):.2f}** | {quartiles(comparison)} | {1e3 * floor:.1f} "
                f"| {at_floor(comparison, floor):.2f} | {peak} | {kept} | {comparison.n_pairs} |"
            )
    return "\n".join(rows)


def targets_table(results: Sequence[Result]) -> str:
    """Each target beside what was found."""
    rows = [
        "| work | model | rows | target | found | at the floor | |",
        "|---|---|--:|--:|--:|--:|---|",
        *(_target_row(*match) for match in matches(results)),
    ]
    return "\n".join(rows)


def matches(results: Sequence[Result]) -> Iterator[tuple[Target, Result, Comparison, float]]:
    """The parts of results that have a target."""
    for target in TARGETS:
        for result in results:
            if result.case == target.case and target.length in (None, result.length):
                yield target, result, *result.parts()[target.part]


def _target_row(target: Target, result: Result, comparison: Comparison, floor: float) -> str:
    found, best = speed(comparison), at_floor(comparison, floor)
    verdict = (
        "met" if found >= target.speed else f"missed; {found / best:.0%} of what the floor allows"
    )
    return (
        f"| {target.case}, {result.length} tokens, {target.part} | {result.model} | {result.rows} "
        f"| {target.speed} | **{found:.2f}** | {best:.2f} | {verdict} |"
    )


def memory_table(memories: Sequence[Memory]) -> str:
    rows = [
        f"| model | tokens | {' | '.join(KINDS)} |",
        f"|---|--:|{'--:|' * len(KINDS)}",
    ]
    for m in memories:
        peaks = " | ".join(f"{m.peaks[kind] / 1e6:.1f}" for kind in KINDS)
        rows.append(f"| {m.model} | {m.context} | {peaks} |")
    return "\n".join(rows)


# --- the plots ----------------------------------------------------------------------------------


def plot(results: Sequence[Result], memories: Sequence[Memory], path: Path) -> None:
    """Speed over length for each case that has several, memory over context, a row for each model."""
    models = list(dict.fromkeys(each.model for each in (*results, *memories)))
    columns = ("decoding", "beams", "samples", "memory")
    figure, panels = subplots(
        len(models),
        len(columns),
        figsize=(4 * len(columns), 4 * len(models)),
        squeeze=False,
        layout="constrained",
    )
    for row, model in zip(panels, models, strict=True):
        for panel, case in zip(row[:-1], columns, strict=False):
            mine = [r for r in results if (r.model, r.case) == (model, case)]
            _plot_speed(panel, case, mine)
            panel.set_title(f"{model}: {case}", fontsize=10)
        _plot_memory(row[-1], [m for m in memories if m.model == model])
        row[-1].set_title(f"{model}: one token more", fontsize=10)
    save(figure, path, dpi=130)


def _plot_speed(panel: Any, case: str, results: Sequence[Result]) -> None:
    lines: dict[str, list[tuple[int, Comparison]]] = {}
    for result in results:
        for part, (comparison, _) in result.parts().items():
            name = f"batch {result.rows}" if case == "decoding" else part
            lines.setdefault(name, []).append((result.length, comparison))
    for name, points in lines.items():
        points.sort(key=lambda point: point[0])
        ratios = [comparison.ratio for _, comparison in points]
        bars = [
            [1 / r.median - 1 / r.high for r in ratios],
            [1 / r.low - 1 / r.median for r in ratios],
        ]
        lengths, speeds = [length for length, _ in points], [1 / r.median for r in ratios]
        panel.errorbar(lengths, speeds, yerr=bars, marker="o", capsize=4, label=name)
    for target in (t for t in TARGETS if t.case == case):
        panel.plot([target.length], [target.speed], "x", color="tab:red")
    panel.axhline(1, color="0.35", linewidth=1)
    _finish(panel, "time of upstream / of hfgen (red: targets)", bool(lines))


def _plot_memory(panel: Any, memories: Sequence[Memory]) -> None:
    contexts = [m.context for m in memories]
    lines = {kind: [m.peaks[kind] / 1e6 for m in memories] for kind in KINDS if memories}
    for kinds, peaks in apart(lines, nearest=0.15).items():
        panel.plot(contexts, peaks, marker="o", label=kinds)
    if memories:
        panel.set_yscale("log")
    _finish(panel, "peak, MB", bool(memories))


def _finish(panel: Any, label: str, has_lines: bool) -> None:
    panel.set_xlabel("tokens before")
    panel.set_ylabel(label, fontsize=8)
    panel.grid(color="0.92")
    if has_lines:
        panel.set_xscale("log", base=2)
        legend_below(panel)


# --- files --------------------------------------------------------------------------------------


def write(
    results: Sequence[Result], memories: Sequence[Memory], facts: dict[str, Any], folder: Path
) -> str:
    """Write report, raw data and plot to ``folder``; returns the report."""
    text = report(results, memories, facts)
    raw = {
        "machine": facts,
        "results": [asdict(result) for result in results],
        "memory": [asdict(memory) for memory in memories],
    }
    return output.write(folder, "caches", text, raw, lambda path: plot(results, memories, path))
