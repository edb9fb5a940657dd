"""What the terminal shows: messages, text without control codes, numbers with their units."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

# What a terminal obeys in place of showing it (ECMA-48), each without its terminator.
_CSI = r"(?:\x1b\[|\x9b)[0-?]*[ -/]*"
_STRING = r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*"  # OSC, DCS, SOS, PM, APC
_ESCAPE = r"\x1b[ -/]*"
#: All of these, whole or broken off, and C0 and C1 controls but tab and line feed.
CONTROL_CODES = re.compile(
    rf"{_CSI}[@-~]?|{_STRING}(?:\x07|\x1b\\|\x9c)?|{_ESCAPE}[0-~]?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
UNFINISHED = re.compile(rf"(?:{_CSI}|{_STRING}\x1b?|{_ESCAPE})\Z")

out = Console(highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)


class CliError(Exception):
    """The input is wrong: shown as one line, exit code 2."""


@dataclass(slots=True)
class TerminalText:
    """Takes control codes, also split ones, out of text for a terminal, not for a pipe or a file."""

    held: str = ""  # the beginning of a control code

    def add(self, piece: str) -> str:
        """What can be written after ``piece``."""
        if not sys.stdout.isatty():
            return piece
        text = self.held + piece
        begun = UNFINISHED.search(text)
        self.held = begun[0] if begun else ""
        return CONTROL_CODES.sub("", text.removesuffix(self.held))


def print_json(report: dict[str, Any]) -> None:
    """Print one JSON object on a line, its control codes escaped."""
    text = json.dumps(report, ensure_ascii=False)
    print(re.sub(r"[\x7f-\x9f]", lambda code: f"\\u{ord(code[0]):04x}", text))


def one_line(message: str, width: int = 320) -> str:
    """``message`` on a single line of at most ``width`` characters, safe as rich markup."""
    return escape(textwrap.shorten(CONTROL_CODES.sub(" ", message), width, placeholder=" …"))


def say(markup: str) -> None:
    """One line on standard error, whatever the width of the terminal."""
    err.print(markup, soft_wrap=True)


def duration(seconds: float | None) -> str:
    """Seconds with a unit that suits them; a dash where there is no measurement."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def mebibytes(size: int | None) -> str:
    """Bytes as MiB; a dash where there is no measurement."""
    return "-" if size is None else f"{size / 2**20:,.0f} MiB"
