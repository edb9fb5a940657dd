"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the last tokens (Saxena 2023)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from .base import Draft, DraftContext, Drafter, draft_of_rows


class PromptLookup(Drafter):
    """Drafts what followed the newest n-gram of each row before: the longest n-gram first, its earliest place first."""

    def __init__(
        self, max_ngram: int, eos: Any = None, allowed: Any = None, overshoots: bool = False
    ) -> None:
        """An EOS of ``eos (n_eos,)`` ends a draft, and the maximum length unless it ``overshoots``; see ``n_allowed``."""
        self.overshoots, self.max_ngram, self.allowed = overshoots, max_ngram, allowed
        self.eos = "" if eos is None else as_text(eos.flatten().cpu())

    def draft(self, context: DraftContext) -> Draft | None:
        ids = context.ids
        host_ids = ids.cpu() if context.host_ids is None else context.host_ids
        rows = []
        for row, length in enumerate(context.known):
            n = max(context.end - length, 0)
            begin, n = self._found(host_ids[row, :length], ids[row, :length], n)
            rows.append(host_ids[row, begin : begin + n].tolist())
            if context.needs_all and length == context.start and not n:
                return None
        return draft_of_rows(rows, context)

    def _found(self, ids: torch.Tensor, device_ids: torch.Tensor, n: int) -> tuple[int, int]:
        """Where in ``ids (known,)`` the next ``n`` tokens are found, and how many; ``device_ids``: the same on their device."""
        text = as_text(ids) if n else ""
        for begin in continuations(text, self.max_ngram):
            drafted = text[begin : begin + n]
            if self.allowed is not None:
                n_allowed = self.allowed(device_ids[None], device_ids[begin : begin + n])
                if not n_allowed:
                    continue
                drafted = drafted[:n_allowed]
            ends = (drafted.find(token) for token in self.eos)
            return begin, min((end for end in ends if end >= 0), default=len(drafted))
        return 0, 0


def as_text(ids: torch.Tensor) -> str:
    """One character for each of ``ids (n,)`` below 2**20, on the CPU: strings are searched fastest."""
    codes = (ids & 0xFFFFF).to(torch.int32).numpy()
    return codes.astype("<i4", copy=False).tobytes().decode("utf-32-le", "surrogatepass")


def continuations(text: str, max_ngram: int) -> Iterator[int]:
    """Where ``text`` goes on after its last n-gram occurred: the longest first, then the earliest; they may overlap."""
    last, size = len(text) - 1, 0
    # A longer n-gram occurs only where a shorter one does.
    while size < min(max_ngram, last) and text.find(text[last - size :], 0, last) >= 0:
        size += 1
    for n in range(size, 0, -1):
        ngram = text[-n:]
        at = text.find(ngram, 0, last)
        while at >= 0:
            yield at + n
            at = text.find(ngram, at + 1, last)


def n_allowed(processors: Any, vocab: int, ids: torch.Tensor, tokens: torch.Tensor) -> int:
    """How many ``tokens (n,)`` a copy of the processors leaves possible after ``ids (1, length)``, as upstream counts."""
    processors = copy.deepcopy(processors)
    for n_tokens, token in enumerate(tokens.tolist()):
        score = processors(ids, torch.ones(1, vocab, device=ids.device))[0, token]
        if score <= torch.finfo(score.dtype).min:
            return n_tokens
        ids = torch.cat([ids, tokens[None, n_tokens : n_tokens + 1]], dim=1)
    return len(tokens)
