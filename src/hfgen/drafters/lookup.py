"""Prompt lookup: what followed the last tokens when they occurred before (Saxena 2023)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .base import Draft, DraftContext, Drafter


class PromptLookup(Drafter):
    """Drafts the continuation of an earlier occurrence of the newest n-gram of each row.

    The longest n-gram that occurred goes first, and of its occurrences the earliest. The host searches.
    """

    def __init__(
        self,
        max_ngram: int,
        eos: torch.Tensor | None = None,
        allowed: Callable[[torch.Tensor, torch.Tensor], int] | None = None,
        overshoots: bool = False,
    ) -> None:
        """``eos (n_eos,)``: a draft ends before these. ``allowed``: see ``n_allowed``.

        ``overshoots``: drafts may go beyond the call's maximum length, as upstream's do.
        """
        self.overshoots, self.max_ngram, self.allowed = overshoots, max_ngram, allowed
        self.eos = [] if eos is None else eos.flatten().tolist()

    def draft(self, context: DraftContext) -> Draft | None:
        host_ids = context.ids.cpu() if context.host_ids is None else context.host_ids
        tokens = context.ids.new_full((len(host_ids), context.n_tokens), -1)
        lengths = []
        for row, known in enumerate(context.known):
            n, lead = max(context.end - known, 0), min(known - context.start, context.n_tokens)
            begin = length = 0
            if n:
                begin, length = self._found(host_ids[row, :known], context.ids[row, :known], n)
            tokens[row, lead : lead + length] = context.ids[row, begin : begin + length]
            lengths.append(lead + length)
        return Draft(tokens[:, : max(lengths)], lengths=tuple(lengths))

    def _found(self, ids: torch.Tensor, device_ids: torch.Tensor, n: int) -> tuple[int, int]:
        """Where in ``ids (known,)`` the next ``n`` tokens may be found, and how many of them.

        ``device_ids``: the same ids on their device, for the processors.
        """
        for begin in self._begins(ids):
            drafted = ids[begin : begin + n].tolist()
            if self.allowed is not None:
                n_allowed = self.allowed(device_ids[None], device_ids[begin : begin + n])
                if not n_allowed:
                    continue
                drafted = drafted[:n_allowed]
            is_eos = (index for index, token in enumerate(drafted) if token in self.eos)
            return begin, next(is_eos, len(drafted))
        return 0, 0

    def _begins(self, ids: torch.Tensor) -> Iterator[int]:
        """Where the text goes on after the newest n-gram occurred: the longest first, then the earliest.

        Occurrences of an n-gram are among those of the shorter ones; it may overlap with itself.
        """
        last = len(ids) - 1
        found = [(ids[:last] == ids[last]).nonzero().flatten() + 1]  # by size, from 1 on
        for size in range(2, min(self.max_ngram, last) + 1):
            before = found[-1][found[-1] >= size]
            longer = before[ids[before - size] == ids[last + 1 - size]]
            if not len(longer):
                break
            found.append(longer)
        for begins in reversed(found):
            yield from begins.tolist()


def n_allowed(processors: Any, vocab: int, ids: torch.Tensor, tokens: torch.Tensor) -> int:
    """How many ``tokens (n,)`` after ``ids (1, length)`` the processors leave possible.

    Counted as upstream does, whose draws depend on it, with a copy of the processors.
    """
    processors = copy.deepcopy(processors)
    for n_tokens, token in enumerate(tokens.tolist()):
        score = processors(ids, torch.ones(1, vocab, device=ids.device))[0, token]
        if score <= torch.finfo(score.dtype).min:
            return n_tokens
        ids = torch.cat([ids, tokens[None, n_tokens : n_tokens + 1]], dim=1)
    return len(tokens)
