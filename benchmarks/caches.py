"""What caches cost: time and memory against upstream.

``python -m benchmarks.caches`` writes ``caches.md``, ``caches.json`` and ``caches.png``. Names of cases
(``decoding``, ``beams``, ``samples``, ``finished``, ``chat``, ``memory``) measure only these.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import transformers
import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from .cache_cases import CASES, KINDS, Memory, Result, Size, measure, measure_memory
from .cache_report import write
from .models import SUBJECTS, Subject
from .output import RESULTS, OutOption, ThreadsOption, set_threads
from .side_by_side import UnequalTokensError, frozen_garbage, machine

MEMORY = "memory"

#: What is measured of each model, if not said. Lengths above 4096 take the large one a minute a pair.
SIZES = {
    "small": Size(pairs=8, seconds=20, prompts=(256, 1024, 2048, 4096)),
    "135m": Size(pairs=4, seconds=40),
}


def measure_all(
    subject: Subject,
    size: Size,
    cases: Sequence[str],
    advance: Callable[[str, int], None] = lambda name, total: None,
) -> tuple[list[Result], list[Memory]]:
    """The named cases; ``advance`` is told of each step its name, and how many there may be of it.

    Raises ``UnequalTokensError`` if the libraries do not generate the same tokens.
    """
    results: list[Result] = []
    memories: list[Memory] = []
    with frozen_garbage():
        for case in cases:
            if case == MEMORY:
                total = len(size.contexts) * len(KINDS)
                with tempfile.TemporaryDirectory() as folder:
                    memories += measure_memory(
                        subject, size.contexts, folder, partial(advance, MEMORY, total)
                    )
                continue
            for work in CASES[case](subject, size):
                name = f"{case}, {work.length} tokens, {work.rows} rows"
                step = partial(advance, name, size.pairs + 1)
                results.append(measure(subject, work, size.pairs, size.seconds, step))
    return results, memories


def main(
    cases: Annotated[
        list[str] | None, typer.Argument(help=f"{', '.join([*CASES, MEMORY])}, or all.")
    ] = None,
    model: Annotated[str, typer.Option(help=f"{', '.join(SUBJECTS)} or all.")] = "all",
    pairs: Annotated[
        int | None,
        typer.Option(min=1, help="Pairs of timed calls, at most. Default: 8 (small), 4 (135m)."),
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(help="Tokens of decoding and memory; repeat for several.")
    ] = None,
    prompt: Annotated[
        list[int] | None, typer.Option(help="Tokens of beams and samples; repeat for several.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Rows of decoding.")] = None,
    threads: ThreadsOption = None,
    out: OutOption = RESULTS,
) -> None:
    """Measure hfgen against upstream; exit code 1 if their tokens differ."""
    everything = [*CASES, MEMORY]
    chosen = everything if not cases or "all" in cases else cases
    for given, known in ((chosen, everything), ([model], [*SUBJECTS, "all"])):
        if unknown := [name for name in given if name not in known]:
            raise typer.BadParameter(f"{unknown}: choose from {', '.join(known)}")
    set_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options = {"pairs": pairs, "contexts": context, "prompts": prompt, "batches": batch}
    given_options: dict[str, Any] = {name: value for name, value in options.items() if value}
    console, facts = Console(), machine()
    results: list[Result] = []
    memories: list[Memory] = []
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    # Drawn between the calls, not during them.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        for name in SUBJECTS if model == "all" else [model]:
            size = replace(SIZES[name], **given_options)
            tasks: dict[str, Any] = {}

            def advance(case: str, total: int, name: str = name, tasks: Any = tasks) -> None:
                if case not in tasks:
                    tasks[case] = progress.add_task(f"{name}, {case}", total=total)
                progress.update(tasks[case], advance=1, refresh=True)

            try:
                measured = measure_all(SUBJECTS[name](), size, chosen, advance)
            except UnequalTokensError as error:
                console.print(f"[red]Other tokens:[/] {error}")
                raise typer.Exit(1) from None
            results += measured[0]
            memories += measured[1]
    console.print(Markdown(write(results, memories, facts, out)))
    console.print(f"Written to {out}: caches.md, caches.json, caches.png.")


if __name__ == "__main__":
    typer.run(main)
