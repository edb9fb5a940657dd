"""What caches cost: time and memory against upstream, over context length.

``python -m benchmarks.caches`` writes ``caches.md``, ``caches.json`` and ``caches.png``.

Decoding: greedy ``generate()`` after a context of random keys and values, which stand for a prompt
(the time of a token does not depend on them). Upstream decodes with its dynamic cache, hfgen with
its own.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
from transformers import DynamicCache
from transformers.configuration_utils import get_head_shapes

from hfgen.caches.dynamic import GrowingCache

from .live_bytes import LiveBytes
from .models import SUBJECTS, Subject
from .side_by_side import (
    LIBRARIES,
    Comparison,
    UnequalTokensError,
    call,
    frozen_garbage,
    machine,
)

CONTEXTS = (1024, 4096, 8192)
BATCHES = (1, 4)
NEW_TOKENS = 33  # 32 forwards of one token after the first

#: Upstream's time by hfgen's, at the longest context.
SPEED_TARGET = 1.4

#: Pairs of calls, if not said.
PAIRS = {"small": 12, "135m": 5}

#: Of ``generate()``, in every call.
ARGUMENTS = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}


@dataclass(frozen=True, slots=True)
class Decoding:
    """Decoding of ``rows`` sequences of ``context`` tokens; bytes at most, cache included."""

    model: str
    context: int
    rows: int
    comparison: Comparison
    cache_bytes: dict[str, int]  # when the call has ended, spare room included
    peak_bytes: dict[str, int]  # of all tensors that the call made

    @property
    def speed(self) -> float:
        """Upstream's time by hfgen's."""
        return 1 / self.comparison.ratio.median

    def per_token(self, library: str) -> float:
        """Milliseconds."""
        return self.comparison.milliseconds(library) / NEW_TOKENS


def filled(library: str, config: Any, context: int, rows: int) -> DynamicCache:
    """The library's cache after a prompt of ``context`` tokens, of which random states are made."""
    heads, size = get_head_shapes(config)
    if library == "hfgen":
        cache = GrowingCache(config=config, max_length=context + NEW_TOKENS)
    else:
        cache = DynamicCache(config=config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in range(config.num_hidden_layers):
            shape = (rows, heads, context, size)
            keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
            cache.update(keys, values, layer)
    return cache


def held_bytes(cache: Any) -> int:
    """Bytes of the storages behind keys and values."""
    states = [states for layer in cache.layers for states in (layer.keys, layer.values)]
    return sum({s.untyped_storage()._cdata: s.untyped_storage().nbytes() for s in states}.values())


def measure(
    subject: Subject,
    context: int,
    rows: int,
    n_pairs: int,
    advance: Callable[[], None] = lambda: None,
) -> Decoding:
    """A pair of calls to count bytes and to warm up, and ``n_pairs`` to time.

    Raises ``UnequalTokensError`` if the libraries do not generate the same tokens.
    """
    model, config = subject.model, subject.model.config
    length = context + 1 + NEW_TOKENS
    config.max_position_embeddings = max(config.max_position_embeddings, length)
    ids = torch.randint(5, config.vocab_size, (rows, context + 1), generator=_seeded())
    comparison = Comparison(f"{context} tokens, batch {rows}", NEW_TOKENS)
    held, peaks = {}, {}
    for turn in range(n_pairs + 1):
        calls = {}
        for library in LIBRARIES if turn % 2 else reversed(LIBRARIES):
            gc.collect()
            arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **ARGUMENTS}
            with LiveBytes() if turn == 0 else torch.no_grad() as counted:
                cache = filled(library, config, context, rows)
                if turn == 0:
                    counted.peak = counted.now  # not of filling
                calls[library] = call(library, model, arguments | {"past_key_values": cache}, 0)
            if turn == 0:
                held[library], peaks[library] = held_bytes(cache), counted.peak
            del cache
        if not torch.equal(calls["upstream"].tokens, calls["hfgen"].tokens):
            raise UnequalTokensError(f"Of {subject.name}, {comparison.name}.")
        if turn:
            comparison.add(calls)
        advance()
    return Decoding(subject.name, context, rows, comparison, held, peaks)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


# --- the report ---------------------------------------------------------------------------------


def report(decodings: list[Decoding], facts: dict[str, Any]) -> str:
    """All tables in Markdown, and what they were measured on."""
    parts = [
        "# Caches: time and memory",
        f"{facts['processor']}, {facts['cores']} cores, {facts['threads']} threads, load {facts['load']}. torch "
        f"{facts['torch']}, transformers {facts['transformers']}, hfgen {facts['hfgen']}, Python {facts['python']}.",
        "## Decoding with the dynamic cache",
        f"Greedy `generate()` of {NEW_TOKENS} tokens after a context of random keys and values, in one process and by "
        "turns; every pair of calls gave the same tokens. Speed is upstream's time by hfgen's, the median of all pairs. "
        "Bytes are those of storages: of the cache when the call has ended, spare room included, and of all tensors "
        "that were alive at once during the call.",
        decoding_table(decodings),
        target_text(decodings),
    ]
    return "\n\n".join(parts) + "\n"


