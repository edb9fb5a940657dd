"""Samplers that transformers lacks: a dynamic temperature, smoothing, truncations, XTC."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from transformers import LogitsProcessor

from ...state import seeds
from .context import Context
from .per_row import quotient

#: A dynamic temperature below it is 0: scores would grow beyond float32.
LEAST = 1e-6


class DynamicTemperature(LogitsProcessor):
    """A temperature between ``temperature - range`` and ``temperature + range``, the higher the less certain.

    It grows with the entropy, divided by that of as many equal tokens, to the power of ``exponent``. As
    llama.cpp's ``temp_ext``.
    """

    def __init__(self, temperature: float, span: float, exponent: float) -> None:
        self.temperature, self.span, self.exponent = temperature, span, exponent

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        t, span, exponent = (
            scores.new_full((1, 1), value) for value in (self.temperature, self.span, self.exponent)
        )
        n_left = (scores > -math.inf).sum(dim=-1, keepdim=True)
        entropy = torch.special.entr(scores.softmax(dim=-1)).sum(dim=-1, keepdim=True)
        share = (entropy / n_left.log()).nan_to_num(nan=0.0, posinf=0.0).clamp(0.0, 1.0)
        low, high = (t - span).clamp(min=0.0), t + span
        dynamic = torch.where(n_left > 1, low + (high - low) * share**exponent, t)
        # Towards a temperature of 0 only the best is left.
        is_best = scores == scores.amax(dim=-1, keepdim=True)
        is_zero = dynamic < LEAST
        divided = quotient(scores, torch.where(is_zero, 1.0, dynamic))
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

    def __init__(self, value: Any, min_tokens_to_keep: int = 1) -> None:
        self.value, self.min_tokens_to_keep = value, min_tokens_to_keep

    def drops(self, scores: torch.Tensor) -> torch.Tensor:
        """Bools ``(rows, vocab)``, false for the best."""
        raise NotImplementedError

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


class ExcludeTopChoices(LogitsProcessor):
    """XTC: with some probability, of the tokens at least as likely as ``threshold`` only the last is kept.

    After p-e-w (2024, github.com/oobabooga/text-generation-webui/pull/6335), as llama.cpp does it. One number
    is drawn per row and call: from the rows' ``keys`` and the number of generated tokens, or from torch's
    generator.
    """

    #: Tells this use of a row's noise from others.
    SALT: ClassVar[int] = -2

    def __init__(
        self,
        probability: float,
        threshold: float,
        min_tokens_to_keep: int = 1,
        keys: torch.Tensor | None = None,
        prompt_length: int = 0,
    ) -> None:
        self.probability, self.threshold = probability, threshold
        self.min_tokens_to_keep, self.keys = min_tokens_to_keep, keys
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        n_rows = len(scores)
        if self.keys is None:
            chance = torch.rand(n_rows, device=scores.device)
        else:
            position = input_ids.shape[1] - self.prompt_length
            chance = seeds.uniform(self.keys, position, self.SALT)
        p = scores.softmax(dim=-1)
        is_top = (p >= self.threshold) & (scores > -math.inf)
        last = p.where(is_top, 2.0).argmin(dim=-1, keepdim=True)
        drops = is_top.scatter(-1, last, False)
        n_left = ((scores > -math.inf) & ~drops).sum(dim=-1, keepdim=True)
        is_hit = chance[:, None] < self.probability
        is_hit = is_hit & (n_left >= self.min_tokens_to_keep)
        return scores.masked_fill(drops & is_hit, -math.inf)


def dynamic_temperature(span: Any, context: Context) -> DynamicTemperature:
    temperature = context.config.temperature
    exponent = float(context.own("dynatemp_exponent"))
    return DynamicTemperature(1.0 if temperature is None else temperature, span, exponent)


def exclude_top_choices(probability: Any, context: Context) -> ExcludeTopChoices | None:
    threshold = float(context.own("xtc_threshold"))
    if threshold > 0.5:  # two tokens cannot both be that likely
        return None
    return ExcludeTopChoices(
        probability, threshold, context.min_tokens_to_keep, context.seeds, context.prompt_length
    )
