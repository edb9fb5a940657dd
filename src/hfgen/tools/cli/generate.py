"""Commands that complete prompts: ``hfgen generate``, ``hfgen inspect`` and ``hfgen chat``."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from rich.text import Text
from typer import Argument, Option

import hfgen

from . import measure, options
from .field_options import Fields, FieldsWithoutResults
from .loading import Loaded, check_output, read_prompt
from .report import (
    Answers,
    CliError,
    duration,
    end_reason,
    err,
    note,
    one_line,
    out,
    print_json,
    refused,
    say,
    table,
)
from .topics import TOPICS

#: New tokens, unless told otherwise: of a completion, on a page, of an answer in a chat.
NEW_TOKENS, TRACED_TOKENS, ANSWER_TOKENS = 64, 48, 256

PAGES = (".html", ".htm", ".json")
NO_MODEL = (
    "a chat needs a model that was trained for it: give --model, a folder or a hub id such as "
    "HuggingFaceTB/SmolLM2-360M-Instruct, which is downloaded. The built-in model only completes Python: "
    "hfgen generate 'def '"
)
HELP = "[dim]/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer[/]"

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
    text = read_prompt(prompt)
    with source.configured(fields, NEW_TOKENS, optimize, compile) as (loaded, config):
        from ...families import max_positions

        model, config.return_dict_in_generate = loaded.model, True
        inputs = measure.encode(loaded, [text])
        limit = max_positions(model)
        n_tokens = inputs["input_ids"].shape[1] + (config.max_new_tokens or 0)
        if limit is not None and n_tokens > limit and not model.config.is_encoder_decoder:
            has = f"the model has {limit:,} positions, and prompt and answer may take {n_tokens:,}"
            note(f"{has}: what comes after is worse, or an error")
        n_rows = config.num_return_sequences or model.generation_config.num_return_sequences or 1
        answers = Answers(n_rows)
        result = measure.generate(loaded, inputs, config, show=answers if stream else None)
        if as_json:
            report = {"model": loaded.name, "prompt": text, "options": fields.as_json()}
            if optimize:
                report["optimization"] = str(model.optimization).splitlines()
            report["prompt_tokens"] = inputs["input_ids"][0].tolist()
            print_json(report | as_object(loaded, result))
            return
        if not stream:
            for row, answer in enumerate(result.output.texts):
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


def as_object(loaded: Loaded, result: measure.Generated) -> dict[str, Any]:
    """What ``--json`` prints of the answers; times in seconds, memory in bytes."""
    sequences: list[dict[str, Any]] = []
    for text, row, reason in zip(result.output.texts, result.rows, result.reasons, strict=True):
        sequence = {"text": text, "tokens": row, "finish_reason": reason}
        sequences.append(sequence | {"stopped_by": getattr(reason, "stop", None)})
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
    for name, kind in ("prompt_logprobs", "prompt"), ("logprobs", "answer"):
        logprobs: Any = getattr(result.output, name, None) or []
        n = min(len(logprobs), 1 if kind == "prompt" else len(logprobs))
        for row in range(n):
            out.print(f"\n[bold]{kind} {row + 1} of {n}[/]" if n > 1 else f"\n[bold]{kind}[/]")
            is_logits = logprobs.settings.mode.endswith("logits")
            out.print(logprobs_table(logprobs[row], pieces, is_logits))


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


def inspect(
    source: options.ModelOptions,
    fields: FieldsWithoutResults,
    output: Path = Option(..., "--output", "-o", metavar="PAGE.html", help="Page, or .json: data."),
    prompts: list[str] | None = Argument(
        None,
        metavar="PROMPT",
        help="Texts to complete, one tab each; - or a pipe reads standard input.",
    ),
    top: int = Option(10, min=1, help="Number of likely tokens to keep at each position."),
) -> None:
    """Complete prompts, and write a page that shows what happened at each token.

    It shows probabilities, alternatives with their scores after each processor, entropy, beams, drafts and times,
    and is one file that needs no network. Every field of GenerationConfig is an option, as in
    --temperature 0.8 --top-p 0.9 --num-beams 4.
    """
    check_output(output, suffixes=PAGES)
    texts = [read_prompt(prompt) for prompt in prompts or (None,)]
    with source.configured(fields, TRACED_TOKENS) as (loaded, config):
        kwargs = {**loaded.mode_kwargs(), "generation_config": config}
        with measure.named_errors():
            trace = hfgen.trace(loaded.model, texts, top=top, **kwargs)
    with refused(OSError, before=f"-o: cannot write {str(output)!r}: "):
        trace.save(output)
    n_tokens = sum(len(sequence.tokens) for sequence in trace.sequences)
    answers = "1 answer" if len(trace.sequences) == 1 else f"{len(trace.sequences)} answers"
    say(
        f"{n_tokens} tokens of {answers} · {output.stat().st_size / 1000:,.0f} kB in {one_line(str(output))}"
    )


def inputs_of(loaded: Loaded, messages: list[dict[str, str]]) -> dict[str, Any]:
    """Model inputs ``(1, length)`` for the answer to ``messages``; plain lines without a chat template."""
    tokenizer = loaded.tokenizer
    if not tokenizer.chat_template:
        text = "".join(message["content"] + "\n" for message in messages)
        return measure.encode(loaded, [text])
    settings = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    # A template raises errors of its own: no system message, roles out of turn.
    with refused(Exception, before="the chat template fails: "):
        encoded = tokenizer.apply_chat_template(messages, **settings)
    return {n: encoded[n].to(loaded.model.device) for n in ("input_ids", "attention_mask")}


def chat(
    source: options.ChatModelOptions,
    fields: FieldsWithoutResults,
    system: str | None = Option(None, help="The system message."),
) -> None:
    """Talk with a model, turn by turn, in its chat template where its tokenizer has one.

    It needs --model: the built-in model completes Python code, and cannot talk.

    Ctrl-C stops the answer and not the program; Ctrl-D or /exit leaves; /reset forgets; /help.
    An answer has at most 256 new tokens unless told otherwise.
    """
    if (fields.get("num_return_sequences") or 1) > 1:
        raise CliError("a chat goes on from one answer: leave --num-return-sequences out")
    if not source.model:
        raise CliError(NO_MODEL)
    with source.configured(fields, ANSWER_TOKENS) as (loaded, config):
        loaded.model.prefix_cache = hfgen.PrefixCache()  # a turn begins with those before it
        opening = [{"role": "system", "content": system}] if system else []
        messages = list(opening)
        if sys.stdin.isatty():
            say(HELP)
        if not loaded.tokenizer.chat_template:
            reason = "this tokenizer has no chat template"
            note(f"{reason}, so the model continues the conversation as plain text")
        while (line := read_line()) is not None:
            if line == "/exit":
                break
            if line == "/reset":
                messages = list(opening)
                say("[dim]forgotten[/]")
            elif line == "/help":
                say(HELP)
            elif line.startswith("/"):
                say(f"no command {one_line(line.split()[0])}; {HELP}")
            elif line:
                turn(loaded, messages, line, config)


def read_line() -> str | None:
    """The next line of the user without spaces around it; None at the end of the input."""
    if not sys.stdin.isatty():
        return next((line.strip() for line in sys.stdin), None)
    with suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input()
    while True:
        try:
            return input("> ").strip()
        except EOFError:
            return print()
        except KeyboardInterrupt:
            print()
            say(HELP)


def turn(loaded: Loaded, messages: list[dict[str, str]], line: str, config: Any) -> None:
    """Stream the answer to ``line`` and append both; Ctrl-C keeps what was said so far, an error undoes the turn."""
    messages.append({"role": "user", "content": line})
    answers = Answers()
    try:
        result = measure.generate(loaded, inputs_of(loaded, messages), config, show=answers)
        if err.is_terminal:
            speed = f"{result.n_tokens} tokens · {result.per_second:,.0f} tokens/s"
            say(f"[dim]{speed} · {end_reason(result.reasons[0])}[/]")
    except KeyboardInterrupt:
        answers.end()
        say("[dim]stopped[/]")
    except CliError as error:
        messages.pop()
        say(f"[red]hfgen:[/] {one_line(str(error))} (/reset starts again)")
        return
    messages.append({"role": "assistant", "content": answers.texts[0]})
