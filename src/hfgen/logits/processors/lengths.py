"""Processors that forbid or force the beginning or the end of a sequence."""

from __future__ import annotations

from typing import Any

import torch
from transformers import ForcedEOSTokenLogitsProcessor
from transformers.generation import logits_process as upstream

from ...settings.requirements import require_eos
from .banned import Banning
from .columns import expand
from .context import Context

# Some return a copy in any case, as upstream's do: a later edit in place then spares the logits.


class MinLengthLogitsProcessor(Banning, upstream.MinLengthLogitsProcessor):
    """No EOS, and no stop token, while the sequence, prompt and left pads included, is shorter than ``min_length``."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_short = input_ids.shape[-1] < self.min_length
        return self.without(self.eos_token_id, scores) if is_short else scores.clone()


class MinNewTokensLengthLogitsProcessor(Banning, upstream.MinNewTokensLengthLogitsProcessor):
    """No EOS, and no stop token, before ``min_new_tokens`` tokens are generated."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_short = input_ids.shape[-1] - self.prompt_length_to_skip < self.min_new_tokens
        return self.without(self.eos_token_id, scores) if is_short else scores.clone()


class _PerRow(Banning):
    """No EOS while a row is shorter than its own of ``lengths (prompts, 1)``."""

    def __init__(self, lengths: torch.Tensor, eos: torch.Tensor) -> None:
        self.lengths, self.eos = lengths, eos

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_short = expand(self.lengths, len(scores)) > input_ids.shape[-1]
        return torch.where(is_short, self.without(self.eos, scores), scores)


class MinLengthPerRow(_PerRow, upstream.MinLengthLogitsProcessor):
    """Counts the prompt and its left pads."""


class MinNewTokensPerRow(_PerRow, upstream.MinNewTokensLengthLogitsProcessor):
    """Counts what is generated, behind a prompt that ``lengths`` include."""


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


def min_length(wanted: Any, context: Context) -> upstream.LogitsProcessor | None:
    if (ending := context.ending_tokens) is None:
        return None
    if isinstance(wanted, torch.Tensor):
        return MinLengthPerRow(wanted, ending)
    return MinLengthLogitsProcessor(wanted, ending, device=context.device)


def min_new_tokens(wanted: Any, context: Context) -> upstream.LogitsProcessor | None:
    length, ending = context.prompt_length, context.ending_tokens
    if ending is None:
        return None
    if isinstance(wanted, torch.Tensor):
        return MinNewTokensPerRow(length + wanted, ending)
    return MinNewTokensLengthLogitsProcessor(length, wanted, ending, device=context.device)


def forced_eos(token: Any, context: Context) -> ForcedEOSTokenLogitsProcessor:
    return ForcedEOSTokenLogitsProcessor(context.config.max_length, token, device=context.device)


def exponential_decay(penalty: Any, context: Context) -> ExponentialDecayLengthPenalty:
    require_eos(context.eos, penalty)
    return ExponentialDecayLengthPenalty(penalty, context.eos, context.prompt_length)
