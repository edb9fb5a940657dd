"""The few tokens that samplers keep of a large vocabulary, found in one pass over the scores; draws from them.

They are the draws of ``torch.multinomial``. With exponential ``q``, torch draws the token with the largest
``p / q``. On the CPU it computes each ``q`` from a uniform number in float64. Here uniform numbers are drawn
for all tokens, so that the generator ends in the same state, and logarithms are computed only for kept tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

#: For fewer scores, or a smaller vocabulary, a few passes over all take no longer than this search.
MANY, LARGE = 2**14, 2**12

#: At most one in so many tokens counts as few.
FEW = 4

#: Pairs: from this size of the vocabulary on, so many columns of the scores share a maximum.
BLOCKS = ((2**16, 64), (0, 16))

#: If too many of the first columns are above -inf, the others are not read.
GLANCE = 256

#: torch's ``p`` and ``q`` are rounded to float32: if two ratios are nearer than this, torch has to draw.
MARGIN = 1e-5

#: Probabilities that are smaller than this share of the largest might be 0 in float32.
TINY = 1e-30


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
    """Whether a search of ``scores`` pays; on an accelerator, to count is to wait for the device.

    Tensors of torch's default dtype and device are made beside them, which have to be those of ``scores``.
    """
    return (
        scores.is_cpu
        and scores.dtype == torch.float32
        and scores.ndim == 2
        and scores.shape[1] >= LARGE
        and scores.numel() >= MANY
        and torch.get_default_dtype() == torch.float32
        and torch.get_default_device().type == "cpu"
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


def draw(scores: Tensor, n: int) -> Tensor | None:
    """Indices ``(rows, n)`` that ``torch.multinomial(scores.softmax(dim=-1), n)`` would draw.

    Returns ``None``, and draws nothing, if torch has to draw: many tokens are left, scores are invalid, two
    ratios are too near to each other, its function is replaced, or another version draws in another way.
    """
    few = left_in(scores)
    is_replaced = not isinstance(torch.multinomial, BuiltinFunctionType)
    if few is None or n > few.values.shape[1] or is_replaced or not draws_by_uniforms():
        return None
    state = torch.get_rng_state()
    uniforms = torch.empty(few.vocab, dtype=torch.float64)  # of a row, to stay in the cache
    uniform = torch.stack([uniforms.uniform_()[tokens] for tokens in few.tokens])
    ratios = few.weights() / -torch.log1p(-uniform)
    best, places = pad(ratios, (0, 1)).topk(n + 1)
    is_clear = (best[:, 1:] < best[:, :-1] * (1 - MARGIN)).all(dim=1) & (best[:, n - 1] > TINY)
    if not is_clear.all():
        torch.set_rng_state(state)
        return None
    return few.tokens.gather(1, places[:, :n])


def multinomial(scores: Tensor) -> Tensor:
    """One index ``(rows, 1)`` for each row, drawn by the softmax of ``scores (rows, vocab)``."""
    drawn = draw(scores, 1)
    return torch.multinomial(scores.softmax(dim=-1), 1) if drawn is None else drawn


@cache
def draws_by_uniforms() -> bool:
    """Whether this version of torch draws as described above; tried once, with a separate generator."""
    generator = torch.Generator()
    for shape in ((1, 7), (3, 5000)):
        exponential = torch.empty(shape).exponential_(generator=generator.manual_seed(1))
        after = generator.get_state()
        uniform = torch.empty(shape, dtype=torch.float64)
        uniform.uniform_(generator=generator.manual_seed(1))
        if not torch.equal(generator.get_state(), after):
            return False
        expected = (-torch.log1p(-uniform)).float()
        if not torch.allclose(exponential, expected, rtol=MARGIN / 10, atol=0.0):
            return False
        p = torch.rand(shape, generator=generator).softmax(dim=-1)
        drawn = torch.multinomial(p, 1, generator=generator.manual_seed(1))
        if not torch.equal(drawn, (p / expected).argmax(dim=-1, keepdim=True)):
            return False
    return True
