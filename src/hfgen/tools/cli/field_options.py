"""Fields of ``GenerationConfig`` on a command line: reading them, checking them, making the config."""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from typer.core import TyperCommand

from ...settings.fields import FIELDS, OWN_FIELDS, is_on
from ...settings.kinds import POSITIVE, SHARE, Range, at_least
from .options import PlainHelp
from .report import CliError, out, say
from .topics import LEGEND, METAVARS, OTHER_NAMES, SHORT_FORMS, option_name, panels

#: The fields that can be given as text, sorted, and the kind of value that each takes.
KNOWN_FIELDS: dict[str, Any] = {
    name: row.kind for name, row in sorted(FIELDS.items()) if row.kind.option is not None
}

#: Those of them that may stand without a value.
FLAGS = {name for name, kind in KNOWN_FIELDS.items() if kind.option == "true or false"}

WORDS = {"true": True, "false": False, "none": None, "null": None}

#: Ranges of values that ``generate`` takes as transformers does, although they mean nothing.
LIMITS: dict[str, Range] = {
    "max_time": POSITIVE,
    "max_length": at_least(1),
    "min_length": at_least(0),
    "max_cache_len": at_least(1),
    "no_repeat_ngram_size": at_least(0),
    "encoder_no_repeat_ngram_size": at_least(0),
    "assistant_confidence_threshold": SHARE,
}

#: Fields that make the model draft; so does ``--assistant``.
DRAFTING = "prompt_lookup_num_tokens assistant_early_exit use_mtp"

#: Fields → what does nothing unless one of them is on, besides ``Field.needs``.
IDLE_WITHOUT = {
    "do_sample": "seed",
    "num_beams": "num_beam_groups",
    "num_beam_groups": "diversity_penalty",
    "dynatemp_range": "dynatemp_exponent",
    "xtc_probability": "xtc_threshold",
    "mirostat": "mirostat_tau mirostat_eta",
    "adaptive_target": "adaptive_decay",
    "dry_multiplier": "dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers",
    "repetition_penalty frequency_penalty presence_penalty": "penalty_window penalty_exclude_ids",
    "penalty_alpha num_beam_groups": "low_memory",
    "thinking_token_budget": "thinking_message",
    "prompt_lookup_num_tokens": "max_matching_ngram_size",
    f"--assistant {DRAFTING}": "num_assistant_tokens num_assistant_tokens_schedule "
    "assistant_confidence_threshold output_speculation",
    "--assistant": "assistant_ensemble_weight assistant_lookbehind target_lookbehind",
    "cache_implementation": "cache_config compile_config max_cache_len use_cuda_graph",
}
NEEDS = {name: n.split() for n, names in IDLE_WITHOUT.items() for name in names.split()}

#: Fields with results of their own, and the commands that do not show these.
RESULTS = (
    "logprobs logprob_token_ids logprobs_support prompt_logprobs output_card output_metrics "
    "output_speculation"
)
WITHOUT_RESULTS = ("chat", "compare", "inspect")


