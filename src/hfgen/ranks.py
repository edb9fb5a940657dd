"""Several processes with one model: comparing their calls, and reporting an error to all of them.

A *rank* is one of these processes. Sharded parameters (FSDP, ZeRO-3) are gathered in each forward, so ranks
have prompts of their own and have to forward as often. Ranks of tensor parallelism compute each layer
together, so they have to choose the same tokens. Either way, a rank that stops leaves the others waiting.

``Ranks.agree`` compares the calls before the first forward, in one collective of a few numbers. An error
before the loop, and one between two forwards of a loop with ``synced_gpus``, travel with the collective
that comes next, and every rank raises. What fails within a forward leaves a note in the store of
``torch.distributed``, which the others find once their own forward has failed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers

from . import __version__, families
from .caches import layers

if TYPE_CHECKING:
    from .call import Call, Request, Run

#: What a failed rank adds to the count of ranks that still decode. Above it are sums of whole numbers.
FAILED = 2.0**20

#: Fields whose values are compared where all has to be the same; others may be any object.
PLAIN = (bool, int, float, str, type(None))


class RankError(RuntimeError):
    """Another rank of the call has failed, or the ranks' calls do not go together."""


@dataclass(slots=True)
class Ranks:
    """The ranks of one call. ``group``: ``None`` for all processes."""

    device: torch.device
    is_synced: bool
    group: Any = None
    #: The ranks that compute each layer together; ``None`` without tensor parallelism.
    tensor_group: Any = None
    #: How many calls of several ranks there have been: the same number on each.
    number: int = field(default_factory=lambda: _count())
    #: Whether the next collective of the others is one of ``agree``, and none of a forward.
    may_tell: bool = True

    @classmethod
    def of_request(cls, model: Any, request: Request) -> Ranks | None:
        """The ranks that a request is decoded with; ``None`` where it concerns this process alone."""
        config = request.generation_config
        if getattr(config, "is_assistant", False):
            return None
        tensor_group = families.tensor_parallel_group(model)
        is_synced = request.synced_gpus
        if is_synced is None:
            is_synced = families.is_sharded(model)
        if not is_synced and tensor_group is None:
            return None
        group = None if is_synced else tensor_group
        return cls(model.device, bool(is_synced), group, tensor_group)

    def agree(self, model: Any, call: Call, prompt: Any) -> None:
        """Wait for the other ranks; ``RankError`` on each if one has failed, or if calls differ."""
        shared = _of_every_rank(call, prompt)
        same = {} if self.tensor_group is None else _of_tensor_ranks(call, prompt)
        part = min(dist.get_process_group_ranks(self.tensor_group)) if same else -1
        digests = map(_digest, (*shared.values(), *same.values()))
        numbers = [0, part, *_room(model, call, prompt), *digests]
        table = self._gather(numbers)
        if any(row[0] for row in table):
            raise self._error_of_others()
        names = [*shared, *same]
        for place, name in enumerate(names, start=4):
            groups: dict[int, set[int]] = {}
            for row in table:
                groups.setdefault(row[1] if name in same else -1, set()).add(row[place])
            if any(len(found) > 1 for found in groups.values()):
                raise self._difference(name, (shared | same)[name])
        longest = max(row[3] for row in table)
        if self.is_synced and any(row[2] < longest for row in table):
            rank = next(index for index, row in enumerate(table) if row[2] < longest)
            raise RankError(
                f"A rank may generate {longest} tokens, and the others keep it company, but rank {rank} "
                f"has cache or positions for {table[rank][2]}. Pass the same `max_new_tokens` on all ranks, "
                "and a dynamic cache."
            )

    @contextmanager
    def encoding(self, model: Any, call: Call, prompt: Any) -> Iterator[None]:
        """An encoder, if there is one, runs within: all ranks have to have come that far."""
        if families.takes_only_text(model) and not model.config.is_encoder_decoder:
            yield
            return
        self.agree(model, call, prompt)
        self.may_tell = False
        yield
        self.may_tell = True

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks, where they wait in ``agree``, that this one will not come."""
        if isinstance(error, RankError):
            return  # they know
        if not self.may_tell:
            leave_note(error, self.number)
            return
        with suppress(Exception):  # what is raised is ``error``
            self._gather([1])
            self._error_of_others(_text(error))

    def _gather(self, numbers: list[int]) -> list[list[int]]:
        """``numbers`` of every rank; shorter lists, of ranks that have failed, are filled up."""
        row = torch.zeros(WIDTH, dtype=torch.long)
        row[: len(numbers)] = torch.tensor(numbers)
        row = row.to(self.device)
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(rows, row, group=self.group)
        table: list[list[int]] = torch.stack(rows).tolist()
        return table

    def _difference(self, name: str, value: Any) -> RankError:
        values: list[Any] = _exchange(value, self.group)
        if isinstance(value, frozenset):
            shared = frozenset.intersection(*values)
            values = [", ".join(sorted(each - shared)) or "nothing of its own" for each in values]
        listed = "; ".join(f"rank {rank}: {each!s:.200}" for rank, each in enumerate(values))
        return RankError(
            f"The ranks of this call differ in {name}. {listed}. {ADVICE.get(name, '')}"
        )

    def _error_of_others(self, own: str = "") -> RankError:
        return error_of(_exchange(own, self.group))


#: Numbers that a rank sends: whether it has failed, its part, its room, its need, and digests of facts.
WIDTH = 16

NO_LIMIT = 2**40

ADVICE = {
    "the prompt": "With tensor parallelism all ranks decode the same prompts.",
    "the random state": "Call torch.manual_seed() with the same number on each rank, or pass `seed`.",
    "the parameters": "With tensor parallelism all ranks make the same call.",
    "the number of parts of the prompt": "Leave out `prefill_chunk_size`, or pad prompts to one length.",
}

_calls = 0


def _count() -> int:
    global _calls
    _calls += 1
    return _calls


# ---------------------------------------------------------------- what is compared


def _of_every_rank(call: Call, prompt: Any) -> dict[str, Any]:
    """By name, what decides how often a rank forwards."""
    config, size = call.config, call.config.prefill_chunk_size
    length = _ids(prompt).shape[1]
    versions = (
        f"hfgen {__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    )
    tried = f" with {config.top_k} candidates" if config.low_memory else ""
    return {
        "the versions": versions,
        "the mode": call.who + tried,
        "the number of parts of the prompt": 1 if size is None else math.ceil(length / size),
    }


def _of_tensor_ranks(call: Call, prompt: Any) -> dict[str, Any]:
    """By name, what decides which tokens are chosen."""
    ids = _ids(prompt)
    parameters = (
        f"{name}={value!r}" + (f" of prompt {place}" if len(call.configs) > 1 else "")
        for place, config in enumerate(call.configs)
        for name, value in vars(config).items()
        if name[0] != "_" and _is_plain(value)
    )
    is_drawn = any(c.do_sample and getattr(c, "seed", None) is None for c in call.configs)
    return {
        "the prompt": [*ids.shape, *ids.flatten().tolist()[:100_000]],
        "the parameters": frozenset(parameters),
        "the random state": _random_state(ids.device) if is_drawn else "none is drawn from",
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)


def _random_state(device: torch.device) -> str:
    """A checksum of torch's generators, of which tokens are drawn."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return hashlib.sha256(b"".join(state.numpy().tobytes() for state in states)).hexdigest()[:16]


