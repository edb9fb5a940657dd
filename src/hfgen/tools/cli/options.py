"""Every field of ``GenerationConfig`` as a command-line option."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Annotated, Any, TypeVar

from typer import Option
from typer.core import TyperCommand

from ...settings.fields import FIELDS
from ...settings.kinds import INT64
from .checks import check_fields
from .companions import check_companions
from .files import read_template
from .loading import DTYPES, check_device, check_source
from .report import CliError, out
from .short_forms import SHORT_FORMS, fields_of
from .topics import LEGEND, METAVARS, option_name, panels

T = TypeVar("T")

#: Names that llama.cpp, vLLM and OpenAI's interface have for fields.
OTHER_NAMES = {
    "temp": "temperature",
    "n_predict": "max_new_tokens",
    "predict": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "n": "num_return_sequences",
    "beam_width": "num_beams",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "penalty_window",
    "typical": "typical_p",
    "top_nsigma": "top_n_sigma",
    "dynatemp_exp": "dynatemp_exponent",
    "mirostat_lr": "mirostat_eta",
    "mirostat_ent": "mirostat_tau",
    "samplers": "sampler_order",
    "grammar_file": "--lark",
    "guided_json": "--json-schema",
    "guided_regex": "--regex",
    "guided_choice": "--choice",
}

#: The fields that can be given as text, sorted, and the kind of value that each takes.
KNOWN_FIELDS: dict[str, Any] = {
    name: row.kind for name, row in sorted(FIELDS.items()) if row.kind.option is not None
}

#: Those of them that may stand without a value.
FLAGS = {name for name, kind in KNOWN_FIELDS.items() if kind.option == "true or false"}

WORDS = {"true": True, "false": False, "none": None, "null": None}


def checked(check: Callable[[T], object]) -> Callable[[T | None], T | None]:
    """A callback of an option, which is checked before torch is imported."""

    def callback(value: T | None) -> T | None:
        if value is not None:
            check(value)
        return value

    return callback


def model_option(help: str) -> Any:
    """``--model``, with its line of help."""
    return Option("--model", metavar="ID_OR_PATH", help=help, callback=checked(check_source))


def one_of_option(option: str, names: Collection[str], help: str) -> Any:
    """An option that takes one of ``names``."""

    def check(value: str) -> None:
        if value not in names:
            raise CliError(f"{option} takes one of {', '.join(names)}, but {value!r} was given")

    return Option(option, help=help, callback=checked(check))


ModelOption = Annotated[str, model_option("A folder, a hub id, builtin or builtin-draft.")]
AssistantOption = Annotated[
    str | None,
    Option(
        "--assistant",
        metavar="ID_OR_PATH",
        help="Draft tokens with this smaller model (assisted decoding).",
        callback=checked(check_source),
    ),
]
DtypeOption = Annotated[
    str, one_of_option("--dtype", DTYPES, "auto, float32, bfloat16 or float16 weights.")
]
DeviceOption = Annotated[
    str | None,
    Option(
        "--device",
        help="cpu, cuda, cuda:1, mps, or auto to spread over all; the GPU if there is one.",
        callback=checked(check_device),
    ),
]
TrustOption = Annotated[
    bool, Option("--trust-remote-code", help="Run the Python code in the model's repository.")
]
DebugOption = Annotated[
    bool, Option("--debug", help="Show warnings, and the traceback of an error.")
]
JsonOption = Annotated[bool, Option("--json", help="Print one JSON object.")]
RepeatOption = Annotated[int, Option("--repeat", min=1, help="Timed runs of each library.")]


def check_memory(memory: float) -> None:
    """Raise ``CliError`` for a ``--memory`` that is neither a share nor bytes."""
    if not 0 < memory < math.inf:
        raise CliError(
            f"--memory takes bytes, or up to 1 a share of what is free, but is {memory:g}"
        )


def seed_option(option: str, help: str) -> Any:
    """An option that takes a seed."""

    def check(seed: int) -> None:
        if not INT64.accepts(seed):
            raise CliError(f"a seed has to be {INT64.words}, but is {seed}")

    return Option(option, help=help, callback=checked(check))


# Of an engine.
RowsOption = Annotated[int, Option("--max-rows", min=1, help="Rows that decode at once.")]
MemoryOption = Annotated[
    float,
    Option(
        "--memory",
        help="Memory for the KV cache: a share of free memory (up to 1), or bytes.",
        callback=checked(check_memory),
    ),
]
PrefillOption = Annotated[
    int, Option("--prefill-tokens", min=1, help="Prompt tokens forwarded per step.")
]
PrefixOption = Annotated[
    bool,
    Option("--prefix-cache", help="Reuse the keys and values of common prompt prefixes."),
]
TemplateOption = Annotated[
    str | None,
    Option(
        "--chat-template",
        metavar="FILE",
        help="A file to use instead of the model's template.",
        callback=read_template,  # the command gets the text
    ),
]
ExactOption = Annotated[
    bool, Option("--exact", help="The same bits for a row, whatever is computed beside it.")
]
OptimizeOption = Annotated[bool, Option("--optimize", help="Use faster kernels for this CPU.")]


class PlainHelp:
    """A mixin of commands whose help has no line ends within a paragraph, and no type of flags."""

    help: str | None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.help = re.sub(r"(?<!\n)\n(?!\n) *", " ", self.help or "")
        super().format_help(ctx, formatter)  # type: ignore[misc]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            remaining: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        except Exception as error:
            if hasattr(error, "ctx"):  # a usage error, which names the command
                error.ctx = error.ctx or ctx
            raise
        return remaining

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class PlainCommand(PlainHelp, TyperCommand):
    """A command without fields of ``GenerationConfig``."""


class GenerationCommand(PlainHelp, TyperCommand):
    """A command whose ``context.obj`` has the fields of ``GenerationConfig`` among its arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names = (name for parameter in self.params for name in parameter.opts)
        own = {"--help", *(name for name in names if name.startswith("-"))}
        rest, fields = split_fields(args, own)
        ctx.obj = with_sampling(fields)
        check_fields(ctx.obj)
        remaining = super().parse_args(ctx, rest)
        check_companions(ctx.obj, ctx.params.get("assistant"))
        return remaining

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        metavars = {option_name(n): METAVARS[kind.option] for n, kind in KNOWN_FIELDS.items()}
        metavars |= {option: form.metavar for option, form in SHORT_FORMS.items()}
        own = {option for parameter in self.params for option in parameter.opts}
        for panel in panels(metavars, own):
            out.print(panel)
        out.print(LEGEND, style="dim")


