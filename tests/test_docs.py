"""What the pages in docs/ show is so (docs/write-a-strategy.md has a test of its own)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"

#: Pages whose code runs elsewhere: it needs a server, other libraries, or more checks.
ELSEWHERE = {
    "serving.md": "clients/test_serving_limits.py",
    "training.md": "clients/test_trl_rollout.py",
    "with-your-library.md": "clients/test_with_your_library.py",
    "write-a-strategy.md": "test_write_a_strategy.py",
}
PAGES = sorted(
    page.name
    for page in DOCS.glob("*.md")
    if "```python" in page.read_text(encoding="utf-8") and page.name not in ELSEWHERE
)


def run_blocks(page: str, names: dict[str, object]) -> int:
    """Run the code of a page, all of it with the same names; how many blocks there are."""
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    return len(blocks)


@pytest.mark.parametrize("page", PAGES)
def test_code_runs(
    page: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)  # where a page may write files
    assert run_blocks(page, {"__name__": "page"}) > 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", sorted(ELSEWHERE))
def test_code_that_runs_elsewhere_does(page: str) -> None:
    assert page in (Path(__file__).parent / ELSEWHERE[page]).read_text(encoding="utf-8")


def test_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_blocks("../README.md", {"__name__": "page"}) == 1
    texts, *events = capsys.readouterr().out.splitlines()
    assert texts.startswith("['ArgumentParser()', ")  # what the page shows is worth reading
    assert len(events) == 3 * 4


def test_the_readme_is_short() -> None:
    assert len((DOCS.parent / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_the_map_of_the_architecture_names_every_module() -> None:
    from scripts.update_architecture_map import PAGE, updated

    page = PAGE.read_text(encoding="utf-8")
    assert page == updated(page), "run: python scripts/update_architecture_map.py"


def test_the_tables_of_the_pages_are_those_of_the_results() -> None:
    from scripts.update_readme_tables import pages, updated_page

    found = {page.name: page for page in pages()}
    assert {"README.md", "caches.md"} <= set(found)
    stale = [
        name
        for name, page in found.items()
        if page.read_text(encoding="utf-8") != updated_page(page)
    ]
    assert not stale, "run: python scripts/update_readme_tables.py"


def test_tables_take_what_was_measured(tmp_path: Path) -> None:
    """Of some models and modes only, of a benchmark without a block of its own, or of nothing."""
    from scripts.update_readme_tables import ROOT, updated

    page = "a\n<!-- results: {} -->\nold\n<!-- /results -->\nz\n"
    nothing = "a\n<!-- results: {} -->\n<!-- /results -->\nz\n"
    assert updated(page.format("scale"), tmp_path) == nothing.format("scale")

    seconds = {"upstream": [2.0, 2.0], "hfgen": [1.0, 1.0]}
    mode = {"name": "greedy", "new_tokens": 4, "wall": seconds, "cpu": seconds}
    facts = {"processor": "P", "cores": 1, "threads": 2, "torch": "2.13.0+cpu", "transformers": "5"}
    raw = {"machine": facts, "models": {"small": {"parameters": 5e6, "modes": {"greedy": mode}}}}
    (tmp_path / "overhead.json").write_text(json.dumps(raw))
    text = updated(page.format("summary"), tmp_path)
    assert "| the same call | 2.00 to 2.00 | |" in text
    assert "\n\nP, 1 core, 2 threads, torch 2.13.0, transformers 5." in text
    assert updated(text, tmp_path) == text

    (tmp_path / "new.json").write_text("{}")
    (tmp_path / "new.md").write_text("# New\n\n| a | b |\n|---|--:|\n| x | 1 |\n\n| c |\n")
    text = updated(page.format("new"), tmp_path)
    assert "| x | 1 |\n\n<!-- /results -->" in text
    assert "old" not in text
    assert "[new.md](benchmarks/results/new.md)" in text
    text = updated(page.format("new"), tmp_path, ROOT / "docs")
    assert "[new.md](../benchmarks/results/new.md)" in text
