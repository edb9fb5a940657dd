"""Thinking sections: where they begin and end, and the budget that closes them after a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor


def marker_ids(marker: str | list[int] | None, tokenizer: Any) -> list[int]:
    """The token ids of a marker, which is text or ids."""
    if isinstance(marker, str):
        return list(tokenizer.encode(marker, add_special_tokens=False))
    return list(marker or ())


def last(ids: torch.Tensor, marker: torch.Tensor) -> torch.Tensor:
    """Where in ``ids (rows, length)`` each row's last ``marker (n,)`` ends: ``(rows,)``, -1 without one."""
    n = len(marker)
    if ids.shape[1] < n:
        return ids.new_full((len(ids),), -1)
    is_marker = (ids.unfold(1, n, 1) == marker).all(dim=2)
    ends = torch.arange(n, ids.shape[1] + 1, device=ids.device)
    return torch.where(is_marker, ends, -1).amax(dim=1)


def first(ids: torch.Tensor, marker: torch.Tensor) -> int:
    """Where in ``ids (length,)`` the first ``marker (n,)`` ends; -1 without one."""
    n = len(marker)
    if len(ids) < n:
        return -1
    places = (ids.unfold(0, n, 1) == marker).all(dim=1).nonzero()
    return int(places[0]) + n if len(places) else -1


@dataclass(frozen=True, slots=True)
class Thinking:
    """The section of a row's thoughts: behind the tokens ``start (n,)``, up to the tokens ``end (n,)``.

    ``may_begin``: the row may open a section itself, with its first tokens; else only its prompt may.
    """

    start: torch.Tensor
    end: torch.Tensor
    may_begin: bool

    def split(self, tokens: torch.Tensor, is_open: bool) -> tuple[int, int | None]:
        """How many of the generated ``tokens (n,)`` precede the text, -1 while the row thinks.

        Also the next token of ``start``, if ``tokens`` are nothing but the beginning of it. ``is_open``:
        the prompt ends inside a section.
        """
        n, n_start = len(tokens), len(self.start)
        if is_open:
            return first(tokens, self.end), None
        if not self.may_begin or not torch.equal(tokens[:n_start], self.start[:n]):
            return 0, None
        if n < n_start:
            return 0, int(self.start[n])
        end = first(tokens[n_start:], self.end)
        return end if end < 0 else n_start + end, None


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
