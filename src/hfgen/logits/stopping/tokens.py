"""Finish reasons, and criteria that read no text: stop tokens, lengths, repetitions, a cancellation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Event
from typing import Any

import torch
from transformers import MaxLengthCriteria, StoppingCriteria

from ...settings.kinds import RepetitionDetection
from ..processors.per_row import expand


class FinishReason(str):
    """A word for why a row ended, as ``"eos"``; ``stop`` has what stopped it.

    * ``"eos"``: ``stop`` is the token's id.
    * ``"stop"``: ``stop`` is the stop string, the pattern, or the token's id.
    * ``"length"``, ``"time"``, ``"repetition"``, ``"cancelled"``.
    * ``"error"``: no token could be chosen, since the row's scores were NaN or infinite.
    * ``"unfinished"``: a beam search found fewer ends than it returns sequences.
    * The name of a criterion of the caller's, or what it says as its ``finish_reason``.
    """

    stop: str | int | None

    def __new__(cls, reason: str, stop: str | int | None = None) -> FinishReason:
        self = super().__new__(cls, reason)
        self.stop = stop
        return self

    def __repr__(self) -> str:
        return super().__repr__() if self.stop is None else f"{super().__repr__()} ({self.stop!r})"


class Cancellation(StoppingCriteria):
    """Ends the calls ``generate(…, cancel=cancellation)`` at their next token, when ``cancel`` is called.

    They return what there is by then; rows that had not ended have the finish reason ``"cancelled"``. One object may
    serve several calls, and once cancelled it stays so. Cancelling is safe from any thread.
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
        return self._event.is_set()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.new_full((len(input_ids),), self.is_cancelled, dtype=torch.bool)


class RowLengthCriteria(MaxLengthCriteria):
    """Ends each row at a length of its own; ``max_length`` is the longest."""

    ends_rows = True

    def __init__(self, lengths: torch.Tensor, limit: int | None) -> None:
        """``lengths (prompts, 1)``, prompt included; ``limit``: the model's positions."""
        super().__init__(int(lengths.max()), limit)
        self.lengths = lengths

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        super().__call__(input_ids, scores, **kwargs)  # warns of lengths beyond the positions
        return self.reached(input_ids)

    def reached(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Bools ``(rows,)``: which rows have their length."""
        return input_ids.shape[1] >= expand(self.lengths, len(input_ids)).squeeze(1)


class StopTokenCriteria(StoppingCriteria):
    """Ends a row at one of ``stop_token_ids``, as at an EOS; also with ``ignore_eos``."""

    ends_rows = True

    def __init__(self, token_ids: list[int], device: Any = None) -> None:
        self.tokens = torch.tensor(sorted(set(token_ids)), device=device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.tokens = self.tokens.to(input_ids.device)
        return torch.isin(input_ids[:, -1], self.tokens)


class RepetitionCriteria(StoppingCriteria):
    """Ends a row whose generated tokens end in a repeated pattern.

    A pattern of ``p`` tokens occurs ``c`` times if each of the last ``p * (c - 1)`` tokens is equal to the
    one ``p`` places before it. All sizes are compared at once, without a read of the device; but of
    many, only those are compared whose ``NEWEST`` tokens are equal.
    """

    ends_rows = True
    MANY, NEWEST = 256, 8

    def __init__(
        self, detection: RepetitionDetection, prompt_length: int = 0, min_tokens: int = 0
    ) -> None:
        self.detection, self.prompt_length, self.min_tokens = detection, prompt_length, min_tokens
        self.smallest = max(detection.min_pattern_size, 1)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        detection, length = self.detection, input_ids.shape[1] - self.prompt_length
        largest = min(detection.max_pattern_size, length // detection.min_count)
        if largest < self.smallest or length < self.min_tokens:
            return input_ids.new_zeros(len(input_ids), dtype=torch.bool)
        sizes = torch.arange(self.smallest, largest + 1, device=input_ids.device)
        newest_first = input_ids[:, -largest * detection.min_count :].flip(1)
        if len(sizes) > self.MANY:
            parts = newest_first.unfold(1, self.NEWEST, 1)
            may_repeat = (parts[:, sizes] == parts[:, :1]).all(dim=2).any(dim=0)
            sizes = sizes[may_repeat | (sizes < self.NEWEST)]
        n_same = sizes[:, None] * (detection.min_count - 1)
        back = torch.arange(largest * (detection.min_count - 1), device=input_ids.device)
        before = (back + sizes[:, None]).clamp(max=newest_first.shape[1] - 1)  # (sizes, back)
        is_same = newest_first[:, None, : len(back)] == newest_first[:, before]
        return (is_same | (back >= n_same)).all(dim=2).any(dim=1)

    def ends(self, ids: Sequence[int]) -> Iterable[int]:
        return range(1, len(ids) + 1)

    def reason(self, ids: Sequence[int], n: int) -> FinishReason | None:
        count = self.detection.min_count
        if n < self.min_tokens:
            return None
        for size in range(self.smallest, self.detection.max_pattern_size + 1):
            start = n - size * count
            if start < 0:
                return None
            if ids[n - 1] == ids[n - 1 - size] and ids[start + size : n] == ids[start : n - size]:
                return FinishReason("repetition")
        return None
