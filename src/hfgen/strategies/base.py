"""What strategies that forward one token per step share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from transformers.utils import ModelOutput

from .. import forward
from ..types import Run


class NextToken:
    """Prefill, then forward one new token per sequence and step."""

    #: How forward is called; a strategy may put a compiled one here before the prefill.
    execute: Callable

    def __init__(self, run: Run) -> None:
        self.execute = run.model.__call__

    def prefill(self, run: Run) -> ModelOutput:
        return run.model._prefill(
            run.ids,
            run.config,
            run.model_kwargs,
            is_first_iteration=not run.config.is_assistant,
        )

    def decoding(self, run: Run) -> AbstractContextManager[None]:
        return nullcontext()

    def forward(self, run: Run) -> ModelOutput:
        return forward.next_token(run, self.execute)


class InvalidScoresError(ValueError, RuntimeError):
    """No token can be chosen from a row of scores. Upstream's sampling raises RuntimeError here."""

    def __init__(self, rows: list[int], step: int) -> None:
        super().__init__(
            f"The scores of row {', '.join(map(str, rows))} are NaN or infinite at step {step}, so no "
            "token can be chosen. Check the attention mask and the dtype (float16 overflows), or "
            "set `remove_invalid_values=True`."
        )
