"""The prompt, and files that options name: their texts, and whether an output can be written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .report import CliError, refused


def read_text(path: Path) -> str:
    """The text of a file, its line ends as they are. Raises ``ValueError`` if there is none."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except UnicodeError as error:
        raise ValueError(f"{str(path)!r} is not UTF-8: {error}") from error


def read_template(path: str | None) -> str | None:
    """The chat template in a file; ``None`` without one. Raises ``CliError`` for what is no template."""
    if path is None:
        return None
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    with refused(ValueError, before="--chat-template: "):
        template = read_text(Path(path))
    try:
        _compile_jinja_template(template)
    except TemplateSyntaxError as error:
        place = f"line {error.lineno} of {path!r}"
        raise CliError(f"--chat-template: {place} is wrong: {error.message}") from error
    return template


def check_output(
    path: Path, source: Path | None = None, suffixes: tuple[str, ...] = (), option: str = "-o"
) -> None:
    """Raise ``CliError`` for a path that cannot be written or is ``source``, before a model is loaded."""
    name = f"{option}: {str(path)!r}"
    if suffixes and path.suffix not in suffixes:
        takes = f"takes a file that ends in {', '.join(suffixes)}"
        raise CliError(f"{option} {takes}, but is {str(path)!r}")
    if path.is_dir():
        raise CliError(f"{name} is a folder: give a file")
    if not path.parent.is_dir():
        raise CliError(f"{name} cannot be written: no such folder")
    if source is not None and path.exists() and path.samefile(source):
        raise CliError(f"{name} is the file that is read: give another one")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise CliError(f"{name} may not be written")


def read_prompt(prompt: str | None) -> str:
    """The prompt, or standard input (a pipe or ``-``) without its line end; ``CliError`` for no text."""
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
