"""Every field of ``GenerationConfig`` as a command line option."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.panel import Panel
from rich.table import Table
from typer.core import TyperCommand

from hfgen.cli.report import CliError, out


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FLAGS = _names("""
    disable_compile do_sample early_stopping is_assistant low_memory output_attentions
    output_hidden_states output_logits output_scores remove_invalid_values renormalize_logits
    return_dict_in_generate token_healing use_cache use_mtp
    """)
INTEGERS = _names("""
    assistant_early_exit assistant_lookbehind bos_token_id encoder_no_repeat_ngram_size
    forced_bos_token_id max_cache_len max_length max_matching_ngram_size max_new_tokens min_length
    min_new_tokens no_repeat_ngram_size num_assistant_tokens num_beam_groups num_beams
    num_return_sequences pad_token_id prefill_chunk_size prompt_lookup_num_tokens target_lookbehind
    top_k
    """)
NUMBERS = _names("""
    assistant_confidence_threshold assistant_ensemble_weight diversity_penalty
    encoder_repetition_penalty epsilon_cutoff eta_cutoff guidance_scale length_penalty max_time
    min_p penalty_alpha repetition_penalty temperature top_h top_p typical_p
    """)
NOT_FROM_TEXT = frozenset({"constraints", "continuous_batching_config", "transformers_version"})
NEEDS_SAMPLING = _names("epsilon_cutoff eta_cutoff min_p temperature top_h top_k top_p typical_p")
NEEDS_BEAMS = frozenset({"early_stopping", "length_penalty"})
WORDS = {"true": True, "false": False, "none": None, "null": None}
FIELDS = "hfgen.fields"  # where the parsed fields travel, in the context's `meta`

ModelOption = Annotated[
    str,
    typer.Option(
        "--model", metavar="ID_OR_PATH", help="A folder, a hub id, builtin or builtin-draft."
    ),
]
AssistantOption = Annotated[
    str | None,
    typer.Option(
        "--assistant",
        metavar="ID_OR_PATH",
        help="Draft tokens with this smaller model (assisted decoding).",
    ),
]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16 weights.")
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="cpu, cuda, cuda:1, mps, or auto to spread over all; the GPU if there is one.",
    ),
]
TrustOption = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run the Python code that a model brings with it."),
]
DebugOption = Annotated[
    bool, typer.Option("--debug", help="Show warnings, and the traceback of an error.")
]


class GenerationCommand(TyperCommand):
    """A command that takes the fields of ``GenerationConfig`` beside its own options.

    The parsed fields are in ``context.meta[FIELDS]``.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {"--help"}.union(*(parameter.opts for parameter in self.params))
        rest, ctx.meta[FIELDS] = split_fields(args, own)
        return super().parse_args(ctx, rest)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        out.print(fields_panel())


def split_fields(args: list[str], own: Iterable[str]) -> tuple[list[str], dict[str, Any]]:
    """Separate generation fields from a command's own arguments.

    ``--top-k 5``, ``--top_k=5``, ``--do-sample``, ``--no-use-cache`` and ``--use-cache false`` are
    understood; after ``--`` everything is left alone. ``own`` are the command's own option names.

    Returns the arguments that are left and the fields with their values.
    Raises ``CliError`` for an unknown name, a missing value or a value of the wrong kind.
    """
    own = set(own)
    rest: list[str] = []
    fields: dict[str, Any] = {}
    pending = list(args)
    while pending:
        argument = pending.pop(0)
        option, equals, text = argument.partition("=")
        if argument == "--":
            rest += [argument, *pending]
            break
        if not option.startswith("--") or option in own:
            rest.append(argument)
            continue
        name, negated = field_name(option, own)
        if negated:
            if equals:
                raise CliError(f"{option} takes no value, but {text!r} was given")
            fields[name] = False
        elif equals:
            fields[name] = parse_value(name, text)
        elif name in FLAGS and not (pending and is_switch(name, pending[0])):
            fields[name] = True
        elif pending:
            fields[name] = parse_value(name, pending.pop(0))
        else:
            raise CliError(f"{option} needs a value: {expected(name)}")
    return rest, fields


def field_name(option: str, own: Iterable[str] = ()) -> tuple[str, bool]:
    """The field that ``option`` names, and whether it is the ``--no-…`` form of a flag."""
    name = option.removeprefix("--").replace("-", "_")
    known = known_fields()
    if name in known:
        return name, False
    if name.removeprefix("no_") in FLAGS.intersection(known):
        return name.removeprefix("no_"), True
    names = [option_name(field) for field in known] + list(own)
    nearest = difflib.get_close_matches(option_name(name), names, n=1, cutoff=0.0)
    raise CliError(f"no option {option}; the nearest is {nearest[0]}, and --help lists all of them")


