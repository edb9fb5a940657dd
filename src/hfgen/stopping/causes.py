"""Why rows ended, found out when they have: asked of the criteria that know it from the ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from ..processors.by_rows import CriteriaByRows
from ..processors.lists import name_of
from .reasons import FinishReason
from .tokens import RowEosCriteria, RowLengthCriteria

if TYPE_CHECKING:
    from ..call import Run


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


@dataclass(frozen=True, slots=True)
class Noted:
    """A criterion that is not a function of the ids: what it said is noted when it says it."""

    name: str
    #: After how many new tokens it has ended the row, or any row of a search.
    lengths: frozenset[int]

    def ends(self, ids: Sequence[int]) -> Iterable[int]:
        return sorted(self.lengths)

    def reason(self, ids: Sequence[int], n: int) -> FinishReason | None:
        return FinishReason(self.name) if n in self.lengths else None


#: What criteria said that have to be noted: by place in the list and by length, ``(rows,)`` bools.
Notes = dict[int, dict[int, torch.Tensor]]


def is_noted(criterion: Any) -> bool:
    """Whether what a criterion says cannot be found out afterwards."""
    if isinstance(criterion, CriteriaByRows):
        return any(is_noted(part) for part, _ in criterion.parts)
    known = (EosTokenCriteria, MaxLengthCriteria, RowEosCriteria)
    return not (isinstance(criterion, known) or hasattr(criterion, "reason"))


class Causes:
    """The causes for the rows of a call, in the order in which they count where several end a row."""

    def __init__(self, criteria: Sequence[Any], notes: Notes, prompt_length: int) -> None:
        self.criteria, self.prompt_length = criteria, prompt_length
        self.notes = {
            place: (list(by_length), torch.stack(list(by_length.values())).cpu())
            for place, by_length in notes.items()
            if by_length
        }

    @classmethod
    def of_run(cls, run: Run, prompt_length: int) -> Causes:
        """Those of ``run``, up to its newest step."""
        return cls(run.criteria, getattr(run.criteria, "notes", None) or {}, prompt_length)

    def of(self, row: int, n_rows: int, is_search: bool) -> list[Any]:
        """Those of row ``row`` of ``n_rows`` returned; noted is, in a search, what ended any of its rows."""
        causes: list[Any] = []
        for place, criterion in enumerate(self.criteria):
            part = _part(criterion, row, n_rows)
            if isinstance(part, EosTokenCriteria):
                causes.append(Eos(frozenset(part.eos_token_id.tolist())))
            elif isinstance(part, RowEosCriteria):
                prompt = row * len(part.tokens) // n_rows
                causes.append(Eos(frozenset(part.tokens[prompt].tolist())))
            elif isinstance(part, RowLengthCriteria):
                prompt = row * len(part.lengths) // n_rows
                causes.append(Length(int(part.lengths[prompt]) - self.prompt_length))
            elif isinstance(part, MaxLengthCriteria):
                causes.append(Length(part.max_length - self.prompt_length))
            elif hasattr(part, "reason"):
                causes.append(part)
            elif part is not None:
                causes.append(self.noted(place, part, row, n_rows, is_search))
        return sorted(causes, key=_rank)  # what is noted of a search may be about another row

    def noted(self, place: int, criterion: Any, row: int, n_rows: int, is_search: bool) -> Noted:
        lengths, ends = self.notes.get(place, ([], torch.zeros(0, n_rows, dtype=torch.bool)))
        is_end = ends.any(dim=1) if is_search or ends.shape[1] != n_rows else ends[:, row]
        after = (
            length - self.prompt_length
            for length, is_it in zip(lengths, is_end.tolist(), strict=True)
            if is_it
        )
        name = "time" if isinstance(criterion, MaxTimeCriteria) else name_of(criterion)
        return Noted(str(getattr(criterion, "finish_reason", name)), frozenset(after))


def first(causes: list[Any], ids: Sequence[int]) -> tuple[int, FinishReason, Any]:
    """After how many of the generated ``ids`` a row ended, why, and the cause; all of them if none."""
    found = []
    for rank, cause in enumerate(causes):
        for n in cause.ends(ids):
            if 0 < n <= len(ids) and (reason := cause.reason(ids, n)) is not None:
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
    return len(ids), UNKNOWN, None


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


def _part(criterion: Any, row: int, n_rows: int) -> Any:
    """What a criterion is for a row, if it is another for each prompt; ``None`` if nothing."""
    if not isinstance(criterion, CriteriaByRows):
        return criterion
    prompt = row * criterion.n_prompts // n_rows
    return next((part for part, prompts in criterion.parts if prompt in prompts.tolist()), None)
