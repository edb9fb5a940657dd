"""Options that several commands share, each declared once as a field of a dataclass."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

from typer import Option
from typer.core import TyperCommand

from ...settings.kinds import INT64
from . import loading
from .files import read_template
from .report import CliError

T = TypeVar("T")


def checked(check: Callable[[T], object]) -> Callable[[T | None], T | None]:
    """A callback of an option, which is checked before torch is imported."""

    def callback(value: T | None) -> T | None:
        if value is not None:
            check(value)
        return value

    return callback


def model_option(help: str) -> Any:
    """``--model``, with its line of help."""
    return Option(
        "--model", metavar="ID_OR_PATH", help=help, callback=checked(loading.check_source)
    )


def one_of_option(option: str, names: Collection[str], help: str) -> Any:
    """An option that takes one of ``names``."""

    def check(value: str) -> None:
        if value not in names:
            raise CliError(f"{option} takes one of {', '.join(names)}, but {value!r} was given")

    return Option(option, help=help, callback=checked(check))


def seed_option(option: str, help: str) -> Any:
    """An option that takes a seed."""

    def check(seed: int) -> None:
        if not INT64.accepts(seed):
            raise CliError(f"a seed has to be {INT64.words}, but is {seed}")

    return Option(option, help=help, callback=checked(check))


def check_memory(memory: float) -> None:
    """Raise ``CliError`` for a ``--memory`` that is neither a share nor bytes."""
    if not 0 < memory < math.inf:
        raise CliError(
            f"--memory takes bytes, or up to 1 a share of what is free, but is {memory:g}"
        )


AssistantOption = Annotated[
    str | None,
    Option(
        "--assistant",
        metavar="ID_OR_PATH",
        help="Draft tokens with this smaller model (assisted decoding).",
        callback=checked(loading.check_source),
    ),
]
DebugOption = Annotated[
    bool, Option("--debug", help="Show warnings, and the traceback of an error.")
]
DtypeOption = Annotated[
    str, one_of_option("--dtype", loading.DTYPES, "auto, float32, bfloat16 or float16 weights.")
]
JsonOption = Annotated[bool, Option("--json", help="Print one JSON object.")]
OptimizeOption = Annotated[bool, Option("--optimize", help="Use faster kernels for this CPU.")]
RepeatOption = Annotated[int, Option("--repeat", min=1, help="Timed runs of each library.")]
RowsOption = Annotated[int, Option("--max-rows", min=1, help="Rows that decode at once.")]


@dataclass(frozen=True, kw_only=True)
class ChatModelOptions:
    """Options of commands that load a model, which has to be named."""

    model: Annotated[str | None, model_option("A folder or a hub id of a model that can chat.")] = (
        None
    )
    exact: Annotated[
        bool, Option("--exact", help="The same bits for a row, whatever is computed beside it.")
    ] = False
    dtype: DtypeOption = "auto"
    device: Annotated[
        str | None,
        Option(
            "--device",
            help="cpu, cuda, cuda:1, mps, or auto to spread over all; the GPU if there is one.",
            callback=checked(loading.check_device),
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run the Python code in the model's repository.")
    ] = False
    debug: DebugOption = False

    @contextmanager
    def loaded(
        self, assistant: str | None = None, optimize: bool = False, compile: bool = False
    ) -> Iterator[loading.Loaded]:
        """Load the model, and keep transformers' messages off while it is used; raises ``CliError``."""
        with loading.quiet(self.debug):
            settings = self.dtype, self.device, self.trust_remote_code
            loaded = loading.load(str(self.model), assistant, *settings)
            if optimize:
                loading.optimize(loaded, compile)
            if self.exact:
                loading.make_exact(loaded)
            yield loaded


@dataclass(frozen=True, kw_only=True)
class ModelOptions(ChatModelOptions):
    """Options of commands that load a model: the built-in one, unless another is named."""

    model: Annotated[str, model_option("A folder, a hub id, builtin or builtin-draft.")] = "builtin"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of commands that decode with an engine."""

    max_rows: RowsOption = 32
    memory: Annotated[
        float,
        Option(
            "--memory",
            help="Memory for the KV cache: a share of free memory (up to 1), or bytes.",
            callback=checked(check_memory),
        ),
    ] = 0.8
    prefill_tokens: Annotated[
        int, Option("--prefill-tokens", min=1, help="Prompt tokens forwarded per step.")
    ] = 2048
    prefix_cache: Annotated[
        bool, Option("--prefix-cache", help="Reuse the keys and values of common prompt prefixes.")
    ] = False
    chat_template: Annotated[
        str | None,
        Option(
            "--chat-template",
            metavar="FILE",
            help="A file to use instead of the model's template.",
            callback=read_template,  # the field has the text
        ),
    ] = None

    def engine(self, model: Any, tokenizer: Any, **settings: Any) -> Any:
        """An engine for ``model``; raises ``CliError`` for one that it does not take."""
        import hfgen

        try:
            return hfgen.Engine(
                model,
                tokenizer,
                max_rows=self.max_rows,
                memory=self.memory,
                prefill_tokens=self.prefill_tokens,
                prefix_cache=hfgen.PrefixCache() if self.prefix_cache else None,
                **settings,
            )
        except (TypeError, ValueError) as error:
            raise CliError(str(error)) from error


def with_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` as typer takes it: for an argument that is a dataclass, an option for each field.

    The annotation of a field is that of typer; without one, ``metadata`` has the ``help``.
    """
    given = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {
        n: p.annotation for n, p in given.items() if is_dataclass(p.annotation)
    }
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in given.items():
        parts = {name: (parameter.annotation, parameter.default)}
        if group := groups.get(name):
            hints = get_type_hints(group, include_extras=True)
            parts = {part.name: (hints[part.name], part.default) for part in fields(group)}
            for part in fields(group):
                if part.metadata:
                    option = Option(
                        "--" + part.name.replace("_", "-"),
                        help=part.metadata["help"],
                        rich_help_panel=group.__name__,
                    )
                    parts[part.name] = Annotated[hints[part.name], option], part.default
        for part_name, (annotation, default) in parts.items():
            parameters[part_name] = inspect.Parameter(
                part_name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )

    @functools.wraps(command)
    def whole(**arguments: Any) -> None:
        for name, group in groups.items():
            values = {part.name: arguments.pop(part.name) for part in fields(group)}
            try:
                arguments[name] = group(**values)
            except ValueError as error:
                raise CliError(str(error)) from error
        command(**arguments)

    whole.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    whole.__annotations__ = {name: each.annotation for name, each in parameters.items()}
    del whole.__wrapped__
    return whole


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