def _digest(value: Any) -> int:
    value = (
        sorted(value) if isinstance(value, frozenset) else value
    )  # sets have an order of their own
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


def _ids(prompt: Any) -> torch.Tensor:
    """What is decoded from; before an encoder has run, what it reads."""
    return prompt.ids if prompt.ids.numel() else prompt.main_input


def _room(model: Any, call: Call, prompt: Any) -> tuple[int, int]:
    """How many tokens cache and learned positions have room for behind the prompt, and how many may come."""
    if not prompt.ids.numel():
        return NO_LIMIT, 0
    cache = families.given_cache(prompt.model_kwargs)
    held = math.inf if cache is None else layers.capacity(cache) + 1  # the last is not forwarded
    table = families.position_table(model)
    if table is not None and not model.config.is_encoder_decoder:
        held = min(held, families.n_positions(table) + 1)
    room = min(held - prompt.ids.shape[1], NO_LIMIT)
    return int(room), int(call.config.max_length - call.prompt_length)


# ---------------------------------------------------------------- errors


def end_with(run: Run, strategy: Any, error: BaseException) -> None:
    """Let the other ranks of a run end with ``error``, which came after a forward and before the next.

    With ``synced_gpus`` they go on to ``loop.unfinished``, where it is told. A strategy that forwards
    within its steps has ``make_up(run)``: it forwards what the others do in this step, or cannot.
    """
    company = None if run.call is None else run.call.ranks
    if company is None or not company.is_synced or isinstance(error, RankError):
        return
    make_up = getattr(strategy, "make_up", None)
    if make_up is not None and not make_up(run):
        return
    with suppress(Exception):  # what is raised is ``error``
        failed = torch.tensor(FAILED, device=run.ids.device)
        dist.all_reduce(failed, op=dist.ReduceOp.SUM)
        _exchange(_text(error), None)


def explain(run: Run, error: BaseException) -> None:
    """Raise the ``RankError`` that says why a forward has failed here, or leave a note of ``error``."""
    company = None if run.call is None else run.call.ranks
    if company is None or isinstance(error, RankError):
        return
    if isinstance(error, RuntimeError) and (note := find_note(company.number)) is not None:
        raise note from error
    leave_note(error, company.number)


def raise_of_others() -> None:
    """Raise what other ranks have told."""
    raise error_of(_exchange("", None))


def error_of(messages: list[str]) -> RankError:
    """The error of those that have not failed themselves; ``messages`` of each rank, or nothing."""
    told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(messages) if text)
    return RankError(f"The call ended on all ranks, since one has failed. {told}")


def _exchange(message: Any, group: Any) -> list[Any]:
    messages: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, message, group=group)
    return messages


def _text(error: BaseException) -> str:
    while isinstance(error, GeneratorExit):  # the consumer of the steps ended; it may have failed
        if error.__context__ is None:
            return "nobody asks for its tokens any more"
        error = error.__context__
    return f"{type(error).__name__}: {error}"[:2000]


def leave_note(error: BaseException, number: int) -> None:
    """Write ``error`` where ranks look whose forward has failed: the others may be within one."""
    with suppress(Exception):
        _store().set(f"hfgen/{number}/{dist.get_rank()}", _text(error))


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
