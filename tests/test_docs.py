"""What the pages in docs/ show is so (docs/write-a-strategy.md has a test of its own)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers

import hfgen

DOCS = Path(__file__).parent.parent / "docs"

PAGES = [
    "batch-jobs.md",
    "controls.md",
    "engine.md",
    "evaluate.md",
    "grammars.md",
    "logprobs.md",
    "optimize.md",
    "samplers.md",
    "speculation.md",
    "streaming.md",
]


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
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where measured times are kept
    assert run_blocks(page, {"__name__": "page"}) > 0
    assert capsys.readouterr().out.strip()


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
