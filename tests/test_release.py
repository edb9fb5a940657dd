"""``scripts/check_release.py``: what it finds wrong."""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from pathlib import Path

import hfgen
from scripts import check_release


def test_the_version_has_to_be_new_and_in_the_changelog() -> None:
    changelog = "# Changelog\n\n## Unreleased\n\n## 0.2.0 (2026-12-01)\n"
    assert list(check_release.wrong_version("0.2.0", changelog, ["v0.1.0", "v0.1.9", "x"])) == []
    old = list(check_release.wrong_version("0.2.0", changelog, ["v0.2.0", "v0.1.0"]))
    assert old == ["version: 0.2.0 is not newer than 0.2.0, which has a tag"]
    unknown = list(check_release.wrong_version("0.3.0", changelog, []))
    assert unknown == ['CHANGELOG.md: no section "## 0.3.0 (YYYY-MM-DD)"']
    begun = list(check_release.wrong_version("0.3.0", "\n## 0.3.0 (unreleased)\n", ["v0.2.0"]))
    assert begun == ['CHANGELOG.md: "## 0.3.0 (unreleased)" needs the date of the release']


def test_the_changelog_has_a_section_for_this_version() -> None:
    text = (check_release.ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(hfgen.__version__)} \(", text, re.MULTILINE)


def test_a_wheel_has_what_is_tracked_and_nothing_else(tmp_path: Path) -> None:
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("hfgen/a.py", "hfgen/notes.txt", "hfgen-0.1.0.dist-info/METADATA"):
            archive.writestr(name, "")
    wrong = list(check_release.wrong_wheel(wheel, ["hfgen/a.py", "hfgen/b.py"]))
    assert wrong == [
        "w.whl: lacks the licence",
        "w.whl: lacks hfgen/b.py",
        "w.whl: has hfgen/notes.txt, which is not tracked",
    ]


def test_an_sdist_has_tests_and_no_caches(tmp_path: Path) -> None:
    sdist = tmp_path / "s.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for name in ("PKG-INFO", "LICENSE", "tests/test_a.py", "src/__pycache__/a.pyc"):
            archive.addfile(tarfile.TarInfo(f"hfgen-0.1.0/{name}"))
    tracked = ["LICENSE", "tests/test_a.py", "src/a.py", ".gitignore"]
    wrong = list(check_release.wrong_sdist(sdist, tracked))
    assert wrong == [
        "s.tar.gz: has src/__pycache__/a.pyc, which is not tracked",
        "s.tar.gz: lacks src/a.py",
    ]


def test_a_command_that_fails_is_shown_with_what_it_said(tmp_path: Path) -> None:
    assert check_release.run([sys.executable, "-c", "print(1)"], tmp_path) is None
    said = check_release.run([sys.executable, "-c", "import sys; sys.exit('no such')"], tmp_path)
    assert said is not None
    assert "no such" in said


def test_the_version_is_the_package_s() -> None:
    assert check_release.version() == hfgen.__version__
