"""Several processes with one model: comparing their calls, and reporting an error to all of them.

A *rank* is one of these processes. Sharded parameters (FSDP, ZeRO-3) are gathered in each forward, so ranks
have prompts of their own and have to forward as often. Ranks of tensor parallelism compute each layer
together, so they have to choose the same tokens. Either way, a rank that stops leaves the others waiting.

``Ranks.agree`` compares the calls before the first forward, in one collective. An error before the loop, and
one between two forwards of a loop with ``synced_gpus``, travel with the next collective, and every rank
raises. After a failure within a forward, the others raise once the process that failed has ended.

Drafts of a sharded model and the second branch of guidance are forwarded besides the loop, as often as a
rank's own tokens ask for it. A rank announces each such forward; the others forward one token meanwhile.
"""

from __future__ import annotations

import copy
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
from torch.utils._pytree import tree_leaves

from .. import __version__, families
from ..memory.caches import layers
from ..state.call import Call, Request
from ..state.run import Run
from .executor import call as forward
from .row_states import generator_states
from .step_inputs import MEDIA

#: Values of fields that are compared; others may be any object.
PLAIN = (bool, int, float, str, type(None))

#: What ranks add up before a forward: whether they decode, forward something besides, have failed.
DECODES, BESIDE, FAILED = 1, 2**20, 2**40

#: What to do about a difference.
ADVICE = {
    "the prompt": "With tensor parallelism all ranks decode the same prompts.",
    "the random state": "Call torch.manual_seed() with the same number on each rank, or pass `seed`.",
    "the parameters": "With tensor parallelism all ranks make the same call.",
    "the number of parts of the prompt": "Leave out `prefill_chunk_size`, or pad prompts to one length.",
}


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
    #: Whether the next collective of the others is one of ``agree``, and none of a forward.
    may_tell: bool = True
    #: The sharded model that ranks forward besides the loop, as often as each has to.
    beside: Any = None

    @classmethod
    def of_request(cls, model: Any, request: Request) -> Ranks | None:
        """The ranks that a request is decoded with; ``None`` where it concerns this process alone."""
        is_asked, tensor_group = request.synced_gpus, families.tensor_parallel_group(model)
        is_synced = families.is_sharded(model) if is_asked is None else bool(is_asked)
        is_assistant = getattr(request.generation_config, "is_assistant", False)
        if is_assistant or (not is_synced and tensor_group is None):
            return None
        return cls(model.device, is_synced, None if is_synced else tensor_group, tensor_group)

    def agree(self, model: Any, call: Call, prompt: Any) -> None:
        """Wait for the other ranks; ``RankError`` on each if one has failed, or if calls differ."""
        ids = getattr(prompt, "ids", prompt.main_input)  # before an encoder has run, what it reads
        facts, facts_of_part, part = _facts_of_every_rank(call, prompt, ids), {}, -1
        if self.tensor_group is not None:
            facts_of_part = _facts_of_tensor_ranks(call, ids)
            part = min(dist.get_process_group_ranks(self.tensor_group))
        facts |= facts_of_part
        room, need = _room(model, call, prompt)
        report = {"part": part, "room": room, "need": need, "facts": facts}
        try:
            reports = exchange(report, self.group)
        except RuntimeError as error:
            raise connection_error(error) from error
        if any("error" in report for report in reports):
            raise error_of([report.get("error", "") for report in reports])
        for name in facts:
            firsts: dict[int, Any] = {}
            for report in reports:
                value, place = report["facts"][name], report["part"] if name in facts_of_part else 0
                if value != firsts.setdefault(place, value):
                    raise _difference(name, [report["facts"][name] for report in reports])
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
        hook = "_maybe_prepare_encoder_kwargs_for_generation"
        register_fsdp_forward_method(model, hook)  # does nothing for other models
        try:
            yield
        finally:
            vars(model).pop(hook, None)
        self.may_tell = True

    def forwards_beside(self, model: Any, is_own: bool) -> bool:
        """Whether ranks forward ``model`` besides the loop. ``is_own``: it is the decoding one or in it."""
        if self.is_synced and (is_own or families.is_sharded(model)):
            self.beside = model
        return self.beside is model

    def announce(self) -> None:
        """Wait until all ranks forward ``beside``, as this one is about to."""
        _add_up(BESIDE, self.device)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks, where they wait in ``agree``, that this one will not come."""
        if self.may_tell and not isinstance(
            error, RankError
        ):  # else they know, or are within a forward
            with suppress(Exception):  # what is raised is ``error``
                exchange({"error": message_of(error)}, self.group)


# ---------------------------------------------------------------- what is compared


def _difference(name: str, values: list[Any]) -> RankError:
    """The error of ranks whose ``values`` differ."""
    if isinstance(values[0], frozenset):
        shared = frozenset.intersection(*values)
        values = [", ".join(sorted(value - shared)) or "nothing of its own" for value in values]
    listed = "; ".join(f"rank {rank}: {value!s:.200}" for rank, value in enumerate(values))
    return RankError(f"The ranks of this call differ in {name}. {listed}. {ADVICE.get(name, '')}")


def _facts_of_every_rank(call: Call, prompt: Any, ids: torch.Tensor) -> dict[str, Any]:
    """By name, what decides how often a rank forwards."""
    config, assistant = call.config, call.request.assistant_model
    size, n_layers = config.prefill_chunk_size, config.assistant_early_exit
    media = {name for name in MEDIA if prompt.model_kwargs.get(name) is not None}
    media |= {*(prompt.model_kwargs.get("mm_encoder_outputs") or ())}
    besides = [] if n_layers is None else [f"the first {n_layers} layers"]
    if hasattr(assistant, "modules") and families.is_sharded(assistant):
        besides.append(f"a sharded {type(assistant).__name__}")
    if any(each.guidance_scale not in (None, 1) for each in call.configs):
        besides.append("the second branch of guidance")
    return {
        "the versions": f"hfgen {__version__}, transformers {transformers.__version__}, torch {torch.__version__}",
        "the mode": call.who + (f" with {config.top_k} candidates" if config.low_memory else ""),
        "what is forwarded besides": ", ".join(besides) or "nothing",
        "the kinds of input": ", ".join(sorted(media)) or "text",
        "the number of parts of the prompt": math.ceil(ids.shape[1] / size) if size else 1,
    }


def _facts_of_tensor_ranks(call: Call, ids: torch.Tensor) -> dict[str, Any]:
    """By name, what decides which tokens are chosen."""
    parameters = (
        f"{name}={value!r}" + (f" of prompt {place}" if len(call.configs) > 1 else "")
        for place, config in enumerate(call.configs)
        for name, value in vars(config).items()
        if name[0] != "_" and all(isinstance(leaf, PLAIN) for leaf in tree_leaves(value))
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


def _room(model: Any, call: Call, prompt: Any) -> tuple[float, int]:
    """How many tokens cache and learned positions have room for behind the prompt, and how many may come."""
    if not hasattr(prompt, "ids"):  # an encoder has yet to run
        return math.inf, 0
    n_places = layers.capacity(families.given_cache(prompt.model_kwargs))
    table = families.position_table(model)
    if table is not None and not model.config.is_encoder_decoder:
        n_places = min(n_places, families.n_positions(table))
    # The last token is not forwarded.
    return n_places + 1 - prompt.ids.shape[1], call.config.max_length - call.prompt_length


# ---------------------------------------------------------------- before each forward


def of_config(config: Any) -> Ranks | None:
    """The ranks that decode the call of ``config``; ``None`` where it concerns this process alone."""
    call = getattr(config, "_call", None)
    return None if call is None else call.ranks


def any_unfinished(model: Any, is_finished: bool, device: torch.device) -> bool:
    """Whether to go on: while any rank decodes; with tensor parallelism, while all of its ranks do."""
    n_decoding = _add_up(0 if is_finished else DECODES, device)
    group = families.tensor_parallel_group(model)
    if group is not None and (n_ranks := dist.get_world_size()) == dist.get_world_size(group):
        return n_decoding == n_ranks
    return n_decoding > 0


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
        forward(ranks.beside, **inputs, use_cache=False)  # so that nothing is left behind


@contextmanager
def together(model: Any) -> Iterator[None]:
    """Within, ranks of a sharded ``model`` may forward as often as each likes; a rank at the end goes on with others.

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
        ids = torch.zeros(1, 1, dtype=torch.long, device=device)
        while failure is None and any_unfinished(model, True, device):
            is_done = True
            forward(model, input_ids=ids, use_cache=False)
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
    if make_up is None or make_up(run):
        _fail(error, run.ids.device)


