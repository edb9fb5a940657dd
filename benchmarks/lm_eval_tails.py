"""lm_eval's model types ``hf`` and ``hfgen`` on answers of very different lengths, in one process.

``python -m benchmarks.lm_eval_tails`` writes ``benchmarks/results/lm_eval_tails.{md,json}``. Requests are
``generate_until`` with the same arguments: most answers end at their stop string soon, few are as long as is
allowed. ``hf`` runs once with each of its batch sizes; the best of them and ``hfgen`` then take turns.
"""

from __future__ import annotations

import gc
import json
import logging
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Annotated, Any

import transformers
import typer

import hfgen
from benchmarks.edits import EDITS
from benchmarks.models import SUBJECTS
from benchmarks.output import RESULTS, OutOption, ThreadsOption, set_threads, write_section
from benchmarks.side_by_side import Spread, frozen_garbage, machine, speed_cells, unmixed
from benchmarks.stopping import build

#: How many times as fast as ``hf`` at its best ``hfgen`` is to be.
TARGET = 1.5

OURS = "hfgen, auto"


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts with what they are asked with, and the batch sizes of ``hf`` that are tried."""

    name: str
    title: str
    model: Any
    tokenizer: Any
    prompts: list[str]
    until: list[str]
    max_new: int
    batch_sizes: Sequence[int | str]
    n_rounds: int

    def instances(self, n: int | None = None, max_new: int | None = None) -> list[Any]:
        """The first ``n`` requests; all without it."""
        from lm_eval.api.instance import Instance

        asked = {"until": self.until, "max_gen_toks": max_new or self.max_new, "do_sample": False}
        return [
            Instance("generate_until", {}, (prompt, asked), number)
            for number, prompt in enumerate(self.prompts[:n])
        ]

    def lengths(self) -> list[int]:
        """New tokens of each answer."""
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


@dataclass(slots=True)
class Timed:
    """Seconds of each round of one way; the first is that in which all batch sizes are tried."""

    name: str
    seconds: list[float] = field(default_factory=list)


def small() -> Task:
    """The built-in model continues a line of code after each of some functions' lines."""
    model, tokenizer = hfgen.builtin_model()
    heads = [
        "".join(lines[:n])
        for edit in EDITS
        for lines in [edit.before.splitlines(keepends=True)]
        for n in range(2, len(lines), 2)
    ]
    title = "Built-in model, the next line of code"
    sizes = (1, 4, 8, 16, 32, "auto")
    return Task("small", title, hfgen.mix_into(model), tokenizer, heads, ["\n"], 256, sizes, 3)


def random_135m() -> Task:
    """The random model repeats a token, then another one; some letters end its answer."""
    subject = SUBJECTS["135m"]()
    tokenizer = build(subject.model.config.vocab_size)
    tokenizer.eos_token, tokenizer.pad_token = tokenizer.convert_ids_to_tokens([2, 0])
    draw = random.Random(0)
    words = tokenizer.convert_ids_to_tokens(range(300, 1000))
    prompts = [" ".join(draw.choices(words, k=draw.randint(4, 16))) for _ in range(24)]
    sizes = (1, 4, 8, 16)
    return Task(
        "135m", subject.title, subject.model, tokenizer, prompts, ["n", "t", "o"], 128, sizes, 2
    )


TASKS: dict[str, Callable[[], Task]] = {"small": small, "135m": random_135m}


# --- measuring ----------------------------------------------------------------------------------


def harnesses(task: Task) -> dict[str, Any]:
    """A model of lm_eval for each way."""
    from lm_eval.models.huggingface import HFLM

    from hfgen.lm_eval import HfgenLM

    given = {"pretrained": task.model, "tokenizer": task.tokenizer, "device": "cpu"}
    # With "auto", rows of `max_length` are tried.
    limit = max(len(task.tokenizer(prompt).input_ids) for prompt in task.prompts) + task.max_new
    made = {
        f"hf, {size}": HFLM(**given, batch_size=size, max_length=limit) for size in task.batch_sizes
    }
    return made | {OURS: HfgenLM(**given)}


