"""What the calls of several ranks have to agree on before the first forward."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import register_fsdp_forward_method

from ... import __version__, families
from ...memory.caches import layers
from ...state.call import Call, Request
from ..row_states import generator_states
from ..step_inputs import MEDIA
from .in_step import RankError, error_of, error_of_connection, exchange, text_of

#: The hook that runs encoders.
ENCODES = "_maybe_prepare_encoder_kwargs_for_generation"

#: Fields whose values are compared where all has to be the same; others may be any object.
PLAIN = (bool, int, float, str, type(None))

#: The room of a rank that has no limit.
NO_LIMIT = 2**40

#: What to do about a difference.
ADVICE = {
    "the prompt": "With tensor parallelism all ranks decode the same prompts.",
    "the random state": "Call torch.manual_seed() with the same number on each rank, or pass `seed`.",
    "the parameters": "With tensor parallelism all ranks make the same call.",
    "the number of parts of the prompt": "Leave out `prefill_chunk_size`, or pad prompts to one length.",
}


@dataclass(slots=True)
class Ranks:
    """The ranks of one call. ``group``: ``None`` for all processes."""

    device: torch.device
    is_synced: bool
    group: Any = None
    #: The ranks that compute each layer together; ``None`` without tensor parallelism.
    tensor_group: Any = None
    #: Whether the next collective of the others is one of ``agree``, and none of a forward.
    may_tell: bool = True
    #: The sharded model that ranks forward besides the loop, as often as each has to (``in_step``).
    beside: Any = None

    @classmethod
    def of_request(cls, model: Any, request: Request) -> Ranks | None:
        """The ranks that a request is decoded with; ``None`` where it concerns this process alone."""
        tensor_group, is_synced = families.tensor_parallel_group(model), request.synced_gpus
        if is_synced is None:
            is_synced = families.is_sharded(model)
        is_assistant = getattr(request.generation_config, "is_assistant", False)
        if is_assistant or (not is_synced and tensor_group is None):
            return None
        group = None if is_synced else tensor_group
        return cls(model.device, bool(is_synced), group, tensor_group)

    def agree(self, model: Any, call: Call, prompt: Any) -> None:
        """Wait for the other ranks; ``RankError`` on each if one has failed, or if calls differ."""
        of_all, of_part, part = _of_every_rank(call, prompt), {}, -1
        if self.tensor_group is not None:
            of_part = _of_tensor_ranks(call, prompt)
            part = min(dist.get_process_group_ranks(self.tensor_group))
        room, need = _room(model, call, prompt)
        facts = of_all | of_part
        reports = self._report({"part": part, "room": room, "need": need, "facts": facts})
        if any("error" in report for report in reports):
            raise error_of([report.get("error", "") for report in reports])
        for name in facts:
            values = [report["facts"][name] for report in reports]
            firsts: dict[int, Any] = {}
            for report, value in zip(reports, values, strict=True):
                if value != firsts.setdefault(report["part"] if name in of_part else -1, value):
                    raise _difference(name, values)
        longest = max(report["need"] for report in reports)
        short = [rank for rank, report in enumerate(reports) if report["room"] < longest]
        if self.is_synced and short:
            raise RankError(
                f"A rank may generate {longest} tokens, and all forward as often, but rank {short[0]} has cache "
                f"or positions for {reports[short[0]]['room']}. Pass the same `max_new_tokens` on all ranks, "
                "and a dynamic cache."
            )

    @contextmanager
    def encoding(self, model: Any, call: Call, prompt: Any) -> Iterator[None]:
        """Run an encoder within, outside of the model's forward, once all ranks have come that far."""
        if families.takes_only_text(model) and not model.config.is_encoder_decoder:
            yield
            return
        self.agree(model, call, prompt)
        self.may_tell = False
        register_fsdp_forward_method(model, ENCODES)  # does nothing for other models
        try:
            yield
        finally:
            vars(model).pop(ENCODES, None)
        self.may_tell = True

    def forwards_beside(self, model: Any, is_own: bool) -> bool:
        """Whether ranks forward ``model`` besides the loop. ``is_own``: it is the decoding one or in it."""
        if self.is_synced and (is_own or families.is_sharded(model)):
            self.beside = model
        return self.beside is model

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks, where they wait in ``agree``, that this one will not come."""
        if isinstance(error, RankError) or not self.may_tell:
            return  # they know, or are within a forward
        with suppress(Exception):  # what is raised is ``error``
            self._report({"error": text_of(error)})

    def _report(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        """``report`` of every rank."""
        try:
            return exchange(report, self.group)
        except RuntimeError as error:
            raise error_of_connection(error) from error


# ---------------------------------------------------------------- what is compared


def _difference(name: str, values: list[Any]) -> RankError:
    """The error of ranks whose ``values`` differ."""
    if isinstance(values[0], frozenset):
        shared = frozenset.intersection(*values)
        values = [", ".join(sorted(value - shared)) or "nothing of its own" for value in values]
    listed = "; ".join(f"rank {rank}: {value!s:.200}" for rank, value in enumerate(values))
    return RankError(f"The ranks of this call differ in {name}. {listed}. {ADVICE.get(name, '')}")


def _of_every_rank(call: Call, prompt: Any) -> dict[str, Any]:
    """By name, what decides how often a rank forwards."""
    config, size = call.config, call.config.prefill_chunk_size
    length = _ids(prompt).shape[1]
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    passed = {name for name, value in prompt.model_kwargs.items() if value is not None}
    media = (passed & MEDIA) | {*(prompt.model_kwargs.get("mm_encoder_outputs") or ())}
    tried = f" with {config.top_k} candidates" if config.low_memory else ""
    return {
        "the versions": f"hfgen {__version__}, {versions}",
        "the mode": call.who + tried,
        "what is forwarded besides": _besides(call),
        "the kinds of input": ", ".join(sorted(media)) or "text",
        "the number of parts of the prompt": 1 if size is None else math.ceil(length / size),
    }


def _besides(call: Call) -> str:
    """What a call forwards besides the loop, where that is a matter of its arguments."""
    assistant, n_layers = call.request.assistant_model, call.config.assistant_early_exit
    parts = [] if n_layers is None else [f"the first {n_layers} layers"]
    if hasattr(assistant, "modules") and families.is_sharded(assistant):
        parts.append(f"a sharded {type(assistant).__name__}")
    if any(config.guidance_scale not in (None, 1) for config in call.configs):
        parts.append("the second branch of guidance")
    return ", ".join(parts) or "nothing"


def _of_tensor_ranks(call: Call, prompt: Any) -> dict[str, Any]:
    """By name, what decides which tokens are chosen."""
    ids = _ids(prompt)
    parameters = (
        f"{name}={value!r}" + (f" of prompt {place}" if len(call.configs) > 1 else "")
        for place, config in enumerate(call.configs)
        for name, value in vars(config).items()
        if name[0] != "_" and _is_plain(value)
    )
    state = "none is drawn from"
    if any(c.do_sample and getattr(c, "seed", None) is None for c in call.configs):
        states = b"".join(state.numpy().tobytes() for state in generator_states(ids.device))
        state = hashlib.sha256(states).hexdigest()[:16]
    return {
        "the prompt": [*ids.shape, *ids.flatten().tolist()[:100_000]],
        "the parameters": frozenset(parameters),
        "the random state": state,
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)


def _ids(prompt: Any) -> torch.Tensor:
    """What is decoded from; before an encoder has run, what it reads."""
    return getattr(prompt, "ids", prompt.main_input)


def _room(model: Any, call: Call, prompt: Any) -> tuple[int, int]:
    """How many tokens cache and learned positions have room for behind the prompt, and how many may come."""
    if not hasattr(prompt, "ids"):  # an encoder has yet to run
        return NO_LIMIT, 0
    cache = families.given_cache(prompt.model_kwargs)
    # The last token is not forwarded.
    n_places = math.inf if cache is None else layers.capacity(cache) + 1
    table = families.position_table(model)
    if table is not None and not model.config.is_encoder_decoder:
        n_places = min(n_places, families.n_positions(table) + 1)
    room = min(n_places - prompt.ids.shape[1], NO_LIMIT)
    return int(room), int(call.config.max_length - call.prompt_length)
