"""``hfgen doctor``: checks the installation and lists optional packages."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import typer
from rich.markup import escape
from rich.table import Table
from typer import Option

import hfgen

from ...settings.versions import TESTED
from . import measure, options
from .compare import compare_call, described
from .field_options import generation_config
from .loading import load, quiet
from .report import duration, out, print_json, table

#: Part → the extra of hfgen that it needs, and the modules in it.
OPTIONAL = {
    "grammars": ("grammar", "llguidance"),
    "minimum Bayes risk": ("mbr", "sacrebleu"),
    "hfgen serve": ("serve", "fastapi jinja2 llguidance openai prometheus_client pydantic uvicorn"),
    "hfgen eval generate": ("eval", "rouge_score sacrebleu"),
    "Ray Data": ("ray", "ray"),
}

PROMPT = "def add(a, b):"
NEW_TOKENS = 24
SEED = 0
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_p": 0.95},
    "beam search (4)": {"do_sample": False, "num_beams": 4},
}
SECONDS = 10.0  # no mode but the first is begun after this
STYLES = {"ok": "green", "note": "yellow", "broken": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: ``note`` can be lived with, ``broken`` cannot."""

    topic: str
    name: str
    value: str
    state: Literal["ok", "note", "broken"] = "ok"


def doctor(
    exact: str | None = Option(None, metavar="MODEL", help="Say instead whether it can be exact."),
    dtype: options.Dtype = options.DTYPE,
    as_json: bool = options.JSON,
    debug: bool = options.DEBUG,
) -> None:
    """Check this installation: versions, devices, optional packages, and the same tokens as transformers.

    Exit code 0: nothing is broken; 1: something is. With --exact MODEL: each kind of operation of a model, its
    shape and type, and whether its rows are exact on this machine (hfgen.exact).
    """
    if exact is not None:
        raise typer.Exit(print_exactness(exact, dtype, as_json, debug))
    findings = [*versions(), *parts(), *devices(), *contract(debug)]
    if not any(finding.state == "broken" for finding in findings):
        findings += self_check(debug)
    n_broken = sum(finding.state == "broken" for finding in findings)
    if as_json:
        print_json({"works": not n_broken, "findings": [asdict(each) for each in findings]})
    else:
        grid = Table.grid(padding=(0, 2, 0, 0))
        for topic, of_topic in groupby(findings, key=lambda finding: finding.topic):
            grid.add_row(f"[bold]{topic}[/]")
            for each in of_topic:
                value = f"[{STYLES[each.state]}]{escape(each.value)}[/]"
                grid.add_row(f"  {escape(each.name)}", value)
        broken, works = f"[bold red]{n_broken} broken.[/]", "[bold green]hfgen works here.[/]"
        out.print(grid, broken if n_broken else works, sep="\n")
    raise typer.Exit(min(n_broken, 1))


def print_exactness(name: str, dtype: str, as_json: bool, debug: bool) -> int:
    """Print what ``hfgen.exact`` says of a model; the exit code."""
    from ...running.exact import InexactError, exact

    refusal = None
    with quiet(debug):
        model = load(name, None, dtype, "cpu").model
        try:
            operations = exact(model).exactness.operations
        except ValueError as error:
            refusal = str(error).removeprefix("exact: ")
            operations = error.operations if isinstance(error, InexactError) else ()
    if as_json:
        rows = [asdict(operation) for operation in operations]
        print_json({"exact": refusal is None, "refusal": refusal, "operations": rows})
    else:
        grid = table("operation", "shape", "type", "rows")
        for each in operations:
            result = f"[bold red]{each.differs}[/]" if each.differs else "[green]exact[/]"
            grid.add_row(escape(each.name), each.shape, each.dtype, result)
        words = f"[bold red]Refused:[/] {escape(refusal or '')}"
        out.print(grid, words if refusal else "[bold green]The model is exact here.[/]", sep="\n")
    return int(refusal is not None)


def versions() -> Iterator[Finding]:
    """Python and the packages that hfgen stands on; which transformers is a tested one."""
    yield Finding("versions", "hfgen", hfgen.__version__)
    yield Finding("versions", "python", platform.python_version())
    for package in ("torch", "transformers", "accelerate"):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            yield Finding("versions", package, f"missing: pip install {package}", "broken")
            continue
        is_tested = package != "transformers" or version in TESTED
        words = version if is_tested else f"{version}, not tested: hfgen's are {TESTED}"
        yield Finding("versions", package, words, "ok" if is_tested else "note")


def parts() -> Iterator[Finding]:
    """Optional packages: installed, or the line that installs them."""
    for name, (extra, modules) in OPTIONAL.items():
        missing = [module for module in modules.split() if find_spec(module) is None]
        advice = f"pip install 'hfgen[{extra}]', for {', '.join(missing)}"
        words = advice if missing else "installed"
        yield Finding("optional", name, words, "note" if missing else "ok")


def devices() -> Iterator[Finding]:
    try:
        import torch
    except Exception as error:  # of any kind: a library that does not load, a wrong build
        yield Finding("devices", "torch", f"cannot be imported: {error}", "broken")
        return
    n_threads = torch.get_num_threads()
    yield Finding("devices", "cpu", f"{n_threads} thread{'s' if n_threads > 1 else ''}")
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        memory = f"{device.total_memory / 2**30:.0f} GiB"
        yield Finding("devices", f"cuda:{number}", f"{device.name}, {memory}")
    if torch.backends.mps.is_available():
        yield Finding("devices", "mps", "available")


def contract(debug: bool) -> Iterator[Finding]:
    """Whether transformers still has what hfgen relies on."""
    topic = "transformers' internals"
    if (spec := find_spec("transformers")) is None or spec.origin is None:
        return
    from ..contract import PRIVATE, hooks, imports, moved_hooks, moved_names

    folder = Path(spec.origin).parent
    lines = moved_names(folder)
    try:
        with quiet(debug):
            lines += moved_hooks(folder)
    except Exception as error:  # hfgen cannot be imported: what moved may be among the other lines
        lines.append(f"import of hfgen: {type(error).__name__}: {error}")
    for line in lines:
        name, _, problem = line.partition(": ")
        yield Finding(topic, name, problem, "broken")
    if not lines:
        yield Finding(topic, "hooks", f"{len(hooks())}, with the same parameters")
        yield Finding(topic, "imports", f"{len(imports())} names, all there")
        yield Finding(topic, "private attributes", f"{len(PRIVATE)}, all there")


def self_check(debug: bool) -> Iterator[Finding]:
    """The built-in model through both libraries."""
    topic, start = "self-check", time.perf_counter()
    with quiet(debug):
        try:
            loaded = load("builtin", None, "auto", "cpu")
            inputs = measure.encode(loaded, [PROMPT])
        except Exception as error:
            yield Finding(topic, "built-in model", f"{type(error).__name__}: {error}", "broken")
            return
        for mode, fields in MODES.items():
            before = time.perf_counter()
            if before - start > SECONDS and mode != "greedy":
                yield Finding(topic, mode, "left out: this machine is slow or busy", "note")
                continue
            try:
                config = generation_config(fields, loaded.model, NEW_TOKENS)
                differences = compare_call(loaded, inputs, config, SEED, 0)["differences"]
            except Exception as error:
                yield Finding(topic, mode, f"{type(error).__name__}: {error}", "broken")
                continue
            words = f"same tokens as transformers, {duration(time.perf_counter() - before)}"
            if differences:
                how = described(differences[0], loaded.tokenizer)
                words = f"transformers' tokens differ: {how}"
            yield Finding(topic, mode, words, "broken" if differences else "ok")
