"""What the pages in docs/ show is so (docs/write-a-strategy.md has a test of its own)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"

PAGES = ["controls.md", "grammars.md", "logprobs.md", "samplers.md", "speculation.md", "streaming.md"]


@pytest.mark.parametrize("page", PAGES)
def test_code_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(
        r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL
    )
    assert blocks
    names: dict[str, object] = {"__name__": "page"}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    assert capsys.readouterr().out.strip()


def test_the_map_of_the_architecture_names_every_module() -> None:
    from scripts.update_architecture_map import PAGE, updated

    page = PAGE.read_text(encoding="utf-8")
    assert page == updated(page), "run: python scripts/update_architecture_map.py"
