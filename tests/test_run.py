"""``python -m hfgen.run``: a program sees what Python shows it, and its models generate with hfgen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hfgen
from hfgen.run import main

PROGRAM = """
import pickle, sys, threading
import __main__
import beside

class Own: ...

def main():
    print(__name__, __file__, sys.argv, sys.path[0], (__spec__ or Own).__class__.__name__)
    print(__main__.Own is Own, pickle.loads(pickle.dumps(Own)) is Own, beside.VALUE)
    if "hfgen" in sys.modules:
        import hfgen, transformers
        print("generates with hfgen:", hfgen.is_active(transformers.LlamaForCausalLM))
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
    *lines, last = result.stdout.splitlines(keepends=True)
    assert "".join(lines) == expected.stdout
    assert result.stderr == expected.stderr == ""
    assert result.returncode == 3
    assert last == "generates with hfgen: True\n"


def test_a_traceback_is_the_programs_alone(folder: Path) -> None:
    expected = run(folder, "script.py", "fail")
    assert "Error" in expected.stderr
    result = run(folder, "-m", "hfgen.run", "script.py", "fail")
    assert result.stderr == expected.stderr
    assert result.returncode == expected.returncode == 1


@pytest.fixture
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``main`` changes in a process is undone, and models stay as they are."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(hfgen, "patch", lambda: None)
    for name in ("argv", "excepthook"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr(sys, "path", [*sys.path])


def shown(error: type[Exception], *arguments: str) -> None:
    """Print what a process shows of the error that ``main`` raises."""
    with pytest.raises(error) as raised:
        main([*arguments])
    sys.excepthook(raised.type, raised.value, raised.tb.tb_next)  # from `main` on


def test_what_cannot_be_run_is_shown_as_python_shows_it(
    folder: Path, inside: None, capsys: pytest.CaptureFixture[str]
) -> None:
    shown(SyntaxError, "wrong.py")
    assert capsys.readouterr().err == run(folder, "wrong.py").stderr
    shown(ImportError, "-m", "no_such_module")
    assert capsys.readouterr().err == "hfgen.run: No module named no_such_module\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "usage: python -m hfgen.run"),
        (["--help"], 0, "usage: python -m hfgen.run"),
        (["-m"], 2, "usage: python -m hfgen.run"),
        (["--bogus", "script.py"], 2, "no option --bogus"),
        (["no_such.py"], 2, "no file 'no_such.py'"),
    ],
)
def test_wrong_arguments(
    inside: None, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == code
    assert words in "".join(capsys.readouterr())
