"""The penalty of diverse beam search, on tokens that earlier groups have chosen at the same step."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor

from .context import Context


class DiversityPenalty(LogitsProcessor):
    """Takes ``penalty`` off the score of a token for each beam of earlier groups that has chosen it."""

    def __init__(self, penalty: float) -> None:
        self.penalty = penalty

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores

    def penalised(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``scores (rows, vocab)`` for prompts whose earlier groups chose ``tokens (prompts, n)``."""
        counts = scores.new_zeros(len(tokens), scores.shape[1])
        counts.scatter_add_(1, tokens, scores.new_ones(1).expand_as(tokens))
        by_prompt = scores.unflatten(0, (len(tokens), -1))
        return (by_prompt - self.penalty * counts[:, None]).flatten(0, 1)


def diversity_penalty(penalty: float, context: Context) -> DiversityPenalty | None:
    config = context.config
    is_grouped = (config.num_beam_groups or 1) > 1 and (config.num_beams or 1) > 1
    return DiversityPenalty(float(penalty)) if is_grouped else None