def decoding_table(decodings: list[Decoding]) -> str:
    rows = [
        "| model | context | batch | upstream, ms per token | hfgen, ms per token | speed | quartiles | "
        "cache, MB: upstream · hfgen | peak, MB: upstream · hfgen | pairs |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for d in decodings:
        ratio = d.comparison.ratio
        times = " | ".join(f"{d.per_token(library):.2f}" for library in LIBRARIES)
        held, peak = (
            " · ".join(f"{n_bytes[library] / 1e6:.1f}" for library in LIBRARIES)
            for n_bytes in (d.cache_bytes, d.peak_bytes)
        )
        rows.append(
            f"| {d.model} | {d.context} | {d.rows} | {times} | **{d.speed:.2f}** "
            f"| {1 / ratio.high:.2f} to {1 / ratio.low:.2f} | {held} | {peak} | {d.comparison.n_pairs} |"
        )
    return "\n".join(rows)


def target_text(decodings: list[Decoding]) -> str:
    longest = max(d.context for d in decodings)
    found = ", ".join(
        f"{d.speed:.2f} ({d.model}, batch {d.rows})" for d in decodings if d.context == longest
    )
    return f"Target at 8192 tokens: {SPEED_TARGET}. Found at {longest}: {found}."


def plot(decodings: list[Decoding], path: Path) -> None:
    """Speed over context length, quartiles as bars, one panel per model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(d.model for d in decodings))
    figure, panels = pyplot.subplots(
        ncols=len(models),
        figsize=(4.5 * len(models), 3.5),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for panel, model in zip(panels[0], models, strict=True):
        for rows in dict.fromkeys(d.rows for d in decodings):
            line = [d for d in decodings if (d.model, d.rows) == (model, rows)]
            ratios = [d.comparison.ratio for d in line]
            speeds = [1 / r.median for r in ratios]
            bars = [
                [1 / r.median - 1 / r.high for r in ratios],
                [1 / r.low - 1 / r.median for r in ratios],
            ]
            contexts = [d.context for d in line]
            panel.errorbar(
                contexts, speeds, yerr=bars, marker="o", capsize=4, label=f"batch {rows}"
            )
        panel.axhline(1, color="0.35", linewidth=1)
        panel.axhline(SPEED_TARGET, color="tab:red", linewidth=1, linestyle="--", label="target")
        panel.set_title(model)
        panel.set_xlabel("tokens of context")
        panel.grid(axis="y", color="0.9")
    panels[0][0].set_ylabel("time of upstream / time of hfgen")
    panels[0][0].legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def write(decodings: list[Decoding], facts: dict[str, Any], folder: Path) -> str:
    """Write report, raw data and plot to ``folder``; returns the report."""
    folder.mkdir(parents=True, exist_ok=True)
    text = report(decodings, facts)
    (folder / "caches.md").write_text(text)
    raw = {"machine": facts, "new_tokens": NEW_TOKENS, "decoding": [asdict(d) for d in decodings]}
    (folder / "caches.json").write_text(json.dumps(raw, indent=1) + "\n")
    plot(decodings, folder / "caches.png")
    return text


def main(
    model: Annotated[str, typer.Option(help=f"{', '.join(SUBJECTS)} or all.")] = "all",
    pairs: Annotated[
        int | None, typer.Option(min=1, help=f"Pairs of timed calls. Default: {PAIRS}.")
    ] = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens; repeat for several.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Rows; repeat for several.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: torch's.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of what is written.")] = Path(
        "benchmarks/results"
    ),
) -> None:
    """Measure hfgen against upstream; exit code 1 if their tokens differ."""
    if threads is not None:
        torch.set_num_threads(threads)
    if model != "all" and model not in SUBJECTS:
        raise typer.BadParameter(f"{model}: choose from {', '.join(SUBJECTS)}, all")
    names = list(SUBJECTS) if model == "all" else [model]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    console, facts, decodings = Console(), machine(), []
    shapes = [(c, b) for c in context or CONTEXTS for b in batch or BATCHES]
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, auto_refresh=False) as progress, frozen_garbage():
        for name in names:
            subject, n_pairs = SUBJECTS[name](), pairs or PAIRS[name]
            task = progress.add_task(name, total=(n_pairs + 1) * len(shapes))
            for n_tokens, rows in shapes:
                try:
                    decodings.append(
                        measure(
                            subject,
                            n_tokens,
                            rows,
                            n_pairs,
                            lambda task=task: progress.update(task, advance=1, refresh=True),
                        )
                    )
                except UnequalTokensError as error:
                    console.print(f"[red]{error}[/]")
                    raise typer.Exit(1) from None
    console.print(Markdown(write(decodings, facts, out)))
    console.print(f"Written to {out}: caches.md, caches.json, caches.png.")


if __name__ == "__main__":
    typer.run(main)
