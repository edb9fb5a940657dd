"""Run the core of the suite with other versions of Python, transformers and torch: ``make versions``.

A Python that is not on the machine, and a version that cannot be installed, are left out and named. So is a torch
that there is only as a build for GPUs, with gigabytes of packages, unless ``--gpu-builds`` is given. pip's own
variables hold: ``PIP_EXTRA_INDEX_URL`` may name an index with builds for the CPU. Environments, packages and what
each run printed are kept in build/versions. The exit code is 1 if a test has failed anywhere.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
IMPORTS = """
import platform, torch, transformers
print("|".join((platform.python_version(), torch.__version__, transformers.__version__)))
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one combination: ``passed`` is ``None`` if it was left out, and ``said`` says why."""

    name: str
    passed: bool | None
    said: str
    found: tuple[str, ...] = ("", "", "")  # the versions of Python, torch and transformers

    def row(self) -> str:
        """A row of a Markdown table."""
        state = {None: "left out", True: "passed", False: "**failed**"}[self.passed]
        return f"| {' | '.join((self.name, *self.found, state, self.said))} |"


class LeftOut(Exception):
    """Why a combination was not run."""


def call(
    *command: str | Path, path: Sequence[Path] = (), log: Path | None = None
) -> tuple[bool, str]:
    """Run in the checkout: whether it succeeded, and what it said; with ``log``, also there and on the terminal."""
    places = os.pathsep.join([*map(str, path), str(ROOT / "src"), str(ROOT)])
    lines = []
    with (
        subprocess.Popen(
            [*map(str, command)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": places},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process,
        open(log or os.devnull, "w", encoding="utf-8") as file,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            file.write(line)
            file.flush()
            if log is not None and re.search(r"\[ *\d+%\]$|^(FAILED|ERROR) ", line):
                print(f"  {line.rstrip()[-150:]}", flush=True)
    return process.returncode == 0, "".join(lines).strip()


def last_line(said: str) -> str:
    return said.splitlines()[-1].strip("= ") if said else ""


def find_python(version: str) -> str:
    """An interpreter of this minor version that runs: on the PATH, or of pyenv."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    ours = sorted(map(str, root.glob(f"{version}.*/bin/python{version}")), reverse=True)
    for found in (shutil.which(f"python{version}"), *ours):
        if found and call(found, "-c", "import ensurepip, venv")[0]:  # pyenv's shims may not run
            return found
    raise LeftOut("not on this machine")


def gpu_packages(report: str) -> list[str]:
    """The packages for GPUs in what ``pip install --dry-run --report -`` would install."""
    names = [each["metadata"]["name"] for each in json.loads(report)["install"]]
    return [name for name in names if re.match(r"(nvidia|cuda|triton)\b", name)]


def install(python: str | Path, *arguments: str | Path, gpu_builds: bool) -> None:
    """``pip install``, but of no build for GPUs."""
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    report = KEPT / "pip.json"
    dry = () if gpu_builds else ((*pip, "--dry-run", "--report", report, *arguments),)
    for command in (*dry, (*pip, *arguments)):
        done, said = call(*command)
        if not done:
            raise LeftOut(f"cannot be installed: {last_line(said)}")
        if command in dry and gpu_packages(report.read_text(encoding="utf-8")):
            raise LeftOut("there is only a build for GPUs: --gpu-builds installs it")


def run_core(name: str, python: str | Path, path: Sequence[Path] = ()) -> Outcome:
    """The core with ``python``, packages of ``path`` first; warnings are not errors there."""
    imported, said = call(python, "-c", IMPORTS, path=path)
    if not imported:
        return Outcome(name, False, last_line(said))
    found = tuple(last_line(said).split("|"))
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", *CORE]
    passed, said = call(*command, path=path, log=KEPT / f"{name.replace(' ', '-')}.log")
    return Outcome(name, passed, last_line(said), found)


def with_python(version: str, gpu_builds: bool) -> Outcome:
    interpreter = find_python(version)
    folder = KEPT / f"python-{version}"
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        call(interpreter, "-m", "venv", folder)
        pins = ("--constraint", ROOT / "constraints.txt")
        install(python, *pins, f"{ROOT}[dev]", gpu_builds=gpu_builds)
        (folder / "installed").touch()
    return run_core(f"Python {version}", python)


def with_package(package: str, version: str, gpu_builds: bool) -> Outcome:
    """This Python with another version of a package; torch brings what it requires along."""
    name, folder = f"{package} {version or 'newest'}", KEPT / f"{package}-{version or 'newest'}"
    if not folder.exists():
        needs = ["--upgrade"] if package == "torch" else ["--no-deps"]
        asked = f"{package}=={version}" if version else package
        begun = KEPT / f"{folder.name}.partial"
        shutil.rmtree(begun, ignore_errors=True)
        arguments = (*needs, "--target", begun, asked)
        install(sys.executable, *arguments, gpu_builds=gpu_builds)
        begun.rename(folder)
    return run_core(name, sys.executable, [folder])


def combinations(what: str, gpu_builds: bool) -> Iterator[tuple[str, Callable[[], Outcome]]]:
    """The name of each, and what runs it."""
    if what == "here":
        yield "this environment", partial(run_core, "this environment", sys.executable)
    if what in ("all", "python"):
        for version in PYTHONS:
            yield f"Python {version}", partial(with_python, version, gpu_builds)
    for package, versions in {"transformers": TRANSFORMERS, "torch": TORCH}.items():
        if what in ("all", package):
            for version in versions:
                run = partial(with_package, package, version, gpu_builds)
                yield f"{package} {version or 'newest'}", run


def main(
    what: Annotated[
        str,
        typer.Argument(help="all, python, transformers, torch, or here: this environment alone."),
    ] = "all",
    only: Annotated[str, typer.Option(help="Only names that have this in them: '5.20'.")] = "",
    gpu_builds: Annotated[
        bool, typer.Option(help="Install builds of torch for GPUs where there is no other.")
    ] = False,
) -> None:
    """Run the core with each version, and print a table of what came of it."""
    if what not in ("all", "python", "transformers", "torch", "here"):
        raise typer.BadParameter(f"{what!r}: choose from all, python, transformers, torch, here")
    KEPT.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for name, run in combinations(what, gpu_builds):
        if only not in name:
            continue
        print(f"{time.strftime('%H:%M')} {name}", flush=True)
        try:
            outcome = run()
        except LeftOut as error:
            outcome = Outcome(name, None, str(error))
        print(f"  {outcome.said}", flush=True)
        outcomes.append(outcome)
    print("\n| | Python | torch | transformers | | |\n|---|---|---|---|---|---|")
    print("\n".join(outcome.row() for outcome in outcomes))
    raise typer.Exit(any(outcome.passed is False for outcome in outcomes))


if __name__ == "__main__":
    typer.run(main)