def known_fields() -> list[str]:
    """Names of the fields that can be given as text, sorted."""
    import hfgen

    fields = hfgen.GenerationConfig().to_dict()
    return sorted(name for name in fields if not name.startswith("_") and name not in NOT_FROM_TEXT)


def option_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def is_switch(name: str, text: str) -> bool:
    """Whether ``text``, found after the flag ``name``, is its value and not the next argument."""
    return text.lower() in WORDS or (name == "early_stopping" and text == "never")


def expected(name: str) -> str:
    """What the field ``name`` takes, in words."""
    if name == "early_stopping":
        return "true, false or never"
    if name in FLAGS:
        return "true or false"
    if name in INTEGERS:
        return "an integer"
    if name in NUMBERS:
        return "a number"
    return "text or JSON"


def parse_value(name: str, text: str) -> Any:
    """The value of ``text`` for the field ``name``: JSON where it is JSON, otherwise the text.

    Raises ``CliError`` where the field takes another kind of value.
    """
    try:
        value = WORDS[text.lower()] if text.lower() in WORDS else json.loads(text)
    except json.JSONDecodeError:
        value = text
    if name in NUMBERS and isinstance(value, str):
        with suppress(ValueError):
            value = float(text)  # '.5' is no JSON
    if value is None:
        return None
    if name in FLAGS:
        fits = isinstance(value, bool) or is_switch(name, text)
    elif name in INTEGERS:
        fits = isinstance(value, int) and not isinstance(value, bool)
    elif name in NUMBERS:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        fits = True
    if not fits:
        raise CliError(f"{option_name(name)} takes {expected(name)}, but {text!r} was given")
    if name == "stop_strings" and not isinstance(value, list):
        return value if isinstance(value, str) else text  # '--stop-strings 1' stops at the text "1"
    return value


def fields_panel() -> Panel:
    """The help on the fields, grouped by what they take."""
    groups: dict[str, list[str]] = {}
    for name in known_fields():
        kind = "true or false" if name in FLAGS else expected(name)
        groups.setdefault(kind, []).append(option_name(name))
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(style="cyan")
    for kind in ("true or false", "an integer", "a number", "text or JSON"):
        table.add_row(kind, " ".join(groups.get(kind, [])))
    return Panel(
        table,
        title="Generation options: every field of GenerationConfig",
        title_align="left",
        border_style="dim",
    )


def generation_config(
    fields: dict[str, Any], model: Any, default_new_tokens: int, **overrides: Any
) -> Any:
    """The ``hfgen.GenerationConfig`` of ``fields``; what is not in it is the model's own.

    Where neither they nor the model say how long the output may be, it is
    ``default_new_tokens``. ``overrides`` win over ``fields``.
    Raises ``CliError`` for a value that the config refuses.
    """
    import transformers

    import hfgen

    values = {**fields, **overrides}
    limits = ("max_new_tokens", "max_length")
    if all(values.get(n) is None and getattr(model.generation_config, n) is None for n in limits):
        values["max_new_tokens"] = default_new_tokens
    try:
        if isinstance(values.get("compile_config"), dict):
            values["compile_config"] = transformers.CompileConfig(**values["compile_config"])
        return hfgen.GenerationConfig(**values)
    except (AttributeError, TypeError, ValueError) as error:
        raise CliError(str(error)) from error


def without_effect(fields: dict[str, Any], config: Any, model: Any) -> list[str]:
    """One sentence per given field that does nothing in the mode that is chosen."""

    def chosen(name: str) -> Any:
        value = getattr(config, name)
        return getattr(model.generation_config, name) if value is None else value

    idle = []
    if not chosen("do_sample"):
        # Contrastive search reads top_k without sampling.
        sampling = NEEDS_SAMPLING - ({"top_k"} if chosen("penalty_alpha") else set())
        idle += [(name, "--do-sample") for name in fields if name in sampling]
    if (chosen("num_beams") or 1) == 1:
        idle += [(name, "--num-beams") for name in fields if name in NEEDS_BEAMS]
    return [f"{option_name(name)} does nothing without {needed}" for name, needed in idle]


def read_prompt(prompt: str | None) -> str:
    """The prompt from the command line, or from standard input when it is piped or ``-``.

    One line end at the end of standard input, which ``echo`` adds, is removed.
    Raises ``CliError`` for a prompt that is missing, empty or not UTF-8.
    """
    if prompt is None and sys.stdin.isatty():
        raise CliError("no prompt: write one after the command, or pipe one in")
    try:
        if prompt is None or prompt == "-":
            prompt = sys.stdin.read().removesuffix("\n")
        prompt.encode()  # what cannot be decoded comes as lone surrogates
    except UnicodeError as error:
        raise CliError("the prompt is not UTF-8 text") from error
    if not prompt:
        raise CliError("the prompt is empty: give at least one character")
    return prompt
