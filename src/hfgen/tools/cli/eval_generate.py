"""``hfgen eval generate``: completions of prompts with references, and their metrics."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from . import files, options
from .evaluate import SeedOption
from .field_options import generation_config, note_idle, plain
from .report import CliError, err, interval_text, one_line, out, print_json, say, table

if TYPE_CHECKING:
    from ..evaluate.completions import Completion, Failure
    from ..evaluate.metrics import Metric, Score

NEW_TOKENS = 64
ONE_ANSWER = "one completion of each line is scored: leave --num-return-sequences out"
#: Failures that are shown one by one, without ``--json``.
SHOWN = 5


@options.with_shared_options
def generate(
    context: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE.jsonl", help='Lines of {"prompt": …, "reference": …}.'),
    ],
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            help="exact_match, bleu, chrf, rouge or module:function; repeatable. Default: all installed.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT.jsonl", help="Predictions and their scores."),
    ] = None,
    max_rows: options.RowsOption = 32,
    seed: SeedOption = 0,
    as_json: options.JsonOption = False,
    *,
    source: options.ModelOptions,
) -> None:
    """Complete the prompts of a file, and compare with references: one text, or a list of texts.

    Fields of GenerationConfig are options, as --temperature 0.7; those of a line are in its "options".
    The exit code is 0 if all lines were scored, 1 if some could not be, 2 for wrong input.
    """
    if not file.is_file():
        raise CliError(f"no file at {str(file)!r}")
    if output is not None and output.exists() and output.samefile(file):
        raise CliError("-o is the file of prompts: give another one")
    if (context.obj.get("num_return_sequences") or 1) > 1:
        raise CliError(ONE_ANSWER)
    if output is not None:
        files.check_output(output)
    from ..evaluate import completions, metrics

    names = metrics.installed() if metric is None else dict.fromkeys(metric)
    try:
        chosen = [each for name in names for each in metrics.metrics_of(name)]
    except (ImportError, ValueError) as error:
        raise CliError(f"--metric: {error}") from error
    lines, failures = completions.read(file)
    if not lines:
        why = f": line {failures[0].number}: {failures[0].error}" if failures else ""
        raise CliError(f"{str(file)!r} has no line that can be used{why}")
    with source.loaded() as loaded:
        config = generation_config(context.obj, loaded.model, NEW_TOKENS)
        note_idle(context.obj, config, loaded)
        outcomes = completions.complete(
            loaded.model,
            loaded.tokenizer,
            lines,
            generation_config=config,
            max_rows=max_rows,
            progress=err.is_terminal,
        )
        found: list[Completion] = []
        for each in outcomes:
            if isinstance(each, completions.Completion):
                found.append(each)
            else:
                failures.append(each)
        failures.sort(key=lambda failure: failure.number)
        if not found:
            raise CliError(f"no line was generated: line {failures[0].number}: {failures[0].error}")
        scores, wrong = scores_of(chosen, found, seed)
    if output is not None:
        write(output, records(found, failures, scores))
    report = {
        "model": loaded.name,
        "options": plain(context.obj),
        "lines": len(found) + len(failures),
        "scored": len(found),
        "tokens": sum(each.n_tokens for each in found),
        "metrics": {
            each.name: {"value": each.value, "interval": each.interval and asdict(each.interval)}
            for each in scores
        },
        "failed": [{"line": each.number, "error": each.error} for each in failures],
        "failed_metrics": wrong,
    }
    if as_json:
        print_json(report)
    else:
        out.print(scores_table(scores))
        out.print(
            f"[dim]{len(found):,} of {report['lines']:,} lines; 95% bootstrap interval over lines[/]"
        )
    for failure in failures[:SHOWN]:
        say(f"[yellow]note:[/] line {failure.number}: {one_line(failure.error)}")
    if len(failures) > SHOWN:
        say(f"[yellow]note:[/] {len(failures) - SHOWN} more lines failed")
    for name, reason in wrong.items():
        say(f"[red]{one_line(name)}[/] failed: {one_line(reason)}")
    raise typer.Exit(1 if failures or wrong else 0)


def scores_of(
    metrics: list[Metric], found: list[Completion], seed: int
) -> tuple[list[Score], dict[str, str]]:
    """The scores, and the metrics that failed with their errors, as a user's may."""
    from ..evaluate.metrics import score

    predictions = [each.text for each in found]
    references = [each.line.references for each in found]
    scores, wrong = [], {}
    for metric in metrics:
        try:
            scores += score([metric], predictions, references, seed)
        except Exception as error:  # the others go on
            wrong[metric.name] = str(error) or type(error).__name__
    return scores, wrong


def records(
    found: list[Completion], failures: list[Failure], scores: list[Score]
) -> list[dict[str, Any]]:
    """The JSON objects to write, one for each line, in the order of the file."""
    rows: list[dict[str, Any]] = [
        {
            "line": each.line.number,
            "prompt": each.line.prompt,
            "prediction": each.text,
            "references": each.line.references,
            "finish_reason": each.finish_reason,
            "scores": {score.name: score.of_lines[index] for score in scores},
        }
        for index, each in enumerate(found)
    ]
    rows += [{"line": each.number, "error": each.error} for each in failures]
    return sorted(rows, key=lambda row: row["line"])


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSON lines. Raises ``CliError`` where that cannot be."""
    try:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    except OSError as error:
        raise CliError(f"cannot write to {str(path)!r}: {error.strerror}") from error


def scores_table(scores: list[Score]) -> Table:
    """A row for each metric."""
    found = table("metric", numbers=("value", "interval"))
    for each in scores:
        between = interval_text(each.interval, ".4g")
        found.add_row(one_line(each.name), f"{each.value:.4g}", between)
    return found
