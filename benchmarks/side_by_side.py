"""Upstream and hfgen in one process: the same weights, calls taking turns, the same tokens.

A machine's speed changes from second to second, so two calls are compared only with each other if
one directly follows the other. Such two are a pair; the libraries take turns in going first. What
is reported is the median of the pairs' ratios, with their quartiles.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

import hfgen
from hfgen.running.optimization.pages import in_huge_pages

LIBRARIES = ("upstream", "hfgen")


class UnequalTokensError(AssertionError):
    """The libraries did not generate the same tokens, so their times say nothing."""


@contextmanager
def unmixed(model: Any) -> Iterator[None]:
    """Within, ``model`` (that ``hfgen.mix_into`` mixed) generates with upstream's own code."""
    mixed = type(model)
    model.__class__ = mixed._unmixed_class
    try:
        yield
    finally:
        model.__class__ = mixed


@dataclass(frozen=True, slots=True)
class Call:
    """One call of ``generate``: its tokens ``(rows, length)``, and its seconds."""

    tokens: torch.Tensor
    wall: float
    cpu: float  # of all threads together
    speculation: Any = None  # hfgen's statistics, if asked for


def call(library: str, model: Any, arguments: dict[str, Any], seed: int) -> Call:
    """Generate with ``library``, one of ``LIBRARIES``; garbage is not collected meanwhile.

    An assistant generates with the same library.
    """
    with ExitStack() as stack:
        for part in (model, arguments.get("assistant_model")):
            if library == "upstream" and isinstance(part, hfgen.GenerationMixin):
                stack.enter_context(unmixed(part))
        return _timed(model, arguments, seed)


def _timed(model: Any, arguments: dict[str, Any], seed: int) -> Call:
    torch.manual_seed(seed)
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        cpu, wall = time.process_time(), time.perf_counter()
        output = model.generate(**arguments)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    finally:
        if was_collecting:
            gc.enable()
    if isinstance(output, torch.Tensor):
        return Call(output, wall, cpu)
    return Call(output.sequences, wall, cpu, getattr(output, "speculation", None))


def pair(model: Any, arguments: dict[str, Any], seed: int, first: str) -> dict[str, Call]:
    """One call of each library, ``first``'s first.

    Raises ``UnequalTokensError`` if their tokens differ.
    """
    gc.collect()
    order = sorted(LIBRARIES, key=lambda library: library != first)
    calls = {library: call(library, model, arguments, seed) for library in order}
    theirs, ours = (calls[library].tokens for library in LIBRARIES)
    if not torch.equal(theirs, ours):
        raise UnequalTokensError(
            f"upstream generated {theirs.tolist()}, and hfgen {ours.tolist()}."
        )
    return calls


@dataclass(slots=True)
class Comparison:
    """The pairs of calls of one kind; seconds."""

    name: str
    new_tokens: int = 0  # per row of the output
    wall: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in LIBRARIES})
    cpu: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in LIBRARIES})

    def add(self, calls: dict[str, Call]) -> None:
        for library, made in calls.items():
            self.wall[library].append(made.wall)
            self.cpu[library].append(made.cpu)

    @property
    def n_pairs(self) -> int:
        return len(self.wall["hfgen"])

    @property
    def ratio(self) -> Spread:
        """hfgen's wall time over upstream's, pair by pair."""
        return Spread.of(ratios(self.wall))

    @property
    def cpu_ratio(self) -> Spread:
        """hfgen's time on the processor over upstream's, pair by pair."""
        return Spread.of(ratios(self.cpu))

    def milliseconds(self, library: str) -> float:
        """Median wall time of a call."""
        return 1e3 * statistics.median(self.wall[library])


def ratios(seconds: dict[str, list[float]]) -> list[float]:
    return [
        ours / theirs for theirs, ours in zip(seconds["upstream"], seconds["hfgen"], strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, and the quartiles around it."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def speed_cells(seconds: Sequence[float], n_tokens: int) -> str:
    """Two cells of a table: the seconds with their quartiles, and tokens per second."""
    spread = Spread.of(seconds)
    return f"{spread.median:.1f} ({spread.low:.1f} to {spread.high:.1f}) | {n_tokens / spread.median:,.0f}"


def compare(
    model: Any,
    calls: dict[str, dict[str, Any]],
    n_pairs: int,
    seed: int = 0,
    advance: Callable[[str], None] = lambda name: None,
) -> list[Comparison]:
    """Measure the named ``calls`` (arguments of ``generate``), a warm-up pair and ``n_pairs`` each.

    Pairs of different calls take turns too, so that a slow minute spoils a pair of each and not all
    of one. ``advance`` is told the name of each pair that is done. Raises ``UnequalTokensError``,
    naming the call.
    """
    comparisons = {name: Comparison(name) for name in calls}
    with frozen_garbage():
        for turn in range(n_pairs + 1):
            for name, arguments in calls.items():
                try:
                    made = pair(model, arguments, seed, first=LIBRARIES[turn % 2])
                except UnequalTokensError as error:
                    raise UnequalTokensError(f"In {name!r}, {error}") from None
                comparison = comparisons[name]
                if turn == 0:
                    length = made["hfgen"].tokens.shape[1]
                    comparison.new_tokens = length - arguments["input_ids"].shape[1]
                else:
                    comparison.add(made)
                advance(name)
    return list(comparisons.values())


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """Within, collecting garbage is quick: it passes over what was there before.

    Otherwise it would walk over all modules before each pair, and the pair's first call would run
    on cold caches.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# --- the machine --------------------------------------------------------------------------------


def read_bandwidth(n_bytes: int = 2**28, repeat: int = 15) -> float:
    """Bytes per second at which ``tensor.sum()`` reads a float32 tensor of ``n_bytes``, in huge pages, at best."""
    tensor = in_huge_pages(torch.ones(n_bytes // 4))
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        tensor.sum()
        seconds.append(time.perf_counter() - start)
    return n_bytes / min(seconds)


def machine() -> dict[str, Any]:
    """What the numbers depend on: processor, threads, versions, and how busy the machine is."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hfgen": hfgen.__version__,
    }


def described(facts: dict[str, Any]) -> str:
    """What ``machine`` found, as the pages of results say it."""
    return (
        f"{facts['processor']}, {facts['cores']} cores, {facts['threads']} thread(s), load {facts['load']}. "
        f"torch {facts['torch']}, transformers {facts['transformers']}, hfgen {facts['hfgen']}"
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
