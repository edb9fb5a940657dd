"""Do draft trees pay? Trees, chains and hfgen's own drafting in turns, at batch 1, on the built-in model.

``python -m benchmarks.trees`` writes ``trees.md`` and ``.json``; ``--optimize`` adds a section to them.
The prototype is ``tree_decoding.py``. A chain is a tree with one branch, decoded by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer

import hfgen
from hfgen.drafters.early_exit import first_layers

from . import output
from .edits import EDITS, beginnings, editing
from .output import RESULTS, OutOption
from .race import Variant, race
from .side_by_side import Spread, UnequalTokensError, frozen_garbage, machine
from .speculation import GREEDY, Task
from .tree_decoding import ByModel, Lookup, decode

#: What is compared, by how the names of the ways begin.
KINDS = ("hfgen", "chain", "tree")

#: Sections of the page.
SECTIONS = ("float32", "hfgen.optimize")


def prototype(name: str, drafter: Callable[..., Any], **settings: Any) -> Variant:
    make = partial(drafter, **settings)
    return Variant(name, options={"custom_generate": partial(decode, make_drafter=make)})


def lookup_ways() -> list[Variant]:
    ways = [GREEDY, Variant("hfgen", options={"prompt_lookup_num_tokens": 20})]
    ways += [prototype(f"chain, {n}", Lookup, n_tokens=n) for n in (5, 10, 20)]
    for n, more, side in ((5, 1, 5), (10, 1, 5), (10, 3, 5), (20, 1, 5), (20, 3, 3)):
        settings = {"n_tokens": n, "n_branches": 1 + more, "side": side}
        ways.append(prototype(f"tree, {n} and {more} of {side}", Lookup, **settings))
    return ways


def model_ways(draft: Any, options: dict[str, Any]) -> list[Variant]:
    """``options``: those with which hfgen drafts with the model ``draft``."""
    ways = [GREEDY, Variant("hfgen", options=options)]
    for n, go_on in ((1, 0.0), (3, 0.0), (6, 0.3), (8, 0.2)):
        name = f"up to {n}, {go_on}" if go_on else f"{n}"
        settings = {"model": draft, "n_tokens": n, "go_on": go_on}
        ways.append(prototype(f"chain, {name}", ByModel, **settings))
        for n_next, n_lines in ((2, 1), (3, 2)) if go_on else ((3, 1),):
            more = {"n_next": n_next, "n_lines": n_lines}
            name_of_all = f"tree, {name}, next {n_next}, {n_lines} lines"
            ways.append(prototype(name_of_all, ByModel, **settings, **more))
    return ways


def tasks(n_texts: int, n_new: int, n_layers: int, is_optimized: bool) -> tuple[Any, list[Task]]:
    """The model, and all work: texts to edit, and functions to complete by ``n_new`` tokens."""
    model, tokenizer = hfgen.builtin_model()
    draft, _ = hfgen.builtin_model(draft=True)
    for each in (model, draft) if is_optimized else ():
        hfgen.optimize(each)
    texts = [[edit] for edit in EDITS[:n_texts]]
    edited = [editing(text, tokenizer) for text in texts]
    limits = {"max_new_tokens": n_new, "eos_token_id": None}
    begun = [beginnings(text, tokenizer, 64) | limits for text in texts]
    by_draft = model_ways(draft, {"assistant_model": draft})
    by_layers = model_ways(first_layers(model, n_layers), {"assistant_early_exit": n_layers})
    return model, [
        Task("prompt lookup, editing", edited, lookup_ways()),
        Task("prompt lookup, completion", begun, lookup_ways()),
        Task("draft model, completion", begun, by_draft),
        Task(f"early exit after layer {n_layers}, completion", begun, by_layers),
    ]


# --- the report ---------------------------------------------------------------------------------


def summary(task: Task) -> dict[str, Any]:
    """hfgen's drafting, the fastest chain and the fastest tree, and that tree beside that chain."""
    row: dict[str, Any] = {"task": task.name}
    fastest = {}
    for kind in KINDS:
        found = [result for result in task.results if result.variant.startswith(kind)]
        fastest[kind] = way = max(found, key=lambda result: result.gain(task.greedy).median)
        gain = way.gain(task.greedy).median
        row[kind] = [way.variant, way.tokens_per_forward, way.width, gain]
    return row | {"ratio": asdict(fastest["tree"].gain(fastest["chain"]))}


