"""Warpers: processors that reshape the distribution before a token is drawn from it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import LogitsProcessor
from transformers import TopPLogitsWarper as UpstreamTopP

from .context import Context

#: Below this vocabulary size, sorting all of it takes no longer than picking a part.
SORTED_AT_ONCE = 8192


class TopPLogitsWarper(UpstreamTopP):
    """Keeps the likeliest tokens whose probabilities sum to ``top_p``.

    Upstream sorts the whole vocabulary. Where an earlier warper (top-k) has left few tokens, only
    those are sorted here; the sums are over the same full rows, so that the result is equal.
    """

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        left = self._tokens_left(scores)
        if not self.min_tokens_to_keep <= left <= scores.shape[-1] // 4:
            return self.of_all(input_ids, scores)
        values, tokens = (part.flip(-1) for part in scores.topk(left))  # ascending
        ascending = pad(values, (scores.shape[-1] - left, 0), value=-math.inf)
        drop = ascending.softmax(dim=-1).cumsum(dim=-1)[:, -left:] <= self.rest(len(scores))
        drop[:, -self.min_tokens_to_keep :] = False
        # Which of equal scores fall on which side of the cut is up to the order of the full sort.
        if (drop[:, :-1] & ~drop[:, 1:] & (values[:, :-1] == values[:, 1:])).any():
            return self.of_all(input_ids, scores)
        return scores.scatter(1, tokens, values.masked_fill(drop, -math.inf))

    def rest(self, n_rows: int) -> float | torch.Tensor:
        """How much may be dropped: a number, or ``(n_rows, 1)``."""
        return 1 - self.top_p

    def of_all(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores by a sort of all of them."""
        return super().__call__(input_ids, scores)

    def _tokens_left(self, scores: torch.Tensor) -> int:
        """The most tokens above -inf in a row; the vocabulary's size where a full sort is as good."""
        vocab = scores.shape[-1]
        # Elsewhere than on the CPU, to count would be to wait for the device.
        if scores.device.type != "cpu" or vocab < SORTED_AT_ONCE or self.filter_value != -math.inf:
            return vocab
        return int((scores != -math.inf).sum(dim=-1).max())


def watermark(config: Any, context: Context) -> LogitsProcessor:
    vocab_size = context.model.config.get_text_config().vocab_size
    return config.construct_processor(vocab_size, context.device)
