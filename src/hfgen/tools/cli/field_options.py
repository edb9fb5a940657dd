"""Fields of ``GenerationConfig`` as options of a command, and the config that they make."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from rich.markup import escape
from typer import Option

import hfgen

from ...settings import grammar
from ...settings.fields import FIELDS, OWN_FIELDS, is_on
from . import loading
from .report import KNOWN_FIELDS, CliError, note, option_name, refused
from .topics import TOPICS

#: Those of them that may stand without a value, and those of these that take a word, too.
FLAG_WORDS = {"early_stopping": "never", "output_card": "prompt"}
FLAGS = {name for name, kind in KNOWN_FIELDS.items() if kind.option == "true or false"}
FLAGS_WITH_WORDS = {name: f"true, false or {word}" for name, word in FLAG_WORDS.items()}

WORDS = {"true": True, "false": False, "none": None, "null": None}

#: What stands for a value of each kind in the help.
METAVARS = {"an integer": "N", "a number": "X", "text or JSON": "…", "true or false": ""}
LEGEND = (
    "N is an integer, X a number, … text or JSON. Options without a value are flags: "
    "--no-… turns them off. --top_k=5 is --top-k 5."
)

#: Fields with results of their own, which some commands do not show.
RESULTS = frozenset(
    "logprobs logprob_token_ids logprobs_support prompt_logprobs "
    "output_card output_metrics output_speculation".split()
)

#: Modes of which transformers uses one and ignores the others.
MODES = (
    "--assistant prompt_lookup_num_tokens assistant_early_exit use_mtp penalty_alpha dola_layers "
    "num_beams"
)

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
    "--assistant prompt_lookup_num_tokens assistant_early_exit use_mtp": "num_assistant_tokens "
    "num_assistant_tokens_schedule assistant_confidence_threshold output_speculation",
    "--assistant": "assistant_ensemble_weight assistant_lookbehind target_lookbehind",
    "cache_implementation": "cache_config compile_config max_cache_len use_cuda_graph",
}
NEEDS = {name: needs.split() for needs, names in IDLE_WITHOUT.items() for name in names.split()}

ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}  # of `--stop`
WHITESPACE = " ?"  # between the tokens of JSON: small models may write spaces without end
JSON_OBJECT = grammar.json_object(whitespace=WHITESPACE)


class ShortForm(NamedTuple):
    """An option that sets a field under another name; ``read`` makes the value of its text or texts."""

    field: str
    metavar: str
    read: Callable[[Any], Any]
    type: Any = str | None


def read_schema(path: str) -> grammar.Grammar:
    """The grammar of the JSON schema in a file. Raises ``ValueError``."""
    try:
        schema = json.loads(loading.read_text(Path(path)))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path!r} is not JSON: {error}") from error
    return grammar.json(schema, whitespace=WHITESPACE)


def read_stops(texts: list[str]) -> list[str]:
    r"""``texts`` with a line feed for ``\n``, and so on for ``\t``, ``\r`` and ``\\``."""
    return [re.sub(r"\\(.)", lambda code: ESCAPES.get(code[1], code[0]), text) for text in texts]


SHORT_FORMS: dict[str, ShortForm] = {
    "--stop": ShortForm("stop_strings", "TEXT", read_stops, list[str] | None),
    "--json-schema": ShortForm("grammar", "FILE", read_schema),
    "--json-object": ShortForm("grammar", "", lambda _: JSON_OBJECT, bool),
    "--regex": ShortForm("grammar", "PATTERN", grammar.regex),
    "--choice": ShortForm("grammar", "TEXT", grammar.choice, list[str] | None),
    "--lark": ShortForm(
        "grammar", "FILE", lambda path: grammar.lark(loading.read_text(Path(path)))
    ),
    "--assistant": ShortForm("--assistant", "ID_OR_PATH", loading.check_source),
}


class Fields(dict[str, Any]):
    """The fields of ``GenerationConfig`` that a command line sets, and the ``assistant`` that drafts.

    A parameter of sampling switches sampling on. Raises ``CliError`` for a text that is no value of its
    field, a value out of range, and options of which transformers would use one and ignore the other.
    """

    left_out: ClassVar[frozenset[str]] = frozenset()  # what a command does not have

    def __init__(self, **texts: Any) -> None:
        super().__init__()
        self.assistant: str | None = texts.pop("assistant", None)
        if self.assistant is not None:
            loading.check_source(self.assistant)
        options: dict[str, str] = {}  # field → the option that sets it
        for parameter, text in texts.items():
            if text in (None, False, []):
                continue
            option = option_name(parameter)
            if text == "" or (isinstance(text, list) and "" in text):
                raise CliError(f"{option} takes a value, but '' was given")
            form = SHORT_FORMS.get(option)
            name = parameter if form is None else form.field
            if name in self:
                raise CliError(f"{options[name]} and {option} exclude each other: leave one out")
            with refused(ImportError, TypeError, ValueError, before=f"{option}: "):
                self[name] = parse_value(name, text) if form is None else form.read(text)
                if name == "grammar":
                    self[name].check()
            options[name] = option
        is_open = "do_sample" not in self and "penalty_alpha" not in self
        samples = any(FIELDS[name].needs == "do_sample" for name in self)
        if is_open and samples and self.get("temperature") != 0:
            self["do_sample"] = True
        self.check()

    @classmethod
    def parameters(cls) -> Iterator[inspect.Parameter]:
        """A parameter of a command for each option, in the panel of its topic."""
        for topic, lines in TOPICS.items():
            for name, line in lines.items():
                if name in cls.left_out:
                    continue
                form, option = SHORT_FORMS.get(name), option_name(name)
                metavar = form.metavar if form else METAVARS[KNOWN_FIELDS[name].option or ""]
                kind = form.type if form else str | None
                # Typer's panels cut long names, so `Command` prints these itself.
                settings: dict[str, Any] = {"metavar": metavar, "rich_help_panel": topic}
                none = False if kind is bool else None
                default: Any = Option(none, option, help=escape(line), hidden=True, **settings)
                name, where = option[2:].replace("-", "_"), inspect.Parameter.KEYWORD_ONLY
                yield inspect.Parameter(name, where, default=default, annotation=kind)

    def check(self) -> None:
        """Raise ``CliError`` for a value out of a range that holds beside the others, and for idle pairs."""
        for name, value in self.items():
            row = FIELDS[name]
            with refused(TypeError, ValueError):
                row.check(name, value, row.needs is None or is_on(row.needs, self.get(row.needs)))
        modes = {name: self.get(name) for name in MODES.split()} | {"--assistant": self.assistant}
        if not is_on("num_beams", self.get("num_beams")):
            del modes["num_beams"]
        if self.get("penalty_alpha"):
            modes["do_sample"] = self.get("do_sample")
        for values in modes, {name: self.get(name) for name in ("max_new_tokens", "max_length")}:
            chosen = [f"{option_name(name)} {value}" for name, value in values.items() if value]
            if len(chosen) > 1:
                raise CliError(f"{chosen[0]} and {chosen[1]} exclude each other: leave one out")
        for least, most in (("min_new_tokens", "max_new_tokens"), ("min_length", "max_length")):
            low, high = self.get(least), self.get(most)
            if low is not None and high is not None and low > high:
                too_high = f"{option_name(least)} {low}"
                raise CliError(f"{too_high} is more than {option_name(most)} {high}")

    def as_json(self) -> dict[str, Any]:
        return {n: value.to_dict() if n == "grammar" else value for n, value in self.items()}


class FieldsWithoutResults(Fields):
    """The fields of a command that shows the answers' texts or tokens only."""

    left_out: ClassVar = RESULTS


