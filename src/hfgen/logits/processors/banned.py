"""Processors that exclude a fixed set of token ids."""

from __future__ import annotations

import math

import torch


class Banning:
    """What they share: ids are moved to the scores once, without those outside the vocabulary.

    Some configs say "none" by -1. Models with several vocabularies name ids that a head lacks.
    """

    _place: tuple[int, torch.device] | None = None

    def without(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """A copy of ``scores (..., vocab)`` with -inf at ``ids``, which are the same in each call."""
        place = (scores.shape[-1], scores.device)
        if self._place != place:
            ids = ids.flatten().long().to(scores.device)
            self._inside = ids[(ids >= 0) & (ids < scores.shape[-1])]
            self._place = place
        return scores.index_fill(-1, self._inside, -math.inf)
