"""The collective before each forward of several processes, which also reports that one has failed.

Each rank forwards once a step, and goes on while others decode. Drafts of a sharded model and the second
branch of guidance are forwarded besides, as often as a rank's own tokens ask for it. A rank announces each
such forward. Ranks that have none to do wait before their next step, and forward one token meanwhile.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ... import families
from ... import running as execution
from .errors import (
    RankError,
    error_of,
    error_of_connection,
    exchange,
    find_note,
    is_of_connection,
    leave_note,
    text_of,
)

if TYPE_CHECKING:
    from ...state.run import Run
    from .agreement import Ranks

#: What ranks add up before a forward: whether they decode, forward something besides, have failed.
DECODES, BESIDE, FAILED = 1, 2**20, 2**40


def of_config(config: Any) -> Ranks | None:
    """The ranks that decode the call of ``config``; ``None`` where it concerns this process alone."""
    call = getattr(config, "_call", None)
    return None if call is None else call.ranks


def any_unfinished(model: Any, is_finished: bool, device: torch.device) -> bool:
    """Whether to go on: while any rank decodes; with tensor parallelism, while all of its ranks do.

    Raises ``RankError`` if a rank has failed.
    """
    n_decoding = _tell(0 if is_finished else DECODES, device)
    group = families.tensor_parallel_group(model)
    if group is not None and (n_ranks := dist.get_world_size()) == dist.get_world_size(group):
        return n_decoding == n_ranks
    return n_decoding > 0


def announce(company: Ranks) -> None:
    """Wait until all ranks forward ``company.beside``, as this one is about to."""
    _tell(BESIDE, company.device)


def wait(run: Run) -> None:
    """Wait until all ranks have come as far; forward with those that forward something besides."""
    company = of_config(run.config)
    if company is None or company.beside is None:
        return
    while _tell(0, company.device) >= BESIDE:
        _forward_one_token(run, company.beside)


def _forward_one_token(run: Run, model: Any) -> None:
    """Forward ``model`` without a cache, so that nothing is left behind."""
    inputs: dict[str, Any] = {"input_ids": run.ids.new_zeros(1, 1)}
    if model.config.is_encoder_decoder:
        names = ("encoder_outputs", "attention_mask")
        inputs = {name: copy.deepcopy(run.model_kwargs.get(name)) for name in names}
        inputs["decoder_input_ids"] = run.ids[:, :1]
    execution.call(model, **inputs, use_cache=False)


def _tell(number: int, device: torch.device) -> int:
    """The sum of what all ranks tell."""
    total = _sum(number, device)
    if total >= FAILED:
        raise error_of(exchange(""))
    return total


def _sum(number: int, device: torch.device) -> int:
    total = torch.tensor(number, device=device)
    dist.all_reduce(total)
    return int(total)


def end_with(run: Run, strategy: Any, error: BaseException) -> None:
    """Let the other ranks of a run end with ``error``, which came after a forward and before the next.

    With ``synced_gpus`` they go on to the next collective, where it is told. A strategy that forwards
    within its steps has ``make_up(run)``: it forwards what the others do in this step, or cannot.
    """
    company = of_config(run.config)
    if company is None or not company.is_synced or isinstance(error, RankError):
        return
    make_up = getattr(strategy, "make_up", None)
    if make_up is not None and not make_up(run):
        return
    with suppress(Exception):  # what is raised is ``error``
        _sum(FAILED, run.ids.device)
        exchange(text_of(error))


def explain(run: Run, error: BaseException) -> None:
    """Raise the ``RankError`` that says why a forward has failed here, or leave a note of ``error``."""
    company = of_config(run.config)
    if company is None or isinstance(error, RankError):
        return
    if isinstance(error, RuntimeError) and (note := find_note(company.number)) is not None:
        raise note from error
    if is_of_connection(error):
        raise error_of_connection(error) from error
    leave_note(error, company.number)
