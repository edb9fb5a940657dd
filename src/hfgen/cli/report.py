"""What the terminal shows: messages, numbers with their units, tables."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from hfgen.cli.compare import Comparison, Difference
    from hfgen.cli.measure import Timings

NEAR_TIE = 1e-4  # a top-2 gap of logits below which rounding alone can choose the token

# What a terminal obeys in place of showing it (ECMA-48), each without what ends it.
_CSI = r"(?:\x1b\[|\x9b)[0-?]*[ -/]*"
_STRING = r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*"  # OSC, DCS, SOS, PM, APC
_ESCAPE = r"\x1b[ -/]*"
#: All of these, whole or broken off, and C0 and C1 controls but tab and line feed.
CONTROL_CODES = re.compile(
    rf"{_CSI}[@-~]?|{_STRING}(?:\x07|\x1b\\|\x9c)?|{_ESCAPE}[0-~]?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
UNFINISHED = re.compile(rf"(?:{_CSI}|{_STRING}\x1b?|{_ESCAPE})\Z")

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


class CliError(Exception):
    """The input is wrong: shown as one line, exit code 2."""


@dataclass(slots=True)
class TerminalText:
    """Text that a model wrote, piece by piece, as it goes to standard output.

    Control codes are taken out if that is a terminal, also where pieces split one. A pipe or a file
    gets the text as it is.
    """

    held: str = ""  # a sequence that has begun

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


def summary(timings: Timings, peak_memory: int | None) -> str:
    """The four numbers of a run on one line."""
    return (
        f"{timings.tokens} tokens · first after {duration(timings.first)} · "
        f"{duration(timings.per_token)} per token · {timings.per_second:,.0f} tokens/s · "
        f"peak {mebibytes(peak_memory)}"
    )


def comparison_table(names: Sequence[str], results: Sequence[Comparison], heading: str) -> Table:
    """Both libraries side by side, one row per prompt or mode; times are medians."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(heading, overflow="ellipsis", no_wrap=True, max_width=26)
    for column in ("tokens", "same tokens", "transformers", "hfgen", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, result in zip(names, results, strict=True):
        verdict = Text("no", style="bold red") if result.differences else Text("yes", style="green")
        table.add_row(
            Text(name),
            str(result.tokens),
            verdict,
            duration(result.seconds("transformers")),
            duration(result.seconds("hfgen")),
            f"{result.ratio:.2f}",
        )
    return table


def difference_line(difference: Difference) -> str:
    """Where two outputs part, in one line of rich markup."""
    place = f"row {difference.row}, new token {difference.position + 1}"
    tokens = (
        f"transformers {difference.describe('transformers')}, hfgen {difference.describe('hfgen')}"
    )
    if difference.gap is None:
        gap = "no logits there"
    elif difference.gap < NEAR_TIE:
        gap = f"top-2 logit gap {difference.gap:.2e}, a near tie that rounding can decide"
    else:
        gap = f"top-2 logit gap {difference.gap:.2e}"
    return f"[red]{place}:[/] {escape(tokens)}; {gap}"
