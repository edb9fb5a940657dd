"""How an error of one rank ends the others, with its message."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch.distributed as dist


class RankError(RuntimeError):
    """Another rank of the call has failed, or the ranks' calls do not go together."""


def error_of(messages: list[str]) -> RankError:
    """The error of those that have not failed themselves; ``messages`` of each rank, or nothing."""
    told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(messages) if text)
    return RankError(f"The call ended on all ranks, since one has failed. {told}")


def exchange(message: Any, group: Any = None) -> list[Any]:
    """``message`` of every rank of ``group``, by default of all."""
    messages: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, message, group=group)
    return messages


def text_of(error: BaseException) -> str:
    """What other ranks are told of ``error``."""
    while isinstance(error, GeneratorExit):  # the consumer of the steps ended; it may have failed
        if error.__context__ is None:
            return "nobody asks for its tokens any more"
        error = error.__context__
    return f"{type(error).__name__}: {error}"[:2000]


def is_of_connection(error: BaseException) -> bool:
    """Whether it is an error of a collective, and of no rank's own doing."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def error_of_connection(error: BaseException) -> RankError:
    """What to raise where a collective has failed, and no rank has said why."""
    return RankError(f"Ranks cannot reach each other, as after the end of a process. {error}")


def leave_note(error: BaseException, number: int) -> None:
    """Write ``error`` where ranks look whose forward has failed: the others may be within one."""
    with suppress(Exception):
        _store().set(f"hfgen/{number}/{dist.get_rank()}", text_of(error))


def find_note(number: int) -> RankError | None:
    """What another rank has left; ``None`` if there is nothing, or no store any more."""
    messages: list[str] = []
    with suppress(Exception):  # there may be no group any more
        messages = [""] * dist.get_world_size()
        for rank in range(len(messages)):
            key = f"hfgen/{number}/{rank}"
            if rank != dist.get_rank() and _store().check([key]):
                messages[rank] = _store().get(key).decode()
    return error_of(messages) if any(messages) else None


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