def split_fields(args: list[str], own: Collection[str]) -> tuple[list[str], dict[str, Any]]:
    """Separate generation fields from a command's own arguments, whose options are ``own``.

    ``--top-k 5``, ``--top_k=5``, ``--do-sample``, ``--no-use-cache`` and ``--use-cache false`` are
    understood, and short forms; what follows ``--`` is left alone. Raises ``CliError`` for what is not
    understood.
    """
    rest: list[str] = []
    fields: dict[str, Any] = {}
    short: dict[str, list[str]] = {}
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
        if (form := SHORT_FORMS.get(option)) is not None:
            takes, name, is_negated = form.metavar, "", False
        else:
            name, is_negated = field_name(option, own)
            takes = "" if is_negated else KNOWN_FIELDS[name].option
        if equals and not takes:
            raise CliError(f"{option} takes no value, but {text!r} was given")
        is_alone = name in FLAGS and not (pending and is_switch(name, pending[0]))
        if takes and not equals and not is_alone:
            if not pending:
                raise CliError(f"{option} needs a value: {takes}")
            text = pending.pop(0)
        if form is not None:
            short.setdefault(option, []).append(text)
        elif is_negated or (is_alone and not equals):
            fields[name] = not is_negated
        else:
            fields[name] = parse_value(name, text)
    return rest, fields | fields_of(short, fields)


