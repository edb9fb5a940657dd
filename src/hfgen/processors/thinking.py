"""The thinking budget: a model that has thought for long enough is made to close its thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor

from ..markers import last, marker_ids


class ThinkingBudget(LogitsProcessor):
    """Forces the end of a thinking section of which ``budget`` tokens have been generated.

    A section begins behind the tokens ``start``, in the prompt or in what is generated, and ends with
    the tokens ``end``. What is forced are ``message`` and ``end``, which do not count; another section
    has a budget of its own. The meaning is that of vLLM's ``thinking_token_budget``.

    It is a function of the ids, of which it reads as many as a section can be long.
    """

    is_row_wise = True

    def __init__(
        self,
        budget: int,
        start: Sequence[int],
        end: Sequence[int],
        message: Sequence[int] = (),
        prompt_length: int = 0,
        device: Any = None,
    ) -> None:
        """``prompt_length``: so many tokens of each row were not generated."""
        self.budget, self.prompt_length = budget, prompt_length
        self.start, self.end, self.forced = (
            torch.tensor(ids, device=device) for ids in (start, end, [*message, *end])
        )
        #: Tokens of the longest section, its markers included; of a marker, all but one.
        self.n_tokens = len(self.start) + budget + len(self.forced)
        self.overlap = max(len(self.start), len(self.end)) - 1
        #: ``(rows,)``: whether the prompt ends amid a section; found at the first step.
        self.begins_open = torch.empty(0, dtype=torch.bool)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores ``(rows, vocab)``, in which a row that has to end a section has one token left."""
        n_thought = self.n_thought(input_ids)
        step = (n_thought - self.budget).clamp(min=0, max=len(self.forced) - 1)
        is_forced = (n_thought >= self.budget)[:, None]
        columns = torch.arange(scores.shape[1], device=scores.device)
        is_other = columns != self.forced[step][:, None]
        return scores.masked_fill(is_forced & is_other, -torch.inf).masked_fill(
            is_forced & ~is_other, 0.0
        )

    def n_thought(self, input_ids: torch.Tensor) -> torch.Tensor:
        """How many tokens of an open section have been generated: ``(rows,)``, -1 outside of one."""
        n_rows, length = input_ids.shape
        if len(self.begins_open) != n_rows:
            prompt = input_ids[:, : self.prompt_length]
            self.begins_open = last(prompt, self.start) > last(prompt, self.end)
        # A marker may begin in the prompt.
        window = input_ids[:, max(length - self.n_tokens, self.prompt_length - self.overlap, 0) :]
        opened, closed = last(window, self.start), last(window, self.end)
        n_new = length - self.prompt_length
        n_thought = (window.shape[1] - opened).clamp(max=n_new)
        n_thought = n_thought.masked_fill(opened <= closed, -1)
        if n_new > self.n_tokens:  # a section that the prompt began has been closed
            return n_thought
        is_first = self.begins_open & (opened < 0) & (closed < 0)
        return n_thought.masked_fill(is_first, n_new)


def thinking_budget(budget: int, context: Any) -> ThinkingBudget:
    """The processor of a call; markers and message are token ids, or strings that are tokenised."""
    config, tokenizer = context.config, context.tokenizer
    start, end, message = (
        marker_ids(getattr(config, f"thinking_{name}"), tokenizer)
        for name in ("start", "end", "message")
    )
    return ThinkingBudget(budget, start, end, message, context.prompt_length, context.device)
