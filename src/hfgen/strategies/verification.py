"""Which of the drafted tokens the target model accepts, and what it says in place of the first other.

Greedy: a draft is accepted as far as it is what the target would have chosen. Sampling: as in
Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", algorithm 1: a
token drafted with probability ``q`` is accepted with probability ``min(1, p / q)``, else one is drawn
from what ``p`` has more than ``q``; what comes out is distributed as ``p``, whatever the drafter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class DraftColumn:
    """What was drafted for one position.

    ``tokens (rows,)``; ``is_drafted (rows,)``: whether a row has a draft there; ``logits (rows,
    vocab)``: the scores that the tokens were drawn from, if the drafter gave any.
    """

    tokens: torch.Tensor
    is_drafted: torch.Tensor
    logits: torch.Tensor | None


class Verification(Protocol):
    """Chooses the tokens of one position after the other."""

    def begin(self, scores: torch.Tensor, n_drafted: int, has_logits: bool) -> None:
        """Start a round whose logits are ``scores (rows, n_drafted + 1, vocab)``."""

    def choose(
        self, position: int, scores: torch.Tensor, guess: DraftColumn
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``(rows,)`` for ``scores (rows, vocab)``, and in which rows it is the draft's."""


class GreedyMatch:
    """Accepts what the target would have chosen.

    With an ensemble weight ``w``, what ``w * p + (1 - w) * q`` would (upstream's
    ``assistant_ensemble_weight``).
    """

    def __init__(self, weight: float | None = None) -> None:
        self.weight = weight

    def begin(self, scores: torch.Tensor, n_drafted: int, has_logits: bool) -> None:
        pass

    def choose(
        self, position: int, scores: torch.Tensor, guess: DraftColumn
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = scores.argmax(dim=-1)
        if self.weight is not None and guess.logits is not None:
            mixed = self.weight * scores.softmax(dim=-1)
            mixed = mixed + (1.0 - self.weight) * guess.logits.softmax(dim=-1)
            tokens = torch.where(guess.is_drafted, mixed.argmax(dim=-1), tokens)
        return tokens, guess.is_drafted & (tokens == guess.tokens)


class SpeculativeSampling:
    """Accepts so that what is returned is distributed as the target's own samples.

    Draws one uniform number per drafted token and one row of exponential noise per sequence and
    round, in upstream's order: at one row the draws are upstream's. With an ensemble weight ``w``
    tokens are accepted with probability ``1 - w + w * p / q`` (as upstream does; no longer exact).
    """

    def __init__(self, weight: float | None = None) -> None:
        self.weight = weight

    def begin(self, scores: torch.Tensor, n_drafted: int, has_logits: bool) -> None:
        rows, _, vocab = scores.shape
        self.uniform = torch.rand(rows, n_drafted, device=scores.device)
        self.noise = exponential_noise((rows, vocab), scores)

    def choose(
        self, position: int, scores: torch.Tensor, guess: DraftColumn
    ) -> tuple[torch.Tensor, torch.Tensor]:
        p = scores.softmax(dim=-1)
        if position >= self.uniform.shape[1]:
            return gumbel_choice(p, self.noise), torch.zeros_like(guess.is_drafted)
        index = guess.tokens[:, None]
        if guess.logits is None:  # drafted for certain
            q = torch.zeros_like(p).scatter_(1, index, 1.0)
        else:
            q = guess.logits.softmax(dim=-1)
        ratio = (p.gather(1, index) / q.gather(1, index)).squeeze(1)
        if self.weight is not None:
            ratio = 1.0 - self.weight + self.weight * ratio
        is_accepted = guess.is_drafted & (self.uniform[:, position] <= ratio)
        residual = (p - q).clamp(min=0)
        total = residual.sum(dim=-1, keepdim=True)
        is_usable = guess.is_drafted[:, None] & (total > torch.finfo(p.dtype).tiny)
        residual = torch.where(is_usable, residual / total, p)
        tokens = gumbel_choice(residual, self.noise)
        return torch.where(is_accepted, guess.tokens, tokens), is_accepted


class SampledMatch:
    """Samples every position and accepts as long as the samples are the draft.

    What upstream does with drafts that have no probabilities: at one row the draws are upstream's.
    Exact too, but accepts no more than ``SpeculativeSampling`` and draws more.
    """

    def begin(self, scores: torch.Tensor, n_drafted: int, has_logits: bool) -> None:
        rows, n_positions, vocab = scores.shape
        self.noise = exponential_noise((rows * n_positions, vocab), scores)
        self.noise = self.noise.view(rows, n_positions, vocab)

    def choose(
        self, position: int, scores: torch.Tensor, guess: DraftColumn
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = gumbel_choice(scores.softmax(dim=-1), self.noise[:, position])
        return tokens, guess.is_drafted & (tokens == guess.tokens)


class UpstreamSampling:
    """Draws as upstream does: by ``SpeculativeSampling`` where the drafter gave scores, else by
    ``SampledMatch``. Which of them it is may change from round to round.
    """

    def __init__(self, weight: float | None = None) -> None:
        self.speculative, self.match = SpeculativeSampling(weight), SampledMatch()
        self.current: Verification = self.match

    def begin(self, scores: torch.Tensor, n_drafted: int, has_logits: bool) -> None:
        self.current = self.speculative if has_logits else self.match
        self.current.begin(scores, n_drafted, has_logits)

    def choose(
        self, position: int, scores: torch.Tensor, guess: DraftColumn
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.current.choose(position, scores, guess)


def exponential_noise(shape: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    """What ``torch.multinomial`` draws for one sample of each row of ``(rows, vocab)``."""
    return torch.empty(shape, dtype=torch.float32, device=like.device).exponential_()


def gumbel_choice(probabilities: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """One sample ``(rows,)`` of ``probabilities (rows, vocab)``, as ``torch.multinomial`` draws it."""
    return (probabilities / noise).argmax(dim=-1)
