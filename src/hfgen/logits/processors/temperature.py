"""Warpers that flatten or sharpen distributions: temperature, dynamic temperature, smoothing."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from transformers import LogitsProcessor, TemperatureLogitsWarper

from .columns import expand, quotient
from .context import Context
from .per_row import TemperaturePerRow

#: A number, or a column of them: one per prompt, ``(prompts, 1)``.
Scale: TypeAlias = float | torch.Tensor


#: A dynamic temperature below it is 0: scores would grow beyond float32.
LEAST = 1e-6


class DynamicTemperature(LogitsProcessor):
    """A temperature between ``temperature - range`` and ``temperature + range``, the higher the less certain.

    It grows with the entropy, by the entropy of as many equal tokens, to the power of ``exponent``. All are
    numbers or columns ``(prompts, 1)``; a range of 0 leaves the temperature. As llama.cpp's ``temp_ext``.
    """

    is_row_wise = True

    def __init__(self, temperature: Scale, span: Scale, exponent: Scale) -> None:
        self.temperature, self.span, self.exponent = temperature, span, exponent

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        t, span, exponent = (
            expand(value, len(scores)).to(scores.dtype)
            if isinstance(value, torch.Tensor)
            else scores.new_full((1, 1), value)
            for value in (self.temperature, self.span, self.exponent)
        )
        n_left = (scores > -math.inf).sum(dim=-1, keepdim=True)
        entropy = torch.special.entr(scores.softmax(dim=-1)).sum(dim=-1, keepdim=True)
        share = (entropy / n_left.log()).nan_to_num(nan=0.0, posinf=0.0).clamp(0.0, 1.0)
        low, high = (t - span).clamp(min=0.0), t + span
        dynamic = torch.where((span > 0) & (n_left > 1), low + (high - low) * share**exponent, t)
        # Towards a temperature of 0 only the best is left.
        is_best = scores == scores.amax(dim=-1, keepdim=True)
        is_zero = (span > 0) & (dynamic < LEAST)
        divided = quotient(scores, torch.where(is_zero, 1.0, dynamic))
        return divided.masked_fill(is_zero & ~is_best, -math.inf)


class QuadraticSmoothing(LogitsProcessor):
    """Scores fall off from the best with the square of the distance: ``max - factor * (max - score) ** 2``.

    ``factor`` is a number or a column ``(prompts, 1)``, in which 0 leaves a row as it is.
    """

    is_row_wise = True

    def __init__(self, factor: float | torch.Tensor) -> None:
        self.factor = factor

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        best = scores.amax(dim=-1, keepdim=True)
        factor = expand(self.factor, len(scores))
        smooth = best - factor * (best - scores).square()
        return torch.where(factor == 0, scores, smooth) if torch.is_tensor(factor) else smooth


def temperature(value: Any, context: Context) -> LogitsProcessor | None:
    if any(context.values("dynatemp_range")):  # which has the temperature in it
        return None
    return TemperaturePerRow(value) if torch.is_tensor(value) else TemperatureLogitsWarper(value)


def dynamic_temperature(span: Any, context: Context) -> DynamicTemperature:
    return DynamicTemperature(
        context.column("temperature", 1.0), span, context.own_column("dynatemp_exponent")
    )
