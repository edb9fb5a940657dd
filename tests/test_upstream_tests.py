"""``scripts/upstream_tests.py`` on a checkout of three tests: each way is tried, and what only hfgen breaks is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "upstream_tests.py"
TESTS = """
import hfgen
import pytest
from transformers import GenerationMixin, LlamaForCausalLM

def test_of_both():
    assert issubclass(LlamaForCausalLM, GenerationMixin)

@pytest.mark.parametrize("is_mine", [False, True], ids=["a 1", "a 2"])
def test_of_transformers(is_mine):
    assert is_mine or not issubclass(LlamaForCausalLM, hfgen.GenerationMixin)

def test_of_none():
    assert False
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


def test_what_hfgen_breaks_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_three.py").write_text(TESTS)
    done = run(str(tmp_path), "-p", "no:cacheprovider")
    assert done.stdout == (
        "test_three.py::test_of_transformers[a 1]\n"
        "2 pass with hfgen, 1 fail with hfgen alone; 1 fail with transformers.\n"
    )
    assert done.returncode == 1
    assert run(str(tmp_path), "-k", "both").returncode == 0


def test_wrong_arguments_are_errors(tmp_path: Path) -> None:
    assert "git clone" in run(str(tmp_path / "none")).stderr
    assert "no tests ran" in run(str(tmp_path)).stderr
