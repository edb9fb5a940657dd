"""``hfgen compare``: both libraries on the same weights, prompts, options and seed."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from . import files, measure, options
from .field_options import generation_config, note_idle, note_own, plain
from .loading import Loaded
from .measure import LIBRARIES
from .report import CliError, duration, out, print_json, spread, table

NEW_TOKENS = 64
NEAR_TIE = 1e-4  # a top-2 gap of logits below which rounding alone can choose the token


@dataclass(frozen=True, slots=True)
class Difference:
    """The first new token at which a row of the two outputs differs."""

    row: int
    position: int  # among the new tokens, from 0
    tokens: dict[str, int | None]  # library -> token there; None where its row has ended
    found: str  # the same in words
    logit_gap: float | None  # between the two largest of transformers' logits there

    def markup(self) -> str:
        """One line of rich markup."""
        place = f"row {self.row}, new token {self.position + 1}"
        gap = "no logits there"
        if self.logit_gap is not None:
            gap = f"top-2 logit gap {self.logit_gap:.2e}"
            gap += ", a near tie that rounding can decide" if self.logit_gap < NEAR_TIE else ""
        return f"[red]{place}:[/] {escape(self.found)}; {gap}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The runs of both libraries for one call, and where their tokens differ."""

    runs: dict[str, list[measure.Generated]]  # library -> its runs, the warm-up first
    differences: list[Difference]

    def median(self, library: str, time: str = "seconds") -> Any:
        """Median of a time of ``Generated``, the warm-up left out; None where it was not taken."""
        times = [getattr(run, time) for run in self.runs[library][1:]]
        return None if None in times else statistics.median(times)

    @property
    def ratio(self) -> float:
        """Time of hfgen divided by that of transformers."""
        return self.median("hfgen") / self.median("transformers")

    def ratios(self) -> list[float]:
        """Time of hfgen divided by that of transformers, of each pair of neighbouring runs."""
        pairs = zip(self.runs["hfgen"][1:], self.runs["transformers"][1:], strict=True)
        return [ours.seconds / theirs.seconds for ours, theirs in pairs]


@options.with_shared_options
def compare(
    context: typer.Context,
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts; - or a pipe reads one from standard input.")
    ] = None,
    assistant: options.AssistantOption = None,
    batch: Annotated[
        bool, typer.Option("--batch", help="All prompts in one call, padded on the left.")
    ] = False,
    repeat: options.RepeatOption = 3,
    seed: Annotated[int, options.seed_option("--seed", "Seed of each call.")] = 0,
    as_json: options.JsonOption = False,
    *,
    source: options.ModelOptions,
) -> None:
    """Run transformers and hfgen side by side: tokens, first difference, times.

    Takes the options of generate. The times are medians of interleaved runs after one warm-up.
    Exit code 0: same tokens; 1: they differ.
    """
    fields: dict[str, Any] = context.obj
    texts = [files.read_prompt(each) for each in prompts or []] or [files.read_prompt(None)]
    with source.loaded(assistant) as loaded:
        config = generation_config(fields, loaded.model, NEW_TOKENS)
        note_idle(fields, config, loaded)
        note_own(fields)
        groups = [texts] if batch else [[text] for text in texts]
        inputs = (measure.encode(loaded, group) for group in groups)
        results = [compare_call(loaded, each, config, seed, repeat) for each in inputs]
    names = [f"{len(texts)} prompts"] if batch and len(texts) > 1 else texts
    if as_json:
        calls = [as_object(*each) for each in zip(groups, results, strict=True)]
        print_json({"model": loaded.name, "options": plain(fields), "seed": seed, "calls": calls})
    else:
        out.print(comparison_table([repr(name)[1:-1] for name in names], results, "prompt"))
        for name, result in zip(names, results, strict=True):
            for difference in result.differences:
                out.print(f"{escape(repr(name))}, {difference.markup()}", soft_wrap=True)
    if any(result.differences for result in results):
        raise typer.Exit(1)


def compare_call(
    loaded: Loaded, inputs: dict[str, Any], config: Any, seed: int, repeat: int
) -> Comparison:
    """One warm-up and ``repeat`` timed calls of each library, in turn; ``CliError`` if one fails."""
    runs: dict[str, list[measure.Generated]] = {library: [] for library in LIBRARIES}
    for _, library in measure.in_turns(range(repeat + 1), loaded):
        runs[library].append(run(library, loaded, inputs, config, seed))
    pairs = zip(runs["transformers"], runs["hfgen"], strict=True)
    differing = next((pair for pair in pairs if pair[0].padded != pair[1].padded), None)
    if differing is None:
        return Comparison(runs, [])
    recording = copy.deepcopy(config)
    recording.return_dict_in_generate = recording.output_logits = True
    with LIBRARIES["transformers"](loaded):
        output = run("transformers", loaded, inputs, recording, seed).output
    rows = enumerate(zip(differing[0].padded, differing[1].padded, strict=False))
    parted = [(number, *row) for number, row in rows if row[0] != row[1]]
    return Comparison(runs, [find_difference(loaded, *row, output) for row in parted])


def run(library: str, loaded: Loaded, *call: Any) -> measure.Generated:
    """``measure.generate``; errors name the ``library`` that generates."""
    try:
        return measure.generate(loaded, *call)
    except CliError as error:
        raise CliError(f"{library}: {error}") from error


def find_difference(
    loaded: Loaded, row: int, theirs: list[int], ours: list[int], output: Any
) -> Difference:
    """Where ``theirs`` and ``ours`` differ first; ``output`` is transformers', with its logits."""
    pairs = enumerate(zip_longest(theirs, ours))
    position, pair = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    tokens = dict(zip(LIBRARIES, pair, strict=True))
    found = [
        f"{library} has {'ended' if t is None else f'{loaded.tokenizer.decode([t])!r} ({t})'}"
        for library, t in tokens.items()
    ]
    return Difference(row, position, tokens, ", ".join(found), logit_gap(output, row, position))


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


def comparison_table(names: Iterable[str], results: list[Comparison], heading: str) -> Table:
    """Both libraries side by side, one row per prompt or mode: medians, ± half of the range."""
    named = Column(heading, overflow="ellipsis", no_wrap=True, max_width=20)
    found = table(named, numbers=("tokens", "same tokens", *LIBRARIES, "ratio"))
    for name, result in zip(names, results, strict=True):
        found.add_row(
            escape(name),
            str(result.runs["transformers"][0].tokens),
            "[bold red]no[/]" if result.differences else "[green]yes[/]",
            *(duration(result.median(library)) for library in LIBRARIES),
            spread(result.ratios(), 2),
        )
    return found


def as_object(prompts: list[str], result: Comparison) -> dict[str, Any]:
    """One of the calls that ``--json`` prints; times in seconds."""
    shown = ("row", "position", "tokens", "logit_gap")
    return {
        "prompts": prompts,
        "identical": not result.differences,
        "differences": [{name: getattr(d, name) for name in shown} for d in result.differences],
        **{
            library: {
                "tokens": result.runs[library][0].padded,
                "seconds": result.median(library),
                "time_to_first_token": result.median(library, "first"),
            }
            for library in LIBRARIES
        },
        "ratio": result.ratio,
        "ratios": result.ratios(),
    }
