"""A request of the engine: its prompt and the checks of its arguments, its events, and its output."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import families
from ..logits.stopping import FinishReason
from ..mixin import mixed_view
from ..running.prefix import PrefixCache
from ..running.ranks import is_together
from ..running.row_states import foreign_code
from ..settings.kinds import check_integer
from ..settings.logs import logger
from ..streaming import StreamEvent
from .decoding import Decoding
from .scheduler import Item

if TYPE_CHECKING:
    from ..logits.logprobs import TokenLogprob
    from ..state.call import Request
    from .engine import Engine


@dataclass(slots=True)
class SequenceOutput:
    """One returned sequence: generated ids up to the one that ended it, and their text."""

    token_ids: list[int] = field(default_factory=list)
    #: ``None`` without a tokenizer.
    text: str | None = None
    finish_reason: FinishReason | None = None
    #: With ``logprobs=``, an entry for each of the ``token_ids``.
    logprobs: list[TokenLogprob] | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request in seconds; ``None`` for what did not happen."""

    #: From ``add`` to the first forward of its prompt.
    queue_time: float | None = None
    #: From ``add``.
    time_to_first_token: float | None = None
    #: Mean time from one token of the longest sequence to its next.
    time_per_output_token: float | None = None
    total_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """The output of a request. ``token_ids``, ``text`` and others are those of the first sequence."""

    id: str
    prompt_token_ids: list[int]
    sequences: list[SequenceOutput]
    metrics: RequestMetrics
    #: The exception that ended the request; ``finish_reason`` is ``"error"`` then.
    error: BaseException | None = None
    prompt_logprobs: Any = field(default=None, repr=False)
    #: What ``generate`` returns; ``None`` if the request did not come to its end.
    generate_output: Any = field(default=None, repr=False)

    @property
    def token_ids(self) -> list[int]:
        return self.sequences[0].token_ids

    @property
    def text(self) -> str | None:
        return self.sequences[0].text

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.sequences[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.sequences[0].logprobs


@dataclass(frozen=True, slots=True)
class EngineEvent(StreamEvent):
    """New tokens of one sequence of a request; the last event of a sequence has its ``finish_reason``."""

    request: EngineRequest = field(kw_only=True)


@dataclass(eq=False, repr=False, kw_only=True)
class EngineRequest(Item):
    """A request that was added to an engine. Times are those of the engine's clock, in seconds."""

    id: str
    engine: Engine
    #: The arguments of ``generate``.
    arguments: Request
    #: When it ends with the tokens that it has by then.
    deadline: float | None = None
    decoding: Decoding | None = None
    #: The reason that ends it before the next step.
    ends_as: FinishReason | None = None
    sequences: dict[int, SequenceOutput] = field(default_factory=dict)
    times: RequestMetrics = field(default_factory=RequestMetrics)
    output: RequestOutput | None = None
    last_token: float | None = None

    def __repr__(self) -> str:
        return f"EngineRequest({self.id!r}, {self.state!r})"

    @property
    def done(self) -> bool:
        return self.output is not None

    def cancel(self) -> None:
        """End the request with what it has, in any state; from any thread."""
        self.engine.cancel(self)

    def result(self) -> RequestOutput:
        """The output; steps the engine until it is there. Raises ``ResultTakenError`` the second time."""
        return self.engine.result(self)

    def gain(self, event: StreamEvent, now: float) -> None:
        sequence = self.sequences.setdefault(event.row, SequenceOutput())
        sequence.token_ids += event.token_ids
        if event.text:
            sequence.text = (sequence.text or "") + event.text
        if event.logprobs is not None:
            sequence.logprobs = [*(sequence.logprobs or ()), *event.logprobs]
        sequence.finish_reason = event.finish_reason
        if event.token_ids:
            if self.times.time_to_first_token is None:
                self.times.time_to_first_token = now - self.arrived
            self.last_token = now

    def prepare(self, model: Any) -> Decoding:
        """The call of the request, prepared once. Raises what ``generate`` raises for its arguments."""
        if self.decoding is None:
            self.decoding = Decoding(model, self)
        return self.decoding

    def end(self, now: float, error: BaseException | None, generated: Any) -> list[int]:
        """Build the output. Sequences that had not ended get the reason ``ends_as``; returns their rows."""
        times, ended_now, decoding = self.times, [], self.decoding
        run: Any = decoding and decoding.run
        n_sequences = 1 if run is None else run.config.num_return_sequences or 1
        for row in range(max(n_sequences, len(self.sequences))):
            sequence = self.sequences.setdefault(row, SequenceOutput())
            if sequence.finish_reason is None:
                sequence.finish_reason = self.ends_as
                ended_now.append(row)
            if sequence.text is None and self.arguments.kwargs.get("tokenizer") is not None:
                sequence.text = ""
        longest = max(len(sequence.token_ids) for sequence in self.sequences.values())
        times.total_time = now - self.arrived
        if longest > 1 and self.last_token is not None and times.time_to_first_token is not None:
            decode_time = self.last_token - self.arrived - times.time_to_first_token
            times.time_per_output_token = decode_time / (longest - 1)
        self.output = RequestOutput(
            self.id,
            [] if run is None else run.prompts[0].tolist(),
            [self.sequences[row] for row in sorted(self.sequences)],
            times,
            error,
            run and run.extras.get("prompt_logprobs"),
            generated,
        )
        self.decoding = None
        return ended_now


@dataclass(slots=True)
class EngineStats:
    """What an engine has done so far."""

    n_steps: int = 0
    n_forwards: int = 0
    prefill_tokens: int = 0
    #: Of all sequences, as their events have them.
    decoded_tokens: int = 0
    n_finished: int = 0
    n_failed: int = 0
    n_cancelled: int = 0
    #: Times that a request was taken out of the batch, since bytes had run out.
    n_taken_out: int = 0
    #: Cells of the cache over all decoding forwards, and those among them that were padding.
    n_cells: int = 0
    n_padding: int = 0

    @property
    def padding(self) -> float:
        """The share of padding in the cache, over all decoding forwards."""
        return self.n_padding / max(self.n_cells, 1)


def model_inputs(prompt: Any, tokenizer: Any, device: torch.device) -> dict[str, Any]:
    """The inputs of one prompt: text, token ids, chat messages, or inputs by name, of one row each.

    Raises ``ValueError`` or ``TypeError`` for a prompt that is empty or of another kind.
    """
    inputs: Any = prompt
    is_chat = isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping)
    if tokenizer is None and (is_chat or isinstance(prompt, str)):
        what = "chat messages" if is_chat else "text"
        raise ValueError(f"A prompt that is {what} needs the engine's `tokenizer`.")
    if isinstance(prompt, str):
        inputs = tokenizer(prompt, return_tensors="pt")
    elif is_chat:
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        inputs = tokenizer.apply_chat_template(list(prompt), **options)
    elif isinstance(prompt, Tensor):
        inputs = {"input_ids": prompt}
    elif isinstance(prompt, list | tuple):
        kinds = set(map(type, prompt))
        if bool in kinds or not all(issubclass(kind, Integral) for kind in kinds):
            raise TypeError(
                f"A prompt that is a list has to hold token ids, but is {prompt!r:.80}."
            )
        inputs = {"input_ids": torch.tensor(prompt, dtype=torch.long)}
    elif not isinstance(prompt, Mapping):
        raise TypeError(
            "A prompt has to be text, token ids, a list of chat messages, or a mapping of model inputs, "
            f"but is {type(prompt).__name__}."
        )
    inputs = {name: value for name, value in inputs.items() if value is not None}
    ids = inputs.get("input_ids")
    if isinstance(ids, Tensor) and ids.ndim == 1:
        same = [n for n, v in inputs.items() if isinstance(v, Tensor) and v.shape == ids.shape]
        inputs |= {name: inputs[name][None] for name in same}
    for name in ("input_ids", "inputs_embeds"):
        rows = inputs.get(name)
        if isinstance(rows, Tensor) and rows.ndim > 1 and len(rows) != 1:
            raise ValueError(
                f"A request has one prompt, but `{name}` has {len(rows)} rows. Add one request for each."
            )
    if isinstance(ids, Tensor) and ids.numel() == 0 and "inputs_embeds" not in inputs:
        raise ValueError("The prompt is empty: it has to have at least one token.")
    return {n: v.to(device) if isinstance(v, Tensor) else v for n, v in inputs.items()}


