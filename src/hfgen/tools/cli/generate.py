"""``hfgen generate``: complete one prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Column, Table
from rich.text import Text
from typer import Argument, Option

from . import files, measure, options
from .field_options import Fields, generation_config, note_idle
from .loading import Loaded
from .report import Answers, CliError, duration, end_reason, err, note, out, print_json, say, table
from .topics import TOPICS

NEW_TOKENS = 64

SHOWN = 10  # alternatives that one line of the table of log-probabilities has room for

#: What keeps the built-in model from repeating itself, measured in its card (``builtin/README.md``).
BUILTIN_FIELDS: dict[str, Any] = {"dry_multiplier": 0.8, "dry_allowed_length": 3}
BUILTIN_FIELDS |= {"dry_sequence_breakers": [], "frequency_penalty": 0.3}

#: Fields beside which the built-in model gets these: where to stop, and what to show.
NEUTRAL = {name for topic in ("Length", "Stopping", "Output") for name in TOPICS[topic]}


def generate(
    source: options.ModelOptions,
    fields: Fields,
    prompt: str | None = Argument(None, help="The text to complete; - or a pipe: standard input."),
    stream: bool = Option(False, "--stream", help="Print text as it is generated."),
    as_json: bool = Option(False, "--json", help="Print JSON: text, tokens, times, memory."),
    optimize: bool = options.OPTIMIZE,
    compile: bool = Option(False, "--compile", help="With --optimize: compile decoder layers."),
) -> None:
    """Complete a prompt; the prompt itself is not printed.

    Every field of GenerationConfig is an option, as in
    --max-new-tokens 64 --temperature 0.7 --seed 3 --stop '\\n\\n' --eos-token-id '\\[1, 2]' --no-use-cache.
    Without a length it stops after 64 new tokens. The built-in model gets penalties on repetition,
    unless an option says more than where to stop and what to show.
    """
    if source.model == "builtin" and fields.assistant is None and NEUTRAL.issuperset(fields):
        fields.update(BUILTIN_FIELDS)
    if stream and as_json:
        raise CliError("--stream and --json exclude each other: leave one out")
    if compile and not optimize:
        raise CliError("--compile is a part of --optimize: give both")
    if compile and source.exact:
        raise CliError(
            "--exact probes operations one by one, and --compile fuses them: leave one out"
        )
    text = files.read_prompt(prompt)
    with source.loaded(fields.assistant, optimize, compile) as loaded:
        from ...families import max_positions

        model = loaded.model
        config = generation_config(fields, model, NEW_TOKENS)
        config.return_dict_in_generate = True
        note_idle(fields, config, loaded)
        inputs = measure.encode(loaded, [text])
        limit = max_positions(model)
        n_tokens = inputs["input_ids"].shape[1] + (config.max_new_tokens or 0)
        if limit is not None and n_tokens > limit and not model.config.is_encoder_decoder:
            has = f"the model has {limit:,} positions, and prompt and answer may take {n_tokens:,}"
            note(f"{has}: what comes after is worse, or an error")
        n_rows = config.num_return_sequences or model.generation_config.num_return_sequences or 1
        answers = Answers(n_rows)
        if stream:
            result = measure.stream(loaded, inputs, config, show=answers)
        else:
            result = measure.generate(loaded, inputs, config)
        texts = result.output.texts
        if as_json:
            report = {"model": loaded.name, "prompt": text, "options": fields.as_json()}
            if optimize:
                report["optimization"] = str(model.optimization).splitlines()
            report["prompt_tokens"] = inputs["input_ids"][0].tolist()
            print_json(report | as_object(loaded, result, texts))
            return
        if not stream:
            for row, answer in enumerate(texts):
                answers.add(row, answer, has_ended=True)
        print_logprobs(loaded, result)
        for name, values in counts_and_times(result).items():
            say(f"[dim]{name}:[/] " + " · ".join(f"{k} {number(v)}" for k, v in values.items()))
        if err.is_terminal:
            reasons = ", ".join(dict.fromkeys(map(end_reason, result.reasons)))
            memory = measure.peak_memory()
            say(
                f"[dim]{result.n_tokens} tokens · {reasons} · first after {duration(result.first)} · "
                f"{duration(result.per_token)} per token · {result.per_second:,.0f} tokens/s · "
                f"peak {'-' if memory is None else f'{memory / 2**20:,.0f} MiB'}[/]"
            )


def as_object(loaded: Loaded, result: measure.Generated, texts: list[str]) -> dict[str, Any]:
    """What ``--json`` prints of the answers; times in seconds, memory in bytes."""
    rows = zip(texts, result.rows, result.reasons, strict=True)
    sequences: list[dict[str, Any]] = [
        {
            "text": text,
            "tokens": row,
            "finish_reason": why,
            "stopped_by": getattr(why, "stop", None),
        }
        for text, row, why in rows
    ]
    if (logprobs := getattr(result.output, "logprobs", None)) is not None:
        for sequence, row in zip(sequences, logprobs.to_openai(loaded.tokenizer), strict=True):
            sequence["logprobs"] = row
    report: dict[str, Any] = {**sequences[0], "sequences": sequences, **counts_and_times(result)}
    if (logprobs := getattr(result.output, "prompt_logprobs", None)) is not None:
        report["prompt_logprobs"] = logprobs.to_openai(loaded.tokenizer)[0]
    report["timings"] = {
        "total": result.seconds,
        "time_to_first_token": result.first,
        "time_per_output_token": result.per_token,
        "tokens_per_second": result.per_second,
    }
    return report | {"peak_memory": measure.peak_memory()}


def counts_and_times(result: measure.Generated) -> dict[str, dict[str, Any]]:
    """What ``--output-speculation`` and ``--output-metrics`` ask for."""
    named = {}
    for name in ("speculation", "metrics"):
        if (counts := getattr(result.output, name, None)) is not None:
            rates = ("acceptance_rate", "tokens_per_forward") if name == "speculation" else ()
            named[name] = asdict(counts) | {rate: getattr(counts, rate) for rate in rates}
    return named


def number(value: float | None) -> str:
    """A number with four digits at most after the point; a dash for none."""
    return "-" if value is None else f"{value:,.4f}".rstrip("0").rstrip(".")


def print_logprobs(loaded: Loaded, result: measure.Generated) -> None:
    """Tables of log-probabilities, if they were asked for: of the prompt, and of each answer."""
    from ...state.text import Pieces

    pieces = Pieces(loaded.tokenizer)
    for field, kind in ("prompt_logprobs", "prompt"), ("logprobs", "answer"):
        logprobs: Any = getattr(result.output, field, None) or []
        n = min(len(logprobs), 1 if kind == "prompt" else len(logprobs))
        for row in range(n):
            out.print(f"\n[bold]{kind} {row + 1} of {n}[/]" if n > 1 else f"\n[bold]{kind}[/]")
            out.print(logprobs_table(logprobs[row], pieces, logprobs.settings.is_logits))


def probability(logprob: float, is_logit: bool) -> str:
    """A probability in per cent, of its logarithm; a logit as it is."""
    if is_logit:
        return f"{logprob:.3f}"
    percent = 100 * math.exp(logprob)
    return f"{percent:.1f}%" if percent >= 0.05 or percent == 0 else "<0.1%"


def logprobs_table(tokens: Sequence[Any], pieces: Any, is_logit: bool) -> Table:
    """A row for each ``TokenLogprob``: token, probability, rank, what else was likely. ``pieces``: of bytes."""

    def spelled(token_id: int) -> str:
        return repr(pieces[token_id].decode("utf-8", "replace"))[1:-1].replace(" ", "␣")

    places = Column("", justify="right", style="dim")
    columns = ("logit" if is_logit else "probability", "rank")
    rows = table(places, Column("token", no_wrap=True), numbers=columns)
    has_others = any(token.top or token.asked for token in tokens if token is not None)
    if has_others:
        rows.add_column("likeliest, and asked for", style="dim")
    for place, token in enumerate(tokens, start=1):
        if token is None:
            continue
        others = list(dict.fromkeys(token.top[:SHOWN] + token.asked))
        likely = (f"{spelled(i)}\u00a0{probability(value, is_logit)}" for i, value in others)
        cells = [spelled(token.token_id), probability(token.logprob, is_logit), f"{token.rank:,}"]
        row = [str(place), *cells, *(["  ".join(likely)] if has_others else [])]
        rows.add_row(*(Text(cell) for cell in row))
    return rows
