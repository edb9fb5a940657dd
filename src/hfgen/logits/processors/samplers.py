"""Samplers that transformers lacks: dynamic temperature, smoothing, truncations, XTC, mirostat, adaptive-p."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import LogitsProcessor

from ...state import seeds
from .context import Context
from .per_row import quotient

LEAST = 1e-6  # a dynamic temperature below it is 0: scores would grow beyond float32


class DynamicTemperature(LogitsProcessor):
    """A temperature between ``temperature - range`` and ``temperature + range``, the higher the less certain.

    It grows with the entropy, divided by that of as many equal tokens, to the power of ``exponent``. As
    llama.cpp's ``temp_ext``.
    """

    def __init__(self, temperature: float, span: float, exponent: float) -> None:
        self.temperature, self.span, self.exponent = temperature, span, exponent

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        values = self.temperature, self.span, self.exponent
        t, span, exponent = (scores.new_full((1, 1), value) for value in values)
        n_left = (scores > -math.inf).sum(dim=-1, keepdim=True)
        entropy = torch.special.entr(scores.softmax(dim=-1)).sum(dim=-1, keepdim=True)
        share = entropy / n_left.to(scores.dtype).log()
        share = share.nan_to_num(nan=0.0, posinf=0.0).clamp(0.0, 1.0)
        low, high = (t - span).clamp(min=0.0), t + span
        dynamic = torch.where(n_left > 1, low + (high - low) * share**exponent, t)
        # Towards a temperature of 0 only the best is left.
        is_best, is_zero = scores == scores.amax(dim=-1, keepdim=True), dynamic < LEAST
        divided = quotient(scores, dynamic.masked_fill(is_zero, 1.0))
        return divided.masked_fill(is_zero & ~is_best, -math.inf)


class QuadraticSmoothing(LogitsProcessor):
    """Scores fall off from the best with the square of the distance: ``max - factor * (max - score) ** 2``."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        best = scores.amax(dim=-1, keepdim=True)
        return best - self.factor * (best - scores).square()


class Truncation(LogitsProcessor):
    """Drops the tokens of ``drops``, but for the ``min_tokens_to_keep`` best."""

    drops: Callable[[torch.Tensor], torch.Tensor]  # bools ``(rows, vocab)``, false for the best

    def __init__(self, value: Any, min_tokens_to_keep: int = 1) -> None:
        self.value, self.min_tokens_to_keep = value, min_tokens_to_keep

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        drops = self.drops(scores)
        if self.min_tokens_to_keep > 1:
            best = scores.topk(min(self.min_tokens_to_keep, scores.shape[-1])).indices
            drops = drops.scatter(-1, best, False)
        return scores.masked_fill(drops, -math.inf)


class TopNSigma(Truncation):
    """Keeps scores within ``value`` standard deviations of the best (Tang et al. 2024, arXiv 2411.07641)."""

    def drops(self, scores: torch.Tensor) -> torch.Tensor:
        is_left = scores > -math.inf
        n_left = is_left.sum(dim=-1, keepdim=True)
        mean = scores.where(is_left, 0.0).sum(dim=-1, keepdim=True) / n_left
        deviations = (scores - mean).where(is_left, 0.0)
        deviation = (deviations.square().sum(dim=-1, keepdim=True) / n_left).sqrt()
        return scores < scores.amax(dim=-1, keepdim=True) - self.value * deviation


class TopA(Truncation):
    """Keeps tokens at least ``value`` times as likely as the square of the best (BlinkDL, RWKV-LM)."""

    def drops(self, scores: torch.Tensor) -> torch.Tensor:
        p = scores.softmax(dim=-1)
        return p < self.value * p.amax(dim=-1, keepdim=True).square()


class PLess(Truncation):
    """Keeps tokens at least as likely as two draws are to be the same: ``p >= sum(p ** 2)``.

    Tan et al. 2025, arXiv 2509.23234.
    """

    def drops(self, scores: torch.Tensor) -> torch.Tensor:
        p = scores.softmax(dim=-1)
        bound = p.square().sum(dim=-1, keepdim=True)
        return (p < bound) & (p < p.amax(dim=-1, keepdim=True))  # rounding spares the best


@dataclass(eq=False)
class ExcludeTopChoices(LogitsProcessor):
    """XTC: with some probability, of the tokens at least as likely as ``threshold`` only the last is kept.

    After p-e-w (2024, github.com/oobabooga/text-generation-webui/pull/6335), as llama.cpp does it. One number
    is drawn per row and call: from the rows' ``keys`` and the number of generated tokens, or from torch's
    generator.
    """

    SALT: ClassVar[int] = -2  # tells this use of a row's noise from others

    probability: float
    threshold: float
    min_tokens_to_keep: int = 1
    keys: torch.Tensor | None = None
    prompt_length: int = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.keys is None:
            chance = torch.rand(len(scores), dtype=scores.dtype, device=scores.device)
        else:
            salt = self.keys.new_full((), self.SALT)  # made on the device: nothing waits
            chance = seeds.uniform(self.keys, input_ids.shape[1] - self.prompt_length, salt)
        p = scores.softmax(dim=-1)
        is_top = (p >= self.threshold) & (scores > -math.inf)
        last = p.where(is_top, 2.0).argmin(dim=-1, keepdim=True)
        drops = is_top.scatter(-1, last, False)
        n_left = ((scores > -math.inf) & ~drops).sum(dim=-1, keepdim=True)
        is_hit = (chance[:, None] < self.probability) & (n_left >= self.min_tokens_to_keep)
        return scores.masked_fill(drops & is_hit, -math.inf)


class Feedback(LogitsProcessor):
    """Base of warpers with a state ``(rows, n)`` that each drawn token updates.

    It keeps the state of each length, since a call may have fewer ids than the last (rejected drafts).
    """

    #: The state before the first token, for scores ``(rows, vocab)``.
    initial: Callable[[torch.Tensor], torch.Tensor]
    #: The state after a token of the log-probability ``(rows, 1)``.
    updated: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    #: For scores and a state: scores to draw from, and log-probabilities that update the state.
    shape: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

    def __init__(self) -> None:
        self.states: dict[int, torch.Tensor] = {}
        #: Of the last call: the length, and the log-probabilities ``(rows, vocab)`` that update the state.
        self.last: tuple[int, torch.Tensor] | None = None

    def reorder(self, index: torch.Tensor) -> None:
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


def dynamic_temperature(span: Any, context: Context) -> DynamicTemperature:
    temperature = context.config.temperature
    exponent = float(context.own("dynatemp_exponent"))
    return DynamicTemperature(1.0 if temperature is None else temperature, span, exponent)


def exclude_top_choices(probability: Any, context: Context) -> ExcludeTopChoices | None:
    threshold = float(context.own("xtc_threshold"))
    if threshold > 0.5:  # two tokens cannot both be that likely
        return None
    facts = context.min_tokens_to_keep, context.seeds, context.prompt_length
    return ExcludeTopChoices(probability, threshold, *facts)