def check_arguments(model: Any, tokenizer: Any, prefix_cache: Any) -> None:
    """Raise ``TypeError`` for a wrong argument of ``Engine``, ``ValueError`` for sharded parameters."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` has to be a model of transformers, but is {model!r:.80}.")
    if families.is_sharded(model) and not is_together(mixed_view(model)):
        raise ValueError(
            "An engine does not support sharded parameters (FSDP, ZeRO-3): each rank has other "
            "requests, but all ranks need the same number of forward passes. Call generate(), load the "
            "whole model on each rank, or train with hfgen.trl.rollout()."
        )
    if isinstance(tokenizer, str):
        raise TypeError(f"`tokenizer` has to be a tokenizer that is loaded, but is {tokenizer!r}.")
    if not isinstance(prefix_cache, PrefixCache | None):
        raise TypeError(f"`prefix_cache` has to be a PrefixCache, but is {prefix_cache!r:.80}.")


def keeps_states(model: Any) -> bool:
    """Whether code in ``model`` may keep states of its rows, so that requests cannot take turns; warns once."""
    if (code := foreign_code(model)) is None:
        return False
    logger.warning_once(
        f"The engine decodes one request at a time: {code} may keep states of its rows. If it computes "
        "each row by itself, set the attribute `is_row_wise = True` on this function or class."
    )
    return True


def check_numbers(priority: Any, timeout: Any) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a wrong ``priority`` or ``timeout`` of ``Engine.add``."""
    check_integer(priority, "priority")
    if isinstance(timeout, bool) or not isinstance(timeout, Real | None):
        raise TypeError(f"`timeout` has to be a number of seconds, but is {timeout!r:.80}.")
    if timeout is not None and math.isnan(timeout):
        raise ValueError("`timeout` has to be a number of seconds, but is NaN.")
