"""The few tokens that samplers keep of a large vocabulary, found in one pass over the scores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: For fewer scores, or a smaller vocabulary, a few passes over all take no longer than this search.
MANY, LARGE = 2**14, 2**12

#: At most one in so many tokens counts as few.
FEW = 4

#: Pairs: from this size of the vocabulary on, so many columns of the scores share a maximum.
BLOCKS = ((2**16, 64), (0, 16))

#: If too many of the first columns are above -inf, the others are not read.
GLANCE = 256


@dataclass(slots=True)
class Survivors:
    """Scores ``values (rows, n)``, descending, of ``tokens (rows, n)``.

    A row with fewer than ``n`` tokens is padded with values of -inf. Each row has at least one token.
    """

    values: Tensor
    tokens: Tensor
    vocab: int

    def scores(self, rows: Any = slice(None)) -> Tensor:
        """Scores ``(rows, vocab)``, of all rows or some: -inf for all other tokens."""
        values = self.values[rows]
        full = values.new_full((len(values), self.vocab), -math.inf)
        return full.scatter_(1, self.tokens[rows], values)

    def weights(self) -> Tensor:
        """Probabilities divided by that of the best token, ``(rows, n)`` in float64."""
        return (self.values - self.values[:, :1]).double().exp()

    def without(self, drops: Tensor) -> Survivors:
        """Drop tokens by bools ``drops (rows, n)``, which have to be the last of each row."""
        values = self.values.masked_fill(drops, -math.inf)
        n = int((values > -math.inf).sum(dim=1).max())
        return Survivors(values[:, :n], self.tokens[:, :n], self.vocab)


class Blocks:
    """Maxima ``(rows, n_blocks)`` of blocks of columns, of ``scores (rows, vocab) / divisor``.

    The divisor is a number, or a column ``(rows, 1)``. Scores above a high bound are in few blocks, and only
    these are read again.
    """

    def __init__(self, scores: Tensor, divisor: float | Tensor | None = None) -> None:
        self.scores, self.divisor = scores, divisor
        self.vocab = scores.shape[1]
        self.size = next(size for vocab, size in BLOCKS if self.vocab >= vocab)
        self.n_blocks = self.vocab // self.size
        n = self.n_blocks * self.size
        self.tail = torch.arange(n, self.vocab)  # the last columns, which fill no block
        blocks = scores[:, :n].unflatten(1, (self.size, self.n_blocks))
        # Division keeps the order, so that only the maxima have to be divided.
        self.maxima = self.scaled(blocks.amax(dim=1))
        #: The best score of each row, ``(rows, 1)``; NaN if the row has one.
        self.best = self.maxima.amax(dim=1, keepdim=True)
        if len(self.tail):
            last = self.scaled(scores[:, n:]).amax(dim=1, keepdim=True)
            self.best = torch.maximum(self.best, last)

    def scaled(self, scores: Tensor) -> Tensor:
        return scores if self.divisor is None else scores / self.divisor

    def is_finite(self) -> bool:
        """Whether the best score of each row is finite: the row has no NaN, no infinity, and a token left."""
        return all(map(math.isfinite, self.best.flatten().tolist()))

    def bound(self, k: int) -> Tensor:
        """Bounds ``(rows, 1)`` that at least ``k`` scores of each row reach."""
        return self.maxima.topk(k).values[:, -1:]

    def above(self, bound: Tensor | None = None) -> Survivors | None:
        """The tokens above -inf whose scores reach ``bound (rows, 1)``; ``None`` if they are not few."""
        has_tokens = self.maxima > -math.inf
        if bound is not None:
            has_tokens &= self.maxima >= bound
        n = int(has_tokens.sum(dim=1).max())
        if n * self.size * FEW > self.vocab:
            return None
        first = self.maxima.topk(n).indices
        inside = self.n_blocks * torch.arange(self.size)
        tokens = (first[:, :, None] + inside).flatten(1)
        tokens = torch.cat([tokens, self.tail.expand(len(first), -1)], dim=1)
        values = self.scaled(self.scores.gather(1, tokens))
        if bound is not None:
            values = values.masked_fill(values < bound, -math.inf)
        n = int((values > -math.inf).sum(dim=1).max())
        values, places = values.topk(n)
        return Survivors(values, tokens.gather(1, places), self.vocab)


def is_large(scores: Tensor) -> bool:
    """Whether a search of ``scores`` pays; on an accelerator, to count is to wait for the device."""
    return (
        scores.is_cpu
        and scores.dtype == torch.float32
        and scores.ndim == 2
        and scores.shape[1] >= LARGE
        and scores.numel() >= MANY
    )


def left_in(scores: Tensor) -> Survivors | None:
    """The tokens above -inf in ``scores (rows, vocab)``; ``None`` if they are not few, or scores are invalid."""
    if not is_large(scores):
        return None
    glance = scores[:, :GLANCE] > -math.inf
    if int(glance.sum()) * FEW > glance.numel():
        return None
    blocks = Blocks(scores)
    return blocks.above() if blocks.is_finite() else None
