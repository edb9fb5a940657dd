"""What a GPU shows, by one command: its tests, upstream side by side, and targets 12 to 14: ``make gpu``.

``python -m benchmarks.gpu`` writes ``gpu.{md,json}`` and prints the table at the end. Without a GPU it says
so, and its exit code is 2. ``--dry-run`` runs all of it on a tiny model on the CPU, the tests included, in a
few minutes: graphs are recorded operation by operation. Its numbers say nothing, and are not written.
"""

from __future__ import annotations

import copy
import gc
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, TypeVar

import torch
import transformers
import typer

from benchmarks import engine, execution, models, output
from benchmarks.models import PROMPT_LENGTH, Subject
from benchmarks.output import RESULTS, OutOption
from benchmarks.side_by_side import Spread, call, frozen_garbage, machine, read_bandwidth
from hfgen.running import ahead
from tests.host_recorder import recording_on_the_cpu

#: Tests that need a GPU; the first file can be rehearsed on a CPU.
TESTS = ("tests/test_gpu.py", "tests/test_quantized_cache.py::test_on_a_gpu")

Result = TypeVar("Result")

#: The exit code where there is none.
NO_GPU = 2


@dataclass(frozen=True, slots=True)
class Way:
    """A way to decode: the library, and arguments of ``generate``; stop flags read late where that pays."""

    side: str
    call: dict[str, Any] = field(default_factory=dict)
    may_check_late: bool = True
    beside: str = "upstream"  # the way that it is compared with


STATIC: dict[str, Any] = {"cache_implementation": "static"}
GRAPHS = STATIC | {"use_cuda_graph": True}
SEEDED: dict[str, Any] = {"do_sample": True, "top_k": 50, "seed": 1}
BEAMS: dict[str, Any] = {"num_beams": 4}
LOOKUP: dict[str, Any] = {"prompt_lookup_num_tokens": 8}

WAYS: dict[str, Way] = {
    "upstream": Way("upstream"),
    "upstream, static and compiled": Way("upstream", STATIC),
    "hfgen": Way("hfgen"),
    "hfgen, static and compiled": Way("hfgen", STATIC),
    "hfgen, static and compiled, checks at once": Way("hfgen", STATIC, may_check_late=False),
    "hfgen, graphs": Way("hfgen", GRAPHS),
    "hfgen, graphs, checks at once": Way("hfgen", GRAPHS, may_check_late=False),
    "hfgen, graphs, sampled by a seed": Way("hfgen", GRAPHS | SEEDED),
    "upstream, beams": Way("upstream", BEAMS, beside="upstream, beams"),
    "hfgen, beams": Way("hfgen", BEAMS, beside="upstream, beams"),
    "hfgen, graphs, beams": Way("hfgen", GRAPHS | BEAMS, beside="upstream, beams"),
    # Upstream drafts for one row alone.
    "upstream, prompt lookup": Way("upstream", LOOKUP, beside="upstream, prompt lookup"),
    "hfgen, graphs, prompt lookup": Way("hfgen", GRAPHS | LOOKUP, beside="upstream, prompt lookup"),
}
REFERENCE = "upstream"


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    new_tokens: int = 256
    n_rounds: int = 5
    warm_up: float = 3.0  # seconds of each way
    rows: tuple[int, ...] = (1, 8)
    n_requests: int = 64

    @property
    def is_dry(self) -> bool:
        return self.n_rounds == 1


@dataclass(slots=True)
class Times:
    """One way at one number of rows: milliseconds per token of a row, one of each round."""

    way: str
    rows: int
    first: float = 0.0  # seconds of the first call
    per_token: list[float] = field(default_factory=list)
    equal: float | None = None  # share of tokens that are upstream's; of samples none
    error: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.per_token)