def measure(task: Task, n_rounds: int) -> list[Timed]:
    """All ways once, then the best of ``hf`` and ``hfgen`` in turns. ``AssertionError``: answers differ."""
    ways, requests = harnesses(task), task.instances()
    timed = {name: Timed(name) for name in ways}
    expected: list[str] | None = None

    def run(name: str) -> None:
        nonlocal expected
        gc.collect()
        start = time.perf_counter()
        texts = answers(ways[name], requests, name)
        timed[name].seconds.append(time.perf_counter() - start)
        expected = expected or texts
        differing = [
            i for i, pair in enumerate(zip(texts, expected, strict=True)) if len({*pair}) > 1
        ]
        assert not differing, f"{name} has other answers to the requests {differing}."
        typer.echo(f"{name}: {timed[name].seconds[-1]:.1f} s", err=True)

    with frozen_garbage():
        for name in ways:
            if name != "hf, auto":
                answers(ways[name], task.instances(2, 4), name)
        for name in ways:
            run(name)
        best = best_of(list(timed.values())).name
        for turn in range(n_rounds):
            for name in (best, OURS) if turn % 2 else (OURS, best):
                run(name)
    return list(timed.values())


def answers(harness: Any, requests: list[Any], name: str) -> list[str]:
    if name == OURS:
        return list(harness.generate_until(requests, disable_tqdm=True))
    with unmixed(harness.model):
        return list(harness.generate_until(requests, disable_tqdm=True))


def best_of(timed: list[Timed]) -> Timed:
    """``hf`` with the batch size that was fastest when all were tried."""
    return min((each for each in timed if each.name != OURS), key=lambda each: each.seconds[0])


def gain(timed: list[Timed]) -> Spread:
    """How many times as fast as the best of ``hf``, round by round."""
    ours = next(each for each in timed if each.name == OURS)
    pairs = list(zip(best_of(timed).seconds, ours.seconds, strict=True))
    return Spread.of([theirs / own for theirs, own in pairs[1:] or pairs])


# --- what is written ----------------------------------------------------------------------------


def section(task: Task, lengths: list[int], timed: list[Timed]) -> str:
    ours = next(each for each in timed if each.name == OURS)
    n = len(lengths)
    longest = sum(length >= task.max_new for length in lengths)
    found = gain(timed)
    lines = [
        f"## {task.name}: {task.title}",
        "",
        f"{n} requests, `until={json.dumps(task.until)}`, `max_gen_toks={task.max_new}`: {sum(lengths):,} tokens, the median answer has "
        f"{statistics.median(lengths):g}, {longest} answers have {task.max_new}.",
        "",
        "| model type, batch size | seconds | tokens per second | times as long as hfgen |",
        "|---|--:|--:|--:|",
    ]
    for each in timed:
        ratio = statistics.median(each.seconds) / statistics.median(ours.seconds)
        cells = speed_cells(each.seconds, sum(lengths))
        lines.append(f"| {each.name} | {cells} | {ratio:.2f} |")
    lines += [
        "",
        f"`hfgen` is {found} times as fast as `{best_of(timed).name}`, the best batch size of `hf`, round by round "
        f"(target {TARGET}: {'met' if found.median >= TARGET else 'missed'}).",
    ]
    return "\n".join(lines) + "\n"


def main(
    model: Annotated[str, typer.Option(help="small or 135m.")] = "small",
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Turns of the best and hfgen. Default: by model.")
    ] = None,
    auto: Annotated[bool, typer.Option(help="Whether `hf` searches for a batch size, too.")] = True,
    threads: ThreadsOption = None,
    out: OutOption = RESULTS,
) -> None:
    """Measure lm_eval's model types on answers of very different lengths."""
    if find_spec("lm_eval") is None:
        typer.echo("lm_eval is not installed: pip install 'hfgen[clients]'", err=True)
        raise typer.Exit(2)
    if model not in TASKS:
        raise typer.BadParameter(f"has to be one of {', '.join(TASKS)}, but is {model!r}")
    set_threads(threads)
    transformers.logging.set_verbosity_error()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    task, facts = TASKS[model](), machine()
    if not auto:
        task = replace(task, batch_sizes=[size for size in task.batch_sizes if size != "auto"])
    lengths = task.lengths()
    timed = measure(task, rounds or task.n_rounds)
    text = section(task, lengths, timed) + (
        f"\n{facts['processor']}, {facts['threads']} threads, torch {facts['torch']}, transformers "
        f"{facts['transformers']}, lm_eval {version('lm_eval')}; load {facts['load']}.\n"
    )
    raw = {
        "machine": facts | {"lm_eval": version("lm_eval")},
        "lengths": lengths,
        "timed": [asdict(each) for each in timed],
        "gain": asdict(gain(timed)),
        "text": text,
    }
    write_section(out, "lm_eval_tails", "lm_eval on long-tailed answers", model, raw, TASKS)
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
