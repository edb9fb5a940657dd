"""Noise determined by a seed: a function of the row's seed, the position in the text, and the token.

The chosen token has the highest sum of score and noise (the Gumbel-max trick). No draw depends on another
one, so a row's tokens do not depend on its neighbours, on drafts, or on the order in which positions are
processed (Gumbel coupling, arXiv 2408.07978).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import survivors

if TYPE_CHECKING:
    from .run import RowParams

#: Multipliers of splitmix64 (Steele et al. 2014), and its increment, as signed integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64

#: Numbers whose noise is made at once on the CPU.
IN_CACHE = 2**16


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 on int64, in place; shifts are logical."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x ^= (x >> shift).bitwise_and_(2 ** (64 - shift) - 1)
        x *= factor
    x ^= (x >> 31).bitwise_and_(2**33 - 1)
    return x


def keys_of(seeds: list[int | None], copies: int, device: Any) -> torch.Tensor:
    """Keys ``(len(seeds) * copies,)`` int64: ``copies`` of each seed. ``None`` is a random seed.

    Random seeds come from torch's generator, so that ``torch.manual_seed`` fixes them.
    """
    seeds = [int(torch.randint(2**62, ())) if seed is None else seed for seed in seeds]
    base = torch.tensor(seeds, device=device)[:, None]
    copy = torch.arange(copies, device=device)
    return _mix(_mix(base) + copy * _GOLDEN).flatten()


def split(seed: int, number: int, position: int) -> int:
    """The seed of copy ``number``, from 1 on, of a row with ``seed`` that has ``position`` generated tokens."""
    key = keys_of([seed], number + 1, "cpu")[-1:]
    return int(_mix(keys_at(key, torch.tensor(position)))) & (2**63 - 1)


def keys_at(keys: torch.Tensor, positions: torch.Tensor | int) -> torch.Tensor:
    """Keys ``(rows,)`` whose noise at position -1 is that of ``keys`` at ``positions``, one or ``(rows,)``."""
    return keys + (positions + 1) * _GOLDEN


def uniform(keys: torch.Tensor, position: int, tokens: torch.Tensor) -> torch.Tensor:
    """Random float32 above 0 and below 1, for ``keys (rows,)`` or ``(…, 1)`` that broadcast with ``tokens``.

    Uses of a row's noise that are no token's have numbers below 0 in the place of tokens.
    """
    start = ((position + 1) * _GOLDEN + 2**63) % 2**64 - 2**63  # as int64 wraps around
    bits = (_mix(_mix(keys + start) + tokens * _GOLDEN) >> 32).bitwise_and_(2**32 - 1)
    # The largest float32 below 1: rounding must not reach 1.
    return ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def gumbel(keys: torch.Tensor, position: int, tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32, for keys and tokens that broadcast.

    It is the logarithm of an exponential variable, whose small values, which decide, are fine-grained.
    """
    return -torch.log(-torch.log1p(-uniform(keys, position, tokens)))


def perturbed(scores: torch.Tensor, keys: torch.Tensor, position: int) -> torch.Tensor:
    """``scores (rows, n)`` plus the noise of ``keys (rows,)`` at a position of the generated text.

    On the CPU, noise is generated only for scores above -inf, if samplers left few of them.
    """
    if (few := survivors.left_in(scores)) is not None:
        few.values = few.values + gumbel(keys[:, None], position, few.tokens)
        return few.scores()
    tokens = torch.arange(scores.shape[1], device=scores.device)
    if not scores.is_cpu:
        return scores + gumbel(keys[:, None], position, tokens)
    # In parts, the tensors stay in the processor's cache: 10 ms for 8 rows of 152,000, not 90.
    noisy = torch.empty_like(scores)
    n = max(IN_CACHE // scores.shape[1], 1)
    for part in (slice(start, start + n) for start in range(0, len(scores), n)):
        torch.add(scores[part], gumbel(keys[part, None], position, tokens), out=noisy[part])
    return noisy


@dataclass(slots=True)
class RowChoice:
    """Chooses tokens by scores and noise, as a function of the row's key and position alone."""

    keys: torch.Tensor  # ``(rows,)``: keys of the rows' noise; with beams, of the prompts'
    is_sampled: torch.Tensor | None  # ``(rows,)`` bools; ``None`` if all rows sample
    prompt_length: int

    @classmethod
    def of(cls, keys: torch.Tensor, rows: RowParams | None, prompt_length: int) -> RowChoice:
        """The choice by ``keys (rows,)``; the configs in ``rows`` say which prompts sample."""
        is_sampled = None
        if rows is not None and not all(flags := rows.values("do_sample")):
            is_sampled = torch.tensor([*map(bool, flags)], device=keys.device)
            is_sampled = is_sampled.repeat_interleave(len(keys) // len(rows))
        return cls(keys, is_sampled, prompt_length)

    def of_prompts(self, prompts: slice) -> RowChoice:
        is_sampled = None if self.is_sampled is None else self.is_sampled[prompts]
        return RowChoice(self.keys[prompts], is_sampled, self.prompt_length)

    def perturbed(self, scores: torch.Tensor, length: int) -> torch.Tensor:
        """``scores (rows, vocab)`` after ``length`` tokens, with noise where rows sample."""
        noisy = perturbed(scores, self.keys, length - self.prompt_length)
        if self.is_sampled is None:
            return noisy
        return torch.where(self.is_sampled[:, None], noisy, scores)

    def choose(self, scores: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``(rows,)``, and bools ``(rows,)``: which rows have none, since scores are NaN or all -inf."""
        if (few := survivors.left_in(scores)) is not None:
            values = few.values + gumbel(
                self.keys[:, None], length - self.prompt_length, few.tokens
            )
            if self.is_sampled is not None:
                values = torch.where(self.is_sampled[:, None], values, few.values)
            # Of equal scores the first of the vocabulary is chosen, as by argmax below.
            is_best = values == values.amax(dim=1, keepdim=True)
            tokens = few.tokens.masked_fill(~is_best, few.vocab).amin(dim=1)
            return tokens, torch.zeros_like(self.keys, dtype=torch.bool)
        tokens = self.perturbed(scores, length).argmax(dim=-1)  # NaN counts as the largest
        chosen = scores.gather(1, tokens[:, None]).squeeze(1)
        return tokens, chosen.isnan() | (chosen == -torch.inf)
