"""The command line: files of commands; ``generate.py`` and ``compare.py`` have several.

Commands import torch and transformers when they run, so that ``--help`` does not wait. Read
``field_options.py`` for the options of generation, ``options.py`` for those that commands share.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import typer
from typer.core import TyperGroup

from . import batch, compare, demo, doctor, evaluate, generate, serve
from .options import Command, FlagsWithoutType, with_groups
from .report import CliError, one_line, say


class OneLineErrors(FlagsWithoutType, TyperGroup):
    """Ends a failed command with one line on standard error; exit code 2 is wrong input."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        arguments = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        try:
            status = super().main(arguments, *rest, **extra)
        except typer.Abort:
            status = 130
        except Exception as error:
            if "--debug" in arguments:
                raise
            status, message = describe(error, arguments)
            say(f"[red]hfgen:[/] {message}")
        sys.exit(status if isinstance(status, int) else 0)


def describe(error: Exception, arguments: Sequence[str]) -> tuple[int, str]:
    """The exit code, and what went wrong in one line of rich markup; ``arguments`` are the command's."""
    if isinstance(error, CliError):
        return 2, one_line(str(error))
    if hasattr(error, "format_message"):  # a usage error, whose class depends on typer's version
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "hfgen"
        message = error.format_message().rstrip(".").replace("Value error, ", "")
        names = getattr(getattr(error, "param", None), "opts", ())
        pairs = pairwise("=".join(arguments).split("="))  # "--name value" or "--name=value"
        for value in [value for name, value in pairs if name in names and value not in message]:
            message += f", but {value!r} was given"
        if "extra argument" in message and command == "hfgen generate":
            message += ": a prompt of several words needs quotes"
        return 2, f"{one_line(message)}; see {command} --help"
    message = f"unexpected {type(error).__name__}: {one_line(str(error))}"
    return 1, f"{message} (--debug shows the traceback)"


app = typer.Typer(
    name="hfgen",
    cls=OneLineErrors,
    add_completion=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),  # --top_k is --top-k
    },
    rich_markup_mode="rich",
    invoke_without_command=True,
)


@app.callback()
def hfgen(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    """Generate with any transformers model: same call, same tokens."""
    if version:
        from ... import __version__

        typer.echo(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for _command in (
    *(generate.generate, generate.chat, generate.inspect, compare.compare, batch.batch),
    *(demo.demo, compare.bench, serve.serve, doctor.doctor, compare.replay),
):
    app.command(cls=Command)(with_groups(_command))
_help = "Measure a model: perplexity of texts, metrics of completions."
_eval = typer.Typer(cls=OneLineErrors, help=_help)
_eval.command(cls=Command)(with_groups(evaluate.perplexity))
_eval.command(cls=Command)(with_groups(evaluate.generate))
app.add_typer(_eval, name="eval")


def main() -> None:
    """Run the command line on ``sys.argv`` and exit with its status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # characters outside of its encoding
    app(prog_name="hfgen")
