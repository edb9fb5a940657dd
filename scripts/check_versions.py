"""Run the core of the suite with other versions of Python, transformers and torch: ``make versions``.

A Python that is not on the machine, and a version that cannot be installed, are left out and named. Environments
and packages are kept in build/versions. The exit code is 1 if a test has failed anywhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "build" / "versions"

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
#: The oldest that is supported, and the last one of each minor version from there on.
TRANSFORMERS = ("5.19.0", "5.20.2", "5.21.1", "5.22.2", "5.23.0")
TORCH = ("2.6.0", "")  # the oldest, and the newest that there is

CORE = [
    f"tests/test_{name}.py"
    for name in (
        "hooks loop patching differences processors stopping seeds stream dynamic_cache static_cache "
        "assisted engine doctor"
    ).split()
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one version: ``passed`` is ``None`` if it was left out."""

    name: str
    passed: bool | None
    said: str


def call(*command: str | Path, path: Sequence[Path] = ()) -> tuple[bool, str]:
    """Run in the checkout; whether it succeeded, and the last line of what it said."""
    places = os.pathsep.join([*map(str, path), str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [*map(str, command)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": places},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return done.returncode == 0, lines[-1] if lines else ""


def find_python(version: str) -> str | None:
    """An interpreter of this minor version that runs: on the PATH, or of pyenv."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    ours = sorted(map(str, root.glob(f"{version}.*/bin/python{version}")), reverse=True)
    for found in (shutil.which(f"python{version}"), *ours):
        if found and call(found, "-c", "import ensurepip, venv")[0]:  # pyenv's shims may not run
            return found
    return None


def run_core(name: str, python: str | Path, path: Sequence[Path] = ()) -> Outcome:
    """The core with ``python``, packages of ``path`` first; warnings are not errors there."""
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", *CORE]
    return Outcome(name, *call(*command, path=path))


def with_python(version: str) -> Outcome:
    name, interpreter = f"Python {version}", find_python(version)
    if interpreter is None:
        return Outcome(name, None, "not on this machine")
    folder = KEPT / f"python-{version}"
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        call(interpreter, "-m", "venv", folder)
        pins = ["--constraint", ROOT / "constraints.txt"]
        installed, said = call(python, "-m", "pip", "install", "--quiet", *pins, f"{ROOT}[dev]")
        if not installed:
            return Outcome(name, None, f"cannot be installed: {said}")
        (folder / "installed").touch()
    return run_core(name, python)


def with_package(package: str, version: str, with_its_own: bool) -> Outcome:
    """This Python with another version of a package, and ``with_its_own`` requirements."""
    name, folder = f"{package} {version or 'newest'}", KEPT / f"{package}-{version or 'newest'}"
    if not folder.exists():
        needs = [] if with_its_own else ["--no-deps"]
        asked = f"{package}=={version}" if version else package
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", folder]
        installed, said = call(*pip, *needs, asked)
        if not installed:
            shutil.rmtree(folder, ignore_errors=True)
            return Outcome(name, None, f"cannot be installed: {said}")
    _, imported = call(
        sys.executable, "-c", f"import {package} as p; print(p.__version__)", path=[folder]
    )
    return run_core(f"{name} ({imported})", sys.executable, [folder])


def outcomes(what: str) -> Iterator[Outcome]:
    if what in ("all", "python"):
        yield from map(with_python, PYTHONS)
    if what in ("all", "transformers"):
        yield from (with_package("transformers", version, False) for version in TRANSFORMERS)
    if what in ("all", "torch"):
        yield from (with_package("torch", version, True) for version in TORCH)


def main(
    what: Annotated[str, typer.Argument(help="all, python, transformers or torch.")] = "all",
) -> None:
    """Run the core with each version, and say what came of it."""
    if what not in ("all", "python", "transformers", "torch"):
        raise typer.BadParameter(f"{what!r}: choose from all, python, transformers, torch")
    has_failed = False
    for outcome in outcomes(what):
        state = {None: "left out", True: "passed", False: "FAILED"}[outcome.passed]
        has_failed |= outcome.passed is False
        print(f"{outcome.name}: {state}: {outcome.said}", flush=True)
    raise typer.Exit(has_failed)


if __name__ == "__main__":
    typer.run(main)
