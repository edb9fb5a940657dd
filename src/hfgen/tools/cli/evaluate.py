"""``hfgen eval``: perplexity of texts, and metrics of completions."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import typer
from typer import Argument, Option

import hfgen

from . import options
from .field_options import FieldsWithoutAssistant
from .loading import check_output, read_text
from .report import CliError, err, interval_text, note, one_line, out, print_json, refused, table

NEW_TOKENS = 64  # of a completion
SHOWN = 5  # failures that are shown one by one, without ``--json``

SEED = Option(0, help="Seed of the bootstrap resamples.", **options.SEED)


def perplexity(
    source: options.ModelOptions,
    files: list[Path] = Argument(metavar="FILE…", help="UTF-8 texts.", **options.FILE),
    window: int | None = Option(None, min=2, help="Tokens per window; default: up to 2048."),
    stride: int | None = Option(None, min=1, help="Tokens between windows; default: half of one."),
    batch_size: int = Option(4, min=1, help="Windows forwarded at once."),
    resample: Literal["windows", "documents"] = Option(
        "windows", metavar="UNITS", help="Of the total's interval: windows or documents."
    ),
    bootstrap_seed: int = SEED,
    as_json: bool = options.JSON,
) -> None:
    """Perplexity and bits per byte of texts, each file and all together.

    The exit code is 0 if all files were scored, 1 if some could not be, 2 for wrong input.
    """
    files = list(dict.fromkeys(files))  # a text that is given twice counts once
    if window is not None and stride is not None and stride >= window:
        raise CliError(f"--stride has to be below --window {window}, but is {stride}")
    with source.loaded() as loaded:
        from ...engine.many import JobProgress
        from ..evaluate.perplexity import Perplexity, score, sizes

        with refused(ValueError):
            window, stride = sizes(loaded.model, window, stride)
        progress, scores, failed = JobProgress(len(files)), [], []
        settings: Any = {"window": window, "stride": stride, "batch_size": batch_size}
        with progress if err.is_terminal else nullcontext():
            for file in files:
                try:
                    texts = loaded.model, loaded.tokenizer, str(file), read_text(file)
                    scores.append(score(*texts, **settings, on_tokens=progress.add_tokens))
                except ValueError as error:  # the other files go on
                    failed.append({"file": str(file), "error": str(error)})
                progress.add_done()
        for failure in failed:
            note(failure["error"])
        if not scores:
            raise CliError(f"none of {len(files)} files could be scored")
        rows = {each.name: Perplexity.of([each], seed=bootstrap_seed) for each in scores}
        total = Perplexity.of(scores, by_document=resample == "documents", seed=bootstrap_seed)
    if as_json:
        per_file = [{"file": name, **asdict(row)} for name, row in rows.items()]
        report = {"model": loaded.name, "window": window, "stride": stride, "resample": resample}
        print_json({**report, "files": per_file, "total": asdict(total), "failed": failed})
    else:
        grid = table("file", numbers=("tokens", "bytes", "perplexity", "interval", "bits/byte"))
        for name, row in [*rows.items(), *([("total", total)] if len(rows) > 1 else [])]:
            counts = f"{row.n_tokens:,}", f"{row.n_bytes:,}", f"{row.perplexity:.3f}"
            values = interval_text(row.interval, ".3f"), f"{row.bits_per_byte:.4f}"
            grid.add_row(one_line(name), *counts, *values, style="bold" if row is total else "")
        out.print(grid)
        out.print(f"[dim]windows of {window} tokens, each {stride}; 95% bootstrap interval[/]")
    raise typer.Exit(1 if failed else 0)


def generate(
    source: options.ModelOptions,
    fields: FieldsWithoutAssistant,
    file: Path = Argument(
        metavar="FILE.jsonl", help='Lines of {"prompt": …, "reference": …}.', **options.FILE
    ),
    metric: list[str] | None = Option(
        None,
        help="exact_match, bleu, chrf, rouge or module:function; repeatable. Default: all installed.",
    ),
    output: Path | None = Option(
        None, "--output", "-o", metavar="OUT.jsonl", help="Predictions and their scores."
    ),
    max_rows: int = options.ROWS,
    bootstrap_seed: int = SEED,
    as_json: bool = options.JSON,
) -> None:
    """Complete the prompts of a file, and compare with references: one text, or a list of texts.

    Fields of GenerationConfig are options, as --temperature 0.7; those of a line are in its "options".
    The exit code is 0 if all lines were scored, 1 if some could not be, 2 for wrong input.
    """
    if output is not None:
        check_output(output, file)
    if (fields.get("num_return_sequences") or 1) > 1:
        raise CliError("one completion of each line is scored: leave --num-return-sequences out")
    from ..evaluate import metrics

    names = metrics.installed() if metric is None else dict.fromkeys(metric)
    with refused(ImportError, ValueError, before="--metric: "):
        chosen = [each for name in names for each in metrics.metrics_of(name)]
    rows: list[dict[str, Any]] = []
    for number, content in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            rows.append({"line": number, **parse_line(content.removeprefix(b"\xef\xbb\xbf"))})
        except ValueError as error:
            rows.append({"line": number, "error": str(error)})
    usable = [row for row in rows if "error" not in row]
    if not usable:
        why = f": line {rows[0]['line']}: {rows[0]['error']}" if rows else ""
        raise CliError(f"{str(file)!r} has no line that can be used{why}")
    with source.configured(fields, NEW_TOKENS) as (loaded, config):
        settings: Any = {"max_rows": max_rows, "progress": err.is_terminal}
        prompts = [(row["prompt"], row["options"]) for row in usable]
        call = loaded.model, prompts, loaded.tokenizer
        outputs = hfgen.generate_many(*call, generation_config=config, **settings)
        for row, answer in zip(usable, outputs, strict=True):
            if answer.error is not None:
                row["error"] = str(answer.error) or type(answer.error).__name__
                continue
            row |= {"prediction": answer.text or "", "finish_reason": str(answer.finish_reason)}
            row["n_tokens"] = len(answer.token_ids)
        scored = [row for row in rows if "error" not in row]
        failed = [{"line": row["line"], "error": row["error"]} for row in rows if "error" in row]
        if not scored:
            raise CliError(f"no line was generated: line {failed[0]['line']}: {failed[0]['error']}")
        texts = [row["prediction"] for row in scored], [row["references"] for row in scored]
        scores: dict[str, metrics.Score] = {}
        failed_metrics = {}
        for each in chosen:
            try:
                [scores[each.name]] = metrics.score([each], *texts, bootstrap_seed)
            except Exception as error:  # a user's function may fail; the other metrics go on
                failed_metrics[each.name] = str(error) or type(error).__name__
    if output is not None:
        write(output, rows, scores)
    if as_json:
        report = {
            "model": loaded.name,
            "options": fields.as_json(),
            "lines": len(rows),
            "scored": len(scored),
            "tokens": sum(row["n_tokens"] for row in scored),
            "metrics": {
                name: {n: v for n, v in asdict(score).items() if n in ("value", "interval")}
                for name, score in scores.items()
            },
            "failed": failed,
            "failed_metrics": failed_metrics,
            "card": asdict(hfgen.card(loaded.model, loaded.tokenizer)),
        }
        print_json(report)
    else:
        grid = table("metric", numbers=("value", "interval"))
        for name, score in scores.items():
            interval = interval_text(score.interval, ".4g")
            grid.add_row(one_line(name), f"{score.value:.4g}", interval)
        out.print(grid)
        counts = f"{len(scored):,} of {len(rows):,} lines"
        out.print(f"[dim]{counts}; 95% bootstrap interval over lines[/]")
    notes = [f"line {failure['line']}: {failure['error']}" for failure in failed]
    if len(notes) > SHOWN:
        notes[SHOWN:] = [f"{len(notes) - SHOWN} more lines failed"]
    for line in [*notes, *(f"{name} failed: {why}" for name, why in failed_metrics.items())]:
        note(line)
    raise typer.Exit(1 if failed or failed_metrics else 0)


def write(path: Path, rows: list[dict[str, Any]], scores: dict[str, Any]) -> None:
    """Write each row of a file as a line of JSON, with its scores or its error; raises ``CliError``."""
    names = ("line", "prompt", "prediction", "references", "finish_reason")
    values = {name: iter(score.of_lines) for name, score in scores.items()}
    cannot = refused(OSError, before=f"cannot write to {str(path)!r}: ")
    with cannot, path.open("w", encoding="utf-8") as file:
        for row in rows:
            record = {"line": row["line"], "error": row.get("error")}
            if "error" not in row:
                of_line = {name: next(value) for name, value in values.items()}
                record = {name: row[name] for name in names} | {"scores": of_line}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def parse_line(content: bytes) -> dict[str, Any]:
    """A line as ``{"prompt": …, "reference": …}``. Raises ``ValueError`` that says what is wrong."""
    if not content.strip():
        raise ValueError("the line is empty")
    try:
        value = json.loads(content)
        json.dumps(value, ensure_ascii=False).encode()  # fails for halves of surrogate pairs
    except (ValueError, RecursionError) as error:  # also what is not UTF-8
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"it has to be a JSON object, but is {value!r:.80}")
    prompt, references = value.get("prompt"), value.get("reference")
    if not (isinstance(prompt, str) or _is_list_of(prompt, dict)) or not prompt:
        raise ValueError(f"`prompt` has to be text or a list of messages, but is {prompt!r}")
    references = [references] if isinstance(references, str) else references
    if not _is_list_of(references, str) or not references:
        raise ValueError(f"`reference` has to be text or a list of texts, but is {references!r}")
    options = value.get("options", {})
    if not isinstance(options, dict):
        raise ValueError(f"`options` has to be a JSON object, but is {options!r}")
    if (n := options.get("num_return_sequences", 1)) != 1:
        why = "one completion is scored"
        raise ValueError(f"{why}: `num_return_sequences` has to be 1, but is {n!r}")
    return {"prompt": prompt, "references": references, "options": options}


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)
