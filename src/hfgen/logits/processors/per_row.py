"""Values per prompt: a column has one number for each prompt of a batch, and each prompt has as many rows.

transformers' common warpers take columns here; scores of each row are bit-identical to theirs. Of other
warpers, there is one for each value (``ProcessorsByRows``).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers.generation import logits_process as upstream

if TYPE_CHECKING:
    from .context import Context

Number = TypeVar("Number", float, int, torch.Tensor, float | torch.Tensor, int | torch.Tensor)


def rows_of(prompts: torch.Tensor, n_each: int) -> torch.Tensor:
    """The rows ``(n * n_each,)`` of ``prompts (n,)``, where each prompt has ``n_each`` rows."""
    if n_each == 1:
        return prompts
    return (prompts[:, None] * n_each + torch.arange(n_each, device=prompts.device)).flatten()


def as_column(values: list[Any], device: Any) -> Any:
    """The value that all of ``values`` are equal to, or a tensor ``(n, 1)`` of them."""
    if all(value == values[0] for value in values):
        return values[0]
    is_whole = all(isinstance(value, int) for value in values)
    dtype = torch.long if is_whole else torch.float32
    return torch.tensor(values, dtype=dtype, device=device)[:, None]


def expand(column: Number, n_rows: int) -> Number:
    """A number unchanged, or a column ``(prompts, 1)`` repeated to ``(n_rows, 1)``."""
    if not isinstance(column, torch.Tensor) or len(column) == n_rows:
        return column
    return column.repeat_interleave(n_rows // len(column), dim=0)


def quotient(scores: torch.Tensor, by: float | torch.Tensor) -> torch.Tensor:
    """``scores / by``, the same for a number and for a column ``(rows, 1)`` of it."""
    if scores.is_cpu or not isinstance(by, torch.Tensor):
        return scores / by
    return scores * by.reciprocal()  # what CUDA does for a number


class TemperaturePerRow(upstream.TemperatureLogitsWarper):
    """Divides the scores of each row by its own temperature ``(prompts, 1)``."""

    def __init__(self, temperature: torch.Tensor) -> None:
        self.temperature = temperature

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return quotient(scores, expand(self.temperature, len(scores)))


class MinPPerRow(upstream.MinPLogitsWarper):
    """Drops tokens less likely than a row's share ``values (prompts, 1)`` of the best; none for 0."""

    def __init__(self, values: torch.Tensor, min_tokens_to_keep: int = 1) -> None:
        super().__init__(0.5, min_tokens_to_keep=min_tokens_to_keep)  # replaced at each call
        self.values = values

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        values = expand(self.values, len(scores)).to(scores.device)
        self.min_p = values.to(scores.dtype)
        return torch.where(values == 0, scores, super().__call__(input_ids, scores))


class TopKPerRow(upstream.TopKLogitsWarper):
    """Keeps each row's ``counts (prompts, 1)`` best tokens and ties of the last; all for a count of 0."""

    def __init__(self, counts: torch.Tensor, min_tokens_to_keep: int = 1) -> None:
        super().__init__(int(counts.max()), min_tokens_to_keep=min_tokens_to_keep)
        self.counts = counts

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = expand(self.counts, len(scores))
        most = min(self.top_k, scores.shape[-1])
        last = counts.clamp(self.min_tokens_to_keep, most) - 1
        bounds = scores.topk(most).values.gather(1, last.long())
        return scores.masked_fill((scores < bounds) & (counts > 0), self.filter_value)


class TopPPerRow(upstream.TopPLogitsWarper):
    """Keeps each row's likeliest tokens whose probabilities sum to its own of ``masses``, one per prompt."""

    def __init__(self, masses: list[float], device: Any, min_tokens_to_keep: int = 1) -> None:
        super().__init__(0.5, min_tokens_to_keep=min_tokens_to_keep)
        # Rounded once, after the difference, as upstream's. Nothing is dropped at a mass of 1.
        rest = [1 - mass if mass < 1 else -math.inf for mass in masses]
        # ``(prompts, 1)``: may be dropped
        self.rest = torch.tensor(rest, dtype=torch.float32, device=device)[:, None]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return cut_to_mass(scores, expand(self.rest, len(scores)), self.min_tokens_to_keep)


def cut_to_mass(scores: torch.Tensor, rest: torch.Tensor, keep: int) -> torch.Tensor:
    """Drop the least likely tokens whose probabilities sum to at most ``rest (rows, 1)``.

    Sums are rounded as in transformers. Of each row's ``scores (rows, vocab)``, ``keep`` tokens are kept.
    """
    values, tokens = scores.sort(dim=-1)
    drop = values.softmax(dim=-1).cumsum(dim=-1) <= rest
    drop[:, -keep:] = False
    return scores.masked_fill(drop.scatter(1, tokens, drop), -math.inf)


def temperature(value: Any, context: Context) -> upstream.TemperatureLogitsWarper | None:
    if getattr(context.config, "dynatemp_range", None):  # its processor has the temperature
        return None
    is_column = isinstance(value, torch.Tensor)
    return TemperaturePerRow(value) if is_column else upstream.TemperatureLogitsWarper(value)


def top_p(mass: Any, context: Context) -> upstream.TopPLogitsWarper:
    n = context.min_tokens_to_keep
    if not isinstance(mass, torch.Tensor):
        return upstream.TopPLogitsWarper(mass, min_tokens_to_keep=n)
    # The column is rounded: a mass is subtracted from 1 before.
    masses = [c.top_p if c.do_sample and c.top_p is not None else 1.0 for c in context.configs]
    return TopPPerRow(masses, context.device, n)
