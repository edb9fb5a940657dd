"""Prompt lookup: what followed the last tokens when they occurred before (Saxena 2023)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeAlias

import torch

from .base import Draft, DraftContext, DraftVerdict

#: Scores ``(rows, vocab)`` after processing, for ids ``(rows, length)``.
Processors: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class PromptLookup:
    """Drafts the continuation of an earlier occurrence of the newest n-gram of each row.

    The longest n-gram that occurred goes first, and of its occurrences the earliest. All rows are
    searched at once, without waiting for the device. Upstream's ``prompt_lookup_num_tokens`` and
    ``max_matching_ngram_size``.
    """

    def __init__(
        self,
        max_ngram: int,
        eos: torch.Tensor | None = None,
        allowed: Callable[[torch.Tensor, torch.Tensor], int] | None = None,
        overshoots: bool = False,
    ) -> None:
        """``eos (n_eos,)``: a draft ends before these. ``allowed``: see ``AllowedPrefix``.

        ``overshoots``: drafts may go beyond the call's maximum length, as upstream's do.
        """
        self.overshoots = overshoots
        self.max_ngram = max_ngram
        self.eos = eos
        self.allowed = allowed

    def draft(self, context: DraftContext) -> Draft | None:
        if self.allowed is not None:
            return self._draft_allowed(context, self.allowed)
        ids = context.ids
        rows, device = ids.shape[0], ids.device
        known = torch.tensor(context.known, device=device).clamp(max=context.end)
        ids = ids[:, : max(int(k) for k in context.known)]
        shift = torch.zeros(rows, dtype=torch.long, device=device)
        for size in range(1, self.max_ngram + 1):  # a longer n-gram replaces a shorter one's match
            starts = self._matches(ids, known, size)
            found = starts.any(dim=1)
            shift = torch.where(found, known - starts.int().argmax(dim=1) - size, shift)
        # Position p is drafted as what stands `shift` before it, as far as that is known.
        positions = torch.arange(context.start, context.end, device=device).expand(rows, -1)
        source = positions - shift[:, None]
        is_drafted = (shift[:, None] > 0) & (source < known[:, None])
        tokens = ids.gather(1, source.clamp(0, ids.shape[1] - 1))
        tokens = torch.where(is_drafted, tokens, -1)
        return Draft(self._before_eos(tokens, positions >= known[:, None]))

    def _matches(self, ids: torch.Tensor, known: torch.Tensor, size: int) -> torch.Tensor:
        """Where the last ``size`` tokens of a row occur before: ``(rows, starts)`` bools."""
        if ids.shape[1] < size:
            return ids.new_zeros((len(ids), 1), dtype=torch.bool)
        grams = ids.unfold(1, size, 1)  # (rows, starts, size)
        starts = torch.arange(grams.shape[1], device=ids.device)
        ends = known[:, None]
        newest = ids.gather(1, (ends - size + torch.arange(size, device=ids.device)).clamp_(min=0))
        # Something has to follow the occurrence, and the n-gram has to fit before itself.
        is_before = (starts + size < ends) & (ends > size)
        return (grams == newest[:, None]).all(dim=2) & is_before

    def _before_eos(self, tokens: torch.Tensor, is_new: torch.Tensor) -> torch.Tensor:
        """``tokens (rows, n)`` with -1 from the first EOS token on, which is not worth drafting."""
        if self.eos is None:
            return tokens
        is_eos = torch.isin(tokens, self.eos.to(tokens.device)) & is_new
        return tokens.masked_fill(is_eos.cumsum(dim=1) > 0, -1)

    def _draft_allowed(
        self, context: DraftContext, allowed: Callable[[torch.Tensor, torch.Tensor], int]
    ) -> Draft | None:
        """One row, its occurrences tried in turn until one has a first token that is allowed."""
        ids = context.ids[:, : context.start]
        length = torch.tensor([context.start], device=ids.device)
        for size in range(min(self.max_ngram, context.start - 1), 0, -1):
            for start in self._matches(ids, length, size)[0].nonzero().flatten().tolist():
                tokens = ids[:, start + size : start + size + context.n_tokens]
                if n_allowed := allowed(ids, tokens[0]):
                    tokens = tokens[:, :n_allowed]
                    return Draft(
                        self._before_eos(tokens, torch.ones_like(tokens, dtype=torch.bool))
                    )
        return None

    def observe(self, verdict: DraftVerdict) -> None:
        """Nothing to learn: the known tokens are all there is."""


class AllowedPrefix:
    """How many tokens of a draft the processors leave possible, as upstream counts them.

    Only asked where draws have to be upstream's: they depend on the number of drafted tokens. A
    copy of the processors is asked, so that those with a state see no draft.
    """

    def __init__(self, processors: Processors, vocab: int) -> None:
        self.processors = processors
        self.vocab = vocab

    def __call__(self, ids: torch.Tensor, tokens: torch.Tensor) -> int:
        """``ids (1, length)``, ``tokens (n,)``."""
        processors = copy.deepcopy(self.processors)
        for n_tokens, token in enumerate(tokens.tolist()):
            scores = torch.ones(1, self.vocab, device=ids.device)
            score = processors(ids, scores)[0, token]
            if score <= torch.finfo(score.dtype).min:
                return n_tokens
            ids = torch.cat([ids, tokens[None, n_tokens : n_tokens + 1]], dim=1)
        return len(tokens)
