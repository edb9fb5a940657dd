"""Grammars: formats that the text of a row must match, passed as ``generate(grammar=…)``."""

from __future__ import annotations

import json as _json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["KINDS", "Grammar", "choice", "json", "json_object", "lark", "regex"]

#: The languages that a grammar may be written in.
KINDS = ("json", "regex", "lark")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language: ``text`` is a JSON schema, a regular expression, or a Lark grammar, as ``kind`` says.

    Made by the functions of this module, and read when ``generate`` is called.
    """

    kind: str
    text: str
    #: Of a JSON schema only: whether there may be white space between tokens, or its pattern.
    whitespace: bool | str = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"`kind` of a grammar has to be one of {KINDS}, but is {self.kind!r}.")
        if not isinstance(self.text, str):
            raise TypeError(
                f"`text` of a grammar has to be a string, but is {described(self.text)}."
            )
        if not isinstance(self.whitespace, bool | str):
            given = described(self.whitespace)
            raise TypeError(f"`whitespace` has to be True, False or a pattern, but is {given}.")

    def __str__(self) -> str:
        text = self.text if len(self.text) <= 60 else f"{self.text[:60]}…"
        return f"{self.kind}({text})"

    def to_dict(self) -> dict[str, Any]:
        """Its fields, as a saved config has them."""
        return asdict(self)

    @classmethod
    def of(cls, value: Any) -> Grammar:
        """A grammar as it is, what ``to_dict`` returns as one, or the grammar of a JSON schema."""
        if isinstance(value, Mapping) and {"kind", "text"} <= value.keys():
            return cls(**value)
        return value if isinstance(value, Grammar) else json(value)

    def source(self) -> str:
        """The grammar in the format of llguidance, which has to be installed."""
        from llguidance import LLMatcher

        if self.kind == "regex":
            return LLMatcher.grammar_from_regex(self.text)
        if self.kind == "lark":
            return LLMatcher.grammar_from_lark(self.text)
        options: Any = {"whitespace_flexible": bool(self.whitespace)}
        if isinstance(self.whitespace, str):
            options = {"whitespace_pattern": self.whitespace}
        return LLMatcher.grammar_from_json_schema(self.text, overrides=options)

    def check(self) -> None:
        """Check the syntax: ``ImportError`` without llguidance, ``ValueError`` for what it refuses."""
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise ImportError(
                "`grammar` needs the package llguidance: pip install 'hfgen[grammar]'"
            ) from None
        if error := LLMatcher.validate_grammar(self.source()):
            raise ValueError(f"llguidance refuses it: {error}")


def json(schema: Any, *, whitespace: bool | str = True) -> Grammar:
    """JSON that a schema describes.

    Args:
        schema: A JSON schema as a dict, as JSON text, or a pydantic class.
        whitespace: Whether white space may stand between tokens, or a regular expression of what may.
            ``False`` writes compact JSON; a small model may else write spaces without end.

    Raises ``TypeError`` for another ``schema``, and ``ValueError`` for text that is not JSON.
    """
    if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        try:
            schema = _json.loads(schema)
        except _json.JSONDecodeError as error:
            raise ValueError(f"`schema` is text, but not JSON: {error}.") from None
    schema = {} if schema is True else schema  # any JSON
    if not isinstance(schema, Mapping):
        allowed = "a dict, JSON text of one, or a pydantic class"
        raise TypeError(f"`schema` has to be {allowed}, but is {described(schema)}.")
    return Grammar("json", _json.dumps(dict(schema), ensure_ascii=False), whitespace)


def json_object(*, whitespace: bool | str = True) -> Grammar:
    """Any JSON object. ``whitespace`` as of ``json``."""
    return json({"type": "object"}, whitespace=whitespace)


def regex(pattern: str) -> Grammar:
    """Text that a regular expression matches as a whole (the syntax of Rust's ``regex`` crate)."""
    return Grammar("regex", pattern)


def lark(text: str) -> Grammar:
    """Text of a context-free grammar in Lark's notation, with the rule ``start``."""
    return Grammar("lark", text)


def choice(options: Sequence[str]) -> Grammar:
    """One of some texts. ``TypeError`` for no list of strings, ``ValueError`` for an empty one."""
    is_list = isinstance(options, Sequence) and not isinstance(options, str)
    if not is_list or not all(isinstance(option, str) for option in options):
        raise TypeError(f"`options` has to be a list of strings, but is {described(options)}.")
    if not options:
        raise ValueError("`options` has to have one string at least, but is empty.")
    texts = (_json.dumps(option, ensure_ascii=False) for option in options)
    return Grammar("lark", f"start: {' | '.join(texts)}")


def described(value: Any) -> str:
    """The type and the first characters of a value, for messages."""
    return f"{type(value).__name__} ({str(value)[:60]})"
