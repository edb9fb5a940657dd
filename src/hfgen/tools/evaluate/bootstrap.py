"""Percentile bootstrap intervals of statistics that are sums over units (windows, documents, lines)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

DRAWS, LEVEL = 1000, 0.95  # resamples of an interval, and the share of them that lies within it


@dataclass(frozen=True, slots=True)
class Interval:
    """The middle ``LEVEL`` of a statistic's values over ``DRAWS`` resamples."""

    low: float
    high: float


def interval(
    parts: Tensor, statistic: Callable[[list[float]], float], seed: int = 0
) -> Interval | None:
    """The percentile bootstrap interval (Efron 1979) of ``statistic(parts.sum(dim=0))``.

    ``parts (units, k)``: what each unit adds to the ``k`` sums that ``statistic`` is computed from. Units
    are drawn with replacement, by a generator with ``seed``. ``None`` for fewer than two units.
    """
    n = len(parts)
    if n < 2:
        return None
    generator = torch.Generator().manual_seed(seed)
    values = []
    for _ in range(DRAWS):
        drawn = torch.randint(n, (n,), generator=generator).bincount(minlength=n)
        values.append(statistic((drawn.double() @ parts.double()).tolist()))
    found, tail = torch.tensor(values, dtype=torch.float64), (1 - LEVEL) / 2
    return Interval(float(found.quantile(tail)), float(found.quantile(1 - tail)))
