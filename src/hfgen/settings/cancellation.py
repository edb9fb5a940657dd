"""Ending a call from another thread, a signal handler or a callback."""

from __future__ import annotations

from threading import Event
from typing import Any

import torch
from transformers import StoppingCriteria


class Cancellation(StoppingCriteria):
    """Ends the calls that it is given to at their next token, when ``cancel`` is called.

    ``generate(…, cancel=cancellation)`` returns what there is by then, the token of that step included;
    rows that had not ended have the finish reason ``"cancelled"``. One object may serve several calls,
    and once cancelled it stays so. Cancelling is safe from any thread.
    """

    is_row_wise = True
    finish_reason = "cancelled"

    def __init__(self) -> None:
        self._event = Event()

    def cancel(self) -> None:
        """End the calls at their next token."""
        self._event.set()

    @property
    def is_cancelled(self) -> bool:
        """Whether ``cancel`` has been called."""
        return self._event.is_set()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """``(rows,)`` bools for ``input_ids (rows, length)``, all the same."""
        fill = input_ids.new_ones if self.is_cancelled else input_ids.new_zeros
        return fill(len(input_ids), dtype=torch.bool)
