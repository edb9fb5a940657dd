"""``python -m hfgen.run``: a program sees what Python shows it, and its models generate with hfgen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
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


@pytest.fixture
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What ``main`` changes in a process is undone."""
    monkeypatch.chdir(folder)
    for name in ("argv", "excepthook"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    yield
    hfgen.unpatch()
    for name in ("beside", "package"):
        sys.modules.pop(name, None)


def shown(error: type[Exception], *arguments: str) -> None:
    """Print what a process shows of the error that ``main`` raises."""
    with pytest.raises(error) as raised:
        main([*arguments])
    sys.excepthook(raised.type, raised.value, raised.tb.tb_next)  # from `main` on


def check(expected: subprocess.CompletedProcess[str], code: object, out: str, err: str) -> None:
    *lines, last = out.splitlines(keepends=True)
    assert "".join(lines) == expected.stdout
    assert err == expected.stderr == ""
    assert code == expected.returncode == 3
    assert last == "generates with hfgen: True\n"


ARGUMENTS = ["x", "3", "--option", "-m", "y z"]


def test_a_script_runs_as_python_runs_it(folder: Path) -> None:
    result = run(folder, "-m", "hfgen.run", "script.py", *ARGUMENTS)
    expected = run(folder, "script.py", *ARGUMENTS)
    check(expected, result.returncode, result.stdout, result.stderr)


def test_a_module_runs_as_python_runs_it(
    folder: Path, inside: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["-m", "package", *ARGUMENTS])
    check(run(folder, "-m", "package", *ARGUMENTS), ended.value.code, *capsys.readouterr())


def test_a_traceback_is_the_programs_alone(
    folder: Path, inside: None, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = run(folder, "script.py", "fail")
    assert "Error" in expected.stderr
    shown(ValueError, "script.py", "fail")
    assert capsys.readouterr().err == expected.stderr


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