def tiny() -> Subject:
    """For a dry run."""
    return models.random(
        "tiny",
        "Tiny Llama",
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


def subject_on(device: str) -> Subject:
    """The 1B-shaped model in bfloat16."""
    subject = models.random_1b()
    model = subject.model.to(device=device, dtype=torch.bfloat16)
    return Subject(subject.name, f"{subject.title}, bfloat16", model, subject.prompt.to(device))


# --- decoding: target 14 ------------------------------------------------------------------------


def copies(subject: Subject) -> dict[str, Any]:
    """A model for each way, of the same weights: what is compiled or recorded stays with a model."""
    made: dict[Any, Any] = {}
    shared = {id(weight): weight for weight in subject.model.parameters()}
    for way in WAYS.values():
        kind = way.side, "use_cuda_graph" in way.call, bool(way.call)
        if kind not in made:
            made[kind] = copy.deepcopy(subject.model, dict(shared))
    return {
        name: made[way.side, "use_cuda_graph" in way.call, bool(way.call)]
        for name, way in WAYS.items()
    }


def decode(subject: Subject, size: Size) -> list[Times]:
    """All ways by turns, each warmed up; a way that fails keeps its error."""
    found, of = {(n, w): Times(w, n) for n in size.rows for w in WAYS}, copies(subject)
    with frozen_garbage():
        for n in size.rows:
            tokens = {}
            for name in WAYS:
                times = found[n, name]
                with failing_alone(times):
                    start = time.perf_counter()
                    tokens[name] = _decode(of[name], subject, name, size, times)
                    times.first = time.perf_counter() - start
                    while time.perf_counter() - start < size.warm_up:
                        _decode(of[name], subject, name, size, times)
                    times.per_token.clear()
            for turn in range(size.n_rounds):
                shift = turn % len(WAYS)
                for name in (*WAYS, *WAYS)[shift : shift + len(WAYS)]:
                    times = found[n, name]
                    if times.error is None:
                        with failing_alone(times):
                            _decode(of[name], subject, name, size, times)
                typer.echo(f"{n} rows: round {turn + 1} of {size.n_rounds}", err=True)
            for name, own in tokens.items():
                theirs = tokens.get(WAYS[name].beside)
                if theirs is not None and "do_sample" not in WAYS[name].call:
                    n_columns = min(own.shape[1], theirs.shape[1])
                    same = own[:, :n_columns] == theirs[:, :n_columns]
                    found[n, name].equal = same.float().mean().item()
    return list(found.values())


def _decode(model: Any, subject: Subject, name: str, size: Size, times: Times) -> torch.Tensor:
    """Call, note the time per token, and return the new tokens on the CPU."""
    way, device = WAYS[name], subject.prompt.device
    prompts = torch.cat([subject.prompt.roll(row, dims=1) for row in range(times.rows)])
    given = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
    given |= {"do_sample": False, "max_new_tokens": size.new_tokens} | way.call
    gc.collect()
    with checking_late(way.may_check_late):
        synchronize(device)
        start = time.perf_counter()
        done = call(way.side, model, given, seed=0)
        synchronize(device)
    tokens = done.tokens[:, PROMPT_LENGTH:]
    times.per_token.append(1e3 * (time.perf_counter() - start) / tokens.shape[1])
    return tokens.cpu()


@contextmanager
def failing_alone(times: Times) -> Iterator[None]:
    """An exception within ends one way, not all."""
    try:
        yield
    except Exception as error:
        times.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        typer.echo(f"{times.way}, {times.rows} rows: {times.error}", err=True)


@contextmanager
def checking_late(may: bool) -> Iterator[None]:
    """Within, stop flags are read late where that pays, or never."""
    before = ahead.ASYNCHRONOUS
    ahead.ASYNCHRONOUS = before if may else ()
    try:
        yield
    finally:
        ahead.ASYNCHRONOUS = before


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_bandwidth(device: str, n_bytes: int = 2**31, repeat: int = 15) -> float:
    """Bytes per second at which ``tensor.sum()`` reads bfloat16 numbers on the device, at best."""
    if device == "cpu":
        return read_bandwidth(2**24, 3)
    tensor, best = torch.ones(n_bytes // 2, dtype=torch.bfloat16, device=device), float("inf")
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        tensor.sum()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return n_bytes / best


# --- continuous batching: target 13 -------------------------------------------------------------


def batching(subject: Subject, size: Size) -> list[engine.Timed]:
    """The engine, padded batches and upstream's continuous batching on the same requests."""
    model = subject.model
    eos, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    try:
        asked = engine.requests(model.config.vocab_size, size.n_requests)
        asked = [(prompt, min(n, size.new_tokens)) for prompt, n in asked]
        ways = engine.ways(32, is_large=False)
        left_out = {"one by one"} | ({"upstream's generate_batch"} if size.is_dry else set())
        chosen = [way for way in ways if way.name not in left_out]
        return engine.measure(model, asked, chosen, min(size.n_rounds, 3))
    finally:
        model.generation_config.eos_token_id = eos


# --- the tests ----------------------------------------------------------------------------------


def run_tests(is_dry: bool = False) -> tuple[bool, str]:
    """Whether the tests for GPUs pass, and the last line that pytest says; dry, on the CPU."""
    tests = TESTS[:1] if is_dry else TESTS
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", *tests]
    environment = os.environ | ({"HFGEN_TEST_DEVICE": "cpu"} if is_dry else {})
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    sys.stderr.write(done.stdout + done.stderr)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return done.returncode == 0, lines[-1].strip("= ") if lines else done.stderr[-200:]


# --- the page -----------------------------------------------------------------------------------


def report(results: dict[str, Any], decoded: list[Times], batched: list[engine.Timed]) -> str:
    """The page: tests, targets, and all times."""
    facts, floor = results["machine"], results["floor"]
    lines = [
        f"# On a GPU: {facts['device']}",
        "",
        f"{facts['processor']}; torch {facts['torch']}, transformers {facts['transformers']}, hfgen "
        f"{facts['hfgen']}, Python {facts['python']}. Read bandwidth {results['bandwidth'] / 1e9:.0f} GB/s "
        "(`tensor.sum()`).",
        "",
        f"* Tests for GPUs: {results['tests']}.",
        *(f"* {line}" for line in targets(results, decoded, batched)),
        "",
        f"## Decoding: {results['title']}; floor {floor:.3f} ms per token",
        "",
        f"Prompts of {PROMPT_LENGTH} tokens, {results['size']['new_tokens']} new ones; the prompt's time is included. *Bandwidth*: the "
        "time in which the weights are read once, by the time; with beams and drafts, a token is not one such read. *Times upstream*: beside "
        "upstream's way of the same mode. *First call*: with all that it compiles or records. *Equal*: tokens that are those of upstream; "
        "after one that differs, a row is another text.",
        "",
        "| way | rows | ms per token | bandwidth | times upstream | first call (s) | equal |",
        "|---|--:|--:|--:|--:|--:|--:|",
        *(_line(times, decoded, floor) for times in decoded),
        "",
        f"## Continuous batching: {results['size']['n_requests']} requests, prompts of 8 to 512 tokens",
        "",
        engine.table(batched) if batched else "Not measured.",
    ]
    return "\n".join(lines) + "\n"


def _line(times: Times, decoded: list[Times], floor: float) -> str:
    if times.error is not None:
        return f"| {times.way} | {times.rows} | {times.error.replace('|', '/')} | | | | |"
    return (
        f"| {times.way} | {times.rows} | {times.median:.3f} | {floor / times.median:.0%} | "
        f"{_gain(decoded, WAYS[times.way].beside, times.way, times.rows)} | {times.first:.1f} | "
        f"{'' if times.equal is None else f'{times.equal:.0%}'} |"
    )


def _gain(decoded: list[Times], slow: str, fast: str, rows: int = 1) -> str:
    """How many times as fast, round by round."""
    of = {times.way: times for times in decoded if times.rows == rows and times.error is None}
    if slow not in of or fast not in of:
        return "not measured"
    pairs = zip(of[slow].per_token, of[fast].per_token, strict=True)
    return str(Spread.of([a / b for a, b in pairs]))


def targets(
    results: dict[str, Any], decoded: list[Times], batched: list[engine.Timed]
) -> list[str]:
    """What was to be reached, and what was."""
    lines = [f"Target 12, decoding on this machine's CPU: {results['cpu']}"]
    seconds = {each.name: statistics.median(each.seconds) for each in batched}
    for name, target in (("padded, unsorted", 2), ("upstream's generate_batch", 5)):
        is_measured = {name, "engine"} <= seconds.keys()
        gained = f"{seconds[name] / seconds['engine']:.2f} times" if is_measured else "not measured"
        lines.append(f"Target 13, the engine beside {name}: {gained} (target {target}).")
    greedy = [name for name, way in WAYS.items() if way.side == "hfgen" and way.beside == REFERENCE]
    own = [t for t in decoded if t.rows == 1 and t.error is None and t.way in greedy]
    best = [min(own, key=lambda t: t.median).way] if own else []
    for way in dict.fromkeys(["hfgen", *best]):
        share = [f"{results['floor'] / t.median:.0%}" for t in own if t.way == way]
        lines.append(
            f"Target 14, `{way}` at batch 1: {', '.join(share) or 'not measured'} of bandwidth (target 80%); "
            f"upstream's default {_gain(decoded, REFERENCE, way)} times (target 5), its static and compiled "
            f"{_gain(decoded, 'upstream, static and compiled', way)} times (target 1.2)."
        )
    return lines


def on_the_cpu(make: Callable[[], Subject], size: Size) -> str:
    """Target 12: ``hfgen.optimize`` on the CPU beside upstream's best way there."""
    bandwidth = read_bandwidth(2**20, 1) if size.is_dry else read_bandwidth()
    rounds, subject = min(size.n_rounds, 3), execution.as_checkpoint(make())
    result = execution.measure(subject, bandwidth, rounds, (1, 8), 8)
    return " ".join(execution.targets_text(result).replace("* ", "").splitlines())


def surely(measure: Callable[[], Result]) -> Result | None:
    """What ``measure`` returns; ``None`` if it fails: the rest of the page is written then, too."""
    try:
        return measure()
    except Exception:
        traceback.print_exc()
        return None


def main(
    dry_run: Annotated[bool, typer.Option(help="A tiny model, on the CPU.")] = False,
    out: OutOption = RESULTS,
) -> None:
    """Run the tests for GPUs and the benchmarks; print the table."""
    if not (dry_run or torch.cuda.is_available()):
        typer.echo(
            f"No GPU: torch {torch.__version__} finds no CUDA device, so there is nothing to measure. "
            "`--dry-run` tries the benchmark on the CPU.",
            err=True,
        )
        raise typer.Exit(NO_GPU)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = "cpu" if dry_run else "cuda"
    size = Size(8, 1, 0.0, (1, 2), 8) if dry_run else Size()
    passed, tests = run_tests(is_dry=dry_run)
    subject = tiny() if dry_run else subject_on(device)
    bandwidth = device_bandwidth(device)
    named = "a dry run on the CPU" if dry_run else torch.cuda.get_device_name()
    with recording_on_the_cpu() if dry_run else nullcontext():
        decoded = decode(subject, size)
    batched = surely(lambda: batching(subject, size)) or []
    make = tiny if dry_run else models.random_135m
    results = {
        "machine": machine() | {"device": named},
        "title": f"{subject.title}, {subject.n_parameters / 1e6:.4g}M parameters",
        "tests": tests,
        "bandwidth": bandwidth,
        "floor": 1e3 * subject.bytes_per_token / bandwidth,
        "size": asdict(size),
        "cpu": surely(lambda: on_the_cpu(make, size)) or "not measured",
    }
    text = report(results, decoded, batched)
    if not dry_run:
        raw = {"decoding": [asdict(t) for t in decoded], "batching": [asdict(t) for t in batched]}
        output.write(out, "gpu", text, results | raw)
    print(text)
    if not passed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