def with_sampling(fields: dict[str, Any]) -> dict[str, Any]:
    """``fields``, which sample if one of them is about sampling, and none says that they do not."""
    says_not = fields.get("temperature") == 0 or "penalty_alpha" in fields
    if says_not or "do_sample" in fields or all(FIELDS[n].needs != "do_sample" for n in fields):
        return fields
    return fields | {"do_sample": True}


def field_name(option: str, own: Collection[str]) -> tuple[str, bool]:
    """The field that ``option`` names, and whether it is the ``--no-…`` form of a flag."""
    name = option.removeprefix("--").replace("-", "_")
    if name in KNOWN_FIELDS:
        return name, False
    if (flag := name.removeprefix("no_")) in FLAGS:
        return flag, True
    options = {n.strip("-").replace("-", "_"): n for n in (*SHORT_FORMS, *own)}
    names = {n: option_name(n) for n in KNOWN_FIELDS} | options
    nearest = [OTHER_NAMES[name]] if name in OTHER_NAMES else []
    nearest += difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    if nearest := nearest or sorted(n for n in names if n.startswith(name)):
        shown = names.get(nearest[0], nearest[0])
        raise CliError(f"no option {option}; the nearest is {shown}, and --help lists all of them")
    raise CliError(f"no option {option}; --help lists all of them")


def is_switch(name: str, text: str) -> bool:
    """Whether ``text``, found after the flag ``name``, is its value and not the next argument."""
    return text.lower() in WORDS or KNOWN_FIELDS[name].accepts(text)


def parse_value(name: str, text: str) -> Any:
    """The value of ``text`` for the field ``name``: JSON or text. Raises ``CliError`` if it fits not."""
    try:
        value = WORDS[text.lower()] if text.lower() in WORDS else json.loads(text)
    except json.JSONDecodeError:
        value = text
    kind = KNOWN_FIELDS[name]
    if kind.option == "a number" and not isinstance(value, bool):
        with suppress(ValueError):
            value = float(text)  # '.5' is no JSON, and '2' no float
    if value is None:
        return None
    if name in FLAGS:
        fits = is_switch(name, text)
    else:
        fits = kind.option == "text or JSON" or (
            kind.accepts(value) and not isinstance(value, bool)
        )
    if not fits:
        takes = "true, false or never" if name == "early_stopping" else kind.option
        raise CliError(f"{option_name(name)} takes {takes}, but {text!r} was given")
    # '--stop-strings 1' stops at the text "1"
    return text if kind.accepts(text) and not kind.accepts(value) else value


def generation_config(fields: dict[str, Any], model: Any, default_new_tokens: int) -> Any:
    """The config of ``fields``; ``default_new_tokens`` are the limit where these and the model have none.

    Raises ``CliError`` for a value that the config refuses.
    """
    import transformers

    import hfgen

    values, own = dict(fields), model.generation_config
    is_one_mode = "penalty_alpha" in values or "dola_layers" in values
    if (values.get("num_return_sequences") or 1) > 1 and not is_one_mode:
        # Several answers are those of the beams, where there are beams, and else samples.
        has_beams = (values.setdefault("num_beams", own.num_beams) or 1) > 1
        values.setdefault("do_sample", bool(own.do_sample) or not has_beams)
    limits = ("max_new_tokens", "max_length")
    if all(values.get(n) is None and getattr(own, n) is None for n in limits):
        values["max_new_tokens"] = default_new_tokens
    try:
        if isinstance(values.get("compile_config"), dict):
            values["compile_config"] = transformers.CompileConfig(**values["compile_config"])
        return hfgen.GenerationConfig(**values)
    except (AttributeError, TypeError, ValueError) as error:
        raise CliError(str(error)) from error


def plain(fields: dict[str, Any]) -> dict[str, Any]:
    """``fields`` as JSON has them."""
    return {n: value.to_dict() if n == "grammar" else value for n, value in fields.items()}
