"""The collective before each forward of several processes, and how an error of one rank ends the others.

Each rank forwards once a step, and goes on while others decode. Drafts of a sharded model and the second
branch of guidance are forwarded besides, as often as a rank's own tokens ask for it. A rank announces each
such forward. Ranks that have none to do wait before their next step, and forward one token meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ... import families
from ... import running as execution
from ...state.run import Run

if TYPE_CHECKING:
    from .agreement import Ranks

#: What ranks add up before a forward: whether they decode, forward something besides, have failed.
DECODES, BESIDE, FAILED = 1, 2**20, 2**40


class RankError(RuntimeError):
    """Another rank of the call has failed, or the ranks' calls do not go together."""


def of_config(config: Any) -> Ranks | None:
    """The ranks that decode the call of ``config``; ``None`` where it concerns this process alone."""
    call = getattr(config, "_call", None)
    return None if call is None else call.ranks


# ---------------------------------------------------------------- before each forward


def any_unfinished(model: Any, is_finished: bool, device: torch.device) -> bool:
    """Whether to go on: while any rank decodes; with tensor parallelism, while all of its ranks do."""
    n_decoding = _add_up(0 if is_finished else DECODES, device)
    group = families.tensor_parallel_group(model)
    if group is not None and (n_ranks := dist.get_world_size()) == dist.get_world_size(group):
        return n_decoding == n_ranks
    return n_decoding > 0


def announce(ranks: Ranks) -> None:
    """Wait until all ranks forward ``ranks.beside``, as this one is about to."""
    _add_up(BESIDE, ranks.device)


def wait(run: Run) -> None:
    """Wait until all ranks have come as far; forward one token with those that forward something besides."""
    ranks = of_config(run.config)
    if ranks is None or ranks.beside is None:
        return
    while _add_up(0, ranks.device) >= BESIDE:
        inputs: dict[str, Any] = {"input_ids": run.ids.new_zeros(1, 1)}
        if ranks.beside.config.is_encoder_decoder:
            names = ("encoder_outputs", "attention_mask")
            inputs = {name: copy.deepcopy(run.model_kwargs.get(name)) for name in names}
            inputs["decoder_input_ids"] = run.ids[:, :1]
        execution.call(ranks.beside, **inputs, use_cache=False)  # so that nothing is left behind


@contextmanager
def together(model: Any) -> Iterator[None]:
    """Within, ranks of a sharded ``model`` may forward as often as each likes: one that is done goes on with others.

    Each forward waits for the other ranks. Raises ``RankError`` here and in forwards, once a rank has failed.
    """
    if not families.is_sharded(model):
        yield
        return
    device, failure, is_done = families.device_of(model), None, False

    def join(*_: Any) -> None:
        nonlocal failure
        if failure is not None:  # the other ranks have left
            raise failure
        try:
            if not is_done:
                any_unfinished(model, False, device)
        except RankError as error:
            failure = error
            raise

    join.is_row_wise = join.joins_ranks = True  # type: ignore[attr-defined]
    handle = model.register_forward_pre_hook(join, prepend=True)  # before parameters are gathered
    try:
        yield
        while failure is None and any_unfinished(model, True, device):
            is_done = True
            execution.call(
                model, input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False
            )
    except BaseException as error:
        if not isinstance(error, RankError):
            _fail(error, device)
        raise
    finally:
        handle.remove()


def is_together(model: Any) -> bool:
    """Whether ``together(model)`` is on."""
    return any(getattr(hook, "joins_ranks", False) for hook in model._forward_pre_hooks.values())


def _add_up(number: int, device: torch.device) -> int:
    """Return the sum of the ranks' numbers. Raises ``RankError`` if another rank has failed."""
    total = torch.tensor(number, device=device)
    dist.all_reduce(total)
    if int(total) >= FAILED and number != FAILED:
        raise error_of(exchange(""))
    return int(total)


# ---------------------------------------------------------------- where one has failed


def end_with(run: Run, strategy: Any, error: BaseException) -> None:
    """Send ``error``, which came between two forwards, to the other ranks of a run: they end with it.

    With ``synced_gpus`` they go on to the next collective, which reports it. A strategy that forwards
    within its steps has ``make_up(run)``: it forwards what the others do in this step, or cannot.
    """
    ranks = of_config(run.config)
    if ranks is None or not ranks.is_synced or isinstance(error, RankError):
        return
    make_up = getattr(strategy, "make_up", None)
    if make_up is not None and not make_up(run):
        return
    _fail(error, run.ids.device)


def _fail(error: BaseException, device: torch.device) -> None:
    """Tell ``error`` to the other ranks, with the collective that comes before their next forward."""
    with suppress(Exception):  # what is raised is ``error``
        _add_up(FAILED, device)
        exchange(text_of(error))


def explain(run: Run, error: BaseException) -> None:
    """Raise a ``RankError`` if a forward has failed here since a collective has: another rank has ended."""
    if of_config(run.config) is None or isinstance(error, RankError):
        return
    if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
        raise error_of_connection(error) from error


def exchange(message: Any, group: Any = None) -> list[Any]:
    """``message`` of every rank of ``group``, by default of all."""
    messages: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, message, group=group)
    return messages


def error_of(messages: list[str]) -> RankError:
    """The error of those that have not failed themselves; ``messages`` of each rank, or nothing."""
    causes = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(messages) if text)
    return RankError(f"The call ended on all ranks, since one has failed. {causes}")


def error_of_connection(error: BaseException) -> RankError:
    """The error where a collective has failed, and no rank has said why."""
    return RankError(f"Ranks cannot reach each other, as after the end of a process. {error}")


def text_of(error: BaseException) -> str:
    """The message by which other ranks learn of ``error``."""
    while isinstance(error, GeneratorExit):  # the consumer of the steps ended; it may have failed
        if error.__context__ is None:
            return "nobody asks for its tokens any more"
        error = error.__context__
    return f"{type(error).__name__}: {error}"[:2000]
