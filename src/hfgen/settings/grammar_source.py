"""Grammars in the format of llguidance, and a check of their syntax without a tokenizer and without torch."""

from __future__ import annotations

from typing import Any

from .grammar import Grammar


def source_of(grammar: Grammar) -> str:
    """The grammar as llguidance writes it."""
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    options: Any = {"whitespace_flexible": bool(grammar.whitespace)}
    if isinstance(grammar.whitespace, str):
        options = {"whitespace_pattern": grammar.whitespace}
    return LLMatcher.grammar_from_json_schema(grammar.text, overrides=options)


def check(grammar: Grammar) -> None:
    """Raise ``ImportError`` if llguidance is not installed, ``ValueError`` for what it does not read."""
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise ImportError(
            "`grammar` needs the package llguidance: pip install 'hfgen[grammar]'"
        ) from None
    if error := LLMatcher.validate_grammar(source_of(grammar)):
        raise ValueError(f"llguidance refuses it: {error}")
