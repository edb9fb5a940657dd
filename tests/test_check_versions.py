"""``scripts/check_versions.py``: what it runs, what it leaves out, and its table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hfgen.settings.versions import TESTED
from scripts import check_versions
from scripts.check_versions import LeftOut, Outcome


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_versions, "KEPT", tmp_path)


@pytest.fixture
def invoke() -> object:
    app = check_versions.typer.Typer()
    app.command()(check_versions.main)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_builds_for_gpus_are_told_by_what_they_bring() -> None:
    def report(*names: str) -> str:
        return json.dumps({"install": [{"metadata": {"name": name}} for name in names]})

    assert check_versions.gpu_packages(report("torch", "sympy", "cudatext")) == []
    brought = ["nvidia-cublas", "triton", "cuda-toolkit"]
    assert check_versions.gpu_packages(report("torch", *brought, "sympy")) == brought


def test_a_build_for_gpus_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def call(*command: object, **_: object) -> tuple[bool, str]:
        calls.append(command)
        if "--dry-run" in command:
            installs = [{"metadata": {"name": "triton"}}]
            (check_versions.KEPT / "pip.json").write_text(json.dumps({"install": installs}))
        return True, ""

    monkeypatch.setattr(check_versions, "call", call)
    with pytest.raises(LeftOut, match="only a build for GPUs"):
        check_versions.install("python", "torch==2.6.0", gpu_builds=False)
    assert len(calls) == 1
    check_versions.install("python", "torch==2.6.0", gpu_builds=True)
    assert "--dry-run" not in calls[1]


def test_a_python_that_is_not_there_is_left_out() -> None:
    with pytest.raises(LeftOut, match="not on this machine"):
        check_versions.find_python("3.1")


def run_here() -> Outcome:
    return check_versions.run_core(("here",), sys.executable)


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> None:
    """``hfgen doctor`` and imports of torch take seconds."""
    monkeypatch.setattr(check_versions, "IMPORTS", "print('3.12|2.13|5.24')")
    call = check_versions.call

    def quick(*command: object, **options: object) -> tuple[bool, str]:
        return (True, "") if "doctor" in command else call(*command, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(check_versions, "call", quick)


@pytest.mark.usefixtures("works")
@pytest.mark.parametrize("passes", [True, False], ids=["passes", "fails"])
def test_a_run_says_with_what_it_ran_and_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: bool
) -> None:
    (tmp_path / "test_one.py").write_text(f"def test_one():\n    assert {passes}\n")
    monkeypatch.setattr(check_versions, "CORE", [str(tmp_path / "test_one.py")])
    outcome = run_here()
    assert outcome.passed is passes
    assert outcome.versions == ("3.12", "2.13", "5.24")
    assert outcome.said.startswith("1 passed" if passes else "1 failed")
    assert "100%" in (tmp_path / "here.log").read_text()


def test_an_environment_that_does_not_import_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_versions, "IMPORTS", "import no_such_module")
    outcome = run_here()
    assert outcome.passed is False
    assert "no_such_module" in outcome.said


def test_an_environment_where_something_is_broken_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = check_versions.call

    def broken(*command: object, **options: object) -> tuple[bool, str]:
        return (False, "1 broken.") if "doctor" in command else call(*command, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(check_versions, "call", broken)
    outcome = run_here()
    assert outcome.passed is False
    assert outcome.said == "hfgen doctor: 1 broken."
    assert outcome.versions[:2] == (sys.version.split()[0], torch.__version__)


def test_other_versions_are_put_before_those_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = []

    def install(python: Path, *arguments: object, gpu_builds: bool) -> None:
        installed.append(arguments[-1])
        if "--target" in arguments:
            Path(str(arguments[arguments.index("--target") + 1])).mkdir()

    monkeypatch.setattr(check_versions, "find_python", lambda version: sys.executable)
    monkeypatch.setattr(check_versions, "call", lambda *_, **__: (tmp_path / "python-3.1").mkdir())
    monkeypatch.setattr(check_versions, "install", install)
    monkeypatch.setattr(
        check_versions, "run_core", lambda versions, python, path: (python, [*path])
    )
    for _ in range(2):  # what is there is not installed again
        python, path = check_versions.run(("3.1", check_versions.NEWEST, "5.20.2"), True)
        assert python == tmp_path / "python-3.1" / "bin" / "python"
        names = ["python-3.1-torch-newest", "python-3.1-transformers-5.20.2"]
        assert path == [tmp_path / name for name in names]
    assert installed[1:] == ["torch", "transformers==5.20.2"]
    pinned = check_versions.PINNED
    assert check_versions.run(("3.1", pinned, pinned), True)[1] == []


def test_the_table_has_all_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, invoke: object
) -> None:
    def run_core(versions: tuple[str, ...], *_: object) -> Outcome:
        return Outcome((versions[0], "2.13.0", versions[2]), "5.20.2" not in versions, "7 passed")

    def environment(version: str, gpu_builds: bool) -> Path:
        if version == "3.14":
            raise LeftOut("not on this machine")
        return Path(f"python-{version}/bin/python")

    monkeypatch.setattr(check_versions, "run_core", run_core)
    monkeypatch.setattr(check_versions, "environment", environment)
    monkeypatch.setattr(check_versions, "packages", lambda *_: Path("packages"))
    result = invoke()  # type: ignore[operator]
    assert result.exit_code == 1
    rows = [line for line in result.stdout.splitlines() if line.startswith("| 3")]
    assert len(rows) == len(check_versions.COMBINATIONS)
    assert "| 3.10 | 2.13.0 | 5.20.2 | **failed** | 7 passed |" in rows
    assert "| 3.14 | newest | 5.24.0 | left out | not on this machine |" in rows
    result = invoke("--only", "3.12")  # type: ignore[operator]
    assert result.exit_code == 0
    assert result.stdout.count("7 passed |") == 1
    assert invoke("pandas").exit_code == 2  # type: ignore[operator]


def test_every_version_is_in_a_combination() -> None:
    pythons, torches, transformers = zip(*check_versions.COMBINATIONS, strict=True)
    project = (check_versions.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = ">={pythons[0]}"' in project
    assert f'"torch>={torches[1].removesuffix(".0")}"' in project
    assert f'"transformers>={transformers[0].removesuffix(".0")}"' in project
    minors = {version.rsplit(".", 1)[0] for version in transformers}
    assert minors == {f"5.{minor}" for minor in range(30) if f"5.{minor}" in TESTED}
