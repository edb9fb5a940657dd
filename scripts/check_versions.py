"""Run the core of the suite with other versions of Python, transformers and torch: ``make versions``.

``COMBINATIONS`` is few runs, with every supported version in one of them. A Python that is not on the machine, and
a version that cannot be installed, are left out and named. So is a torch that there is only as a build for GPUs, with
gigabytes of packages, unless ``--gpu-builds`` is given. pip's own variables hold: ``PIP_EXTRA_INDEX_URL`` may name an
index with builds for the CPU. Environments, packages and what each run printed are kept in build/versions. The exit
code is 1 if a test has failed anywhere.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "build" / "versions"

#: The version that ``constraints.txt`` names for a Python, and the newest that can be installed.
PINNED, NEWEST = "pinned", "newest"

#: Python, torch and transformers: the oldest that is supported, and the last of each minor version from there on.
#: transformers 5.19 with torch 2.6 needs a GPU, and transformers 5.21 needs Python 3.11.
COMBINATIONS = (
    ("3.10", PINNED, "5.19.0"),
    ("3.10", "2.6.0", "5.20.2"),
    ("3.11", PINNED, "5.21.1"),
    ("3.12", PINNED, "5.22.2"),
    ("3.13", PINNED, "5.23.0"),
    ("3.13", NEWEST, "5.24.0"),
    ("3.14", NEWEST, "5.24.0"),
)

CORE = [
    f"tests/test_{name}.py"
    for name in (
        "hooks loop patching differences processors stopping seeds stream dynamic_cache static_cache "
        "assisted engine doctor cache_names"
    ).split()
]
IMPORTS = """
import platform, torch, transformers
print("|".join((platform.python_version(), torch.__version__, transformers.__version__)))
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one combination: ``passed`` is ``None`` if it was left out, and ``said`` says why."""

    versions: tuple[str, ...]  # of Python, torch and transformers
    passed: bool | None
    said: str

    def row(self) -> str:
        """A row of a Markdown table."""
        state = {None: "left out", True: "passed", False: "**failed**"}[self.passed]
        return f"| {' | '.join((*self.versions, state, self.said))} |"


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


def run_core(versions: tuple[str, ...], python: str | Path, path: Sequence[Path] = ()) -> Outcome:
    """The core with ``python``, packages of ``path`` first; warnings are not errors there."""
    imported, said = call(python, "-c", IMPORTS, path=path)
    if not imported:
        return Outcome(versions, False, last_line(said))
    found, log = tuple(last_line(said).split("|")), "-".join(versions)
    works, said = call(python, "-m", "hfgen", "doctor", path=path, log=KEPT / f"{log}.doctor.log")
    if not works:
        return Outcome(found, False, f"hfgen doctor: {last_line(said)}")
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-W", "default", *CORE]
    passed, said = call(*command, path=path, log=KEPT / f"{log}.log")
    return Outcome(found, passed, last_line(said))


def environment(version: str, gpu_builds: bool) -> Path:
    """The interpreter of an environment with what ``constraints.txt`` names for this Python."""
    folder = KEPT / f"python-{version}"
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        call(find_python(version), "-m", "venv", folder)
        pins = ("--constraint", ROOT / "constraints.txt")
        install(python, *pins, f"{ROOT}[dev]", gpu_builds=gpu_builds)
        (folder / "installed").touch()
    return python


def packages(python: Path, package: str, version: str, gpu_builds: bool) -> Path:
    """A folder with this version of a package for ``python``; torch brings what it requires along."""
    folder = KEPT / f"{python.parts[-3]}-{package}-{version}"
    if not folder.exists():
        needs = ["--upgrade"] if package == "torch" else ["--no-deps"]
        asked = package if version == NEWEST else f"{package}=={version}"
        begun = KEPT / f"{folder.name}.partial"
        shutil.rmtree(begun, ignore_errors=True)
        install(python, *needs, "--target", begun, asked, gpu_builds=gpu_builds)
        begun.rename(folder)
    return folder


def run(versions: tuple[str, str, str], gpu_builds: bool) -> Outcome:
    """Install what is not there yet, and run the core with it."""
    try:
        python = environment(versions[0], gpu_builds)
        other = zip(("torch", "transformers"), versions[1:], strict=True)
        path = [packages(python, *each, gpu_builds) for each in other if each[1] != PINNED]
    except LeftOut as error:
        return Outcome(versions, None, str(error))
    return run_core(versions, python, path)


def main(
    what: Annotated[
        Literal["all", "here"], typer.Argument(help="All, or this environment alone.")
    ] = "all",
    only: Annotated[str, typer.Option(help="Only those with this version: '5.20.2'.")] = "",
    gpu_builds: Annotated[
        bool, typer.Option(help="Install builds of torch for GPUs where there is no other.")
    ] = False,
) -> None:
    """Run the core with each combination, and print a table of what came of it."""
    KEPT.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for versions in COMBINATIONS if what == "all" else (("here",),):
        if only and only not in versions:
            continue
        print(f"{time.strftime('%H:%M')} {' '.join(versions)}", flush=True)
        if what == "here":
            outcome = run_core(versions, sys.executable)
        else:
            outcome = run(versions, gpu_builds)
        print(f"  {outcome.said}", flush=True)
        outcomes.append(outcome)
    print("\n| Python | torch | transformers | | |\n|---|---|---|---|---|")
    print("\n".join(outcome.row() for outcome in outcomes))
    raise typer.Exit(any(outcome.passed is False for outcome in outcomes))


if __name__ == "__main__":
    typer.run(main)
