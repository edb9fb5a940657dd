"""``hfgen eval``: perplexity of texts, and metrics of completions."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from . import files as paths
from . import options
from .field_options import generation_config, note_idle, plain
from .report import CliError, err, interval_text, one_line, out, print_json, say, table

UNITS = ("windows", "documents")
NEW_TOKENS = 64  # of a completion
SHOWN = 5  # failures that are shown one by one, without ``--json``

SeedOption = Annotated[
    int, options.seed_option("--bootstrap-seed", "Seed of the bootstrap resamples.")
]


@options.with_shared_options
def perplexity(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", help="UTF-8 texts.")],
    window: Annotated[
        int | None, typer.Option("--window", help="Tokens per window; default: up to 2048.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option("--stride", help="Tokens between windows; default: half a window.")
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Windows forwarded at once.")
    ] = 4,
    resample: Annotated[
        str,
        options.one_of_option(
            "--resample", UNITS, "Units of the interval of the total: windows or documents."
        ),
    ] = "windows",
    seed: SeedOption = 0,
    as_json: options.JsonOption = False,
    *,
    source: options.ModelOptions,
) -> None:
    """Perplexity and bits per byte of texts, each file and all together.

    The exit code is 0 if all files were scored, 1 if some could not be, 2 for wrong input.
    """
    for option, value, least in (("--window", window, 2), ("--stride", stride, 1)):
        if value is not None and value < least:
            raise CliError(f"{option} has to be at least {least}, but is {value}")
    if window is not None and stride is not None and stride >= window:
        raise CliError(
            f"--stride has to be from 1 to {window - 1}, below --window, but is {stride}"
        )
    files = list(dict.fromkeys(files))  # a text that is given twice counts once
    for file in files:
        if not file.is_file():
            raise CliError(f"no file at {str(file)!r}")
    with source.loaded() as loaded:
        from ...engine.many import JobProgress
        from ..evaluate.perplexity import Perplexity, score, sizes

        try:
            window, stride = sizes(loaded.model, window, stride)
        except ValueError as error:
            raise CliError(str(error)) from error
        progress, scores, failed = JobProgress(len(files)), [], []
        with progress if err.is_terminal else nullcontext():
            for file in files:
                try:
                    found = score(
                        loaded.model,
                        loaded.tokenizer,
                        str(file),
                        file.read_bytes().decode("utf-8-sig"),
                        window=window,
                        stride=stride,
                        batch_size=batch_size,
                        on_tokens=progress.add_tokens,
                    )
                    scores.append(found)
                except UnicodeDecodeError as error:  # the other files go on
                    message = f"{str(file)!r} is not UTF-8: {error}"
                    failed.append({"file": str(file), "error": message})
                except (OSError, ValueError) as error:
                    failed.append({"file": str(file), "error": str(error)})
                progress.add_done()
        for each in failed:
            say(f"[yellow]note:[/] {one_line(each['error'])}")
        if not scores:
            raise CliError(f"none of {len(files)} files could be scored")
        rows = {each.name: Perplexity.of([each], seed=seed) for each in scores}
        total = Perplexity.of(scores, by_document=resample == "documents", seed=seed)
    if as_json:
        per_file = [{"file": name, **asdict(row)} for name, row in rows.items()]
        settings = {"model": loaded.name, "window": window, "stride": stride, "resample": resample}
        print_json({**settings, "files": per_file, "total": asdict(total), "failed": failed})
    else:
        out.print(perplexity_table(rows, total))
        out.print(f"[dim]windows of {window} tokens, each {stride}; 95% bootstrap interval[/]")
    raise typer.Exit(1 if failed else 0)


def perplexity_table(rows: dict[str, Any], total: Any) -> Table:
    """A row for each file, and one for all."""
    columns = ("tokens", "bytes", "perplexity", "interval", "bits/byte")
    found = table("file", numbers=columns)
    named = {**rows, "total": total} if len(rows) > 1 else rows
    for name, row in named.items():
        between = interval_text(row.interval, ".3f")
        counts = f"{row.n_tokens:,}", f"{row.n_bytes:,}"
        values = f"{row.perplexity:.3f}", between, f"{row.bits_per_byte:.4f}"
        found.add_row(one_line(name), *counts, *values, style="bold" if row is total else "")
    return found


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
        raise CliError("one completion of each line is scored: leave --num-return-sequences out")
    if output is not None:
        paths.check_output(output)
    from ..evaluate import completions, metrics

    names = metrics.installed() if metric is None else dict.fromkeys(metric)
    try:
        chosen = [each for name in names for each in metrics.metrics_of(name)]
    except (ImportError, ValueError) as error:
        raise CliError(f"--metric: {error}") from error
    rows = completions.read(file)
    usable = [row for row in rows if "error" not in row]
    if not usable:
        why = f": line {rows[0]['line']}: {rows[0]['error']}" if rows else ""
        raise CliError(f"{str(file)!r} has no line that can be used{why}")
    with source.loaded() as loaded:
        config = generation_config(context.obj, loaded.model, NEW_TOKENS)
        note_idle(context.obj, config, loaded)
        settings = {"max_rows": max_rows, "progress": err.is_terminal}
        completions.complete(
            loaded.model, loaded.tokenizer, usable, generation_config=config, **settings
        )
        scored = [row for row in rows if "error" not in row]
        failed = [{"line": row["line"], "error": row["error"]} for row in rows if "error" in row]
        if not scored:
            raise CliError(f"no line was generated: line {failed[0]['line']}: {failed[0]['error']}")
        predictions = [row["prediction"] for row in scored]
        references = [row["references"] for row in scored]
        scores, failed_metrics = [], {}
        for each in chosen:
            try:
                scores += metrics.score([each], predictions, references, seed)
            except Exception as error:  # a user's function may fail; the other metrics go on
                failed_metrics[each.name] = str(error) or type(error).__name__
    if output is not None:
        write(output, rows, scores)
    if as_json:
        from ...decoding.card import card

        report = {
            "model": loaded.name,
            "options": plain(context.obj),
            "lines": len(rows),
            "scored": len(scored),
            "tokens": sum(row["n_tokens"] for row in scored),
            "metrics": {
                score.name: {
                    "value": score.value,
                    "interval": score.interval and asdict(score.interval),
                }
                for score in scores
            },
            "failed": failed,
            "failed_metrics": failed_metrics,
            "card": asdict(card(loaded.model, loaded.tokenizer)),
        }
        print_json(report)
    else:
        print_scores(scores, f"{len(scored):,} of {len(rows):,} lines")
    for failure in failed[:SHOWN]:
        say(f"[yellow]note:[/] line {failure['line']}: {one_line(failure['error'])}")
    if len(failed) > SHOWN:
        say(f"[yellow]note:[/] {len(failed) - SHOWN} more lines failed")
    for name, reason in failed_metrics.items():
        say(f"[red]{one_line(name)}[/] failed: {one_line(reason)}")
    raise typer.Exit(1 if failed or failed_metrics else 0)


def write(path: Path, rows: list[dict[str, Any]], scores: list[Any]) -> None:
    """Write each row of a file as a line of JSON, with its scores or its error; raises ``CliError``."""
    names = ("line", "prompt", "prediction", "references", "finish_reason")
    records: list[dict[str, Any]] = []
    index = 0
    for row in rows:
        if "error" in row:
            records.append({"line": row["line"], "error": row["error"]})
            continue
        of_line = {score.name: score.of_lines[index] for score in scores}
        records.append({name: row[name] for name in names} | {"scores": of_line})
        index += 1
    try:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    except OSError as error:
        raise CliError(f"cannot write to {str(path)!r}: {error.strerror}") from error


def print_scores(scores: list[Any], counts: str) -> None:
    """A row for each metric, and how many lines were scored."""
    values = table("metric", numbers=("value", "interval"))
    for score in scores:
        between = interval_text(score.interval, ".4g")
        values.add_row(one_line(score.name), f"{score.value:.4g}", between)
    out.print(values)
    out.print(f"[dim]{counts}; 95% bootstrap interval over lines[/]")
