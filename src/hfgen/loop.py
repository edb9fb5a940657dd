"""The decode loop. There is one; strategies say how tokens are chosen, consumers what becomes of them."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

    from .types import Run, Step, Strategy


def steps(run: Run, strategy: Strategy) -> Generator[Step, None, None]:
    """Decode until every sequence is finished, yielding each step as it is made.

    Closing the iterator stops decoding; the model is left as it was.
    """
    outputs = strategy.prefill(run)  # None: the first forward takes the prompt itself
    with strategy.decoding(run):
        while unfinished(run):
            if outputs is None:
                outputs = strategy.forward(run)
            if run.synced_gpus and run.finished:  # other devices still decode: keep them company
                commit(run, outputs)
                outputs = None
                continue
            step = strategy.step(run, outputs)
            outputs = None
            strategy.stop(run)
            yield step


def unfinished(run: Run) -> bool:
    """Whether any sequence, on any device, is still being decoded."""
    return bool(
        run.model._has_unfinished_sequences(run.finished, run.synced_gpus, device=run.ids.device)
    )


def commit(run: Run, outputs: ModelOutput, **num_new_tokens: int) -> None:
    """Take a forward's cache, and one more mask column and position, into ``run.model_kwargs``.

    The only caller of the hook. ``num_new_tokens`` is passed by strategies that draft, and only
    by them: some models' hooks do not take it.
    """
    run.model_kwargs = run.model._update_model_kwargs_for_generation(
        outputs, run.model_kwargs, is_encoder_decoder=run.is_encoder_decoder, **num_new_tokens
    )


def has_unfinished_sequences(
    self: Any, this_peer_finished: bool, synced_gpus: bool, device: torch.device
) -> bool:
    """The hook behind ``unfinished``: ``False`` once this device, or with sync every one, is done."""
    if not synced_gpus:
        return not this_peer_finished
    still_decoding = torch.tensor(0.0 if this_peer_finished else 1.0, device=device)
    dist.all_reduce(still_decoding, op=dist.ReduceOp.SUM)
    return still_decoding.item() > 0
