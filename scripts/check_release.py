"""Check what has to hold before a release: ``make release-check``.

Builds sdist and wheel, installs the wheel in an empty environment and runs the demo from it. Everything
that is wrong is named, and the exit code is then 1. CONTRIBUTING.md has what a program cannot check.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from packaging.version import Version

ROOT = Path(__file__).parent.parent
if str(ROOT) not in sys.path:  # run as a file
    sys.path.insert(0, str(ROOT))

PROMPT = "def add(a, b):"
CALL = f"""
import hfgen
model, tokenizer = hfgen.builtin_model()
output = model.generate(**tokenizer({PROMPT!r}, return_tensors="pt"), max_new_tokens=8)
assert hfgen.is_active(model) and output.shape[1] > 8
print(tokenizer.decode(output[0]))
"""

#: What a user does with the wheel alone, and with an extra: arguments of the environment's Python.
COMMANDS = {
    "": [
        ["-m", "hfgen", "--version"],
        ["-m", "hfgen", "doctor"],
        ["-m", "hfgen", "demo"],
        ["-m", "hfgen", "generate", PROMPT, "--max-new-tokens", "8"],
        ["-c", CALL],
    ],
    "grammar": [["-m", "hfgen", "generate", PROMPT, "--choice", "yes", "--choice", "no", "--json"]],
}


def version() -> str:
    text = (ROOT / "src" / "hfgen" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert found is not None
    return found[1]


def wrong_version(new: str, changelog: str, tags: list[str]) -> Iterator[str]:
    """What is wrong with the version, the changelog and the tags that there are."""
    released = [Version(tag[1:]) for tag in tags if re.fullmatch(r"v\d+(\.\d+)*", tag)]
    if released and Version(new) <= max(released):
        yield f"version: {new} is not newer than {max(released)}, which has a tag"
    if re.search(rf"^## {re.escape(new)} \(unreleased\)$", changelog, re.MULTILINE):
        yield f'CHANGELOG.md: "## {new} (unreleased)" needs the date of the release'
    elif not re.search(rf"^## {re.escape(new)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE):
        yield f'CHANGELOG.md: no section "## {new} (YYYY-MM-DD)"'


def wrong_pages() -> Iterator[str]:
    """Pages that do not say what the results and the source say."""
    from scripts import update_architecture_map, update_readme_tables

    page = update_architecture_map.PAGE.read_text(encoding="utf-8")
    if page != update_architecture_map.updated(page):
        yield "docs/architecture.md: run scripts/update_architecture_map.py"
    for path in update_readme_tables.pages():
        if path.read_text(encoding="utf-8") != update_readme_tables.updated_page(path):
            yield f"{path.relative_to(ROOT)}: run scripts/update_readme_tables.py"


def wrong_wheel(wheel: Path, files: list[str]) -> Iterator[str]:
    """What the wheel lacks of ``files`` (paths below src/), or has besides."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    found = {name for name in names if ".dist-info/" not in name}
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        yield f"{wheel.name}: lacks the licence"
    for name in sorted(set(files) - found):
        yield f"{wheel.name}: lacks {name}"
    for name in sorted(found - set(files)):
        yield f"{wheel.name}: has {name}, which is not tracked"


def wrong_sdist(sdist: Path, tracked: list[str]) -> Iterator[str]:
    """What the sdist has besides ``tracked`` (paths in the checkout), or lacks of what a build and the tests need."""
    with tarfile.open(sdist) as archive:
        names = {each.name.partition("/")[2] for each in archive.getmembers() if each.isfile()}
    for name in sorted(names - {*tracked, "PKG-INFO"}):
        yield f"{sdist.name}: has {name}, which is not tracked"
    wanted = ("src/", "tests/", "scripts/", "LICENSE", "Makefile", "SECURITY.md", "pyproject.toml")
    for name in sorted(name for name in set(tracked) - names if name.startswith(wanted)):
        yield f"{sdist.name}: lacks {name}"


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.split()


def run(command: list[str], folder: Path) -> str | None:
    """Run outside of the checkout; the end of what it says if it fails."""
    print("+", " ".join(command), flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return None if done.returncode == 0 else done.stdout[-2000:]


def environment(folder: Path) -> Path:
    """The Python of a new, empty environment."""
    venv.create(folder, with_pip=True)
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


def install(python: Path, what: str, constraints: Path | None, folder: Path) -> str | None:
    pinned = ["--constraint", str(constraints)] if constraints else []
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return run([*pip, *pinned, what], folder)


def main(
    dist: Annotated[Path, typer.Option(help="Where sdist and wheel go.")] = ROOT / "dist",
    constraints: Annotated[
        Path | None, typer.Option(help="Versions to install; newest ones with --constraints ''.")
    ] = ROOT / "constraints.txt",
) -> None:
    """Check everything, and name what is wrong."""
    new = version()
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    problems = [*wrong_version(new, changelog, git("tag")), *wrong_pages()]
    if changed := git("status", "--porcelain"):
        problems.append(f"not committed: {' '.join(changed[1::2][:5])}")
    pinned = constraints.resolve() if constraints and constraints.is_file() else None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        builder = environment(folder / "builder")
        failed = install(builder, "build", None, folder)
        build = [str(builder), "-m", "build", "--outdir", str(dist.resolve()), str(ROOT)]
        failed = failed or run(build, folder)
        wheel = dist.resolve() / f"hfgen-{new}-py3-none-any.whl"
        if failed or not wheel.exists():
            problems.append(f"the build: {failed or f'{wheel} is not there'}")
        else:
            files = [path.removeprefix("src/") for path in git("ls-files", "src/hfgen")]
            problems += wrong_wheel(wheel, files)
            problems += wrong_sdist(dist.resolve() / f"hfgen-{new}.tar.gz", git("ls-files"))
            python = environment(folder / "empty")
            for extra, commands in COMMANDS.items():
                what = f"{wheel}[{extra}]" if extra else str(wheel)
                if failed := install(python, what, pinned, folder):
                    problems.append(f"pip install {what}: {failed}")
                    continue
                for command in commands:
                    if failed := run([str(python), *command], folder):
                        problems.append(f"{' '.join(command)}: {failed}")
    for problem in problems:
        print(f"- {problem}")
    print(
        f"{len(problems)} to be done before {new} is released." if problems else f"{new} is ready."
    )
    raise typer.Exit(bool(problems))


if __name__ == "__main__":
    typer.run(main)