class GenerationCommand(PlainHelp, TyperCommand):
    """A command whose ``context.obj`` has the fields of ``GenerationConfig`` among its arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names = (name for parameter in self.params for name in parameter.opts)
        command_options = {"--help", *(name for name in names if name.startswith("-"))}
        rest, fields = split_fields(args, command_options)
        ctx.obj = with_sampling(fields)
        check_fields(ctx.obj)
        remaining = super().parse_args(ctx, rest)
        check_together(ctx.obj, ctx.params.get("assistant"))
        if self.name in WITHOUT_RESULTS and (option := next(shown(ctx.obj, RESULTS), None)):
            raise CliError(f"hfgen {self.name} does not show what {option} returns: leave it out")
        return remaining

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        metavars = {option_name(n): METAVARS[kind.option] for n, kind in KNOWN_FIELDS.items()}
        metavars |= {option: form.metavar for option, form in SHORT_FORMS.items()}
        command_options = {option for parameter in self.params for option in parameter.opts}
        for panel in panels(metavars, command_options):
            out.print(panel)
        out.print(LEGEND, style="dim")


def split_fields(
    args: list[str], command_options: Collection[str]
) -> tuple[list[str], dict[str, Any]]:
    """Separate generation fields from a command's own arguments.

    ``--top-k 5``, ``--top_k=5``, ``--do-sample``, ``--no-use-cache`` and ``--use-cache false`` are
    understood, and short forms; what follows ``--`` is left alone. Raises ``CliError`` for what is not
    understood.
    """
    rest: list[str] = []
    fields: dict[str, Any] = {}
    texts: dict[str, list[str]] = {}  # of short forms
    pending = list(args)
    while pending:
        argument = pending.pop(0)
        option, equals, text = argument.partition("=")
        if argument == "--":
            rest += [argument, *pending]
            break
        if not option.startswith("--") or option in command_options:
            rest.append(argument)
            continue
        if (form := SHORT_FORMS.get(option)) is not None:
            takes, name, is_negated = form.metavar, "", False
        else:
            name, is_negated = field_name(option, command_options)
            takes = "" if is_negated else KNOWN_FIELDS[name].option
        if equals and not takes:
            raise CliError(f"{option} takes no value, but {text!r} was given")
        is_alone = name in FLAGS and not (pending and is_switch(name, pending[0]))
        if takes and not equals and not is_alone:
            if not pending:
                raise CliError(f"{option} needs a value: {takes}")
            text = pending.pop(0)
        if takes and not is_alone and not text:
            raise CliError(f"{option} takes {takes}, but '' was given")
        if form is not None:
            texts.setdefault(option, []).append(text)
        elif is_negated or (is_alone and not equals):
            fields[name] = not is_negated
        else:
            fields[name] = parse_value(name, text)
    options = {name: option_name(name) for name in fields}
    for option, given in texts.items():
        form = SHORT_FORMS[option]
        if form.field in options:
            raise CliError(f"{options[form.field]} and {option} exclude each other: leave one out")
        if len(given) > 1 and not form.is_repeated:
            raise CliError(f"{option} was given {len(given)} times: give it once")
        try:
            fields[form.field] = form.read(given if form.is_repeated else given[0])
            if form.field == "grammar":
                fields["grammar"].check()
        except (ImportError, TypeError, ValueError) as error:
            raise CliError(f"{option}: {error}") from error
        options[form.field] = option
    return rest, fields


def field_name(option: str, command_options: Collection[str]) -> tuple[str, bool]:
    """The field that ``option`` names, and whether it is the ``--no-…`` form of a flag."""
    name = option.removeprefix("--").replace("-", "_")
    if name in KNOWN_FIELDS:
        return name, False
    if (flag := name.removeprefix("no_")) in FLAGS:
        return flag, True
    options = {n.strip("-").replace("-", "_"): n for n in (*SHORT_FORMS, *command_options)}
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


def with_sampling(fields: dict[str, Any]) -> dict[str, Any]:
    """``fields``, which sample if one of them is about sampling, and none says that they do not."""
    says_not = fields.get("temperature") == 0 or "penalty_alpha" in fields
    if says_not or "do_sample" in fields or all(FIELDS[n].needs != "do_sample" for n in fields):
        return fields
    return fields | {"do_sample": True}


def check_fields(fields: dict[str, Any]) -> None:
    """Raise ``CliError`` for a value of the wrong kind, or out of a range that holds beside the others."""
    for name, value in fields.items():
        row = FIELDS[name]
        if name in LIMITS:
            row = replace(row, range=LIMITS[name])
        try:
            row.check(name, value, row.needs is None or is_on(row.needs, fields.get(row.needs)))
        except (TypeError, ValueError) as error:
            raise CliError(with_options(str(error))) from error


def check_together(fields: dict[str, Any], assistant: str | None) -> None:
    """Raise ``CliError`` for options of which transformers would ignore one."""
    contrast = fields.get("penalty_alpha")
    has_beams = (fields.get("num_beams") or 1) > 1
    ways = [
        *([f"--assistant {assistant}"] if assistant else ()),
        *shown(fields, DRAFTING),
        *shown(fields, "penalty_alpha" if contrast else ""),
        *shown(fields, "dola_layers"),
        *shown(fields, "num_beams" if has_beams else "force_words_ids"),
        *shown(fields, "do_sample" if contrast else ""),
    ]
    for excluding in (ways, list(shown(fields, "max_new_tokens max_length"))):
        if len(excluding) > 1:
            first, second, *_ = excluding
            raise CliError(f"{first} and {second} exclude each other: leave one out")
    for least, most in (("min_new_tokens", "max_new_tokens"), ("min_length", "max_length")):
        low, high = fields.get(least), fields.get(most)
        if low is not None and high is not None and low > high:
            raise CliError(f"{option_name(least)} {low} is more than {option_name(most)} {high}")


def shown(fields: dict[str, Any], names: str) -> Iterator[str]:
    """Yield the fields among ``names`` that are set, as options with their values."""
    for name in names.split():
        value = fields.get(name)
        if value is not None and value is not False:
            yield option_name(name) if value is True else f"{option_name(name)} {value}"


def with_options(message: str) -> str:
    """An error's ``message`` with options for fields: ``--no-use-cache`` for "`use_cache=False`"."""

    def option(found: re.Match[str]) -> str:
        name, value = found[1], found[2]
        if name not in KNOWN_FIELDS:
            return found[0]
        if value == "False":
            return f"--no-{option_name(name)[2:]}"
        return option_name(name) + ("" if value in (None, "True") else f" {value.strip(chr(39))}")

    return re.sub(r"`(\w+)(?:=([^`]+))?`", option, message).rstrip(".")


