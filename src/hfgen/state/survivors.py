"""The tokens that samplers keep of a large vocabulary, as short rows, found in one pass over the scores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: In fewer scores, or in a smaller vocabulary, a few passes over all take no longer than looking for a part.
MANY, LARGE = 2**14, 2**12

#: Few tokens are at most one in so many.
FEW = 4

#: Columns of the scores that share a maximum: in a vocabulary of so many tokens, and below.
BLOCKS = ((2**16, 64), (0, 16))


#: Columns that tell at once of most scores that nothing was ruled out.
GLANCE = 256


@dataclass(slots=True)
class Survivors:
    """Of each row, ``values (rows, n)``, descending, of ``tokens (rows, n)``.

    A row that has fewer than ``n`` ends in values of -inf. Each row has at least one above it.
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
        """Probabilities by that of the best, ``(rows, n)`` in float64."""
        return (self.values - self.values[:, :1]).double().exp()

    def without(self, drops: Tensor) -> Survivors:
        """Those that are not in ``drops (rows, n)``, the last of each row."""
        values = self.values.masked_fill(drops, -math.inf)
        n = int((values > -math.inf).sum(dim=1).max())
        return Survivors(values[:, :n], self.tokens[:, :n], self.vocab)


class Blocks:
    """Maxima ``(rows, n_blocks)`` of blocks of columns, of ``scores (rows, vocab) / divisor``.

    The divisor is a number, or a column ``(rows, 1)``.
    What is above some bound is in few blocks, and only these are looked into.
    """

    def __init__(self, scores: Tensor, divisor: float | Tensor | None = None) -> None:
        self.scores, self.divisor = scores, divisor
        self.vocab = scores.shape[1]
        self.size = next(size for vocab, size in BLOCKS if self.vocab >= vocab)
        self.n_blocks = self.vocab // self.size
        n = self.n_blocks * self.size
        #: The columns that fill no block.
        self.tail = torch.arange(n, self.vocab)
        blocks = scores[:, :n].unflatten(1, (self.size, self.n_blocks))
        # A quotient by one number is the larger, the larger what is divided.
        self.maxima = self.scaled(blocks.amax(dim=1))
        #: ``(rows, 1)``; NaN if there is one in the row.
        self.best = self.maxima.amax(dim=1, keepdim=True)
        if len(self.tail):
            last = self.scaled(scores[:, n:]).amax(dim=1, keepdim=True)
            self.best = torch.maximum(self.best, last)

    def scaled(self, scores: Tensor) -> Tensor:
        return scores if self.divisor is None else scores / self.divisor

    def is_finite(self) -> bool:
        """Whether the best of each row is: there is no NaN, no infinity, and something left."""
        return all(map(math.isfinite, self.best.flatten().tolist()))

    def bound(self, k: int) -> Tensor:
        """Numbers ``(rows, 1)`` that at least ``k`` scores of each row reach, if it has as many left."""
        return self.maxima.topk(k).values[:, -1:]

    def above(self, bound: Tensor | None = None) -> Survivors | None:
        """The tokens whose scores reach ``bound (rows, 1)``, or are not -inf; ``None`` if they are not few."""
        is_left = self.maxima > -math.inf
        if bound is not None:
            is_left &= self.maxima >= bound
        n = int(is_left.sum(dim=1).max())
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
    """Whether it pays to look for what is left of ``scores (rows, vocab)``.

    Elsewhere than on the CPU, to know how many tokens are left would be to wait for the device.
    """
    return (
        scores.is_cpu
        and scores.dtype == torch.float32
        and scores.ndim == 2
        and scores.shape[1] >= LARGE
        and scores.numel() >= MANY
    )


def left_in(scores: Tensor) -> Survivors | None:
    """The tokens of ``scores (rows, vocab)`` above -inf, if there are few in each row, and no invalid scores."""
    if not is_large(scores):
        return None
    glance = scores[:, :GLANCE] > -math.inf
    if int(glance.sum()) * FEW > glance.numel():
        return None
    blocks = Blocks(scores)
    return blocks.above() if blocks.is_finite() else None
