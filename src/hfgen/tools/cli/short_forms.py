"""Options with names of their own that set a field: ``--stop``, ``--json-schema``, …"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...settings import grammar
from ...settings import grammar_source as source
from .files import read_text
from .report import CliError
from .topics import option_name

ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


@dataclass(frozen=True, slots=True)
class ShortForm:
    """An option: the field that it sets, what is written behind it, and how that is read."""

    field: str
    metavar: str
    read: Callable[..., Any]
    #: Whether it may be given several times; ``read`` gets a list then.
    is_repeated: bool = False


def unescaped(text: str) -> str:
    r"""``text`` with a line feed for ``\n``, and so on for ``\t``, ``\r`` and ``\\``."""
    return re.sub(r"\\(.)", lambda found: ESCAPES.get(found[1], found[0]), text)


#: Between the tokens of JSON: small models may write spaces without end.
WHITESPACE = " ?"


def _schema(path: str) -> grammar.Grammar:
    try:
        schema = json.loads(read_text(Path(path)))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path!r} is not JSON: {error}") from error
    return grammar.json(schema, whitespace=WHITESPACE)


def _checked(make: Callable[..., grammar.Grammar]) -> Callable[..., grammar.Grammar]:
    """``make``, and an error at once if the library of grammars does not read what it made."""

    def read(value: Any) -> grammar.Grammar:
        made = make(value)
        source.check(made)
        return made

    return read


SHORT_FORMS: dict[str, ShortForm] = {
    "--stop": ShortForm("stop_strings", "TEXT", lambda texts: list(map(unescaped, texts)), True),
    "--json-schema": ShortForm("grammar", "FILE", _checked(_schema)),
    "--json-object": ShortForm(
        "grammar", "", _checked(lambda _: grammar.json_object(whitespace=WHITESPACE))
    ),
    "--regex": ShortForm("grammar", "PATTERN", _checked(grammar.regex)),
    "--choice": ShortForm("grammar", "TEXT", _checked(grammar.choice), True),
    "--lark": ShortForm(
        "grammar", "FILE", _checked(lambda path: grammar.lark(read_text(Path(path))))
    ),
}


def fields_of(texts_of: dict[str, list[str]], fields: Collection[str]) -> dict[str, Any]:
    """The fields that short forms set; ``texts_of`` has what was written behind each.

    ``fields`` are those that other options have set.

    Raises ``CliError`` for two options of one field, and for what cannot be read.
    """
    options = {field: option_name(field) for field in fields}
    values = {}
    for option, texts in texts_of.items():
        form = SHORT_FORMS[option]
        if form.field in options:
            raise CliError(f"{options[form.field]} and {option} exclude each other: leave one out")
        if len(texts) > 1 and not form.is_repeated:
            raise CliError(f"{option} was given {len(texts)} times: give it once")
        if form.metavar and "" in texts:
            raise CliError(f"{option} takes {form.metavar}, but '' was given")
        try:
            values[form.field] = form.read(texts if form.is_repeated else texts[0])
        except (ImportError, TypeError, ValueError) as error:
            raise CliError(f"{option}: {error}") from error
        options[form.field] = option
    return values
