"""Length classes: rows of similar length get a batch of their own if padding costs more than a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from ..running import MayJoin
from .decoding import Decoding
from .joined import JoinedRows
from .memory import Memory

#: A batch is split above this share of padding, and two are merged if they are below the other one then.
#: Between them lies what joins, leaves and growth change in many steps: no step undoes the last one.
SPLIT_ABOVE, MERGE_BELOW = 0.30, 0.15

#: Two batches are merged for their padding alone if that costs less than this share of a forward.
MERGE_COST = 0.5

#: Batches of rows that could be in one, at most: each is a forward of its own.
MAX_CLASSES = 3

#: How many bytes of weights cost what a byte of the cache costs. Measured on a CPU with 1 to 32 rows of 16
#: to 1024 tokens: 1 for the built-in model, and 7 to 13 where three heads share keys, which are repeated
#: for them (135M parameters). What a forward of one row takes is, there, the time of reading the weights.
READS = 3

#: Bytes that an accelerator could read while it waits for the launches of a forward: an estimate, of 5 ms
#: at 1 TB/s, that was not measured.
LAUNCHES = 5e9


class Classes(MayJoin):
    """Decides which rows decode in one batch, by the bytes that padding and one more forward pass cost."""

    def __init__(self, model: Any, memory: Memory) -> None:
        super().__init__(model)
        self.memory = memory
        weights = sum(weight.nbytes for weight in model.parameters())
        waits = LAUNCHES if model.device.type != "cpu" else 0.0
        #: Of a forward whatever its rows are, in bytes of cells.
        self.fixed_cost = max(weights, waits) / READS

    def may_join(self, rows: JoinedRows, other: JoinedRows) -> bool:
        """Whether ``rows`` may join ``other``; what is not known is tried out."""
        if rows is other or rows.drafts is not other.drafts:
            return False
        longest = max(decoding.longest for decoding in (*rows.moves, *other.moves))
        return self(rows.batch, other.batch, longest, between=rows.drafts)

    def join_nearest(self, rows: JoinedRows, batches: list[JoinedRows]) -> None:
        """Join ``rows``, one of ``batches``, with the one that they add the least padding to, or the next that takes them."""
        others = [other for other in batches if self.may_join(rows, other)]
        others.sort(
            key=lambda other: padding([*other.members, *rows.members]) - padding(other.members)
        )
        refused: set[object] = set()
        for other in others:
            if other.kind not in refused:
                with suppress(ValueError):
                    other.absorb(rows)
                    batches.remove(rows)
                    return
                refused.add(other.kind)  # so do all batches of that kind

    def arrange(self, batches: list[JoinedRows]) -> None:
        """Split each batch that has too much padding, and merge two that have become similar."""
        for kind in {rows.kind for rows in batches}:
            same = [rows for rows in batches if rows.kind is kind]
            self._merge_similar(same, batches)
            n_classes, to_check = len(same), same
            while to_check and n_classes < MAX_CLASSES:
                rows = to_check.pop()
                if shorter := self.split(rows.members):
                    batches.append(rows.split(shorter))
                    to_check += [rows, batches[-1]]
                    n_classes += 1

    def _merge_similar(self, same: list[JoinedRows], batches: list[JoinedRows]) -> None:
        by_length = sorted(same, key=lambda rows: rows.batch.ids.shape[1])
        for shorter, longer in pairwise(by_length):
            both = [*shorter.members, *longer.members]
            saved = self.saved(shorter.members, longer.members)
            is_similar = padding(both) <= MERGE_BELOW * cells(both)
            if is_similar or saved < MERGE_COST * self.fixed_cost:
                try:
                    longer.absorb(shorter)
                except ValueError:  # what has joined one of them cannot join the other
                    shorter.kind = object()
                    return
                same.remove(shorter)
                batches.remove(shorter)

    def split(self, members: Sequence[Decoding]) -> list[Decoding]:
        """The shorter ones of ``members``, if a batch of their own is cheaper."""
        if padding(members) <= SPLIT_ABOVE * cells(members):
            return []
        by_length = sorted(members, key=lambda decoding: decoding.length)
        parts = [(by_length[:n], by_length[n:]) for n in range(1, len(by_length))]
        shorter, longer = max(parts, key=lambda two: self.saved(*two))
        return shorter if self.saved(shorter, longer) > self.fixed_cost else []

    def saved(self, members: Sequence[Decoding], others: Sequence[Decoding]) -> float:
        """Bytes of cells that two batches save against one."""
        return self._bytes([*members, *others]) - self._bytes(members) - self._bytes(others)

    def _bytes(self, members: Sequence[Decoding]) -> float:
        n_rows = sum(decoding.n_rows for decoding in members)
        return self.memory.needed(n_rows, max(decoding.length for decoding in members))


def cells(members: Sequence[Decoding]) -> int:
    """Cells of a batch, padding included."""
    n_rows = sum(decoding.n_rows for decoding in members)
    return n_rows * max((decoding.length for decoding in members), default=0)


def padding(members: Sequence[Decoding]) -> int:
    """Cells of a batch that are padding."""
    return cells(members) - sum(decoding.n_rows * decoding.length for decoding in members)
