"""Samplers that follow each other on a large vocabulary: one pass over the scores, then short rows.

Which tokens are left is decided from sums that are rounded in another way than upstream's. Where a sum is so
near to its bound that rounding might decide, or equal scores lie on both sides of it, upstream's class decides
about that row. So scores are upstream's, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..survivors import Blocks, Survivors, is_large
from .per_row import TopPPerRow

#: How far torch's exponentials in float32 may be off, relatively (its vectorised ones: 20 units in the last place).
EXP = 4e-6

#: Half a unit in the last place of float32, relatively.
HALF_ULP = 2.0**-24

#: Torch sums a row in at least so many lanes.
LANES = 4

#: How many tokens are looked at first, where probabilities have to add up to something.
FIRST = 64


@dataclass(slots=True)
class Chain:
    """Scores ``(rows, vocab)``, by what they are yet to be divided, and what is left of them once it is few."""

    given: Tensor
    divisor: float | None = None
    left: Survivors | None = None

    def blocks(self) -> Blocks | None:
        """The maxima of the scores; ``None`` if some are invalid."""
        blocks = Blocks(self.given, self.divisor)
        return blocks if blocks.is_finite() else None

    def rows(self, rows: list[int]) -> Tensor:
        """The scores of some rows as they are now."""
        if self.left is not None:
            return self.left.scores(rows)
        return self.given[rows] if self.divisor is None else self.given[rows] / self.divisor

    def cut(
        self,
        left: Survivors,
        drops: Tensor,
        is_unsure: Tensor,
        exact: Callable[[list[int], Tensor], Tensor],
    ) -> None:
        """Let go of ``drops (rows, n)``; of rows that are unsure, of what ``exact(rows, scores)`` does."""
        if unsure := is_unsure.nonzero().flatten().tolist():
            scores = exact(unsure, self.rows(unsure))
            drops[unsure] = scores.gather(1, left.tokens[unsure]) == -math.inf
            # Of equal scores any may be gone.
            values, order = left.values.masked_fill(drops, -math.inf).sort(dim=1, descending=True)
            left = Survivors(values, left.tokens.gather(1, order), left.vocab)
            drops = values == -math.inf
        self.left = left.without(drops)


def temperature(chain: Chain, warper: Any) -> bool:
    if chain.left is not None:
        chain.left.values = chain.left.values / warper.temperature
    elif chain.divisor is None:
        chain.divisor = warper.temperature
    else:
        return False
    return True


def top_k(chain: Chain, warper: Any) -> bool:
    left, k = chain.left, warper.top_k
    if left is None:
        if (blocks := chain.blocks()) is None or k > blocks.n_blocks:
            return False
        left = blocks.above(blocks.bound(k))
    if left is None:
        return False
    last = min(k, left.values.shape[1]) - 1
    chain.left = left.without(left.values < left.values[:, last : last + 1])
    return True


def min_p(chain: Chain, warper: Any) -> bool:
    left, share, keep = chain.left, warper.min_p, warper.min_tokens_to_keep
    if share <= 0.0:
        return True
    if left is None:
        if (blocks := chain.blocks()) is None:
            return False
        slack = 1e-3 + 1e-5 * blocks.best.abs()
        left = blocks.above(blocks.best + math.log(share) - slack)
    if left is None:
        return False
    p = (left.values - left.values[:, :1]).double().exp()
    drops = p < share
    if keep > 1 and int((~drops).sum(dim=1).min()) < keep:
        return False  # which of equal probabilities are kept is up to upstream
    is_unsure = ((p - share).abs() <= EXP * share).any(dim=1)
    chain.cut(left, drops, is_unsure, lambda rows, scores: warper(None, scores))
    return True


def top_p(chain: Chain, warper: Any) -> bool:
    return _top_p(chain, warper, 1 - warper.top_p, lambda rows, scores: warper(None, scores))


def top_p_per_row(chain: Chain, warper: TopPPerRow) -> bool:
    rest = warper.rest(len(chain.given))
    return _top_p(chain, warper, rest, lambda rows, scores: warper.cut(scores, rest[rows]))


def _top_p(
    chain: Chain,
    warper: Any,
    rest: float | Tensor,
    exact: Callable[[list[int], Tensor], Tensor],
) -> bool:
    """Let go of the least likely tokens, as long as the sum of their probabilities is at most ``rest``."""
    left, keep = chain.left, warper.min_tokens_to_keep
    outside: float | Tensor = 0.0
    if left is None:
        found = _likeliest(chain, rest, keep)
        if found is None:
            return False
        left, outside = found
    n = left.values.shape[1]
    p = (left.values - left.values[:, :1]).double().exp()
    p /= p.sum(dim=1, keepdim=True) / (1 - outside)
    sums = (
        p.flip(1).cumsum(dim=1).flip(1) + outside
    )  # of each token and of all that are less likely
    drops = sums <= rest
    drops[:, :keep] = False
    # The error of upstream's sum of exponentials: one of each addition, of what was added up by then.
    rank = (p * torch.arange(n)).sum(dim=1, keepdim=True) + outside * left.vocab
    error = (EXP + HALF_ULP * rank / LANES) * sums + (EXP if chain.left is None else 0.0)
    is_last = left.values == -math.inf
    is_near = ((sums - rest).abs() <= error) & ~is_last
    after = (~drops).sum(dim=1, keepdim=True).clamp(max=n - 1)
    is_tie = left.values.gather(1, after) == left.values.gather(1, (after - 1).clamp(min=0))
    is_tie &= drops.gather(1, after) & ~is_last.gather(1, after)
    is_unsure = is_near[:, keep:].any(dim=1) | is_tie.squeeze(1)
    chain.cut(left, drops, is_unsure, exact)
    return True


def _likeliest(chain: Chain, rest: float | Tensor, keep: int) -> tuple[Survivors, Tensor] | None:
    """So many tokens, at least ``keep``, that all others may go, and the share ``(rows, 1)`` of the others; ``None`` if not few."""
    if (blocks := chain.blocks()) is None:
        return None
    total = (blocks.scaled(chain.given) - blocks.best).exp_().sum(dim=1, keepdim=True).double()
    k = max(FIRST, keep)
    while k <= blocks.n_blocks:
        left = blocks.above(blocks.bound(k))
        if left is None:
            return None
        p = (left.values - blocks.best).double().exp() / total
        outside = (1 - p.sum(dim=1, keepdim=True)).clamp(min=0.0)
        if (outside <= 0.99 * rest - 10 * EXP).all():
            return left, outside
        k *= 4
    return None


#: What samplers do to a chain; ``False``: not this way.
STEPS: dict[type, Callable[[Chain, Any], bool]] = {
    TemperatureLogitsWarper: temperature,
    TopKLogitsWarper: top_k,
    TopPLogitsWarper: top_p,
    TopPPerRow: top_p_per_row,
    MinPLogitsWarper: min_p,
}


def apply(warpers: Sequence[Any], input_ids: Tensor, scores: Tensor) -> Tensor:
    """What ``warpers``, each of a kind in ``STEPS``, make of ``scores (rows, vocab)`` one after another."""
    if is_large(scores):
        chain = Chain(scores)
        is_done = all(
            getattr(warper, "filter_value", -math.inf) == -math.inf
            and STEPS[type(warper)](chain, warper)
            for warper in warpers
        )
        if is_done and chain.left is not None:
            return chain.left.scores()
    for warper in warpers:
        scores = warper(input_ids, scores)
    return scores
