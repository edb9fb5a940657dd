"""``hfgen doctor``, and what it checks: the contract with transformers' source."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from packaging.specifiers import SpecifierSet
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

import hfgen
from hfgen.settings import versions
from hfgen.tools import contract
from hfgen.tools.cli import app, doctor, report
from tests import tiny

UPSTREAM = Path(transformers.__file__).parent
SOURCE = Path(hfgen.__file__).parent
#: Private attributes of torch, Python and accelerate, in hfgen's source.
OTHERS = {"_cdata", "_compiled_call", "_forward_hooks", "_forward_pre_hooks"} | {
    "_hf_hook",
    "_modules",
    "_parameters",
    "_buffers",
}


#: Reading hfgen's source takes half a second.
imports = cache(contract.imports)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modes are not left out where tests run beside each other."""
    monkeypatch.setattr(doctor, "SECONDS", 600.0)
    monkeypatch.setattr(contract, "imports", imports)


def run(*arguments: str) -> SimpleNamespace:
    result = CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "200"})
    assert isinstance(result.exception, SystemExit | None), result.exception
    return SimpleNamespace(code=result.exit_code, out=result.stdout)


def test_the_table_has_every_private_attribute_that_is_read() -> None:
    """Of objects that are not hfgen's: no module of hfgen defines a name like it."""
    defined: set[str] = set()
    read: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute):
                is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
                is_private = node.attr.startswith("_") and not node.attr.startswith("__")
                if isinstance(node.ctx, ast.Store) and is_own:
                    defined.add(node.attr)
                elif is_private and ast.unparse(node.value).split(".")[0] != "torch":
                    read.add(node.attr)
    ours = {"_call", "_unmixed_class", "_values", "_indexer_keys"}
    files = [
        *UPSTREAM.glob("*.py"),
        *UPSTREAM.glob("generation/**/*.py"),
        *UPSTREAM.glob("tools/cli/**/*.py"),
    ]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    theirs = read & set(re.findall(r"\b_\w+", text))  # others are sacrebleu's, …
    assert len(theirs) > 10
    assert theirs - defined - OTHERS - ours - set(contract.PRIVATE) == set()


def test_what_moved_is_named(tmp_path: Path) -> None:
    for path in {file for file, _ in contract.PRIVATE.values()} | {"generation/utils.py"}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(UPSTREAM / path, tmp_path / path)
    file = tmp_path / "generation" / "utils.py"
    text = file.read_text(encoding="utf-8").replace("def heal_tokens(", "def healed(")
    text = re.sub(r"def _prefill\(\s*self", "def _prefill(self, more", text)
    file.write_text(text, encoding="utf-8")
    (tmp_path / contract.PRIVATE["_is_stateful"][0]).write_text("")
    lines = [*contract.moved_names(tmp_path), *contract.moved_hooks(tmp_path)]
    assert "GenerationMixin.heal_tokens: is not there" in lines
    assert any(line.startswith("GenerationMixin._prefill: takes (self, more, ") for line in lines)
    assert any(line.startswith("_is_stateful: ") and "rolled back" in line for line in lines)
    assert len(contract.hooks()) > 30
    everything = [*contract.hooks(), *contract.imports(), *contract.PRIVATE]
    nothing = tmp_path / "nothing"
    lines = [*contract.moved_names(nothing), *contract.moved_hooks(nothing)]
    assert len(lines) == len(everything)


