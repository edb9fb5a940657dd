"""The thinking budget: closes a model's thinking section after a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor

from ..markers import last, marker_ids


class ThinkingBudget(LogitsProcessor):
    """Forces the end of a thinking section that has ``budget`` tokens, as vLLM's ``thinking_token_budget``.

    A section begins behind the tokens ``start``, in the prompt or in the output, and ends with the tokens
    ``end``. The forced tokens are ``message`` and ``end``, which do not count. Each section has the whole
    budget.
    """

    def __init__(
        self,
        budget: int,
        start: Sequence[int],
        end: Sequence[int],
        message: Sequence[int] = (),
        prompt_length: int = 0,
        device: Any = None,
    ) -> None:
        self.budget, self.prompt_length = budget, prompt_length
        self.start, self.end, self.forced = (
            torch.tensor(ids, device=device) for ids in (start, end, [*message, *end])
        )

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores ``(rows, vocab)``; a row that has to end a section has one token left."""
        n_thought = self.n_thought(input_ids)
        is_forced = n_thought >= self.budget
        if is_forced.is_cpu and not is_forced.any():  # to look at an accelerator is to wait for it
            return scores
        step = (n_thought - self.budget).clamp(min=0, max=len(self.forced) - 1)
        forced = torch.full_like(scores, -torch.inf).scatter(1, self.forced[step][:, None], 0.0)
        return torch.where(is_forced[:, None], forced, scores)

    def n_thought(self, input_ids: torch.Tensor) -> torch.Tensor:
        """How many tokens an open section has: ``(rows,)``, -1 outside of one.

        Those in the prompt count as ``budget`` tokens at most: the end is forced from its first token on.
        """
        opened, closed = last(input_ids, self.start), last(input_ids, self.end)
        n_in_prompt = (self.prompt_length - opened).clamp(min=0, max=self.budget)
        n_thought = n_in_prompt + input_ids.shape[1] - opened.clamp(min=self.prompt_length)
        return n_thought.masked_fill(opened <= closed, -1)


def thinking_budget(budget: int, context: Any) -> ThinkingBudget:
    """The processor of a call; markers and message are token ids, or strings that are tokenised."""
    config = context.config
    parts = (config.thinking_start, config.thinking_end, config.thinking_message)
    start, end, message = (marker_ids(part, context.tokenizer) for part in parts)
    return ThinkingBudget(budget, start, end, message, context.prompt_length, context.device)
