"""An assistant's scores, restricted to the tokens that the target's vocabulary also has."""

from __future__ import annotations

import math

import torch

from ...logits.processors import LogitsProcessorList
from .base import DraftContext


class Restriction:
    """A processor of the assistant's scores: those of shared tokens, as the target would process them."""

    is_row_wise = True

    def __init__(
        self,
        to_target: dict[int, int],
        target_size: int,
        processors: LogitsProcessorList,
        device: torch.device,
    ) -> None:
        self.own = torch.tensor(list(to_target), device=device)
        self.target = torch.tensor(list(to_target.values()), device=device)
        self.target_size, self.processors, self.device = target_size, processors, device
        #: How far the rows are known, in the assistant's columns.
        self.own_known: tuple[int, ...] = ()

    def begin(self, context: DraftContext) -> None:
        """Start a draft behind ``context``."""
        self.known = torch.tensor(context.known, device=self.device)
        self.ids = context.ids.to(self.device)

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``ids (rows, length)`` and ``scores (rows, vocab)`` of the assistant; the same back."""
        vocab, device = scores.shape[1], scores.device
        shared = self.to_target(scores.to(self.device))
        restricted = self.to_own(shared, vocab)
        if self.processors:
            ids = self.target_ids(ids.to(self.device))
            processed = self.to_own(self.processors(ids, shared.clone()), vocab)
            # Nothing shared may be left, if an EOS is forced: any other draft will do as well.
            is_left = (processed > -math.inf).any(dim=1, keepdim=True)
            restricted = torch.where(is_left, processed, restricted)
        return restricted.to(device)

    def to_target(self, scores: torch.Tensor) -> torch.Tensor:
        """``(…, assistant's vocab)`` to ``(…, target's vocab)``: -inf where it is not shared."""
        result = scores.new_full((*scores.shape[:-1], self.target_size), -math.inf)
        result[..., self.target.to(scores.device)] = scores[..., self.own.to(scores.device)]
        return result

    def to_own(self, scores: torch.Tensor, vocab: int) -> torch.Tensor:
        """``(rows, target's vocab)`` to ``(rows, vocab)``, the assistant's."""
        result = scores.new_full((scores.shape[0], vocab), -math.inf)
        result[:, self.own] = scores[:, self.target]
        return result

    def target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """The target's ids ``(rows, length)`` so far; rows that are shorter repeat their first id."""
        own_known = torch.tensor(self.own_known, device=self.device)[:, None]
        lengths = self.known[:, None] + (ids.shape[1] - own_known).clamp(min=0)
        longest = int(lengths.max())
        columns = (torch.arange(longest, device=self.device) - longest + lengths).clamp(min=0)
        known = self.ids.gather(1, columns.clamp(max=self.ids.shape[1] - 1))
        index = torch.searchsorted(self.own, ids.contiguous()).clamp(max=len(self.own) - 1)
        drafts = columns - self.known[:, None]  # from 0 on, behind what is known
        drafted = (own_known + drafts).clamp(0, ids.shape[1] - 1)
        return torch.where(drafts >= 0, self.target[index].gather(1, drafted), known)
