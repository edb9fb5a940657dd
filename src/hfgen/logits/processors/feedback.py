"""Warpers that depend on the probabilities of drawn tokens: mirostat, adaptive-p."""

from __future__ import annotations

import math

import torch
from transformers import LogitsProcessor


class Feedback(LogitsProcessor):
    """Base of warpers with a state ``(rows, n)`` that each drawn token updates.

    It keeps the state of each length, since a call may have fewer ids than the last (rejected drafts).
    """

    def __init__(self) -> None:
        self.states: dict[int, torch.Tensor] = {}
        #: Of the last call: the length, and the log-probabilities ``(rows, vocab)`` that update the state.
        self.last: tuple[int, torch.Tensor] | None = None

    def initial(self, scores: torch.Tensor) -> torch.Tensor:
        """The state ``(rows, n)`` before the first token."""
        raise NotImplementedError

    def updated(self, state: torch.Tensor, log_prob: torch.Tensor) -> torch.Tensor:
        """The state after a token of the log-probability ``(rows, 1)``."""
        raise NotImplementedError

    def shape(self, scores: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores ``(rows, vocab)`` to draw from, and the log-probabilities that update the state."""
        raise NotImplementedError

    def reorder(self, index: torch.Tensor) -> None:
        """Reorder rows: row ``i`` becomes old row ``index[i]``."""
        self.states = {length: state[index] for length, state in self.states.items()}
        if self.last is not None:
            self.last = self.last[0], self.last[1][index]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        if self.last is not None and len(self.last[1]) != len(scores):  # other rows than before
            self.states, self.last = {}, None
        if self.last is not None and self.last[0] == length - 1:
            log_prob = self.last[1].gather(1, input_ids[:, -1:])
            self.states[length] = self.updated(self.states[length - 1], log_prob)
        elif length not in self.states:
            self.states[length] = self.initial(scores)
        shaped, log_probs = self.shape(scores, self.states[length])
        self.last = length, log_probs
        return shaped


class Mirostat(Feedback):
    """Keeps the surprise of tokens near ``tau`` bits: version 1 or 2 (Basu et al. 2021, arXiv 2007.14966).

    The state is a bound ``mu`` of the surprise, which moves by ``eta`` times the error. Version 1 estimates
    from the ``m`` best tokens, by Zipf's law, how many are below the bound; version 2 drops those above.
    """

    def __init__(self, version: int, tau: float, eta: float, m: int = 100) -> None:
        super().__init__()
        self.version, self.tau, self.eta, self.m = version, tau, eta, m

    def initial(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.new_full((len(scores), 1), 2.0 * self.tau)

    def updated(self, state: torch.Tensor, log_prob: torch.Tensor) -> torch.Tensor:
        surprise = -log_prob / math.log(2)
        # Where a row has ended, padding follows, which could not be drawn.
        return torch.where(surprise.isfinite(), state - self.eta * (surprise - self.tau), state)

    def shape(self, scores: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.version == 2:
            drops = scores.log_softmax(dim=-1) < -state * math.log(2)
            drops = drops & (scores < scores.amax(dim=-1, keepdim=True))
        else:
            order = scores.argsort(dim=-1, descending=True)
            ranks = torch.arange(scores.shape[-1], device=scores.device)
            is_beyond = ranks >= self._n_within(scores, state)
            drops = torch.zeros_like(is_beyond).scatter(-1, order, is_beyond)
        shaped = scores.masked_fill(drops, -math.inf)
        return shaped, shaped.log_softmax(dim=-1)

    def _n_within(self, scores: torch.Tensor, mu: torch.Tensor) -> torch.Tensor:
        """How many tokens ``(rows, 1)`` to keep, by the exponent of Zipf's law."""
        vocab = scores.shape[-1]
        best = scores.topk(min(self.m, vocab)).values.log_softmax(dim=-1)
        t = torch.arange(1, best.shape[1], device=scores.device, dtype=scores.dtype)
        t = ((t + 1) / t).log()
        b = (best[:, :-1] - best[:, 1:]).where(best[:, 1:] > -math.inf, 0.0)
        is_pair = (best[:, 1:] > -math.inf).to(t.dtype)
        exponent = (t * b).sum(-1, keepdim=True) / (t * t * is_pair).sum(-1, keepdim=True)
        excess = exponent - 1
        k = (excess * 2**mu / (1 - vocab**-excess)) ** (1 / exponent)
        return k.nan_to_num(nan=1.0, posinf=float(vocab)).clamp(1, vocab).long()


class AdaptiveP(Feedback):
    """Favours tokens near a probability that moves so that drawn tokens have ``target`` on average.

    As llama.cpp's sampler of that name. The average is weighted by ``decay`` per token. The state is the
    weighted sum of probabilities, and the sum of weights.
    """

    #: llama.cpp's score at the target, width of the peak, and rate of its decline.
    PEAK, WIDTH, SHARPNESS = 5.0, 0.3, 10.0

    def __init__(self, target: float, decay: float) -> None:
        super().__init__()
        self.target, self.decay = target, decay

    def initial(self, scores: torch.Tensor) -> torch.Tensor:
        weight = 1 / (1 - self.decay)
        return scores.new_tensor([self.target * weight, weight]).expand(len(scores), 2)

    def updated(self, state: torch.Tensor, log_prob: torch.Tensor) -> torch.Tensor:
        p = log_prob.exp()
        after = self.decay * state + torch.cat([p, torch.ones_like(p)], dim=1)
        return torch.where(p > 0, after, state)

    def shape(self, scores: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total, weight = state.split(1, dim=1)
        aim = (2 * self.target - total / weight).clamp(0.0, 1.0)
        log_probs = scores.log_softmax(dim=-1)
        distance = (log_probs.exp() - aim).abs() / self.WIDTH
        shaped = self.PEAK - self.SHARPNESS * distance.square() / (1 + distance)
        return shaped.masked_fill(scores == -math.inf, -math.inf), log_probs
