"""Columns: one number for each prompt of a batch, and the rows that belong to each prompt."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

Number = TypeVar("Number", float, int, torch.Tensor, float | torch.Tensor, int | torch.Tensor)


def take_prompts(value: Any, prompts: torch.Tensor, n_prompts: int) -> Any:
    """The rows of ``prompts (n,)`` in a tensor with as many rows for each of ``n_prompts``, or ``value``."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) % n_prompts:
        return value
    return value[rows_of(prompts, len(value) // n_prompts)]


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
