"""``python -m upstream``: a table of the defects, and which of them the installed transformers has.

Exits with 1 if one is no longer there: docs/differences.md has to change then.
"""

from __future__ import annotations

import logging
import warnings

import transformers
from rich.console import Console
from rich.table import Table

from upstream import DEFECTS


def main() -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    table = Table("what should hold", "state", "cause", "mend", "lines", show_lines=True)
    n_there = 0
    for defect in DEFECTS:
        state, error = defect.state()
        n_there += state == "still there"
        shown = error if state == "fails otherwise" else ""
        table.add_row(defect.name, f"{state} {shown}", defect.cause, defect.mend, f"{defect.lines}")
    Console().print(table)
    print(f"transformers {transformers.__version__}: {n_there} of {len(DEFECTS)} are still there.")
    return int(n_there < len(DEFECTS))


if __name__ == "__main__":
    raise SystemExit(main())
