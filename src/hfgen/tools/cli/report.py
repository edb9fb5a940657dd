"""Terminal output: messages, text without control codes, numbers with units."""

from __future__ import annotations

import json
import re
import statistics
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

if TYPE_CHECKING:
    from ... import StreamEvent

# What a terminal obeys in place of showing it (ECMA-48), each without its terminator.
_CSI = r"(?:\x1b\[|\x9b)[0-?]*[ -/]*"
_STRING = r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*"  # OSC, DCS, SOS, PM, APC
_ESCAPE = r"\x1b[ -/]*"
#: All of these, whole or broken off, and C0 and C1 controls but tab and line feed.
CONTROL_CODES = re.compile(
    rf"{_CSI}[@-~]?|{_STRING}(?:\x07|\x1b\\|\x9c)?|{_ESCAPE}[0-~]?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
UNFINISHED = re.compile(rf"(?:{_CSI}|{_STRING}\x1b?|{_ESCAPE})\Z")

#: Why an answer ended, in words.
REASONS = {
    "eos": "ended by itself",
    "length": "cut off by its length",
    "stop": "stopped",
    "time": "out of time",
    "repetition": "repeated itself",
}

out = Console(highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)


class CliError(Exception):
    """The input is wrong: shown as one line, exit code 2."""


@dataclass(slots=True)
class TerminalText:
    """Takes control codes, also split ones, out of text for a terminal, not for a pipe or a file."""

    held: str = ""  # the beginning of a control code

    def add(self, piece: str) -> str:
        """Add ``piece``; return the text that can be written now."""
        if not sys.stdout.isatty():
            return piece
        text = self.held + piece
        begun = UNFINISHED.search(text)
        self.held = begun[0] if begun else ""
        return CONTROL_CODES.sub("", text.removesuffix(self.held))


class Answers:
    """Writes texts to standard output, one after the other, the first as it comes."""

    def __init__(self, n_rows: int = 1) -> None:
        self.n_rows = n_rows
        self.texts: list[str] = [""] * n_rows
        self.has_ended = [False] * n_rows
        #: The row that is being written, and its characters that have been; ``None`` before its heading.
        self.row, self.n_written = 0, None  # type: int, int | None
        self.terminal = TerminalText()

    def __call__(self, event: StreamEvent) -> None:
        """Take an event of a stream."""
        self.add(event.row, event.text, event.finish_reason is not None)

    def add(self, row: int, text: str, has_ended: bool) -> None:
        """Take more text of ``row``; write the current row, and the next ones if it has ended."""
        self.texts[row] += text
        self.has_ended[row] = has_ended
        while self.row < self.n_rows and row <= self.row:
            self.write(self.texts[self.row])
            if not self.has_ended[self.row]:
                break
            self.end()

    def write(self, text: str) -> None:
        """Write the new part of ``text``, the whole text of the current row so far."""
        if self.n_written is None and self.n_rows > 1:
            sys.stdout.write(f"--- {self.row + 1} of {self.n_rows} ---\n")
        sys.stdout.write(self.terminal.add(text[self.n_written or 0 :]))
        sys.stdout.flush()
        self.n_written = len(text)

    def end(self) -> None:
        """End the current row with a line feed, and go on to the next one."""
        if not self.texts[self.row].endswith("\n"):
            sys.stdout.write("\n")
        self.row, self.n_written, self.terminal = self.row + 1, None, TerminalText()


def print_json(report: dict[str, Any]) -> None:
    """Print one JSON object on a line, its control codes escaped."""
    is_unicode = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    text = json.dumps(report, ensure_ascii=not is_unicode)
    print(re.sub(r"[\x7f-\x9f]", lambda code: f"\\u{ord(code[0]):04x}", text))


def one_line(message: str, width: int = 320) -> str:
    """``message`` on a single line of at most ``width`` characters, safe as rich markup."""
    return escape(textwrap.shorten(CONTROL_CODES.sub(" ", message), width, placeholder=" …"))


def say(markup: str) -> None:
    """One line on standard error, whatever the width of the terminal."""
    err.print(markup, soft_wrap=True)


def why(reason: str) -> str:
    """Why an answer ended, in words, safe as rich markup; what stopped it is named."""
    stop = getattr(reason, "stop", None) if reason == "stop" else None
    return one_line(REASONS.get(reason, reason) + ("" if stop is None else f" by {stop!r}"))


def duration(seconds: float | None) -> str:
    """Seconds with a unit that suits them; a dash where there is no measurement."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def spread(values: Sequence[float], digits: int) -> str:
    """The median, and half of the range where there are several; a dash for none."""
    if len(values) < 2:
        return f"{values[0]:,.{digits}f}" if values else "-"
    half = (max(values) - min(values)) / 2
    return f"{statistics.median(values):,.{digits}f} ±{half:,.{digits}f}"


def table(*texts: str | Column, numbers: Iterable[str] = ()) -> Table:
    """A table without lines: columns of ``texts`` on the left, those of ``numbers`` on the right."""
    found = Table(*texts, box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in numbers:
        found.add_column(name, justify="right", no_wrap=True)
    return found


def interval_text(interval: Any, digits: str) -> str:
    """Both ends of an interval; a dash without one."""
    return "-" if interval is None else f"{interval.low:{digits}} to {interval.high:{digits}}"


def mebibytes(size: int | None) -> str:
    """Bytes as MiB; a dash where there is no measurement."""
    return "-" if size is None else f"{size / 2**20:,.0f} MiB"
