"""Processors that decide when a sequence may, or has to, begin and end."""

from __future__ import annotations

from typing import Any

import torch
from transformers import ForcedEOSTokenLogitsProcessor
from transformers.generation import logits_process as upstream

from .. import validate
from .banned import Banning
from .context import Context

# Some return a copy in any case, as upstream's do: a later edit in place then spares the logits.


class MinLengthLogitsProcessor(Banning, upstream.MinLengthLogitsProcessor):
    """No EOS while the sequence, prompt and left pads included, is shorter than ``min_length``."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_short = input_ids.shape[-1] < self.min_length
        return self.without(self.eos_token_id, scores) if is_short else scores.clone()


class MinNewTokensLengthLogitsProcessor(Banning, upstream.MinNewTokensLengthLogitsProcessor):
    """No EOS before ``min_new_tokens`` tokens are generated."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_short = input_ids.shape[-1] - self.prompt_length_to_skip < self.min_new_tokens
        return self.without(self.eos_token_id, scores) if is_short else scores.clone()


class ExponentialDecayLengthPenalty(upstream.ExponentialDecayLengthPenalty):
    """EOS grows likelier by a factor per token, from a given number of new tokens on."""

    eos_token_id: torch.Tensor

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        late = input_ids.shape[-1] - self.regulation_start
        if late <= 0:
            return scores
        self.eos_token_id = self.eos_token_id.to(scores.device)
        eos = scores[:, self.eos_token_id]
        gain = eos.abs() * (pow(self.regulation_factor, late) - 1)
        return scores.index_copy(1, self.eos_token_id, eos + gain.masked_fill(~eos.isfinite(), 0.0))


def min_length(wanted: int, context: Context) -> MinLengthLogitsProcessor | None:
    eos = context.eos
    return None if eos is None else MinLengthLogitsProcessor(wanted, eos, device=context.device)


def min_new_tokens(wanted: int, context: Context) -> MinNewTokensLengthLogitsProcessor | None:
    if context.eos is None:
        return None
    return MinNewTokensLengthLogitsProcessor(
        context.prompt_length, wanted, context.eos, device=context.device
    )


def forced_eos(token: Any, context: Context) -> ForcedEOSTokenLogitsProcessor:
    return ForcedEOSTokenLogitsProcessor(context.config.max_length, token, device=context.device)


def exponential_decay(penalty: Any, context: Context) -> ExponentialDecayLengthPenalty:
    validate.require_eos(context.eos, penalty)
    return ExponentialDecayLengthPenalty(penalty, context.eos, context.prompt_length)
