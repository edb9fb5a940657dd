"""Write the map of docs/architecture.md: each module with the first line of its docstring.

A test holds the two equal, so the map is true line by line.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
SOURCE = ROOT / "src" / "hfgen"
START, END = "<!-- map -->\n", "<!-- end of map -->\n"
#: Modules that say nothing about the structure.
LEFT_OUT = ("__main__.py", "logs.py")


def summary(path: Path) -> str:
    """The first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.sub(r"``", "`", docstring.partition("\n")[0])


def rows() -> str:
    """The table: packages after the modules beside them."""
    files = sorted(SOURCE.rglob("*.py"), key=lambda p: (len(p.parts), p.parent, p.name))
    lines = ["| module | what it is |", "|---|---|"]
    for path in files:
        if path.name in LEFT_OUT:
            continue
        name = path.relative_to(SOURCE).as_posix()
        name = name.removesuffix("__init__.py") if "/" in name else name
        lines.append(f"| `{name}` | {summary(path)} |")
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    """``page`` with the table as it has to be."""
    before, _, rest = page.partition(START)
    return before + START + "\n" + rows() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