def _fail(error: BaseException, device: torch.device) -> None:
    """Tell ``error`` to the other ranks, with the collective that comes before their next forward."""
    with suppress(Exception):  # what is raised is ``error``
        _add_up(FAILED, device)
        exchange(message_of(error))


def explain(run: Run, error: BaseException) -> None:
    """Raise a ``RankError`` if a forward has failed here since a collective has: another rank has ended."""
    is_lost = isinstance(error, dist.DistError) or "gloo/transport" in str(error)
    if is_lost and not isinstance(error, RankError) and of_config(run.config) is not None:
        raise connection_error(error) from error


def exchange(message: Any, group: Any = None) -> list[Any]:
    """``message`` of every rank of ``group``, by default of all."""
    messages: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, message, group=group)
    return messages


def error_of(messages: list[str]) -> RankError:
    """The error of those that have not failed themselves; ``messages`` of each rank, or nothing."""
    causes = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(messages) if text)
    return RankError(f"The call ended on all ranks, since one has failed. {causes}")


def connection_error(error: BaseException) -> RankError:
    """The error where a collective has failed, and no rank has said why."""
    return RankError(f"Ranks cannot reach each other, as after the end of a process. {error}")


def message_of(error: BaseException) -> str:
    """The message by which other ranks learn of ``error``."""
    while isinstance(error, GeneratorExit):  # the consumer of the steps ended; it may have failed
        if error.__context__ is None:
            return "nobody asks for its tokens any more"
        error = error.__context__
    return f"{type(error).__name__}: {error}"[:2000]
