"""``hfgen eval``: perplexity of texts, and metrics of completions."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from . import options
from .report import CliError, err, interval_text, one_line, out, print_json, say, table

UNITS = ("windows", "documents")

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
    if window is not None and stride is not None and not 1 <= stride < window:
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
                        read(file),
                        window=window,
                        stride=stride,
                        batch_size=batch_size,
                        on_tokens=progress.add_tokens,
                    )
                    scores.append(found)
                except (OSError, ValueError) as error:  # the other files go on
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


def read(file: Path) -> str:
    """The text of a file as it is, its line ends too, without a byte order mark. Raises ``OSError``.

    Raises ``ValueError`` for what is not UTF-8.
    """
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(file)!r} is not UTF-8: {error}") from error


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
