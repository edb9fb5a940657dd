"""Times a step of the whole model with and without the selected kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from .. import execution
from .forward import ROWS, PackedForward
from .measure import CHANGED, OWN, Times

#: Pairs of steps for one number of rows: so many, or fewer once the time is over, but ``MIN_PAIRS``.
PAIRS, MIN_PAIRS, SECONDS = 15, 3, 1.0
#: A layer and what may compute it.
Change = tuple[nn.Linear, PackedForward]


def apply(changes: Iterable[Change]) -> None:
    """Let other kernels compute the layers."""
    for module, forward in changes:
        vars(module)["forward"] = forward


def undo(changes: Iterable[Change]) -> None:
    """Let the layers compute by their own forwards."""
    for module, _ in changes:
        vars(module).pop("forward", None)


def takes_ids(model: nn.Module) -> bool:
    """Whether ``model`` decodes from ids alone, so that a step can be timed."""
    config: Any = getattr(model, "config", None)
    is_decoder = config is not None and not getattr(config, "is_encoder_decoder", False)
    return is_decoder and getattr(model, "main_input_name", None) == "input_ids"


def measure_steps(model: nn.Module, changes: Sequence[Change], rows: Iterable[int]) -> Times:
    """Times of a step without and with ``changes``, by number of rows; ∅ if it cannot be run.

    A step is a forward of one token per row, without a cache; for a prefill, of one row of so many
    tokens. Both ways take turns; medians.
    """
    own: dict[int, float] = {}
    changed: dict[int, float] = {}
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        for n in sorted(rows):
            shape = (1, n) if n == ROWS[-1] else (n, 1)
            ids = torch.ones(shape, dtype=torch.long, device="cpu")
            own[n], changed[n] = _step_times(model, changes, ids)
    except Exception:  # of the model's making: it needs more than ids
        return {}
    finally:
        undo(changes)
        for module in training:
            module.training = True
    return {OWN: own, CHANGED: changed}


def slower(times: Times) -> frozenset[int]:
    """Numbers of rows at which ``measure_steps`` found no gain."""
    if not times:
        return frozenset()
    return frozenset(n for n, took in times[CHANGED].items() if took >= times[OWN][n])


@torch.no_grad()
def _step_times(
    model: nn.Module, changes: Sequence[Change], ids: torch.Tensor
) -> tuple[float, float]:
    """Microseconds without ``changes`` and with them."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    end = None
    for turn in range(PAIRS + 1):
        for is_changed in (turn % 2 == 0, turn % 2 == 1):
            (apply if is_changed else undo)(changes)
            begin = time.perf_counter()
            execution.call(model, input_ids=ids, use_cache=False)
            seconds[is_changed].append(time.perf_counter() - begin)
        if end is None:  # the first pair packs weights and starts threads
            end = time.perf_counter() + SECONDS
            seconds = {False: [], True: []}
        elif turn >= MIN_PAIRS and time.perf_counter() > end:
            break
    own, changed = (round(1e6 * statistics.median(seconds[way]), 1) for way in (False, True))
    return own, changed
