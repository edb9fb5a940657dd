"""``python -m hfgen.run``: a program sees what Python shows it, and its models generate with hfgen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import pickle, sys, threading
import __main__
import beside

class Own: ...

def main():
    print(__name__, __file__, sys.argv, sys.path[0], (__spec__ or Own).__class__.__name__)
    print(__main__.Own is Own, pickle.loads(pickle.dumps(Own)) is Own, beside.VALUE)
    if sys.argv[1] == "active":
        import hfgen, transformers
        print(hfgen.is_active(transformers.LlamaForCausalLM))
    if sys.argv[1] == "fail":
        raise ValueError("of the program")
    sys.exit(int(sys.argv[2]))

if __name__ == "__main__":
    main()
"""
PROGRAMS = [["script.py"], ["-m", "package"]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    (tmp_path / "beside.py").write_text("VALUE = 5")
    for name in ("script.py", "package/__main__.py"):
        (tmp_path / name).write_text(PROGRAM)
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "wrong.py").write_text("def f(:")
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent / "src")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_a_program_runs_as_python_runs_it(folder: Path, program: list[str]) -> None:
    arguments = [*program, "x", "3", "--option", "-m", "y z"]
    expected = run(folder, *arguments)
    assert expected.returncode == 3, expected.stderr
    result = run(folder, "-m", "hfgen.run", *arguments)
    assert result.stdout == expected.stdout
    assert result.stderr == expected.stderr == ""
    assert result.returncode == 3


def test_models_generate_with_hfgen(folder: Path) -> None:
    assert run(folder, "script.py", "active", "0").stdout.splitlines()[2] == "False"
    assert (
        run(folder, "-m", "hfgen.run", "script.py", "active", "0").stdout.splitlines()[2] == "True"
    )


@pytest.mark.parametrize("program", [["script.py", "fail"], ["wrong.py"]], ids=str)
def test_a_traceback_is_the_programs_alone(folder: Path, program: list[str]) -> None:
    expected = run(folder, *program)
    assert "Error" in expected.stderr
    result = run(folder, "-m", "hfgen.run", *program)
    assert result.stderr == expected.stderr
    assert result.returncode == expected.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "usage: python -m hfgen.run"),
        (["--help"], 0, "usage: python -m hfgen.run"),
        (["-m"], 2, "usage: python -m hfgen.run"),
        (["--bogus", "script.py"], 2, "no option --bogus"),
        (["no_such.py"], 2, "no file 'no_such.py'"),
        (["-m", "no_such_module"], 1, "No module named no_such_module"),
    ],
)
def test_wrong_arguments(folder: Path, arguments: list[str], code: int, words: str) -> None:
    result = run(folder, "-m", "hfgen.run", *arguments)
    assert result.returncode == code
    assert words in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
