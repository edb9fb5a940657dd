"""The decode loop: a strategy chooses tokens, observers record and stream them."""

from __future__ import annotations

import traceback
from collections.abc import Generator
from contextlib import closing, nullcontext
from typing import Any

import torch
from transformers.utils import ModelOutput

from ..logits import logprobs
from ..logits.logprobs.recorder import PromptRecorder
from ..memory.batch import Batch
from ..running import ahead, ranks
from ..state.run import Observer, Run, Step, Strategy
from . import activations
from .card import CardWriter
from .outputs import GenerateOutput, Recording, Results


def steps(run: Run, strategy: Strategy) -> Generator[Step, None, None]:
    """Decode until every sequence is finished, yielding each step; closing the iterator stops it."""
    may_check_late = ahead.ALWAYS or not run.ids.is_cpu
    with ahead.decided(run, strategy) if may_check_late else nullcontext():
        outputs = strategy.prefill(run)  # None: the first forward takes the prompt itself
    with strategy.decoding(run):
        while unfinished(run):
            if outputs is None:
                outputs = strategy.forward(run)
            if run.synced_gpus and run.finished:  # other devices still decode: forward as often
                commit(run, outputs)
                outputs = None
                continue
            try:
                step = strategy.step(run, outputs)
                outputs = None
                strategy.stop(run)
                if run.ahead is not None and run.ahead.pending_flags is not None:
                    outputs = ahead.forward_ahead(run, strategy)
                yield step
            except BaseException as error:  # the other devices go on to the next forward
                ranks.end_with(run, strategy, error)
                raise


def drive(run: Run, strategy: Strategy) -> Generator[Step, None, None]:
    """Yield the steps of ``steps``; each observer of the run gets a step before it is yielded."""
    if run.config.max_new_tokens == 0:
        return
    iterator = steps(run, strategy)
    if run.call is not None and run.call.interventions is not None:
        iterator = run.call.interventions.during(run, iterator)
    try:
        with closing(iterator):
            for step in iterator:
                for observer in run.observers:
                    observer.add(run, strategy, step)
                yield step
    except BaseException as error:
        ranks.explain(run, error)
        raise


def finish(run: Run, strategy: Strategy) -> GenerateOutput | torch.Tensor:
    """Decode to the end: record each step, stream it, and put together what ``generate`` returns."""
    recording = begin(run)
    try:
        for _ in drive(run, strategy):
            pass
    except RuntimeError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        is_in_hfgen = frame.f_globals["__name__"].startswith("hfgen.")
        if is_in_hfgen and isinstance(error.__cause__, StopIteration):
            raise error.__cause__ from None  # Python replaces it where a generator raises it
        raise
    return conclude(run, strategy, recording)[1]


def begin(run: Run) -> Recording:
    """Set the observers that the call asks for; return the first of them, the recording."""
    recording, config, call = Recording(run), run.config, run.call
    run.observers = [recording]
    if config.return_dict_in_generate:
        run.observers.append(Results(run))
        if run.asks_for("prompt_logprobs"):
            run.observers.append(PromptRecorder(run))
        has_support = getattr(config, "logprobs_support", None)
        if has_support or run.asks_for("logprobs", "logprob_token_ids"):
            run.observers.append(logprobs.Recorder(run))
        if call is not None and call.record is not None:
            run.observers.append(activations.Recorder(run, call.record))
        if getattr(config, "output_card", None):
            run.observers.append(CardWriter(run))  # behind the log-probabilities
    if run.streamer is not None:
        run.observers.append(Streaming(run.streamer))
    if call is not None and call.prefix_session is not None:
        run.observers.append(call.prefix_session)  # copies states: after the streamer
    return recording


def conclude(
    run: Run, strategy: Strategy, recording: Recording
) -> tuple[dict[str, Any], GenerateOutput | torch.Tensor]:
    """Return the strategy's result, which the observers get too, and what ``generate`` returns."""
    result = strategy.result(run)
    for observer in run.observers:
        observer.finish(run, strategy, result)
    return result, recording.output(run, result)


class Streaming(Observer):
    """Puts the final tokens of each step into a streamer: ``(rows,)``, or ``(batch, n)`` of ``Step.settled``."""

    def __init__(self, streamer: Any) -> None:
        self.streamer = streamer

    def add(self, run: Run, strategy: Strategy, step: Step) -> None:
        tokens = step.tokens.squeeze(1) if step.settled is None else step.settled()
        if tokens.numel() > 0:
            self.streamer.put(tokens.cpu())

    def finish(self, run: Run, strategy: Strategy, result: dict[str, Any]) -> None:
        self.streamer.end()


def unfinished(run: Run) -> bool:
    """Whether any sequence, on any device, is still being decoded."""
    ranks.wait(run)
    has_unfinished = run.model._has_unfinished_sequences
    return bool(has_unfinished(run.finished, run.synced_gpus, device=run.ids.device))


def commit(run: Run | Batch, outputs: ModelOutput, **num_new_tokens: int) -> None:
    """Write a forward's cache, mask and positions to ``run.model_kwargs``; some hooks take no ``num_new_tokens``."""
    run.model_kwargs = run.model._update_model_kwargs_for_generation(
        outputs, run.model_kwargs, is_encoder_decoder=run.is_encoder_decoder, **num_new_tokens
    )


def has_unfinished_sequences(
    self: Any, this_peer_finished: bool, synced_gpus: bool, device: torch.device
) -> bool:
    """The hook behind ``unfinished``; with sync, the answer holds for all devices (``ranks.any_unfinished``)."""
    if synced_gpus:
        return ranks.any_unfinished(self, this_peer_finished, device)
    return not this_peer_finished