def generation_config(fields: dict[str, Any], model: Any, default_new_tokens: int) -> Any:
    """The config of ``fields``; ``default_new_tokens`` are the limit where these and the model have none.

    Raises ``CliError`` for a value that the config refuses.
    """
    import transformers

    import hfgen

    values, defaults = dict(fields), model.generation_config
    is_one_mode = "penalty_alpha" in values or "dola_layers" in values
    if (values.get("num_return_sequences") or 1) > 1 and not is_one_mode:
        # Several answers are those of the beams, where there are beams, and else samples.
        has_beams = (values.setdefault("num_beams", defaults.num_beams) or 1) > 1
        values.setdefault("do_sample", bool(defaults.do_sample) or not has_beams)
    limits = ("max_new_tokens", "max_length")
    if all(values.get(n) is None and getattr(defaults, n) is None for n in limits):
        values["max_new_tokens"] = default_new_tokens
    if (settings := values.get("compile_config")) is not None:
        try:
            values["compile_config"] = transformers.CompileConfig(**settings)
        except TypeError as error:
            keys = ", ".join(inspect.signature(transformers.CompileConfig).parameters)
            takes = f"--compile-config takes a JSON object with some of {keys}"
            raise CliError(f"{takes}, but {settings!r} was given") from error
    try:
        return hfgen.GenerationConfig(**values)
    except (AttributeError, TypeError, ValueError) as error:
        raise CliError(with_options(str(error))) from error


def plain(fields: dict[str, Any]) -> dict[str, Any]:
    """``fields`` as JSON has them."""
    return {n: value.to_dict() if n == "grammar" else value for n, value in fields.items()}


def note_idle(fields: dict[str, Any], config: Any, loaded: Any) -> None:
    """Say which of the given fields do nothing in the chosen mode."""

    def chosen(name: str) -> Any:
        if name == "--assistant":
            return loaded.assistant
        value = getattr(config, name)
        return getattr(loaded.model.generation_config, name, None) if value is None else value

    for name in fields:
        needs = NEEDS.get(name) or [n for n in [FIELDS[name].needs] if n is not None]
        reads_top_k = name == "top_k" and chosen("penalty_alpha")  # contrastive search does
        if needs and not reads_top_k and not any(is_on(each, chosen(each)) for each in needs):
            needed = " or ".join(map(option_name, needs))
            say(f"[yellow]note:[/] {option_name(name)} does nothing without {needed}")


def note_own(fields: dict[str, Any]) -> None:
    """Say which fields transformers does not have, and ignores."""
    options = ["a grammar" if n == "grammar" else option_name(n) for n in fields if n in OWN_FIELDS]
    if options:
        say(f"[yellow]note:[/] transformers does not know {', '.join(options)}, and runs without")
