"""A fixed set of token ids that a processor rules out."""

from __future__ import annotations

import math

import torch


class Banned:
    """Token ids to set to -inf, cut to the vocabulary and moved to the scores once.

    Ids outside the vocabulary are dropped: -1 stands for "none" in some configs, and models with
    several vocabularies name ids that a head does not have.
    """

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids.flatten().long()
        self.place: tuple[int, torch.device] | None = None

    def fill(self, scores: torch.Tensor) -> torch.Tensor:
        """A copy of ``scores (..., vocab)`` with -inf at the ids."""
        place = (scores.shape[-1], scores.device)
        if self.place != place:
            ids = self.ids.to(scores.device)
            self.inside = ids[(ids >= 0) & (ids < scores.shape[-1])]
            self.place = place
        return scores.index_fill(-1, self.inside, -math.inf)
