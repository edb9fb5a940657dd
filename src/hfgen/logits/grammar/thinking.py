"""Where the grammar begins in a row with a thinking section."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...settings.markers import first, last


class Thinking:
    """The section of a row's thoughts: behind the tokens ``start``, up to the tokens ``end``.

    ``may_begin``: the row may open a section itself, with its first tokens; else only its prompt may.
    """

    def __init__(self, start: Sequence[int], end: Sequence[int], may_begin: bool) -> None:
        self.start, self.end, self.may_begin = torch.tensor(start), torch.tensor(end), may_begin

    def is_open(self, prompt: torch.Tensor) -> bool:
        """Whether a ``prompt (length,)`` ends amid a section."""
        return bool(last(prompt[None], self.start) > last(prompt[None], self.end))

    def begin(self, tokens: torch.Tensor, is_open: bool) -> int:
        """How many of the generated ``tokens (n,)`` come before the text; -1 while the row thinks."""
        n = len(self.start)
        if is_open:
            return first(tokens, self.end)
        if not self.may_begin or len(tokens) < n or not torch.equal(tokens[:n], self.start):
            return 0
        end = first(tokens[n:], self.end)
        return end if end < 0 else n + end

    def next_of_start(self, tokens: torch.Tensor, is_open: bool) -> int | None:
        """The token that goes on opening a section, if ``tokens (n,)`` have done nothing else."""
        n = len(tokens)
        is_opening = self.may_begin and not is_open and n < len(self.start)
        return int(self.start[n]) if is_opening and torch.equal(tokens, self.start[:n]) else None
