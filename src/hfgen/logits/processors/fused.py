"""Consecutive samplers on a large vocabulary: one pass over the scores, then short rows.

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

from ...state.survivors import Blocks, Survivors, is_large
from .columns import expand
from .per_row import (
    MinPPerRow,
    TemperaturePerRow,
    TopKPerRow,
    TopPPerRow,
    cut_to_mass,
)

#: How far torch's exponentials in float32 may be off, relatively (its vectorised ones: 20 units in the last place).
EXP = 4e-6

#: Half a unit in the last place of float32, relatively.
HALF_ULP = 2.0**-24

#: Smaller probabilities may be 0 in float32.
TINY = 1e-30

#: Torch sums a row in at least so many lanes.
LANES = 4

#: How many tokens are looked at first, where probabilities have to add up to something.
FIRST = 64


@dataclass(slots=True)
class Chain:
    """Scores ``(rows, vocab)``, by what they are yet to be divided, and what is left of them once it is few."""

    given: Tensor
    divisor: float | Tensor | None = None
    left: Survivors | None = None

    def blocks(self) -> Blocks | None:
        """The maxima of the scores; ``None`` if some are invalid."""
        blocks = Blocks(self.given, self.divisor)
        return blocks if blocks.is_finite() else None

    def rows(self, rows: list[int]) -> Tensor:
        """The scores of some rows as they are now."""
        if self.left is not None:
            return self.left.scores(rows)
        given, divisor = self.given[rows], self.divisor
        if isinstance(divisor, Tensor):
            divisor = divisor[rows]
        return given if divisor is None else given / divisor

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
    divisor = expand(warper.temperature, len(chain.given))
    if chain.left is not None:
        chain.left.values = chain.left.values / divisor
        return bool(chain.left.values[:, 0].isfinite().all())
    if chain.divisor is not None:
        return False
    chain.divisor = divisor
    return True


def top_k(chain: Chain, warper: Any) -> bool:
    return _top_k(chain, warper.top_k, torch.full((len(chain.given), 1), warper.top_k))


def top_k_per_row(chain: Chain, warper: TopKPerRow) -> bool:
    counts = expand(warper.counts, len(chain.given))
    if not counts.all():  # a row keeps all tokens
        return False
    return _top_k(chain, warper.top_k, counts.clamp(min=warper.min_tokens_to_keep).long())


def _top_k(chain: Chain, most: int, counts: Tensor) -> bool:
    """Keep ``counts (rows, 1)`` tokens, at most ``most``, and what is equal to the last of them."""
    left = chain.left
    if left is None:
        if (blocks := chain.blocks()) is None or most > blocks.n_blocks:
            return False
        left = blocks.above(blocks.bound(most))
    if left is None:
        return False
    last = (counts - 1).clamp(max=left.values.shape[1] - 1)
    chain.left = left.without(left.values < left.values.gather(1, last))
    return True


def min_p(chain: Chain, warper: Any) -> bool:
    share = torch.full((len(chain.given), 1), warper.min_p)
    return _min_p(chain, share, warper.min_tokens_to_keep)


def min_p_per_row(chain: Chain, warper: MinPPerRow) -> bool:
    share = expand(warper.values, len(chain.given)).float()
    return _min_p(chain, share, warper.min_tokens_to_keep)


def _min_p(chain: Chain, share: Tensor, keep: int) -> bool:
    """Let go of tokens that are less likely than ``share (rows, 1)`` of the best."""
    left = chain.left
    if left is None:
        if (blocks := chain.blocks()) is None:
            return False
        slack = 1e-3 + 1e-5 * blocks.best.abs()
        left = blocks.above(blocks.best + share.log() - slack)
    if left is None:
        return False
    p = left.weights()
    drops = p < share
    if keep > 1 and int((~drops).sum(dim=1).min()) < keep:
        return False  # which of equal probabilities are kept is up to upstream

    def exact(rows: list[int], scores: Tensor) -> Tensor:
        return torch.cat(
            [
                MinPLogitsWarper(float(share[row]), min_tokens_to_keep=keep)(None, own[None])
                for row, own in zip(rows, scores, strict=True)
            ]
        )

    is_near = ((p - share).abs() <= EXP * share + TINY) & (p > 0.0)
    chain.cut(left, drops, is_near.any(dim=1), exact)
    return True


def top_p(chain: Chain, warper: Any) -> bool:
    rest = torch.full((len(chain.given), 1), 1 - warper.top_p)
    return _top_p(chain, rest, warper.min_tokens_to_keep)


def top_p_per_row(chain: Chain, warper: TopPPerRow) -> bool:
    return _top_p(chain, warper.rest(len(chain.given)), warper.min_tokens_to_keep)


def _top_p(chain: Chain, rest: Tensor, keep: int) -> bool:
    """Let go of the least likely tokens, as long as their probabilities sum to at most ``rest (rows, 1)``."""
    outside = torch.zeros(1, 1)
    left = chain.left
    if left is None:
        if (found := _likeliest(chain, rest, keep)) is None:
            return False
        left, outside = found
    n = left.values.shape[1]
    p = left.weights()
    p *= (1 - outside) / p.sum(dim=1, keepdim=True)
    # Of each token and of all that are less likely.
    sums = p.flip(1).cumsum(dim=1).flip(1) + outside
    drops = sums <= rest
    drops[:, :keep] = False
    # Upstream's sum of exponentials is off by half a unit of what was added up by then, at each addition.
    rank = (p * torch.arange(n)).sum(dim=1, keepdim=True) + outside * left.vocab
    error = (EXP + HALF_ULP * rank / LANES) * sums + EXP * (outside > 0) + TINY
    is_left = left.values > -math.inf
    is_near = ((sums - rest).abs() <= error) & is_left
    # The first that goes may be equal to the last that stays.
    first = (~drops).sum(dim=1, keepdim=True).clamp(max=n - 1)
    is_tie = left.values.gather(1, first) == left.values.gather(1, (first - 1).clamp(min=0))
    is_tie &= drops.gather(1, first) & is_left.gather(1, first)
    is_unsure = is_near[:, keep:].any(dim=1) | is_tie.squeeze(1)
    chain.cut(left, drops, is_unsure, lambda rows, scores: cut_to_mass(scores, rest[rows], keep))
    return True


def _likeliest(chain: Chain, rest: Tensor, keep: int) -> tuple[Survivors, Tensor] | None:
    """So many tokens, at least ``keep``, that all others may go, and the share ``(rows, 1)`` of the others.

    ``None`` if they are not few.
    """
    if (blocks := chain.blocks()) is None:
        return None
    if (left := blocks.above()) is not None:  # few to begin with
        return left, torch.zeros(1, 1)
    total = (blocks.scaled(chain.given) - blocks.best).exp_().sum(dim=1, keepdim=True).double()
    k = max(FIRST, keep)
    while k <= blocks.n_blocks:
        left = blocks.above(blocks.bound(k))
        if left is None:
            return None
        p = left.weights() / total
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
    MinPLogitsWarper: min_p,
    TemperaturePerRow: temperature,
    TopKPerRow: top_k_per_row,
    TopPPerRow: top_p_per_row,
    MinPPerRow: min_p_per_row,
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
