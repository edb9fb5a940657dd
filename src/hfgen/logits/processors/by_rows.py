"""Processors and stopping criteria that apply to some prompts of a batch each."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from .lists import is_row_wise
from .per_row import rows_of

#: Functions, each with the prompts that it holds for.
Parts = list[tuple[Any, list[int]]]


class _OfPrompts:
    """Functions of ids, each for some of ``n_prompts``; no two have a prompt in common."""

    def __init__(self, parts: Parts, n_prompts: int, device: Any) -> None:
        self.n_prompts = n_prompts
        self.parts = [(function, torch.tensor(p, device=device)) for function, p in parts]

    @property
    def is_row_wise(self) -> bool:
        return all(is_row_wise(function) for function, _ in self.parts)

    def reorder(self, index: torch.Tensor) -> None:
        """Reorder rows within their prompts: row ``i`` becomes old row ``index[i]``."""
        for function, prompts in self.parts:
            if hasattr(function, "reorder"):
                rows = rows_of(prompts, len(index) // self.n_prompts).to(index.device)
                function.reorder(torch.searchsorted(rows, index[rows].to(rows.dtype)))


class ProcessorsByRows(_OfPrompts, LogitsProcessor):
    """Calls each processor with the rows of its own prompts."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for processor, prompts in self.parts:
            rows = rows_of(prompts, len(scores) // self.n_prompts)
            scores[rows] = processor(input_ids[rows], scores[rows])
        return scores


class CriteriaByRows(_OfPrompts, StoppingCriteria):
    """Calls each criterion with the rows of its own prompts."""

    #: Rows may end before the others do, and are padded then.
    ends_rows = True

    def of_row(self, row: int, n_rows: int) -> Any:
        """The criterion of a row of ``n_rows``; ``None`` if it has none."""
        prompt = row * self.n_prompts // n_rows
        return next((part for part, prompts in self.parts if prompt in prompts.tolist()), None)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        is_done = input_ids.new_zeros(len(input_ids), dtype=torch.bool)
        for criterion, prompts in self.parts:
            rows = rows_of(prompts, len(input_ids) // self.n_prompts)
            is_done[rows] = criterion(input_ids[rows], scores, **kwargs)
        return is_done
