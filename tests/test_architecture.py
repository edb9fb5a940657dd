"""What docs/architecture.md promises of the structure, read off the source and off a running call."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch
from transformers.generation.configuration_utils import GenerationMode

import hfgen
from hfgen.decoding.modes import MODES
from scripts.update_architecture_map import FLOORS
from tests import tiny

SOURCE = Path(hfgen.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


@cache
def trees() -> dict[str, ast.Module]:
    """All modules, parsed: some seconds that the first test to ask for them takes."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imported(name: str, tree: ast.Module, everywhere: bool = True) -> Iterator[str]:
    """The modules of hfgen that a module imports, in functions too if ``everywhere``."""
    for node in ast.walk(tree) if everywhere else run_at_import(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        if not isinstance(node, ast.ImportFrom):
            continue
        base = node.module or ""
        if node.level:
            package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
            parts = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parts, *filter(None, [node.module])])
        for alias in node.names:
            whole = f"{base}.{alias.name}"
            if whole in MODULES:
                yield whole
            elif base in MODULES:
                yield base


def run_at_import(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a module that run when it is imported, but for imports of types."""
    stack: list[ast.stmt] = list(tree.body)
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.If | ast.Try | ast.With):
            stack.extend(node.body)


def test_no_module_imports_one_that_imports_it():
    # `hfgen` itself imports its public names when they are first used.
    graph = {
        name: set(imported(name, tree, everywhere=False)) - {name, "hfgen"}
        for name, tree in trees().items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")


FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}


def floor_of(module: str) -> int:
    return FLOOR_OF[module.split(".")[1]]


def test_no_room_imports_one_above_it():
    """Imports of types and within functions count too."""
    upwards = [
        f"{name} imports {target}"
        for name, tree in trees().items()
        if name != "hfgen" and name not in LATE_IMPORTS
        for target in imported(name, tree)
        if target != "hfgen" and floor_of(target) > floor_of(name)
    ]
    assert not upwards


#: Modules that may import hfgen's within a function, and why.
LATE_IMPORTS = {
    "hfgen": "public names are imported when they are first used",
    "hfgen.tools.contract": "what moved has to be named where the mixin cannot be imported",
    "hfgen.delegate": "the engine is imported when it is first used; it needs the mixin",
    "hfgen.tools.cli": "no torch before the options are checked",
}


def test_imports_within_functions_do_not_hide_circles():
    for name, tree in trees().items():
        if name in LATE_IMPORTS or name.startswith("hfgen.tools.cli."):
            continue
        late = [
            target
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef)
            for target in imported(name, ast.Module(function.body, []))
        ]
        assert not late, f"{name} imports {late} within a function"


def calls_of_the_model(tree: ast.Module) -> Iterator[str]:
    """Calls of ``model(…)``, ``….model(…)``, ``forward`` or ``__call__`` of a model, ``_prefill``."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        owner, _, method = called.rpartition(".")
        is_model = called.split(".")[-1] == "model" or called in ("self.decoder", "decoder")
        is_forward = owner.endswith("model") and method in ("forward", "__call__")
        if is_model or is_forward or method == "_prefill":
            yield f"line {node.lineno}: {ast.unparse(node)[:80]}"


def test_nothing_outside_of_execution_calls_the_model():
    found = {
        name: calls
        for name, tree in trees().items()
        if not name.startswith("hfgen.running") and (calls := list(calls_of_the_model(tree)))
    }
    assert not found
    assert list(calls_of_the_model(trees()["hfgen.running.executor"]))  # it does find them


def test_one_private_name_on_a_generation_config():
    # Those of upstream's that models read.
    upstreams = {"_mask_length", "_from_model_config", "_commit_hash", "_original_object_hash"} | {
        f"_{token}_token_tensor" for token in ("bos", "eos", "pad", "decoder_start")
    }
    model, seen = hfgen.mix_into(tiny.llama()), set()

    def look(model, input_ids, generation_config, **kwargs):
        seen.update(name for name in vars(generation_config) if name.startswith("_"))
        return input_ids

    model.generate(
        tiny.prompt(2), num_beams=2, max_new_tokens=2, custom_generate=look, stop_strings=None
    )
    assert seen - upstreams == {"_call"}


def test_a_call_lets_go_of_what_it_prepared():
    model, configs = hfgen.mix_into(tiny.llama()), []

    def look(model, input_ids, generation_config, **kwargs):
        configs.append(generation_config)
        assert generation_config._call.prompt is not None
        return input_ids

    model.generate(tiny.prompt(1), max_new_tokens=2, custom_generate=look)
    assert configs[0]._call is None


def test_every_mode_of_upstream_has_a_row():
    assert set(MODES) == set(GenerationMode)
    for mode in MODES.values():
        assert getattr(hfgen.GenerationMixin, mode.hook) is mode.decode


def test_a_greedy_call_enters_few_functions_before_its_first_forward():
    model, calls = hfgen.mix_into(tiny.llama()), []
    folder = str(SOURCE)

    def trace(frame, event, argument):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(folder) and not model.has_forwarded:
            calls.append((name.removeprefix(folder), frame.f_code.co_firstlineno))

    def note(*args):
        model.has_forwarded = True

    note.is_row_wise = True
    model.has_forwarded = False
    model.register_forward_pre_hook(note)
    ids = tiny.prompt(1)
    model.generate(ids, max_new_tokens=2)
    model.has_forwarded, previous = False, sys.getprofile()
    sys.setprofile(trace)
    try:
        model.generate(ids, max_new_tokens=2)
    finally:
        sys.setprofile(previous)
    files = {name for name, _ in calls}
    assert len(files) <= 24, sorted(files)
    assert len(set(calls)) <= 100
    assert len(calls) <= 160


def test_ten_files_are_named_to_read():
    page = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text("utf-8")
    listed = page.partition("<!-- ten files -->")[2].partition("<!-- end of ten files -->")[0]
    files = re.findall(r"^\d+\. `([\w/.]+)`", listed, flags=re.MULTILINE)
    lengths = [len((SOURCE / name).read_text("utf-8").splitlines()) for name in files]
    assert len(files) == 10
    assert sum(lengths) <= 2_500, dict(zip(files, lengths, strict=True))


def test_files_are_short():
    lengths = {str(p.relative_to(SOURCE)): len(p.read_text("utf-8").splitlines()) for p in FILES}
    assert {name: n for name, n in lengths.items() if n > 350} == {}


def test_what_a_capability_says_is_declared_by_its_class():
    for mode in MODES.values():
        for name in ("continues_cache", "drops_rows", "streams"):
            assert isinstance(getattr(mode.strategy, name, False), bool)
    assert torch is not None
