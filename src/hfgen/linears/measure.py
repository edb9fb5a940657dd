"""Measures each kernel for the layers of one shape and selects the fastest."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from .forward import ROWS, PackedForward, own_forward

#: Microseconds by kernel and number of rows.
Times = dict[str, dict[int, float]]

#: What is timed: one layer, of activations.
Run = Callable[[Tensor], object]

#: Names among ``Times``: of a layer's own forward, and of a whole step by kernels that are chosen.
OWN, CHANGED = "own", "changed"
#: A kernel is used where it takes at most this share of the layer's own time.
WORTH = 0.9
#: Layers of a shape are used in turn, up to so many bytes of weights: caches of processors hold less.
SPAN = 2**26
#: Seconds and turns for one number of rows: at least ``MIN_TURNS``, then until the time is over.
SECONDS, MIN_TURNS, MAX_TURNS = 0.06, 3, 40


def measure(modules: Sequence[nn.Linear], kernels: Mapping[str, Sequence[nn.Linear]]) -> Times:
    """Times of the layers' own forward and of kernels, which take turns; medians.

    ``modules``: the layers of one shape and type; ``kernels``: by name, those that it takes.
    """
    weight = modules[0].weight
    n_used = max(1, SPAN // (weight.numel() * weight.element_size()))
    runs: dict[str, list[Run]] = {OWN: [own_forward(m) for m in modules[:n_used]]}
    for name, fitting in kernels.items():
        everywhere = frozenset(ROWS)
        runs[name] = [PackedForward(m, name, everywhere).compute for m in fitting[:n_used]]
    generator = torch.Generator().manual_seed(0)
    times: Times = {name: {} for name in runs}
    for rows in ROWS:
        shape = (rows, weight.shape[1])
        x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        for name, median in milliseconds(runs, x.to(weight.dtype)).items():
            times[name][rows] = round(1e3 * median, 3)
    return times


def milliseconds(
    runs: Mapping[str, Sequence[Run]], x: Tensor, seconds: float = SECONDS
) -> dict[str, float]:
    """Of one call of each, the median; functions of a list are called in turn."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for functions in runs.values():  # weights are packed, and threads started
            for function in functions:
                function(x)
        end = time.perf_counter() + seconds
        for turn in range(MAX_TURNS):
            for name, functions in runs.items():
                begin = time.perf_counter()
                for function in functions:
                    function(x)
                found[name].append((time.perf_counter() - begin) / len(functions))
            if turn + 1 >= MIN_TURNS and time.perf_counter() > end:
                break
    return {name: 1e3 * statistics.median(seconds) for name, seconds in found.items()}


def best(times: Times, names: Sequence[str]) -> tuple[str | None, frozenset[int]]:
    """The one of ``names`` that gains most while decoding, and the numbers of rows at which it does.

    One kernel per shape, since each keeps a copy of the weight. (None, ∅) if none is worth it.
    """
    gains: dict[str, float] = {}
    rows: dict[str, frozenset[int]] = {}
    own = times[OWN]
    for name in names:
        if name not in times:
            continue
        ratios = {n: took / own[n] for n, took in times[name].items()}
        rows[name] = frozenset(n for n, ratio in ratios.items() if ratio <= WORTH)
        gains[name] = sum(-math.log(ratios[n]) for n in rows[name])
    chosen = max(gains, key=gains.__getitem__, default=None)
    return (chosen, rows[chosen]) if chosen and rows[chosen] else (None, frozenset())
