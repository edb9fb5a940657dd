"""``scripts/check_versions.py``: what it runs, what it leaves out, and its table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

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


@pytest.mark.parametrize("passes", [True, False], ids=["passes", "fails"])
def test_a_run_says_with_what_it_ran_and_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: bool
) -> None:
    (tmp_path / "test_one.py").write_text(f"def test_one():\n    assert {passes}\n")
    monkeypatch.setattr(check_versions, "CORE", [str(tmp_path / "test_one.py")])
    outcome = check_versions.run_core("this environment", sys.executable)
    assert outcome.passed is passes
    assert outcome.found[:2] == (sys.version.split()[0], torch.__version__)
    assert outcome.said.startswith("1 passed" if passes else "1 failed")
    assert "100%" in (tmp_path / "this-environment.log").read_text()


def test_an_environment_that_does_not_import_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_versions, "IMPORTS", "import no_such_module")
    outcome = check_versions.run_core("this environment", sys.executable)
    assert outcome.passed is False
    assert "no_such_module" in outcome.said


def test_the_table_has_all_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, invoke: object
) -> None:
    def run(name: str, *_: object) -> Outcome:
        if "2.6.0" in name:
            raise LeftOut("there is only a build for GPUs")
        return Outcome(name, "5.20" not in name, "7 passed", ("3.11.7", "2.13.0", "5.23.0"))

    monkeypatch.setattr(
        check_versions, "with_package", lambda name, version, _: run(f"{name} {version}")
    )
    result = invoke("transformers")  # type: ignore[operator]
    assert result.exit_code == 1
    rows = [line for line in result.stdout.splitlines() if line.startswith("| t")]
    assert len(rows) == len(check_versions.TRANSFORMERS)
    assert "| transformers 5.20.2 | 3.11.7 | 2.13.0 | 5.23.0 | **failed** | 7 passed |" in rows
    result = invoke("torch", "--only", "2.6")  # type: ignore[operator]
    assert result.exit_code == 0
    assert "| torch 2.6.0 |  |  |  | left out | there is only a build for GPUs |" in result.stdout
    assert invoke("pandas").exit_code == 2  # type: ignore[operator]
