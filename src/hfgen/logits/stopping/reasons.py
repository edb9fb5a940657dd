"""Why rows end: finish reasons, criteria that read no text, and the cause of each end.

A cause has ``ends(ids)``, the ascending numbers of generated ``ids`` after which it may have ended a row, and
``reason(ids, n)``, the reason why it ends a row with the ``n``-th of its generated ids, or ``None``. Some criteria are
causes themselves; of others, a cause is told from the ids or from notes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteria

from ...settings.kinds import RepetitionDetection
from ..processors.context import CriteriaByRows
from ..processors.lists import name_of
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


@dataclass(frozen=True, slots=True)
class Tokens:
    """One of the EOS or stop tokens."""

    tokens: frozenset[int]
    name: str
    rank: int

    def ends(self, ids: Sequence[int]) -> Iterable[int]:
        return (n for n, token in enumerate(ids, 1) if token in self.tokens)

    def reason(self, ids: Sequence[int], n: int) -> FinishReason | None:
        return FinishReason(self.name, ids[n - 1]) if ids[n - 1] in self.tokens else None


@dataclass(frozen=True, slots=True)
class Length:
    """The greatest number of new tokens."""

    n: int
    rank: int = 3

    def ends(self, ids: Sequence[int]) -> Iterable[int]:
        return [self.n]

    def reason(self, ids: Sequence[int], n: int) -> FinishReason | None:
        return FinishReason("length") if n >= self.n else None


class Notes:
    """Which rows a criterion that is no function of the ids has ended, by length."""

    def __init__(self) -> None:
        self.unread: list[tuple[int, torch.Tensor]] = []
        #: The newest bools of the rows, and whether a row was ever ended.
        self.rows: dict[int, list[bool]] = {}
        self.any: dict[int, bool] = {}

    def add(self, length: int, ends: torch.Tensor) -> None:
        """Add the criterion's bools ``(rows,)`` for ids of ``length``; they stay on the device for now."""
        self.unread.append((length, ends))

    def read(self) -> None:
        """Read new bools off the device, all at once."""
        if not self.unread:
            return
        # A search may have more candidates at one step than at another.
        table = pad_sequence([ends for _, ends in self.unread], batch_first=True).tolist()
        for (length, _), ends in zip(self.unread, table, strict=True):
            self.rows[length] = ends  # overwrites those of rejected drafts
            self.any[length] = self.any.get(length, False) or any(ends)
        self.unread = []


@dataclass(frozen=True, slots=True)
class Noted:
    """A criterion that is no function of the ids: its bools are noted at each step."""

    name: str
    notes: Notes
    row: int | None  # ``None`` in a search, where candidates have no row
    prompt_length: int
    rank: int

    def ends(self, ids: Sequence[int]) -> Iterable[int]:
        self.notes.read()
        return sorted(length - self.prompt_length for length in self.notes.rows)

    def reason(self, ids: Sequence[int], n: int) -> FinishReason | None:
        self.notes.read()
        length = n + self.prompt_length
        if self.row is None:
            ends = self.notes.any.get(length, False)
        else:
            ends = length in self.notes.rows and self.notes.rows[length][self.row]
        return FinishReason(self.name) if ends else None


def is_noted(criterion: Any) -> bool:
    """Whether a criterion has to be noted, since the ids do not tell what it decided."""
    if isinstance(criterion, CriteriaByRows):
        return any(is_noted(part) for part, _ in criterion.parts)
    is_known = isinstance(criterion, EosTokenCriteria | StopTokenCriteria | MaxLengthCriteria)
    return not (is_known or hasattr(criterion, "reason"))


class Causes:
    def __init__(self, criteria: Sequence[Any], prompt_length: int) -> None:
        self.prompt_length = prompt_length
        notes = getattr(criteria, "notes", None) or {}
        #: Each criterion or its parts for some prompts, their causes and notes.
        self.parts: list[tuple[Any, Any, Any, Notes]] = []
        for place, criterion in enumerate(criteria):
            is_by_rows = isinstance(criterion, CriteriaByRows)
            for part, _ in criterion.parts if is_by_rows else [(criterion, None)]:
                cause = self.cause_of(part)
                self.parts.append((criterion, part, cause, notes.get(place, Notes())))

    def cause_of(self, part: Any) -> Any:
        """The cause of a criterion, or a list of one for each prompt; ``None`` if it is noted."""
        if isinstance(part, EosTokenCriteria):
            return Tokens(frozenset(part.eos_token_id.tolist()), "eos", rank=0)
        if isinstance(part, StopTokenCriteria):
            return Tokens(frozenset(part.tokens.tolist()), "stop", rank=1)
        if isinstance(part, RowLengthCriteria):
            return [Length(n - self.prompt_length) for n in part.lengths.flatten().tolist()]
        if isinstance(part, MaxLengthCriteria):
            return Length(part.max_length - self.prompt_length)
        return part if hasattr(part, "reason") else None

    def of(self, row: int, n_rows: int, is_search: bool) -> list[Any]:
        """The causes for a row of ``n_rows``, of which the first counts: EOS, stops, the caller's, length, time."""
        causes: list[Any] = []
        for criterion, part, cause, notes in self.parts:
            if isinstance(criterion, CriteriaByRows) and part is not criterion.of_row(row, n_rows):
                continue
            if isinstance(cause, list):
                causes.append(cause[row * len(cause) // n_rows])
            elif cause is not None:
                causes.append(cause)
            else:
                name = "time" if isinstance(part, MaxTimeCriteria) else name_of(part)
                name = str(getattr(part, "finish_reason", name))  # the caller's own name for it
                rank = 4 if name in ("time", "cancelled") else 2
                of_row = None if is_search else row
                causes.append(Noted(name, notes, of_row, self.prompt_length, rank))
        return sorted(causes, key=lambda cause: getattr(cause, "rank", 1))


def first(causes: list[Any], ids: Sequence[int]) -> tuple[int, FinishReason, Any]:
    """After how many of the generated ``ids`` a row ended, the reason, and the cause.

    Without a cause, the strategy ended the row after all of them.
    """
    endings = []
    for rank, cause in enumerate(causes):
        for n in cause.ends(ids):
            if n <= len(ids) and (reason := cause.reason(ids, n)) is not None:
                endings.append((n, rank, reason))
                break
    if not endings:
        return len(ids), UNKNOWN, None
    n, rank, reason = min(endings)
    return n, reason, causes[rank]


def at_end(causes: list[Any], ids: Sequence[int]) -> tuple[int, FinishReason, Any]:
    """``first`` of a finished hypothesis, which ended with the last of its ids."""
    for cause in causes:
        if ids and (reason := cause.reason(ids, len(ids))) is not None:
            return len(ids), reason, cause
    return len(ids), FinishReason("unfinished"), None


UNKNOWN = FinishReason("strategy")  # no criterion ended the row, but the strategy itself
