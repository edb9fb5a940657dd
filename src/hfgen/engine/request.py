"""A request of the engine, its events, and its output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..logits.stopping import FinishReason
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
        """Add an event to the output of its sequence."""
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
            [] if decoding is None else decoding.prompt_ids,
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
