"""lm_eval's model types ``hf`` and ``hfgen`` in one process: long-tailed answers, and multiple choice.

``python -m benchmarks.lm_eval_tails`` writes ``benchmarks/results/lm_eval_tails.{md,json}``. Requests are
``generate_until`` (most answers end at their stop string soon, few are as long as is allowed) or
``loglikelihood`` (see ``lm_eval_tasks.py``). ``hf`` runs once with each of its batch sizes; the best of them
and ``hfgen`` then take turns.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import transformers
import typer

from benchmarks.lm_eval_tasks import TASKS, Task
from benchmarks.output import RESULTS, OutOption, ThreadsOption, set_threads, write_section
from benchmarks.side_by_side import Spread, frozen_garbage, machine, speed_cells, unmixed

OURS = "hfgen, auto"


@dataclass(slots=True)
class Timed:
    """Seconds of each round of one way; the first is that in which all batch sizes are tried."""

    name: str
    seconds: list[float] = field(default_factory=list)


# --- measuring ----------------------------------------------------------------------------------


def harnesses(task: Task) -> dict[str, Any]:
    """A model of lm_eval for each way."""
    from lm_eval.models.huggingface import HFLM

    from hfgen.lm_eval import HfgenLM

    given = {"pretrained": task.model, "tokenizer": task.tokenizer, "device": "cpu"}
    # With "auto", rows of `max_length` are tried.
    given_limit = given | {"max_length": task.longest()}
    made = {f"hf, {size}": HFLM(**given_limit, batch_size=size) for size in task.batch_sizes}
    return made | {OURS: HfgenLM(**given)}


def measure(task: Task, n_rounds: int) -> list[Timed]:
    """All ways once, then the best of ``hf`` and ``hfgen`` in turns. ``AssertionError``: results differ."""
    ways = harnesses(task)
    timed = {name: Timed(name) for name in ways}
    expected: list[Any] = []

    def run(name: str) -> None:
        nonlocal expected
        gc.collect()
        start = time.perf_counter()
        results = run_unmixed(task, ways[name], name)
        timed[name].seconds.append(time.perf_counter() - start)
        expected = expected or results
        pairs = enumerate(zip(results, expected, strict=True))
        differing = [number for number, pair in pairs if not task.are_equal(*pair)]
        assert not differing, f"{name} has other results for the requests {differing}."
        typer.echo(f"{name}: {timed[name].seconds[-1]:.1f} s", err=True)

    with frozen_garbage():
        for name in ways:
            if name != "hf, auto":
                run_unmixed(task, ways[name], name, warms_up=True)
        for name in ways:
            run(name)
        best = best_of(list(timed.values())).name
        for turn in range(n_rounds):
            for name in (best, OURS) if turn % 2 else (OURS, best):
                run(name)
    return list(timed.values())


def run_unmixed(task: Task, harness: Any, name: str, warms_up: bool = False) -> list[Any]:
    """The results; ``hf`` runs with transformers' own code."""
    with nullcontext() if name == OURS else unmixed(harness.model):
        return task.run(harness, warms_up)


def best_of(timed: list[Timed]) -> Timed:
    """``hf`` with the batch size that was fastest when all were tried."""
    return min((each for each in timed if each.name != OURS), key=lambda each: each.seconds[0])


def gain(timed: list[Timed]) -> Spread:
    """How many times as fast as the best of ``hf``, round by round."""
    ours = next(each for each in timed if each.name == OURS)
    pairs = list(zip(best_of(timed).seconds, ours.seconds, strict=True))
    return Spread.of([theirs / own for theirs, own in pairs[1:] or pairs])


# --- what is written ----------------------------------------------------------------------------


def section(task: Task, n_tokens: int, timed: list[Timed]) -> str:
    ours = next(each for each in timed if each.name == OURS)
    found = gain(timed)
    lines = [
        f"## {task.name}: {task.title}",
        "",
        task.facts(),
        "",
        "| model type, batch size | seconds | tokens per second | times as long as hfgen |",
        "|---|--:|--:|--:|",
    ]
    for each in timed:
        ratio = statistics.median(each.seconds) / statistics.median(ours.seconds)
        cells = speed_cells(each.seconds, n_tokens)
        lines.append(f"| {each.name} | {cells} | {ratio:.2f} |")
    lines += [
        "",
        f"`hfgen` is {found} times as fast as `{best_of(timed).name}`, the best batch size of `hf`, round by round "
        f"(target {task.target:.3g}: {'met' if found.median >= task.target else 'missed'}).",
    ]
    return "\n".join(lines) + "\n"


def main(
    task: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(TASKS)}; may be repeated. Default: all but 135m."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Turns of the best and hfgen. Default: by task.")
    ] = None,
    auto: Annotated[bool, typer.Option(help="Whether `hf` searches for a batch size, too.")] = True,
    threads: ThreadsOption = None,
    out: OutOption = RESULTS,
) -> None:
    """Measure lm_eval's model types on long-tailed answers and multiple choice."""
    if find_spec("lm_eval") is None:
        typer.echo("lm_eval is not installed: pip install 'hfgen[clients]'", err=True)
        raise typer.Exit(2)
    names = task or [name for name in TASKS if name != "135m"]
    if unknown := [name for name in names if name not in TASKS]:
        raise typer.BadParameter(f"has to be one of {', '.join(TASKS)}, but is {unknown[0]!r}")
    set_threads(threads)
    transformers.logging.set_verbosity_error()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    for name in names:
        write_task(TASKS[name](), rounds, auto, out)


def write_task(task: Task, rounds: int | None, auto: bool, out: Path) -> None:
    """Measure a task, and write its section."""
    facts = machine()
    if not auto:
        task = replace(task, batch_sizes=[size for size in task.batch_sizes if size != "auto"])
    timed, n_tokens = measure(task, rounds or task.n_rounds), task.n_tokens()
    text = section(task, n_tokens, timed) + (
        f"\n{facts['processor']}, {facts['threads']} threads, torch {facts['torch']}, transformers "
        f"{facts['transformers']}, lm_eval {version('lm_eval')}; load {facts['load']}.\n"
    )
    raw = {
        "machine": facts | {"lm_eval": version("lm_eval")},
        "tokens": n_tokens,
        "timed": [asdict(each) for each in timed],
        "gain": asdict(gain(timed)),
        "text": text,
    }
    write_section(out, "lm_eval_tails", "lm_eval's hf and hfgen", task.name, raw, TASKS)
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