def block(raw: dict[str, Any]) -> str:
    """What the docs quote: of each task, the fastest ways; ``raw`` has the sections."""
    lines = [
        "| | tokens per forward: chain · tree | fed: chain · tree | gain: hfgen · chain · tree | tree over chain |",
        "|---|--:|--:|--:|--:|",
    ]
    for key, of_section in raw.items():
        for row in of_section["summary"]:
            gains, tokens, fed = (
                " · ".join(f"{row[kind][i]:.{digits}f}" for kind in kinds)
                for i, digits, kinds in ((3, 2, KINDS), (1, 1, KINDS[1:]), (2, 1, KINDS[1:]))
            )
            name, ratio = f"{row['task']}, {key}", Spread(**row["ratio"])
            lines.append(f"| {name} | {tokens} | {fed} | {gains} | **{ratio.median:.2f}** |")
    return "\n".join(lines)


def section(key: str, tasks: Sequence[Task], facts: dict[str, Any]) -> str:
    """A section of the page: all ways of each task, and the fastest tree beside the fastest chain."""
    lines = [
        f"## {key}\n\n{facts['processor']}, {facts['cores']} cores, 1 thread, load {facts['load']} at the "
        f"start. torch {facts['torch']}, transformers {facts['transformers']}, hfgen {facts['hfgen']}."
    ]
    for task in tasks:
        lines.append(f"\n### {task.name}\n\n| | ms | gain | quartiles | tokens per forward | fed |")
        lines.append("|---|--:|--:|--:|--:|--:|")
        for way in task.results:
            gain = way.gain(task.greedy)
            lines.append(
                f"| {way.variant} | {way.milliseconds:.0f} | **{gain.median:.2f}** | {gain.low:.2f} to "
                f"{gain.high:.2f} | {way.tokens_per_forward:.2f} | {way.width:.1f} |"
            )
        row = summary(task)
        lines.append(
            f"\n{row['tree'][0].capitalize()} over {row['chain'][0]}: {Spread(**row['ratio'])}."
        )
    return "\n".join(lines) + "\n"


TITLE = """Draft trees beside draft chains

Batch 1, the built-in model, the texts of [speculation.md](speculation.md). All ways take turns on each text, and give greedy decoding's tokens. Gain: how many times faster than hfgen's greedy decoding, wall time, call by call; medians, with quartiles. One prototype (`benchmarks/tree_decoding.py`) decodes with chains and with trees; hfgen drafts with its defaults. Fed: tokens of a forward, those of the prompt left out.

"20 and 3 of 5": a branch of 20 tokens, and up to 3 more of 5. "up to 6, 0.3": at most 6 levels, as long as they are reached with a probability of 0.3. "next 3, 2 lines": behind each of the 2 likeliest nodes of a level the likeliest token, and of the next ones, up to 3 in all, those that are reached with a probability of 0.05."""


def measure(
    rounds: int, n_texts: int, n_new: int, n_layers: int, is_optimized: bool, folder: Path
) -> str:
    """Measure all ways of all tasks, and write a section; returns it.

    Raises ``UnequalTokensError``, naming the task.
    """
    facts = machine()
    model, work = tasks(n_texts, n_new, n_layers, is_optimized)
    with frozen_garbage():
        for task in work:
            try:
                task.results = race(model, task.inputs, task.variants, rounds)
            except UnequalTokensError as error:
                raise UnequalTokensError(f"In {task.name!r}, {error}") from None
    key = SECTIONS[is_optimized]
    text = section(key, work, facts)
    raw: dict[str, Any] = {"text": text, "machine": facts, "summary": [*map(summary, work)]}
    raw["results"] = {task.name: [way.as_object() for way in task.results] for task in work}
    output.write_section(folder, "trees", TITLE, key, raw, SECTIONS)
    return text


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Of all tasks, after a warm-up.")] = 2,
    texts: Annotated[int, typer.Option(min=1, max=len(EDITS), help="Of each task.")] = 3,
    new_tokens: Annotated[int, typer.Option(min=2, help="Of a completion.")] = 96,
    layers: Annotated[int, typer.Option(min=1, help="After which early exit drafts.")] = 1,
    optimize: Annotated[bool, typer.Option(help="hfgen.optimize both models first.")] = False,
    out: OutOption = RESULTS,
) -> None:
    """Measure trees, chains and hfgen's drafting on one thread; exit code 1 if any gives other tokens."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        print(measure(rounds, texts, new_tokens, layers, optimize, out))
    except UnequalTokensError as error:
        typer.echo(f"Other tokens: {error}", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
