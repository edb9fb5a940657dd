"""Write the map of docs/architecture.md: each room with the first line of its docstring, top floor first.

A test holds the two equal, and that no room imports one above it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
SOURCE = ROOT / "src" / "hfgen"
START, END = "<!-- map -->\n", "<!-- end of map -->\n"
#: The floors, lowest first: what stands on each may import what stands on it or below.
FLOORS = (
    ("settings", "families"),
    ("state",),
    ("memory",),
    ("running",),
    ("logits",),
    ("decoding",),
    ("prepare",),
    ("streaming",),
    ("mixin", "delegate", "patching"),
    ("engine", "session"),
    ("tools", "lm_eval", "ray", "run", "trl", "__main__"),
)


def summary(path: Path) -> str:
    """The first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.sub(r"``", "`", docstring.partition("\n")[0])


def rows() -> str:
    """The table of rooms and loose modules."""
    lines = ["| floor | room | what it is |", "|--:|---|---|"]
    for floor, names in reversed([*enumerate(FLOORS, 1)]):
        for name in names:
            path = SOURCE / f"{name}.py"
            if (start := SOURCE / name / "__init__.py").exists():
                lines.append(f"| {floor} | `{name}/` | {summary(start)} |")
            elif name != "__main__":
                lines.append(f"| {floor} | `{name}.py` | {summary(path)} |")
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    """``page`` with the table as it has to be."""
    before, _, rest = page.partition(START)
    return before + START + "\n" + rows() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
