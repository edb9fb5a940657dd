"""Finds out why rows ended, by asking the criteria that can tell it from the ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from ..processors.by_rows import CriteriaByRows
from ..processors.lists import name_of
from .reasons import FinishReason
from .tokens import RowEosCriteria, RowLengthCriteria

if TYPE_CHECKING:
    from ...state.run import Run


class Cause(Protocol):
    """What may have ended a row."""

    def ends(self, ids: Sequence[int]) -> Iterable[int]:
        """Ascending numbers of generated ``ids`` after which it may have ended the row."""

    def reason(self, ids: Sequence[int], n: int) -> FinishReason | None:
        """Why it ends the row with the ``n``-th of its generated ``ids``, if it does."""


@dataclass(frozen=True, slots=True)
class Eos:
    """One of the EOS tokens."""

    tokens: frozenset[int]

    def ends(self, ids: Sequence[int]) -> Iterable[int]:
        return (n for n, token in enumerate(ids, 1) if token in self.tokens)

    def reason(self, ids: Sequence[int], n: int) -> FinishReason | None:
        return FinishReason("eos", ids[n - 1]) if ids[n - 1] in self.tokens else None


@dataclass(frozen=True, slots=True)
class Length:
    """The greatest number of new tokens."""

    n: int

    def ends(self, ids: Sequence[int]) -> Iterable[int]:
        return [self.n]

    def reason(self, ids: Sequence[int], n: int) -> FinishReason | None:
        return FinishReason("length") if n >= self.n else None


class Notes:
    """Which rows a criterion has ended, by length: of one that cannot be asked again later."""

    def __init__(self) -> None:
        self.unread: list[tuple[int, torch.Tensor]] = []
        #: What it said last of each row, and whether it ever ended one.
        self.rows: dict[int, list[bool]] = {}
        self.any: dict[int, bool] = {}

    def add(self, length: int, ends: torch.Tensor) -> None:
        """Take what it says, ``(rows,)`` bools, of ids of ``length``; read later, all at once."""
        self.unread.append((length, ends))

    def read(self) -> None:
        if not self.unread:
            return
        # A search may have more candidates at one step than at another.
        table = pad_sequence([ends for _, ends in self.unread], batch_first=True).tolist()
        for (length, _), ends in zip(self.unread, table, strict=True):
            self.rows[length] = ends  # what it said of drafts that were rejected is overwritten
            self.any[length] = self.any.get(length, False) or any(ends)
        self.unread = []


@dataclass(frozen=True, slots=True)
class Noted:
    """A criterion that is not a function of the ids: what it says is noted when it says it."""

    name: str
    notes: Notes
    #: The row that it was asked about; ``None`` in a search, where candidates have no row.
    row: int | None
    prompt_length: int

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
    """Whether what a criterion says cannot be found out afterwards."""
    if isinstance(criterion, CriteriaByRows):
        return any(is_noted(part) for part, _ in criterion.parts)
    known = (EosTokenCriteria, MaxLengthCriteria, RowEosCriteria)
    return not (isinstance(criterion, known) or hasattr(criterion, "reason"))


class Causes:
    """The causes for the rows of a call, in the order in which they count where several end a row."""

    def __init__(self, criteria: Sequence[Any], prompt_length: int) -> None:
        self.prompt_length = prompt_length
        notes = getattr(criteria, "notes", None) or {}
        #: Each criterion, what it is made of, and the cause that this is for all rows or each prompt.
        self.parts = [
            (criterion, part, self.made(part), notes.get(place, Notes()))
            for place, criterion in enumerate(criteria)
            for part in _parts(criterion)
        ]

    @classmethod
    def of_run(cls, run: Run, prompt_length: int) -> Causes:
        """Those of ``run``, made once."""
        made = getattr(run.criteria, "causes", None)
        if made is None:
            made = cls(run.criteria, prompt_length)
            if hasattr(run.criteria, "causes"):
                run.criteria.causes = made
        return made

    def made(self, part: Any) -> Any:
        """The cause that a criterion is, or one for each prompt; ``None`` for one that is noted."""
        if isinstance(part, EosTokenCriteria):
            return Eos(frozenset(part.eos_token_id.tolist()))
        if isinstance(part, RowEosCriteria):
            return [Eos(frozenset(tokens)) for tokens in part.tokens.tolist()]
        if isinstance(part, RowLengthCriteria):
            return [Length(n - self.prompt_length) for n in part.lengths.flatten().tolist()]
        if isinstance(part, MaxLengthCriteria):
            return Length(part.max_length - self.prompt_length)
        return part if hasattr(part, "reason") else None

    def of(self, row: int, n_rows: int, is_search: bool) -> list[Any]:
        """Those of row ``row`` of ``n_rows`` returned; noted is, in a search, what ended any of its rows."""
        causes: list[Any] = []
        for criterion, part, made, notes in self.parts:
            if isinstance(criterion, CriteriaByRows) and part is not _part(criterion, row, n_rows):
                continue
            if isinstance(made, list):
                causes.append(made[row * len(made) // n_rows])
            elif made is not None:
                causes.append(made)
            else:
                place = None if is_search else row
                causes.append(Noted(_name(part), notes, place, self.prompt_length))
        return sorted(causes, key=_rank)


def first(causes: list[Any], ids: Sequence[int]) -> tuple[int, FinishReason, Any]:
    """After how many of the generated ``ids`` a row ended, why, and the cause; all of them if none."""
    found = []
    for rank, cause in enumerate(causes):
        for n in cause.ends(ids):
            if n <= len(ids) and (reason := cause.reason(ids, n)) is not None:
                found.append((n, rank, reason))
                break
    if not found:
        return len(ids), UNKNOWN, None
    n, rank, reason = min(found)
    return n, reason, causes[rank]


def at_end(causes: list[Any], ids: Sequence[int]) -> tuple[int, FinishReason, Any]:
    """``first`` of a hypothesis, which is known to end with the last of its ids."""
    for cause in causes:
        if ids and (reason := cause.reason(ids, len(ids))) is not None:
            return len(ids), reason, cause
    return len(ids), FinishReason("unfinished"), None


#: A row that no criterion ended, but the strategy itself; without any token, the length did.
UNKNOWN = FinishReason("strategy")


def _rank(cause: Any) -> int:
    """Where several end a row: EOS, stops, criteria of the caller's, length, time."""
    if isinstance(cause, Eos):
        return 0
    if isinstance(cause, Length):
        return 3
    return 1 if not isinstance(cause, Noted) else 4 if cause.name in LATE else 2


#: Reasons that say less than any other.
LATE = ("time", "cancelled")


def _name(criterion: Any) -> str:
    """What a criterion says as its reason: its own ``finish_reason``, or what the caller calls it."""
    name = "time" if isinstance(criterion, MaxTimeCriteria) else name_of(criterion)
    return str(getattr(criterion, "finish_reason", name))


def _parts(criterion: Any) -> list[Any]:
    """What a criterion is made of: itself, or others for some prompts each."""
    if isinstance(criterion, CriteriaByRows):
        return [part for part, _ in criterion.parts]
    return [criterion]


def _part(criterion: CriteriaByRows, row: int, n_rows: int) -> Any:
    """What a criterion is for a row of ``n_rows``; ``None`` if nothing."""
    prompt = row * criterion.n_prompts // n_rows
    return next((part for part, prompts in criterion.parts if prompt in prompts.tolist()), None)
