"""Consecutive samplers on a large vocabulary: one pass over the scores, then short rows.

Sums of probabilities are rounded in another way here than in upstream's classes. Where a sum is so near to
its bound that rounding might decide, or equal scores lie on both sides of the bound, upstream's class
processes that row. So scores are upstream's, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers.generation import logits_process as upstream

from ...state.survivors import Blocks, Survivors, is_large
from .per_row import MinPPerRow, TemperaturePerRow, TopKPerRow, TopPPerRow, cut_to_mass, expand

#: Relative errors of torch's exponentials in float32 (20 units in the last place), and of rounding to it.
EXP, HALF_ULP = 4e-6, 2.0**-24
TINY = 1e-30  # smaller probabilities may be 0 in float32
LANES = 4  # torch sums a row in at least so many lanes
FIRST = 64  # the number of tokens that a top-p is first tried with


#: ``exact(rows, scores)``: the scores of some rows as upstream's class returns them.
Exact: TypeAlias = Callable[[list[int], Tensor], Tensor]


@dataclass(slots=True)
class Chain:
    """Scores ``(rows, vocab)`` on their way through the samplers.

    They are still to be divided by ``divisor``, until few tokens remain: then these are ``survivors``.
    """

    scores: Tensor
    divisor: float | Tensor | None = None
    survivors: Survivors | None = None

    def blocks(self) -> Blocks | None:
        """The maxima of the scores; ``None`` if some are invalid."""
        blocks = Blocks(self.scores, self.divisor)
        return blocks if blocks.is_finite() else None

    def keep(self, survivors: Survivors, drops: Tensor, is_unsure: Tensor, exact: Exact) -> None:
        """Keep ``survivors`` without ``drops (rows, n)``; in unsure rows ``(rows,)``, as ``exact`` does."""
        if rows := is_unsure.nonzero().flatten().tolist():
            by = self.divisor[rows] if isinstance(self.divisor, Tensor) else self.divisor
            if self.survivors is not None:
                scores = self.survivors.scores(rows)
            else:
                scores = self.scores[rows] if by is None else self.scores[rows] / by
            is_dropped = exact(rows, scores) == -math.inf
            drops[rows] = is_dropped.gather(1, survivors.tokens[rows])
            # Of equal scores, any may be dropped, so values have to be sorted again.
            values = survivors.values.masked_fill(drops, -math.inf)
            values, order = values.sort(dim=1, descending=True)
            survivors = Survivors(values, survivors.tokens.gather(1, order), survivors.vocab)
            drops = values == -math.inf
        self.survivors = survivors.without(drops)


# Each sampler changes a chain, or returns ``False`` if it cannot be applied this way.


def temperature(chain: Chain, warper: Any) -> bool:
    divisor = expand(warper.temperature, len(chain.scores))
    if (survivors := chain.survivors) is not None:
        survivors.values = survivors.values / divisor
        return bool(survivors.values[:, 0].isfinite().all())
    if chain.divisor is not None:
        return False
    chain.divisor = divisor
    return True


def top_k(chain: Chain, warper: Any) -> bool:
    counts = torch.full((1, 1), warper.top_k)
    if isinstance(warper, TopKPerRow):
        counts = warper.counts.clamp(min=warper.min_tokens_to_keep).long()
        if not warper.counts.all():  # a row keeps all tokens
            return False
    if (survivors := chain.survivors) is None:
        if (blocks := chain.blocks()) is None or warper.top_k > blocks.n_blocks:
            return False
        if (survivors := blocks.above(blocks.bound(warper.top_k))) is None:
            return False
    last = (expand(counts, len(chain.scores)) - 1).clamp(max=survivors.values.shape[1] - 1)
    chain.survivors = survivors.without(survivors.values < survivors.values.gather(1, last))
    return True


def min_p(chain: Chain, warper: Any) -> bool:
    column = warper.values.float() if isinstance(warper, MinPPerRow) else [[warper.min_p]]
    share, keep = expand(torch.as_tensor(column), len(chain.scores)), warper.min_tokens_to_keep
    if (survivors := chain.survivors) is None:
        if (blocks := chain.blocks()) is None:
            return False
        slack = 1e-3 + 1e-5 * blocks.best.abs()
        if (survivors := blocks.above(blocks.best + share.log() - slack)) is None:
            return False
    p = survivors.weights()
    drops = p < share
    if keep > 1 and int((~drops).sum(dim=1).min()) < keep:
        return False  # which of equal probabilities are kept is up to upstream
    is_near = ((p - share).abs() <= EXP * share + TINY) & (p > 0.0)

    def exact(rows: list[int], scores: Tensor) -> Tensor:
        return MinPPerRow(share[rows], keep)(None, scores)

    chain.keep(survivors, drops, is_near.any(dim=1), exact)
    return True


def top_p(chain: Chain, warper: Any) -> bool:
    """Drop the least likely tokens whose probabilities sum to at most ``rest (rows, 1)``."""
    n_rows, keep = len(chain.scores), warper.min_tokens_to_keep
    is_per_row = isinstance(warper, TopPPerRow)
    rest = expand(warper.rest if is_per_row else torch.full((1, 1), 1 - warper.top_p), n_rows)
    survivors, outside = chain.survivors, torch.zeros(1, 1)
    if survivors is None:
        if (likeliest := _likeliest(chain, rest, keep)) is None:
            return False
        survivors, outside = likeliest
    n = survivors.values.shape[1]
    p = survivors.weights()
    p *= (1 - outside) / p.sum(dim=1, keepdim=True)
    sums = p.flip(1).cumsum(dim=1).flip(1) + outside  # of each token and all less likely ones
    drops = sums <= rest
    drops[:, :keep] = False
    # Each addition of upstream's rounds by at most half a unit in the last place of the sum so far.
    rank = (p * torch.arange(n)).sum(dim=1, keepdim=True) + outside * survivors.vocab
    error = (EXP + HALF_ULP * rank / LANES) * sums + EXP * (outside > 0) + TINY
    is_left = survivors.values > -math.inf
    is_near = ((sums - rest).abs() <= error) & is_left
    # The first dropped score may be equal to the last kept one.
    first = (~drops).sum(dim=1, keepdim=True).clamp(max=n - 1)
    last_kept = survivors.values.gather(1, (first - 1).clamp(min=0))
    is_tie = survivors.values.gather(1, first) == last_kept
    is_tie &= drops.gather(1, first) & is_left.gather(1, first)
    is_unsure = is_near[:, keep:].any(dim=1) | is_tie.squeeze(1)
    chain.keep(
        survivors, drops, is_unsure, lambda rows, scores: cut_to_mass(scores, rest[rows], keep)
    )
    return True


def _likeliest(chain: Chain, rest: Tensor, keep: int) -> tuple[Survivors, Tensor] | None:
    """At least ``keep`` tokens such that all others may be dropped, and the share ``(rows, 1)`` of these.

    ``None`` if these tokens are not few.
    """
    if (blocks := chain.blocks()) is None:
        return None
    if (survivors := blocks.above()) is not None:  # few to begin with
        return survivors, torch.zeros(1, 1)
    total = (blocks.scaled(chain.scores) - blocks.best).exp_().sum(dim=1, keepdim=True).double()
    k = max(FIRST, keep)
    while k <= blocks.n_blocks:
        survivors = blocks.above(blocks.bound(k))
        if survivors is None:
            return None
        p = survivors.weights() / total
        outside = (1 - p.sum(dim=1, keepdim=True)).clamp(min=0.0)
        if (outside <= 0.99 * rest - 10 * EXP).all():
            return survivors, outside
        k *= 4
    return None


STEPS: dict[type, Callable[[Chain, Any], bool]] = {
    **dict.fromkeys((upstream.TemperatureLogitsWarper, TemperaturePerRow), temperature),
    **dict.fromkeys((upstream.TopKLogitsWarper, TopKPerRow), top_k),
    **dict.fromkeys((upstream.TopPLogitsWarper, TopPPerRow), top_p),
    **dict.fromkeys((upstream.MinPLogitsWarper, MinPPerRow), min_p),
}


def apply(warpers: Sequence[Any], input_ids: Tensor, scores: Tensor) -> Tensor:
    """``scores (rows, vocab)`` after ``warpers``, whose classes are in ``STEPS``, in their order."""
    if is_large(scores):
        chain = Chain(scores)
        is_done = all(
            getattr(warper, "filter_value", -math.inf) == -math.inf
            and STEPS[type(warper)](chain, warper)
            for warper in warpers
        )
        if is_done and chain.survivors is not None:
            return chain.survivors.scores()
    for warper in warpers:
        scores = warper(input_ids, scores)
    return scores
