"""Warpers that flatten or sharpen distributions: temperature, dynamic temperature, smoothing."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import LogitsProcessor, TemperatureLogitsWarper

from .columns import quotient
from .context import Context
from .per_row import TemperaturePerRow

#: A dynamic temperature below it is 0: scores would grow beyond float32.
LEAST = 1e-6


class DynamicTemperature(LogitsProcessor):
    """A temperature between ``temperature - range`` and ``temperature + range``, the higher the less certain.

    It grows with the entropy, divided by that of as many equal tokens, to the power of ``exponent``. As
    llama.cpp's ``temp_ext``.
    """

    is_row_wise = True

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

    is_row_wise = True

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        best = scores.amax(dim=-1, keepdim=True)
        return best - self.factor * (best - scores).square()


def temperature(value: Any, context: Context) -> LogitsProcessor | None:
    if getattr(context.config, "dynatemp_range", None):  # its processor has the temperature
        return None
    return TemperaturePerRow(value) if torch.is_tensor(value) else TemperatureLogitsWarper(value)


def dynamic_temperature(span: Any, context: Context) -> DynamicTemperature:
    temperature = context.config.temperature
    exponent = float(context.own("dynatemp_exponent"))
    return DynamicTemperature(1.0 if temperature is None else temperature, span, exponent)
