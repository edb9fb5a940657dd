"""What docs/with-your-library.md shows: each block runs as written, on hfgen's loop."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hfgen
from hfgen import run
from hfgen.decoding import loop
from tests import tiny
from tests.clients.conftest import TEMPLATE, model

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "with-your-library.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


def blocks(kind: str) -> list[tuple[str, str]]:
    """The blocks of code of a kind, each with the name of its section."""
    return [
        (name, block)
        for name, text in SECTIONS.items()
        for found, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        if found == kind
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with models of the names that the page uses."""
    model().save_pretrained(tmp_path / "my-model")
    tiny.byte_tokenizer(TEMPLATE).save_pretrained(tmp_path / "my-model")
    tiny.t5().save_pretrained(tmp_path / "my-translator")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The steps of hfgen's loop, as they come; models are unpatched at the end."""
    seen: list[Any] = []
    original = loop.steps

    def noting(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for step in original(*args, **kwargs):
            seen.append(step)
            yield step

    monkeypatch.setattr(loop, "steps", noting)
    with torch.compiler.set_stance("force_eager"):  # outlines compiles a kernel that masks scores
        yield seen
    hfgen.unpatch()


@pytest.mark.parametrize(("name", "block"), blocks("python"), ids=[n for n, _ in blocks("python")])
@pytest.mark.usefixtures("folder")
def test_a_block_runs_on_hfgen(
    name: str, block: str, steps: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(block, f"with-your-library.md, {name}", "exec"), {"__name__": "page"})
    assert steps
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(("name", "line"), blocks(""), ids=[n for n, _ in blocks("")])
def test_a_command_is_there(
    name: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its help, with the options that the page gives: to run it takes a network, or for ever."""
    python, _, module, *arguments = shlex.split(line)
    assert (python, module) == ("python", "hfgen.run")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit, match=r"^0$"):
        run.main([*arguments, "--help"])
    hfgen.unpatch()
    assert name.split()[-1].replace("_", "-") in capsys.readouterr().out.replace("_", "-")


def test_the_table_has_every_section() -> None:
    names = re.findall(r"^\| \[(.+?)\]\(#", PAGE, re.MULTILINE)
    assert names == list(SECTIONS)
