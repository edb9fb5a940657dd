"""``hfgen generate``: complete one prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

from . import files, measure, options
from .field_options import generation_config, note_idle, plain
from .loading import Loaded
from .report import (
    Answers,
    CliError,
    duration,
    err,
    mebibytes,
    out,
    print_json,
    say,
    table,
    why,
)
from .topics import TOPICS

NEW_TOKENS = 64

#: Alternatives that one line of the table of log-probabilities has room for.
SHOWN = 10

#: What keeps the built-in model from repeating itself, measured in its card (``builtin/README.md``).
BUILTIN_FIELDS: dict[str, Any] = {
    "frequency_penalty": 0.3,
    "dry_multiplier": 0.8,
    "dry_allowed_length": 3,
    "dry_sequence_breakers": [],
}


@options.with_shared_options
def generate(
    context: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(help="The text to complete; - or a pipe reads standard input.")
    ] = None,
    assistant: options.AssistantOption = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print text as it is generated.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: text, tokens, times, memory.")
    ] = False,
    optimize: options.OptimizeOption = False,
    compile: Annotated[
        bool, typer.Option("--compile", help="With --optimize: also compile decoder layers.")
    ] = False,
    *,
    source: options.ModelOptions,
) -> None:
    """Complete a prompt; the prompt itself is not printed.

    Every field of GenerationConfig is an option, as in
    --max-new-tokens 64 --temperature 0.7 --seed 3 --stop '\\n\\n' --eos-token-id '\\[1, 2]' --no-use-cache.
    Without a length it stops after 64 new tokens. The built-in model gets penalties on repetition,
    unless an option says more than where to stop and what to show.
    """
    fields: dict[str, Any] = context.obj
    neutral = {name for topic in ("Length", "Stopping", "Output") for name in TOPICS[topic]}
    if source.model == "builtin" and assistant is None and neutral.issuperset(fields):
        fields = BUILTIN_FIELDS | fields
    if stream and as_json:
        raise CliError("--stream and --json exclude each other: leave one out")
    if compile and not optimize:
        raise CliError("--compile is a part of --optimize: give both")
    if compile and source.exact:
        raise CliError(
            "--exact probes operations one by one, and --compile fuses them: leave one out"
        )
    text = files.read_prompt(prompt)
    with source.loaded(assistant, optimize, compile) as loaded:
        config = generation_config(fields, loaded.model, NEW_TOKENS)
        config.return_dict_in_generate = True
        note_idle(fields, config, loaded)
        inputs = measure.encode(loaded, [text])
        limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
        n_tokens = inputs["input_ids"].shape[1] + (config.max_new_tokens or 0)
        if (
            isinstance(limit, int)
            and n_tokens > limit
            and not loaded.model.config.is_encoder_decoder
        ):
            say(
                f"[yellow]note:[/] the model has {limit:,} positions, and prompt and answer may take "
                f"{n_tokens:,}: what comes after is worse, or an error"
            )
        if stream:
            own = loaded.model.generation_config
            answers = Answers(config.num_return_sequences or own.num_return_sequences or 1)
            result = measure.stream(loaded, inputs, config, show=answers)
        else:
            result = measure.generate(loaded, inputs, config)
        texts = texts_of(loaded, result)
        if as_json:
            report = {"model": loaded.name, "prompt": text, "options": plain(fields)}
            if optimize:
                report["optimization"] = str(loaded.model.optimization).splitlines()
            report["prompt_tokens"] = inputs["input_ids"][0].tolist()
            print_json(report | as_object(loaded, result, texts))
            return
        if not stream:
            answers = Answers(len(texts))
            for row, text in enumerate(texts):
                answers.add(row, text, has_ended=True)
        print_logprobs(loaded, result)
        for name, found in asked_of(result).items():
            say(f"[dim]{name}:[/] " + " · ".join(f"{k} {number(v)}" for k, v in found.items()))
        if err.is_terminal:
            say(f"[dim]{summary(result)}[/]")


def texts_of(loaded: Loaded, result: measure.Generated) -> list[str]:
    """The text of each row, without the stop string that ended it."""
    if (texts := getattr(result.output, "texts", None)) is not None:
        return texts
    return [loaded.tokenizer.decode(row, skip_special_tokens=True) for row in result.rows]


def as_object(loaded: Loaded, result: measure.Generated, texts: list[str]) -> dict[str, Any]:
    """What ``--json`` prints of the answers; times in seconds, memory in bytes."""
    pairs = zip(texts, result.rows, strict=True)
    sequences: list[dict[str, Any]] = [{"text": text, "tokens": row} for text, row in pairs]
    for sequence, reason in zip(sequences, result.reasons, strict=False):
        sequence["finish_reason"] = reason
        sequence["stopped_by"] = getattr(reason, "stop", None)
    if (found := getattr(result.output, "logprobs", None)) is not None:
        for sequence, logprobs in zip(sequences, found.to_openai(loaded.tokenizer), strict=True):
            sequence["logprobs"] = logprobs
    report = {**sequences[0], "sequences": sequences}
    if (found := getattr(result.output, "prompt_logprobs", None)) is not None:
        report["prompt_logprobs"] = found.to_openai(loaded.tokenizer)[0]
    report |= asked_of(result)
    timings = {
        "total": result.seconds,
        "time_to_first_token": result.first,
        "time_per_output_token": result.per_token,
        "tokens_per_second": result.per_second,
    }
    return report | {"timings": timings, "peak_memory": measure.peak_memory()}


def asked_of(result: measure.Generated) -> dict[str, dict[str, Any]]:
    """The counts and times that ``--output-speculation`` and ``--output-metrics`` ask for."""
    found: dict[str, dict[str, Any]] = {}
    if (speculation := getattr(result.output, "speculation", None)) is not None:
        rates = ("acceptance_rate", "tokens_per_forward")
        found["speculation"] = asdict(speculation) | {n: getattr(speculation, n) for n in rates}
    if (metrics := getattr(result.output, "metrics", None)) is not None:
        found["metrics"] = asdict(metrics)
    return found


def number(value: float | None) -> str:
    """A number with four digits at most after the point; a dash for none."""
    return "-" if value is None else f"{value:,.4f}".rstrip("0").rstrip(".")


def print_logprobs(loaded: Loaded, result: measure.Generated) -> None:
    """Tables of log-probabilities, if they were asked for: of the prompt, and of each answer."""
    spelling = Spelling(loaded.tokenizer)
    tables: list[tuple[str, Any, int]] = []
    if (found := getattr(result.output, "prompt_logprobs", None)) is not None:
        tables.append(("prompt", found, 0))
    if (found := getattr(result.output, "logprobs", None)) is not None:
        n = len(found)
        names = (f"answer {row} of {n}" if n > 1 else "answer" for row in range(1, n + 1))
        tables += [(name, found, row) for row, name in enumerate(names)]
    for name, logprobs, row in tables:
        out.print(f"\n[bold]{name}[/]")
        out.print(logprobs_table(logprobs[row], spelling, logprobs.settings.is_logits))


def summary(result: measure.Generated) -> str:
    """One line: how many tokens, why they ended, how fast they came, and the memory."""
    reasons = ", ".join(dict.fromkeys(map(why, result.reasons)))
    return (
        f"{result.n_tokens} tokens · {reasons} · first after {duration(result.first)} · "
        f"{duration(result.per_token)} per token · {result.per_second:,.0f} tokens/s · "
        f"peak {mebibytes(measure.peak_memory())}"
    )


class Spelling:
    """Tokens as one line of text: white space and control codes are escaped."""

    def __init__(self, tokenizer: Any) -> None:
        from ...state.text import Pieces

        self.pieces = Pieces(tokenizer)

    def __getitem__(self, token_id: int) -> str:
        text = repr(self.pieces[token_id].decode("utf-8", "replace"))[1:-1]
        return text.replace(" ", "␣")


def probability(logprob: float, is_logit: bool) -> str:
    """A probability in per cent, of its logarithm; a logit as it is."""
    if is_logit:
        return f"{logprob:.3f}"
    percent = 100 * math.exp(logprob)
    return f"{percent:.1f}%" if percent >= 0.05 or percent == 0 else "<0.1%"


def logprobs_table(tokens: Sequence[Any], spelling: Spelling, is_logit: bool = False) -> Table:
    """A row for each ``TokenLogprob``: the token, its probability and rank, and what else was likely."""
    places = Column("", justify="right", style="dim")
    columns = ("logit" if is_logit else "probability", "rank")
    rows = table(places, Column("token", no_wrap=True), numbers=columns)
    has_others = any(token.top or token.asked for token in tokens if token is not None)
    if has_others:
        rows.add_column("likeliest, and asked for", style="dim")
    for number, token in enumerate(tokens, start=1):
        if token is None:
            continue
        others = list(dict.fromkeys(token.top[:SHOWN] + token.asked))
        said = (f"{spelling[i]}\u00a0{probability(logprob, is_logit)}" for i, logprob in others)
        cells = [spelling[token.token_id], probability(token.logprob, is_logit), f"{token.rank:,}"]
        row = [str(number), *cells, *(["  ".join(said)] if has_others else [])]
        rows.add_row(*(Text(cell) for cell in row))
    return rows
