"""The site of docs/: its navigation, its links, and that it builds without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

NO_MKDOCS = find_spec("mkdocs") is None
pytestmark = pytest.mark.skipif(NO_MKDOCS, reason="mkdocs is not installed: hfgen[docs]")

ROOT = Path(__file__).parent.parent


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in (ROOT / "docs").glob("*.md"):
        assert (tmp_path / page.stem / "index.html").exists()
    lesson = (tmp_path / "learn" / "01-streaming" / "index.html").read_text(encoding="utf-8")
    assert "<table data-values>" in lesson  # values beside lines
    assert "b/learn/generate.py" in lesson  # the diff
    assert "def beam_search" in re.sub(
        "<.*?>", "", (tmp_path / "learn/index.html").read_text("utf-8")
    )
    assert (tmp_path / "benchmarks" / "results" / "caches.png").exists()
    assert "pip install" in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_a_new_page_is_in_the_navigation() -> None:
    from scripts.docs_site import navigation

    found = navigation(["engine.md", "brand-new.md", "index.md"])
    assert found == [
        {"Start": ["index.md"]},
        {"Serve, run, evaluate": ["engine.md"]},
        {"More": ["brand-new.md"]},
    ]
    assert navigation(["engine.md"]) == [{"Serve, run, evaluate": ["engine.md"]}]


def test_links_hold_on_the_site() -> None:
    from scripts.docs_site import linked

    assert linked("[a](docs/caches.md#static)", "index.md") == "[a](caches.md#static)"
    assert linked("![a](../benchmarks/x.png)", "caches.md") == "![a](benchmarks/x.png)"
    assert linked("[a](learn/README.md)", "CHANGELOG.md") == "[a](learn/index.md)"
    assert linked("[a](engine.md)", "caches.md") == "[a](engine.md)"
