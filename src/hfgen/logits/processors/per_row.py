"""transformers' warpers with one value per prompt; each row's scores are bit-identical to transformers'."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation import logits_process as upstream

from .columns import expand, quotient

if TYPE_CHECKING:
    from .context import Context


class TemperaturePerRow(upstream.TemperatureLogitsWarper):
    """Divides the scores of each row by its own temperature ``(prompts, 1)``."""

    def __init__(self, temperature: torch.Tensor) -> None:
        self.temperature = temperature

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return quotient(scores, expand(self.temperature, len(scores)))


class _PerRow:
    """Lets upstream's class read a column where it has a number: ``values (prompts, 1)``.

    A row whose value is ``off`` is left as it is.
    """

    #: The attribute that upstream's class reads, and whether it wants one value per row, ``(rows,)``.
    attribute: str
    is_flat = False
    off: float

    def __init__(self, values: torch.Tensor, **arguments: Any) -> None:
        # Any number will do: it is replaced at each call.
        super().__init__(0.5, **arguments)  # type: ignore[call-arg]
        self.values = values

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        values = expand(self.values, len(scores)).to(scores.device)
        column = values.to(scores.dtype)
        setattr(self, self.attribute, column.squeeze(1) if self.is_flat else column)
        processed = super().__call__(input_ids, scores)  # type: ignore[misc]
        return torch.where(values == self.off, scores, processed)


class MinPPerRow(_PerRow, upstream.MinPLogitsWarper):
    """Drops what is less likely than a row's share of the best."""

    attribute, off = "min_p", 0.0


class TypicalPerRow(_PerRow, upstream.TypicalLogitsWarper):
    """Keeps the most typical tokens, up to a row's mass (Meister et al. 2022, arXiv 2202.00666)."""

    attribute, off = "mass", 1.0


class EpsilonPerRow(_PerRow, upstream.EpsilonLogitsWarper):
    """Drops what is less likely than a row's epsilon."""

    attribute, off = "epsilon", 0.0


class EtaPerRow(_PerRow, upstream.EtaLogitsWarper):
    """Drops what is less likely than a row's eta, which its epsilon and entropy give."""

    attribute, off, is_flat = "epsilon", 0.0, True


class TopHPerRow(_PerRow, upstream.TopHLogitsWarper):
    """Keeps the best tokens up to a row's share of the entropy."""

    attribute, off, is_flat = "top_h", 0.0, True


class TopKPerRow(upstream.TopKLogitsWarper):
    """Keeps each row's ``counts (prompts, 1)`` best tokens, and their ties; all of them for a count of 0."""

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
        self.column = torch.tensor(rest, device=device)[:, None]

    def rest(self, n_rows: int) -> torch.Tensor:
        """How much may be dropped of each row, ``(n_rows, 1)``."""
        return expand(self.column, n_rows)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return cut_to_mass(scores, self.rest(len(scores)), self.min_tokens_to_keep)


def cut_to_mass(scores: torch.Tensor, rest: torch.Tensor, keep: int) -> torch.Tensor:
    """``scores (rows, vocab)`` without the least likely, which sum to at most ``rest (rows, 1)``, as upstream sums."""
    values, tokens = scores.sort(dim=-1)
    drop = values.softmax(dim=-1).cumsum(dim=-1) <= rest
    drop[:, -keep:] = False
    return scores.masked_fill(drop.scatter(1, tokens, drop), -math.inf)


def top_p(mass: Any, context: Context) -> upstream.TopPLogitsWarper:
    n = context.min_tokens_to_keep
    if not isinstance(mass, torch.Tensor):
        return upstream.TopPLogitsWarper(mass, min_tokens_to_keep=n)
    masses = [1.0 if value is None else value for value in context.values("top_p")]
    return TopPPerRow(masses, context.device, n)


def eta_cutoff(cutoff: Any, context: Context) -> upstream.EtaLogitsWarper:
    kind = EtaPerRow if isinstance(cutoff, torch.Tensor) else upstream.EtaLogitsWarper
    return kind(cutoff, min_tokens_to_keep=context.min_tokens_to_keep, device=context.device)
