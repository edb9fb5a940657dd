"""The lessons in order, and the twin after each of them.

To change a lesson: ``python -m learn.lessons unpack FOLDER`` writes the twin and what each lesson
makes of it as ``FOLDER/00.py``, ``01.py``, and so on. Edit these files, then ``python -m
learn.lessons pack FOLDER`` writes ``generate.py`` and the diffs again, and ``python -m learn.show``
the values in the pages.
"""

from __future__ import annotations

import difflib
import linecache
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent
LESSONS = [
    "01-streaming",
    "02-processors",
    "03-prefill-once",
    "04-growing-cache",
    "05-drafts",
    "06-continuous-batching",
    "07-grammars",
    "08-seeds",
    "09-exact-rows",
]


def sources() -> list[str]:
    """Return the twin, and the twin after each lesson: ten texts, made with ``git apply``."""
    texts = [(FOLDER / "generate.py").read_text(encoding="utf-8")]
    # Variables such as GIT_DIR would lead git to another folder.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    with tempfile.TemporaryDirectory() as folder:
        twin = Path(folder, "learn", "generate.py")
        twin.parent.mkdir()
        twin.write_text(texts[0], encoding="utf-8")
        for lesson in LESSONS:
            diff = FOLDER / f"{lesson}.diff"
            subprocess.run(["git", "apply", str(diff)], cwd=folder, env=environment, check=True)
            texts.append(twin.read_text(encoding="utf-8"))
    return texts


@cache
def modules() -> list[ModuleType]:
    """Return the twin and what each lesson makes of it as modules that can be called."""
    return [load(text, f"learn_after_{number}") for number, text in enumerate(sources())]


def load(text: str, name: str) -> ModuleType:
    """Make a module of a text."""
    module = ModuleType(name)
    sys.modules[name] = module  # where dataclasses look up the names in annotations
    linecache.cache[name] = (
        len(text),
        None,
        text.splitlines(keepends=True),
        name,
    )  # for tracebacks
    exec(compile(text, name, "exec"), module.__dict__)
    return module


def unpack(folder: Path) -> None:
    """Write the ten versions to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(sources()):
        (folder / f"{number:02}.py").write_text(text, encoding="utf-8")


def pack(folder: Path) -> None:
    """Write ``generate.py`` and the diffs from the versions in ``folder``."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("[0-9][0-9].py"))]
    (FOLDER / "generate.py").write_text(texts[0], encoding="utf-8")
    for lesson, before, after in zip(LESSONS, texts, texts[1:], strict=False):
        names = "a/learn/generate.py", "b/learn/generate.py"
        lines = difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), *names
        )
        (FOLDER / f"{lesson}.diff").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    {"unpack": unpack, "pack": pack}[sys.argv[1]](Path(sys.argv[2]))
