"""Terminal output: messages, answers without control codes, tables, numbers with units."""

from __future__ import annotations

import json
import re
import statistics
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ...settings.fields import FIELDS

#: The fields that can be given as text, and the kind of value that each takes.
KNOWN_FIELDS = {name: row.kind for name, row in FIELDS.items() if row.kind.option is not None}

#: C0 and C1 controls but tab and line feed: without them, a terminal obeys no text (ECMA-48).
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

#: Why an answer ended, in words.
REASONS = {"eos": "ended by itself", "length": "cut off by its length", "stop": "stopped"}
REASONS |= {"time": "out of time", "repetition": "repeated itself"}

out = Console(highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)


class CliError(Exception):
    """The input is wrong: shown as one line, exit code 2."""


@contextmanager
def refused(*kinds: type[Exception], before: str = "") -> Iterator[None]:
    """Turn errors of ``kinds`` into ``CliError``, which names options for fields; of ``OSError`` alone, its reason."""
    try:
        yield
    except (BrokenPipeError, CliError):  # the former: the reader of the output has closed the pipe
        raise
    except kinds as error:
        is_of_system = kinds == (OSError,)
        message = getattr(error, "strerror", None) if is_of_system else with_options(str(error))
        raise CliError(f"{before}{message or type(error).__name__}") from error


def option_name(field: str) -> str:
    """The option of a field; one that is no field has its own name."""
    return field if field.startswith("--") else "--" + field.replace("_", "-")


def with_options(message: str) -> str:
    """An error's ``message`` with options for fields: ``--no-use-cache`` for "`use_cache=False`"."""

    def option(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        if name not in KNOWN_FIELDS:
            return match[0]
        if value == "False":
            return f"--no-{option_name(name)[2:]}"
        return option_name(name) + ("" if value in (None, "True") else f" {value.strip(chr(39))}")

    return re.sub(r"`(\w+)(?:=([^`]+))?`", option, message).rstrip(".")


class Answers:
    """Writes texts to standard output, the first as it comes; a terminal gets no control codes."""

    def __init__(self, n_rows: int = 1) -> None:
        self.texts = [""] * n_rows
        self.has_ended = [False] * n_rows
        self.row = 0  # the one that is being written
        self.n_written: int | None = None  # characters of it; None before its heading

    def __call__(self, event: Any) -> None:
        """Take a ``StreamEvent``."""
        self.add(event.row, event.text, event.finish_reason is not None)

    def add(self, row: int, text: str, has_ended: bool) -> None:
        """Take more text of ``row``; write the current row, and the next ones if it has ended."""
        self.texts[row] += text
        self.has_ended[row] = has_ended
        while row <= self.row < len(self.texts):
            if self.n_written is None and len(self.texts) > 1:
                sys.stdout.write(f"--- {self.row + 1} of {len(self.texts)} ---\n")
            new_text = self.texts[self.row][self.n_written or 0 :]
            sys.stdout.write(CONTROLS.sub("", new_text) if sys.stdout.isatty() else new_text)
            sys.stdout.flush()
            self.n_written = len(self.texts[self.row])
            if not self.has_ended[self.row]:
                break
            self.end()

    def end(self) -> None:
        """End the current row with a line feed, and go on to the next one."""
        if not self.texts[self.row].endswith("\n"):
            sys.stdout.write("\n")
        self.row, self.n_written = self.row + 1, None


def print_json(report: dict[str, Any]) -> None:
    """Print one JSON object on a line, its control codes escaped."""
    is_unicode = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    text = json.dumps(report, ensure_ascii=not is_unicode)
    print(re.sub(r"[\x7f-\x9f]", lambda code: f"\\u{ord(code[0]):04x}", text))


def one_line(message: str, width: int = 320) -> str:
    """``message`` on a single line of at most ``width`` characters, safe as rich markup."""
    return escape(textwrap.shorten(CONTROLS.sub(" ", message), width, placeholder=" …"))


def say(markup: str) -> None:
    """One line on standard error, whatever the width of the terminal."""
    err.print(markup, soft_wrap=True)


def note(message: str) -> None:
    """A note on standard error: something that the user may not expect."""
    say(f"[yellow]note:[/] {one_line(message)}")


def end_reason(reason: str) -> str:
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
    grid = Table(*texts, box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in numbers:
        grid.add_column(name, justify="right", no_wrap=True)
    return grid


def interval_text(interval: Any, digits: str) -> str:
    """Both ends of an interval; a dash without one."""
    return "-" if interval is None else f"{interval.low:{digits}} to {interval.high:{digits}}"
