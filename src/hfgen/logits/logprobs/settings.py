"""The settings of a call: how many tokens, which tokens, and from which scores.

Names and meanings are vLLM's (``SamplingParams`` and its engine's ``logprobs_mode``). One differs:
``logprobs`` and ``logprob_token_ids`` may be given together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...settings.kinds import LOGPROBS_MODES as MODES
from ...state.run import Run

ALL = -1  # stands for all tokens of the vocabulary


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """The request of one row: the ``n_top`` likeliest tokens (``None``: nothing), and ``token_ids``."""

    n_top: int | None = None
    token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Any) -> LogprobRequest:
        """The request for generated tokens. ``logprob_token_ids`` alone ask for the chosen token, too."""
        # A recipe may run on a model that is not mixed, whose config lacks the fields.
        n_top, ids = (getattr(config, name, None) for name in ("logprobs", "logprob_token_ids"))
        has_more = ids is not None or getattr(config, "logprobs_support", None)
        return cls(0 if n_top is None and has_more else n_top, tuple(ids or ()))


@dataclass(frozen=True, slots=True)
class Settings:
    """The requests of the prompts of a call, and which scores they are about."""

    requests: Sequence[LogprobRequest]  # one per prompt, or a single one for all
    mode: str = MODES[0]

    @property
    def n_top(self) -> int | None:
        """The largest ``n_top`` of any row; ``None`` if none asks for anything."""
        counts = [request.n_top for request in self.requests if request.n_top is not None]
        return ALL if ALL in counts else max(counts, default=None)

    @property
    def is_processed(self) -> bool:
        return self.mode.startswith("processed")

    @property
    def is_logits(self) -> bool:
        return self.mode.endswith("logits")

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for calls that ask for the same."""
        return (self.mode, *self.requests)

    def of_row(self, row: int, n_rows: int) -> LogprobRequest:
        """The request of a row of ``n_rows``; rows of a prompt are next to each other."""
        return self.requests[row * len(self.requests) // n_rows]

    def token_ids(self, n_rows: int, device: torch.device) -> torch.Tensor | None:
        """``(n_rows, m)``: the ids that rows ask for, padded with zeros."""
        rows = [request.token_ids for request in self.requests]
        if (width := max(map(len, rows))) == 0:
            return None
        ids = torch.tensor([row + (width - len(row)) * (0,) for row in rows], device=device)
        return ids.repeat_interleave(n_rows // len(ids), dim=0, output_size=n_rows)


def mode_of(config: Any) -> str:
    return getattr(config, "logprobs_mode", None) or MODES[0]


def asks_for_any(config: Any) -> bool:
    """Whether a config asks for log-probabilities, of the prompt or of what follows it."""
    of_prompt = getattr(config, "prompt_logprobs", None)
    return of_prompt is not None or LogprobRequest.of(config).n_top is not None


def reads(run: Run, which: str) -> bool:
    """Whether ``which``, "raw" or "processed" scores, must not be written to before a step is over."""
    if which == "processed" and getattr(run.config, "logprobs_support", None):
        return True
    return run.asks_for("logprobs", "logprob_token_ids") and mode_of(run.config).startswith(which)
