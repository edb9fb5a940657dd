"""Scored sequences, from which beam searches choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

NEG_INF = -1.0e9  # stands for minus infinity where a difference between two of them must not be NaN


@dataclass(slots=True)
class Hypotheses:
    ids: torch.Tensor  # (batch, n, length)
    parents: torch.Tensor  # (batch, n, steps): the row that scored each generated token, or -1
    scores: torch.Tensor  # (batch, n)
    is_done: torch.Tensor  # (batch, n)

    def best(
        self, n: int, n_first: Sequence[int] | None = None, stays: torch.Tensor | None = None
    ) -> Hypotheses:
        """The ``n`` of each prompt with the best scores, in descending order, or its first if it ``stays (batch, 1)``.

        ``n_first``: how many of each are considered, since topk orders equal scores by how many there are.
        """
        if n_first is None:
            index = self.scores.topk(n).indices
        else:
            parts = zip(self.scores, n_first, strict=True)
            index = torch.stack([row[:m].topk(n).indices for row, m in parts])
        if stays is not None:
            index = torch.where(stays, torch.arange(n, device=index.device), index)
        return self.at(index)

    def ranked(self, n: int) -> Hypotheses:
        """The ``n`` worthiest of each prompt: done before not done, then by score."""
        index = self.scores.argsort(dim=1, descending=True, stable=True)
        is_done = self.is_done.gather(1, index).to(torch.int8)
        return self.at(index.gather(1, is_done.argsort(dim=1, descending=True, stable=True)[:, :n]))

    def at(self, index: torch.Tensor) -> Hypotheses:
        """The hypotheses at ``index (batch, m)`` of each prompt."""
        return Hypotheses(*(take(field, index) for field in self.fields))

    def beside(self, others: Hypotheses, fill: int) -> Hypotheses:
        """These and ``others (batch, m)``, which may be longer: the ids of these end in ``fill`` then."""
        n_missing = others.ids.shape[2] - self.ids.shape[2]
        ids = pad(self.ids, (0, n_missing), value=fill)
        parents = pad(self.parents, (0, n_missing), value=-1)
        pairs = zip((ids, parents, self.scores, self.is_done), others.fields, strict=True)
        return Hypotheses(*(torch.cat(pair, dim=1) for pair in pairs))

    @property
    def fields(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.ids, self.parents, self.scores, self.is_done


def take(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``tensor (batch, n, …)`` at ``index (batch, m)``: ``(batch, m, …)``."""
    shape = (*index.shape, *tensor.shape[2:])
    return tensor.gather(1, index.view(*index.shape, *[1] * (tensor.ndim - 2)).expand(shape))
