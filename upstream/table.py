"""``DEFECTS``: what is wrong, where, and what would mend it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

State = Literal["still there", "mended", "fails otherwise"]


@dataclass(frozen=True)
class Defect:
    """A defect of transformers. ``check()`` raises ``error``, with a matching ``message``, until it is mended."""

    check: Callable[[], None]
    error: type[Exception]
    message: str
    #: File and function of transformers, and what it does.
    cause: str
    mend: str
    #: How many lines of transformers the mend changes, about.
    lines: int

    @property
    def name(self) -> str:
        """The call and what should hold: the first line of the check's docstring."""
        return (self.check.__doc__ or "").strip().partition("\n")[0]

    def state(self) -> tuple[State, str]:
        """Run the check; the state, and the error that was raised."""
        try:
            self.check()
        except Exception as error:
            is_known = isinstance(error, self.error) and re.search(self.message, str(error))
            text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return ("still there" if is_known else "fails otherwise"), text
        return "mended", ""


DEFECTS: list[Defect] = []


def defect(
    error: type[Exception], message: str, cause: str, mend: str, lines: int
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Add the decorated check to ``DEFECTS``, which has the smallest mends first."""

    def add(check: Callable[[], None]) -> Callable[[], None]:
        DEFECTS.append(Defect(check, error, message, cause, mend, lines))
        DEFECTS.sort(key=lambda each: each.lines)
        return check

    return add
