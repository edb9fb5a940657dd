"""``hfgen compare``: both libraries on the same weights, prompts, options and seed."""

from __future__ import annotations

import copy
import statistics
from itertools import zip_longest
from typing import Any, ClassVar

import typer
from rich.markup import escape
from rich.table import Column
from typer import Argument, Option

from . import files, measure, options
from .field_options import RESULTS, Fields, generation_config, note_idle, note_unknown_upstream
from .loading import Loaded
from .measure import LIBRARIES
from .report import duration, out, print_json, spread, table

NEW_TOKENS = 64
NEAR_TIE = 1e-4  # a top-2 gap of logits below which rounding alone can choose the token


class CompareFields(Fields):
    """Fields without those whose results are not compared; ``--seed`` is torch's generator's."""

    left_out: ClassVar = RESULTS | {"seed"}


def compare(
    source: options.ModelOptions,
    fields: CompareFields,
    prompts: list[str] | None = Argument(None, help="Prompts; - or a pipe: of standard input."),
    batch: bool = Option(False, "--batch", help="All prompts in one call, padded to one length."),
    repeat: int = options.REPEAT,
    seed: int = options.seed("Seed of each call.", "--seed"),
    as_json: bool = options.JSON,
) -> None:
    """Run transformers and hfgen side by side: tokens, first difference, times.

    Takes the options of generate. The times are medians of interleaved runs after one warm-up.
    Exit code 0: same tokens; 1: they differ.
    """
    texts = [files.read_prompt(prompt) for prompt in prompts or (None,)]
    groups = [texts] if batch else [[text] for text in texts]
    with source.loaded(fields.assistant) as loaded:
        config = generation_config(fields, loaded.model, NEW_TOKENS)
        note_idle(fields, config, loaded)
        note_unknown_upstream(fields)
        inputs = [measure.encode(loaded, group) for group in groups]
        results = [compare_call(loaded, each, config, seed, repeat) for each in inputs]
    if as_json:
        calls = [{"prompts": group} | call for group, call in zip(groups, results, strict=True)]
        settings = {"model": loaded.name, "options": fields.as_json(), "seed": seed}
        print_json({**settings, "calls": calls})
    else:
        names = [f"{len(texts)} prompts"] if batch and len(texts) > 1 else texts
        print_table(names, results, loaded.tokenizer)
    if any(result["differences"] for result in results):
        raise typer.Exit(1)


def compare_call(
    loaded: Loaded, inputs: dict[str, Any], config: Any, seed: int, repeat: int
) -> dict[str, Any]:
    """A warm-up and ``repeat`` timed calls of each library, in turns, as ``--json`` prints them."""
    runs = measure.race(loaded, lambda _: measure.generate(loaded, inputs, config, seed), repeat)
    pairs = list(zip(runs["transformers"], runs["hfgen"], strict=True))
    ratios = [ours.seconds / theirs.seconds for theirs, ours in pairs[1:]]
    result: dict[str, Any] = {"identical": True, "differences": []}
    for library, (first, *timed) in runs.items():
        result[library] = {
            "tokens": first.padded,
            "n_tokens": first.n_tokens,
            "seconds": median([run.seconds for run in timed]),
            "time_to_first_token": median([run.first for run in timed]),
        }
    times = result["hfgen"]["seconds"], result["transformers"]["seconds"]
    result |= {"ratio": times[0] / times[1] if ratios else None, "ratios": ratios}
    differing = next((pair for pair in pairs if pair[0].padded != pair[1].padded), None)
    if differing is not None:
        recording = copy.deepcopy(config)
        recording.return_dict_in_generate = recording.output_logits = True
        with LIBRARIES["transformers"](loaded):
            output = measure.generate(loaded, inputs, recording, seed).output
        rows = enumerate(zip(differing[0].padded, differing[1].padded, strict=False))
        result["identical"] = False
        result["differences"] = [
            find_difference(row, *pair, output) for row, pair in rows if pair[0] != pair[1]
        ]
    return result


def median(values: list[Any]) -> Any:
    """The median; None for no values, and for those that were not taken."""
    return None if None in values or not values else statistics.median(values)


def find_difference(row: int, theirs: list[int], ours: list[int], output: Any) -> dict[str, Any]:
    """Where the rows differ first (None: ended); ``output`` is transformers', with its logits."""
    pairs = enumerate(zip_longest(theirs, ours))
    position, pair = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    tokens = dict(zip(LIBRARIES, pair, strict=True))
    gap = logit_gap(output, row, position)
    return {"row": row, "position": position, "tokens": tokens, "logit_gap": gap}


def logit_gap(output: Any, row: int, position: int) -> float | None:
    """Difference of the two largest logits of ``row`` at new token ``position``."""
    if position >= len(output.logits):
        return None
    if getattr(output, "beam_indices", None) is not None:
        row = int(output.beam_indices[row, position])  # the beam that the row was in at that step
    if row < 0:
        return None
    best, second = output.logits[position][row].float().topk(2).values.tolist()
    return best - second


def described(difference: dict[str, Any], tokenizer: Any) -> str:
    """A difference in words."""
    words = ", ".join(
        f"{library} has {'ended' if token is None else f'{tokenizer.decode([token])!r} ({token})'}"
        for library, token in difference["tokens"].items()
    )
    if (gap := difference["logit_gap"]) is None:
        return f"{words}; no logits there"
    tie = ", a near tie that rounding can decide" if gap < NEAR_TIE else ""
    return f"{words}; top-2 logit gap {gap:.2e}{tie}"


def print_table(names: list[str], results: list[dict[str, Any]], tokenizer: Any) -> None:
    """Both libraries side by side, a row per call: medians, ± half of the range; then differences."""
    heading = Column("prompt", overflow="ellipsis", no_wrap=True, max_width=20)
    rows = table(heading, numbers=("tokens", "same tokens", *LIBRARIES, "ratio"))
    for name, result in zip(names, results, strict=True):
        rows.add_row(
            escape(repr(name)[1:-1]),
            str(result["transformers"]["n_tokens"]),
            "[green]yes[/]" if result["identical"] else "[bold red]no[/]",
            *(duration(result[library]["seconds"]) for library in LIBRARIES),
            spread(result["ratios"], 2),
        )
    out.print(rows)
    for name, result in zip(names, results, strict=True):
        for difference in result["differences"]:
            place = f"row {difference['row']}, new token {difference['position'] + 1}"
            words = escape(described(difference, tokenizer))
            out.print(f"{escape(repr(name))}, [red]{place}:[/] {words}", soft_wrap=True)
