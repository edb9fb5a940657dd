"""Options that several commands share, and the commands that take them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial, wraps
from itertools import groupby
from typing import Any, Literal, get_type_hints

from rich.panel import Panel
from rich.table import Column, Table
from typer import Option
from typer.core import TyperCommand

import hfgen

from . import loading
from .field_options import LEGEND, Fields, generation_config, joined_flags, note_idle
from .report import out, refused
from .topics import TOPICS


def checked_source(name: str | None) -> str | None:
    """``name`` of a model, which is checked before torch is imported."""
    if name is not None:
        loading.check_source(name)
    return name


#: What options and arguments of a kind have in common: models, seeds, files that have to be there.
SOURCE: Any = {"metavar": "ID_OR_PATH", "callback": checked_source}
SEED: Any = {"min": 0, "max": 2**63 - 1, "metavar": "N"}
FILE: Any = {"exists": True, "dir_okay": False}

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

DEBUG = Option(False, "--debug", help="Show warnings, and the traceback of an error.")
DTYPE = Option("auto", metavar="TYPE", help="auto, float32, bfloat16 or float16 weights.")
JSON = Option(False, "--json", help="Print one JSON object.")
MODEL = Option("builtin", help="A folder, a hub id, builtin or builtin-draft.", **SOURCE)
OPTIMIZE = Option(False, "--optimize", help="Use faster kernels for this CPU.")
REPEAT = Option(3, "--repeat", min=1, help="Timed runs of each library.")
ROWS = Option(32, "--max-rows", min=1, help="Rows that decode at once.")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of commands that load a model: the built-in one, unless another is named."""

    model: str = MODEL
    exact: bool = Option(False, "--exact", help="The same bits for a row, whatever is beside it.")
    dtype: Dtype = DTYPE
    device: str | None = Option(
        None, help="cpu, cuda, cuda:1, mps, or auto to spread over all; the GPU if there is one."
    )
    trust_remote_code: bool = Option(
        False, "--trust-remote-code", help="Run the Python code in the model's repository."
    )
    debug: bool = DEBUG

    @contextmanager
    def loaded(
        self, assistant: str | None = None, optimize: bool = False, compile: bool = False
    ) -> Iterator[loading.Loaded]:
        """Load the model, and keep transformers' messages off while it is used; raises ``CliError``."""
        settings = self.dtype, self.device, self.trust_remote_code
        with loading.quiet(self.debug):
            loaded = loading.load(self.model, assistant, *settings)
            yield loading.change(loaded, optimize, self.exact, compile)

    @contextmanager
    def configured(
        self, fields: Fields, new_tokens: int, optimize: bool = False, compile: bool = False
    ) -> Iterator[tuple[loading.Loaded, Any]]:
        """``loaded``, and the config of ``fields``, of which those are noted that do nothing."""
        with self.loaded(fields.assistant, optimize, compile) as loaded:
            config = generation_config(fields, loaded.model, new_tokens)
            note_idle(fields, config, loaded)
            yield loaded, config


@dataclass(frozen=True, kw_only=True)
class ChatModelOptions(ModelOptions):
    """Options of ``hfgen chat``, whose model has to be named."""

    model: str = Option("", metavar="ID_OR_PATH", help="A folder or hub id of a chat model.")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of commands that decode with an engine."""

    max_rows: int = ROWS
    memory: float = Option(
        0.8, min=0, help="Memory for the KV cache: a share of free memory (up to 1), or bytes."
    )
    prefill_tokens: int = Option(2048, min=1, help="Prompt tokens forwarded per step.")
    prefix_cache: bool = Option(
        False, "--prefix-cache", help="Reuse the keys and values of common prompt prefixes."
    )
    chat_template: str | None = Option(
        None,
        metavar="FILE",
        help="A file to use instead of the model's template.",
        callback=loading.read_template,  # the field has the text
    )

    def engine(self, model: Any, tokenizer: Any, **settings: Any) -> Any:
        """An engine for ``model``; raises ``CliError`` for one that it does not take."""
        settings |= {n: getattr(self, n) for n in ("max_rows", "memory", "prefill_tokens")}
        prefixes = hfgen.PrefixCache() if self.prefix_cache else None
        with refused(TypeError, ValueError):
            return hfgen.Engine(model, tokenizer, prefix_cache=prefixes, **settings)


def parameters_of(group: Any) -> Iterator[inspect.Parameter]:
    """A parameter for each field of a dataclass; a plain default has its help in ``metadata``."""
    hints = get_type_hints(group)
    for part in fields(group):
        default: Any = part.default
        if part.metadata:
            default = Option(default, help=part.metadata["help"], rich_help_panel=group.__name__)
        kind, annotation = inspect.Parameter.KEYWORD_ONLY, hints[part.name]
        yield inspect.Parameter(part.name, kind, default=default, annotation=annotation)


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with an option for each part of its groups: dataclasses, or classes with ``parameters``."""
    groups: dict[str, tuple[Any, list[inspect.Parameter]]] = {}
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        kind = parameter.annotation
        members = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        if hasattr(kind, "parameters") or hasattr(kind, "__dataclass_fields__"):
            members = list(getattr(kind, "parameters", partial(parameters_of, kind))())
            groups[name] = kind, members
        parameters |= {member.name: member for member in members}

    @wraps(command)
    def whole(**arguments: Any) -> None:
        for name, (group, members) in groups.items():
            values = {member.name: arguments.pop(member.name) for member in members}
            with refused(ValueError):
                arguments[name] = group(**values)
        command(**arguments)

    whole.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    whole.__annotations__ = {name: each.annotation for name, each in parameters.items()}
    whole.__doc__ = re.sub(r"(?<!\n)\n(?!\n) *", " ", command.__doc__ or "")  # a line per paragraph
    del whole.__wrapped__
    return whole


class FlagsWithoutType:
    """A mixin of commands and groups whose help shows no type of flags."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class Command(FlagsWithoutType, TyperCommand):
    """A command whose usage errors name it, and whose help has a panel for each topic of generation."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, list(joined_flags(args)))
        except Exception as error:
            if hasattr(error, "ctx"):  # a usage error
                error.ctx = error.ctx or ctx
            if hasattr(error, "possibilities"):  # there is no such option
                wrong, names = getattr(error, "option_name", "-"), self.params
                longer = [n for each in names for n in each.opts if n.startswith(wrong)]
                error.possibilities = longer or error.possibilities
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        parameters: list[Any] = self.params
        of_topics = [p for p in parameters if getattr(p, "rich_help_panel", None) in TOPICS]
        for topic, options in groupby(of_topics, key=lambda p: p.rich_help_panel):
            grid = Table.grid(Column(style="cyan", no_wrap=True), "", padding=(0, 2, 0, 0))
            for option in options:
                grid.add_row(f"{option.opts[0]} {option.metavar or ''}".rstrip(), option.help)
            out.print(Panel(grid, title=topic, title_align="left", border_style="dim"))
        if of_topics:
            out.print(LEGEND, style="dim")
