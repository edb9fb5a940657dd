"""Processors that forbid or force the beginning or the end of a sequence."""

from __future__ import annotations

from typing import Any

import torch
from transformers import ExponentialDecayLengthPenalty
from transformers.generation import logits_process as upstream

from ...settings.fields import require_eos
from .context import Context
from .per_row import expand
from .vocabulary import Banning


class _NoEarlyEnd(Banning):
    """Rules out EOS and stop tokens in rows that are too short."""

    eos_token_id: torch.Tensor

    def without_end(self, is_short: bool | torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``scores (rows, vocab)``, changed in the rows that ``is_short``: a bool, or bools ``(rows, 1)``."""
        if isinstance(is_short, torch.Tensor):
            return torch.where(is_short, self.without(self.eos_token_id, scores), scores)
        # A copy in any case, as upstream's: a later edit in place then spares the logits.
        return self.without(self.eos_token_id, scores) if is_short else scores.clone()


class MinLengthLogitsProcessor(_NoEarlyEnd, upstream.MinLengthLogitsProcessor):
    """No EOS, and no stop token, while the sequence, prompt and left pads included, is too short."""

    min_length: int | torch.Tensor  # or a column (prompts, 1)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_short = expand(self.min_length, len(scores)) > input_ids.shape[-1]
        return self.without_end(is_short, scores)


class MinNewTokensLengthLogitsProcessor(_NoEarlyEnd, upstream.MinNewTokensLengthLogitsProcessor):
    """No EOS, and no stop token, before ``min_new_tokens`` tokens are generated."""

    min_new_tokens: int | torch.Tensor  # or a column (prompts, 1)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        n_new = input_ids.shape[-1] - self.prompt_length_to_skip
        return self.without_end(expand(self.min_new_tokens, len(scores)) > n_new, scores)


def min_length(length: Any, context: Context) -> MinLengthLogitsProcessor | None:
    if (ending := context.ending_tokens) is None:
        return None
    number = 0 if isinstance(length, torch.Tensor) else length  # upstream takes no column
    processor = MinLengthLogitsProcessor(number, ending, device=context.device)
    processor.min_length = length
    return processor


def min_new_tokens(n: Any, context: Context) -> MinNewTokensLengthLogitsProcessor | None:
    if (ending := context.ending_tokens) is None:
        return None
    number, start = 0 if isinstance(n, torch.Tensor) else n, context.prompt_length
    processor = MinNewTokensLengthLogitsProcessor(start, number, ending, device=context.device)
    processor.min_new_tokens = n
    return processor


def exponential_decay(penalty: Any, context: Context) -> ExponentialDecayLengthPenalty:
    require_eos(context.eos, penalty)
    return ExponentialDecayLengthPenalty(penalty, context.eos, context.prompt_length)