@pytest.fixture
def moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A transformers, as far as its source is read, without one hook and one class of layers."""
    folder = tmp_path / "transformers"
    (folder / "generation").mkdir(parents=True)
    for path in (*UPSTREAM.iterdir(), *(UPSTREAM / "generation").iterdir()):
        if path.name != "generation":
            (folder / path.relative_to(UPSTREAM)).symlink_to(path)
    for file, old, new in (
        ("generation/utils.py", "def heal_tokens(", "def healed("),
        ("cache_utils.py", "DynamicIndexedLayer", "DynamicIndexLayer"),
    ):
        text = (UPSTREAM / file).read_text(encoding="utf-8")
        assert old in text
        (folder / file).unlink()
        (folder / file).write_text(text.replace(old, new), encoding="utf-8")
    spec = SimpleNamespace(origin=str(folder / "__init__.py"))
    monkeypatch.setattr(doctor, "find_spec", lambda name: spec)
    return folder


@pytest.mark.usefixtures("moved")
def test_the_page_names_what_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.out, "width", 200)
    result = run()
    assert result.code == 1
    shown = " ".join(result.out.split())
    assert "GenerationMixin.heal_tokens is not there" in shown
    layer = "transformers.cache_utils.DynamicIndexedLayer"
    assert f"{layer} is not there; hfgen/session/states.py imports it" in shown
    assert "2 broken" in result.out
    assert "self-check" not in result.out


@pytest.mark.usefixtures("moved")
def test_what_moved_is_named_where_hfgen_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise ImportError("cannot import name 'DynamicIndexedLayer'")

    monkeypatch.setattr(contract, "hooks", fail)
    found = {finding.name: finding for finding in doctor.contract(debug=False)}
    assert list(found) == ["transformers.cache_utils.DynamicIndexedLayer", "import of hfgen"]
    assert "ImportError: cannot import name" in found["import of hfgen"].value


def test_the_doctor_finds_this_environment_well() -> None:
    result = run("--json")
    report = json.loads(result.out)
    assert result.code == 0, report
    assert report["works"]
    found = {finding["name"]: finding for finding in report["findings"]}
    assert found["transformers"] == {
        "topic": "versions",
        "name": "transformers",
        "value": transformers.__version__,
        "state": "ok",
    }
    modes = [name for name, each in found.items() if each["topic"] == "self-check"]
    assert modes == list(doctor.MODES)
    assert found["greedy"]["value"].startswith("same tokens")


def test_other_tokens_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def prefer_others(module, args, output):  # type: ignore[no-untyped-def]
        if hfgen.is_active(module):
            output.logits = output.logits.roll(1, dims=-1)

    loaded = doctor.load("builtin", None, "auto", "cpu")
    loaded.model.register_forward_hook(prefer_others)
    monkeypatch.setattr(doctor, "load", lambda *args: loaded)
    greedy = next(iter(doctor.self_check(debug=False)))
    assert (greedy.name, greedy.state) == ("greedy", "broken")
    assert "tokens differ" in greedy.value


def test_a_slow_machine_is_not_kept_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SECONDS", -1.0)
    first, *others = doctor.self_check(debug=False)
    assert first.state == "ok"  # one mode is checked on any machine
    assert {finding.state for finding in others} == {"note"}


def test_what_is_missing_is_said_with_the_line_that_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(doctor.OPTIONAL, "nothing", ("none", "no_such_module"))
    finding = next(each for each in doctor.parts() if each.name == "nothing")
    advice = "pip install 'hfgen[none]', for no_such_module"
    assert (finding.state, finding.value) == ("note", advice)
    monkeypatch.setattr(doctor, "TESTED", SpecifierSet("<1"))
    finding = next(each for each in doctor.versions() if each.name == "transformers")
    assert finding.state == "note"
    assert "not tested" in finding.value
    monkeypatch.setitem(sys.modules, "torch", None)
    assert [each.state for each in doctor.devices()] == ["broken"]


def test_the_package_takes_the_tested_versions_and_newer_ones() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    asked = re.search(r'"transformers([<>=].*)",', text)
    assert asked is not None
    assert [asked[1]] == [str(each) for each in doctor.TESTED if each.operator == ">="]


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers says that it is newer than those of the tests."""
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "99.1.0")
    versions.warn_if_untested.cache_clear()
    yield
    versions.warn_if_untested.cache_clear()


@pytest.mark.usefixtures("newer")
def test_a_newer_transformers_works_and_is_told_once() -> None:
    with pytest.warns(versions.UntestedVersionWarning, match=r"hfgen is not tested .* 99\.1\.0"):
        hfgen.patch()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")

            class Mine(LlamaForCausalLM, hfgen.GenerationMixin):
                """Not the first use."""

            model = tiny.llama()
            model.__class__ = Mine
            assert model.generate(tiny.prompt(), max_new_tokens=2).shape == (2, 9)
    finally:
        hfgen.unpatch()


@pytest.mark.usefixtures("newer")
def test_the_warning_of_a_newer_transformers_can_be_an_error_or_off() -> None:
    upstreams = transformers.GenerationMixin.generate
    with warnings.catch_warnings():
        warnings.simplefilter("error", versions.UntestedVersionWarning)
        with pytest.raises(versions.UntestedVersionWarning):
            hfgen.patch()
        with pytest.raises(versions.UntestedVersionWarning):

            class First(LlamaForCausalLM, hfgen.GenerationMixin):
                """The first use."""

    assert transformers.GenerationMixin.generate is upstreams
    assert not hfgen.is_active(tiny.llama())
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "hfgen is not tested")

        class Second(LlamaForCausalLM, hfgen.GenerationMixin):
            """The first use, too."""

    assert shown == []


def test_the_doctor_shows_a_newer_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor.metadata.version
    newer = {"transformers": "99.1.0"}
    monkeypatch.setattr(doctor.metadata, "version", lambda name: newer.get(name) or found(name))
    finding = next(each for each in doctor.versions() if each.name == "transformers")
    assert (finding.state, finding.value.startswith("99.1.0, not tested")) == ("note", True)
