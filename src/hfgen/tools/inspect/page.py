"""A trace as one HTML page: the data as JSON, with styles and scripts."""

from __future__ import annotations

import html
from functools import lru_cache
from pathlib import Path

HERE = Path(__file__).parent

#: Scripts, in the order in which they run.
SCRIPTS = ("format.js", "tokens.js", "details.js", "charts.js", "main.js")


def page(data: str, title: str) -> str:
    """The page of ``data``, a text of JSON in ASCII."""
    before, after = _template()
    # What ends a script, or begins a comment in one, has a "<", which JSON spells in another way too.
    return before.replace("{{title}}", html.escape(title)) + data.replace("<", "\\u003c") + after


@lru_cache(maxsize=1)
def _template() -> tuple[str, str]:
    """What comes before the data, and what comes after it."""
    text = _read("page.html").replace("{{style}}", _read("page.css"))
    text = text.replace("{{script}}", "\n".join(map(_read, SCRIPTS)))
    before, _, after = text.partition("{{data}}")
    return before, after


def _read(name: str) -> str:
    return (HERE / "assets" / name).read_text(encoding="utf-8")
