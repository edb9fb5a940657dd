"""What the commands of benchmarks share: their options, and the files that they write."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

RESULTS = Path("benchmarks/results")

OutOption = Annotated[Path, typer.Option(help="Folder of what is written.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="Default: torch's.")]


def set_threads(threads: int | None) -> None:
    """Let torch compute with so many threads; ``None`` leaves what it has."""
    if threads is not None:
        torch.set_num_threads(threads)


def write(
    folder: Path,
    name: str,
    text: str,
    raw: Any,
    plot: Callable[[Path], None] | None = None,
    indent: int | None = 1,
) -> str:
    """Write ``name``.md, ``name``.json and, by ``plot(path)``, ``name``.png to ``folder``; returns ``text``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    (folder / f"{name}.json").write_text(json.dumps(raw, indent=indent) + "\n", encoding="utf-8")
    if plot is not None:
        plot(folder / f"{name}.png")
    return text


def write_section(
    folder: Path, name: str, title: str, key: str, raw: dict[str, Any], order: Iterable[str]
) -> None:
    """Write ``raw``, of which ``raw["text"]`` is a section of the page, beside those of other keys.

    The sections stay that earlier runs have written, in ``order``.
    """
    path = folder / f"{name}.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept[key] = raw
    sections = [kept[each]["text"] for each in order if each in kept]
    write(folder, name, f"# {title}\n\n" + "\n".join(sections), kept)
