"""What the pages in docs/ show is so (docs/write-a-strategy.md has a test of its own)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import transformers

import hfgen

DOCS = Path(__file__).parent.parent / "docs"

#: Pages whose code runs elsewhere: it needs a server, other libraries, or more checks.
ELSEWHERE = {
    "serving.md": "clients/test_serving_limits.py",
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
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where measured times are kept
    assert run_blocks(page, {"__name__": "page"}) > 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", sorted(ELSEWHERE))
def test_code_that_runs_elsewhere_does(page: str) -> None:
    assert page in (Path(__file__).parent / ELSEWHERE[page]).read_text(encoding="utf-8")


def test_the_readme_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the built-in model in place of the reader's."""
    model, tokenizer = hfgen.builtin_model()
    for name, loaded in ("AutoModelForCausalLM", model), ("AutoTokenizer", tokenizer):
        monkeypatch.setattr(
            getattr(transformers, name), "from_pretrained", lambda *_, of=loaded: of
        )
    names: dict[str, object] = {"__name__": "page"}
    assert run_blocks("../README.md", names) == 2
    assert names["model"] is not model  # the second block loads the built-in model itself
    assert capsys.readouterr().out.count("length") > 0


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
    assert updated(page.format("overhead"), tmp_path) == nothing.format("overhead")

    seconds = {"upstream": [2.0, 2.0], "hfgen": [1.0, 1.0]}
    mode = {"name": "greedy", "new_tokens": 4, "wall": seconds, "cpu": seconds}
    facts = {"processor": "P", "cores": 1, "threads": 2, "torch": "2.13.0+cpu", "transformers": "5"}
    raw = {"machine": facts, "prompt_tokens": 3, "max_new_tokens": 4}
    raw["models"] = {"tiny": {"parameters": 5e6, "modes": {"greedy": mode}}}
    (tmp_path / "overhead.json").write_text(json.dumps(raw))
    text = updated(page.format("overhead"), tmp_path)
    assert "| greedy | **0.500** (0.500 to 0.500) |" in text
    assert "2 pairs (tiny), with quartiles; prompts of 3 tokens, 4 new tokens. P, 1 core, " in text
    assert "2 threads, torch 2.13.0, transformers 5." in text
    assert updated(text, tmp_path) == text

    (tmp_path / "new.json").write_text("{}")
    (tmp_path / "new.md").write_text("# New\n\n| a | b |\n|---|--:|\n| x | 1 |\n\n| c |\n")
    text = updated(page.format("new"), tmp_path)
    assert "### New" in text
    assert "| x | 1 |\n\n<!-- /results -->" in text
    assert "old" not in text
    assert "[new.md](benchmarks/results/new.md)" in text
    text = updated(page.format("new"), tmp_path, ROOT / "docs")
    assert "[new.md](../benchmarks/results/new.md)" in text

    summary = updated(page.format("summary"), tmp_path)
    assert "| short calls: the 1 modes" not in summary  # of neither model of the table