class FieldsWithoutAssistant(Fields):
    """The fields of a command that decodes with an engine."""

    left_out: ClassVar = frozenset(["--assistant"])


def joined_flags(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the arguments, each flag with its value: ``--no-use-cache`` as ``--use-cache=false``."""
    pending = list(arguments)
    while pending:
        argument = pending.pop(0)
        if argument == "--":
            yield from (argument, *pending)
            return
        name = argument[2:].replace("-", "_") if argument.startswith("--") else ""
        if name in FLAGS:
            following = pending[0] if pending else "-"
            is_word = name in FLAGS_WITH_WORDS and not following.startswith("-")
            has_value = is_word or following.lower() in WORDS
            yield f"{argument}={pending.pop(0) if has_value else 'true'}"
        elif name.startswith("no_") and name[3:] in FLAGS:
            yield f"--{name[3:]}=false"
        else:
            yield argument


def parse_value(name: str, text: str) -> Any:
    """The value of ``text`` for the field ``name``: JSON or text. Raises ``CliError`` if it fits not."""
    kind = KNOWN_FIELDS[name]
    is_number = kind.option in ("an integer", "a number")
    try:
        value = WORDS[text.lower()] if text.lower() in WORDS else json.loads(text)
    except (ValueError, RecursionError):
        value = text
    if kind.option == "a number" and not isinstance(value, bool):
        with suppress(ValueError):
            value = float(text)  # '.5' is no JSON, and '2' no float
    if value is None or (kind.accepts(value) and not (is_number and isinstance(value, bool))):
        return value
    if kind.option != "text or JSON":
        takes = FLAGS_WITH_WORDS.get(name, kind.option)
        raise CliError(f"{option_name(name)} takes {takes}, but {text!r} was given")
    return text if kind.accepts(text) else value  # '--stop-strings 1' stops at the text "1"


def generation_config(fields: dict[str, Any], model: Any, default_new_tokens: int) -> Any:
    """The config of ``fields``, with a length if nobody has set one. Raises ``CliError``."""
    import transformers

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
    with refused(AttributeError, TypeError, ValueError):
        return hfgen.GenerationConfig(**values)


def note_idle(fields: dict[str, Any], config: Any, loaded: loading.Loaded) -> None:
    """Note which of the fields do nothing in the chosen mode."""

    def is_chosen(name: str) -> bool:
        if name == "--assistant":
            return loaded.assistant is not None
        value = getattr(config, name)
        if value is None:
            value = getattr(loaded.model.generation_config, name, None)
        return is_on(name, value)

    for name in fields:
        needs = NEEDS.get(name) or [n for n in [FIELDS[name].needs] if n is not None]
        reads_top_k = name == "top_k" and is_chosen("penalty_alpha")  # contrastive search does
        if needs and not reads_top_k and not any(map(is_chosen, needs)):
            note(f"{option_name(name)} does nothing without {' or '.join(map(option_name, needs))}")


def note_unknown_upstream(fields: dict[str, Any]) -> None:
    """Note which fields transformers does not have, and ignores."""
    options = ["a grammar" if n == "grammar" else option_name(n) for n in fields if n in OWN_FIELDS]
    if options:
        note(f"transformers does not know {', '.join(options)}, and runs without")
