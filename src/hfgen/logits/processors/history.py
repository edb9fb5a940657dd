"""What has occurred in each row so far, updated at a constant cost per new token.

Functions of the ids alone would read all of them at each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence


class Follower:
    """Base of what is known about ``ids (rows, length)`` and updated from call to call.

    A call may have more ids than the last one, or fewer (drafts that were rejected), and another last id.
    ``reorder`` says which rows continue which, as after a step of beams. On the CPU all ids are compared
    with those of the last call, so that any ids are right; elsewhere a comparison would wait for the device.
    """

    def __init__(self) -> None:
        #: ``(rows, capacity)``: the ids that are known, up to ``length``.
        self.length, self._ids = 0, torch.zeros(0, 0, dtype=torch.long)

    def follow(self, ids: torch.Tensor) -> None:
        """Update to ``ids (rows, length)``."""
        n_rows, length = ids.shape
        if self._ids.shape[0] != n_rows or self._ids.device != ids.device:
            self.forget()
            self._ids = ids.new_empty(n_rows, 0, dtype=torch.long)
            self.begin(n_rows, ids.device)
        same = self._n_same(ids)
        if same < self.length:
            self.rewind(self._ids[:, same : self.length], same)
        self.length = same
        if same < length:
            self._keep(ids, same)
            self.extend(ids[:, same:], same)
            self.length = length

    def forget(self) -> None:
        """Drop everything: the next call starts from its first id."""
        self.length, self._ids = 0, torch.zeros(0, 0, dtype=torch.long)

    def _n_same(self, ids: torch.Tensor) -> int:
        """How many columns at the start are those of the last call."""
        n = min(self.length, ids.shape[1])
        if not ids.is_cpu:
            return n if n < ids.shape[1] else n - 1
        if torch.equal(self._ids[:, :n], ids[:, :n]):
            return n
        return int((self._ids[:, :n] != ids[:, :n]).any(dim=0).int().argmax())

    def _keep(self, ids: torch.Tensor, start: int) -> None:
        length, capacity = ids.shape[1], self._ids.shape[1]
        if length > capacity:
            self._ids = pad(self._ids, (0, max(length, 2 * capacity, 64) - capacity))
        self._ids[:, start:length] = ids[:, start:]

    def reorder(self, index: torch.Tensor) -> None:
        """Reorder rows: row ``i`` becomes old row ``index[i]``."""
        if self.length:
            self._ids = self._ids[index]
            self.take(index)

    def begin(self, n_rows: int, device: torch.device) -> None:
        """Start with ``n_rows`` empty rows."""
        raise NotImplementedError

    def extend(self, tokens: torch.Tensor, start: int) -> None:
        """Add ``tokens (rows, n)``, the columns from ``start`` on."""
        raise NotImplementedError

    def rewind(self, tokens: torch.Tensor, length: int) -> None:
        """Take ``tokens (rows, n)`` back, the columns from ``length`` on."""
        raise NotImplementedError

    def take(self, index: torch.Tensor) -> None:
        """Reorder rows by ``index (rows,)``."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Counted:
    """Which of the ids of a row count.

    All from column ``first`` on, or the last ``window`` of all; but not those in ``excluded (n,)``, nor
    the pads of a prompt, of which a row has ``n_pads (rows,)``.
    """

    first: int = 0
    window: int | None = None
    n_pads: torch.Tensor | None = None
    excluded: torch.Tensor | None = None

    def start(self, length: int) -> int:
        """The first column that counts where there are ``length``."""
        return max(0, length - self.window) if self.window else min(self.first, length)

    def tokens(self, ids: torch.Tensor, start: int, end: int, vocab: int) -> torch.Tensor:
        """The columns from ``start`` to ``end``, with ``vocab`` in place of what does not count."""
        tokens = ids[:, start:end].clamp(max=vocab)
        if self.excluded is not None:
            tokens = tokens.masked_fill(torch.isin(tokens, self.excluded.to(ids.device)), vocab)
        if self.n_pads is not None:
            columns = torch.arange(start, end, device=ids.device)
            tokens = tokens.masked_fill(columns < self.n_pads.to(ids.device)[:, None], vocab)
        return tokens


class Counts(Follower):
    """How often each token occurs: ``counts (rows, vocab + 1)`` int32.

    The last column collects what does not count.
    """

    def __init__(self, counted: Counted, vocab: int = 0) -> None:
        super().__init__()
        self.counted, self.vocab = counted, vocab

    def begin(self, n_rows: int, device: torch.device) -> None:
        self.counts = torch.zeros(n_rows, self.vocab + 1, dtype=torch.int32, device=device)

    def extend(self, tokens: torch.Tensor, start: int) -> None:
        end = start + tokens.shape[1]
        before, after = self.counted.start(start), self.counted.start(end)
        self._add(before, min(after, start), -1)
        self._add(max(after, start), end, 1)

    def rewind(self, tokens: torch.Tensor, length: int) -> None:
        end = length + tokens.shape[1]
        before, after = self.counted.start(end), self.counted.start(length)
        self._add(max(before, length), end, -1)
        self._add(after, min(before, length), 1)

    def _add(self, start: int, end: int, sign: int) -> None:
        """Count the columns from ``start`` to ``end``, or take them back."""
        if start < end:
            tokens = self.counted.tokens(self._ids, start, end, self.vocab)
            signs = self.counts.new_full((1, 1), sign).expand_as(tokens)
            self.changed(tokens, self.counts.scatter_add_(1, tokens, signs).gather(1, tokens))

    def changed(self, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Called with ``tokens (rows, n)`` whose counts changed to ``counts (rows, n)``."""

    def take(self, index: torch.Tensor) -> None:
        self.counts = self.counts[index]


#: ``Distinct`` adds columns in blocks of so many; columns of an incomplete block are read as they are.
BLOCK = 512


class Distinct(Follower):
    """The tokens that occur, each once: ``(rows, n)``, padded with ``vocab``."""

    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self.counted, self.vocab = counted, 0

    def tokens(self, ids: torch.Tensor, vocab: int) -> torch.Tensor:
        """The tokens ``(rows, n)`` that count among ``ids (rows, length)``; some more than once."""
        length, start = ids.shape[1], self.counted.start(ids.shape[1])
        if self.counted.window or length < BLOCK:
            return self.counted.tokens(ids, start, length, vocab)
        n_whole = length - length % BLOCK
        if vocab != self.vocab:
            self.vocab = vocab
            self.forget()
        self.follow(ids[:, :n_whole])
        return torch.cat([self.distinct, self.counted.tokens(ids, n_whole, length, vocab)], dim=1)

    def begin(self, n_rows: int, device: torch.device) -> None:
        self.distinct = torch.zeros(n_rows, 0, dtype=torch.long, device=device)

    def extend(self, tokens: torch.Tensor, start: int) -> None:
        end = start + tokens.shape[1]
        new = self.counted.tokens(self._ids, max(start, self.counted.start(end)), end, self.vocab)
        rows = [row.unique() for row in torch.cat([self.distinct, new], dim=1)]
        self.distinct = pad_sequence(rows, batch_first=True, padding_value=self.vocab)

    def rewind(self, tokens: torch.Tensor, length: int) -> None:
        self.distinct = self.distinct[:, :0]
        if length:
            self.extend(self._ids[:, :length], 0)

    def take(self, index: torch.Tensor) -> None:
        self.distinct = self.distinct[index]


class RowStates(Follower):
    """A Python object for each row, made by ``make``; new ids are read off their device once a call.

    The objects have ``push(token)``, ``pop()``, which takes back a push, and ``copy()``. The first ``n_pads
    (rows,)`` columns are left out.
    """

    def __init__(self, make: Callable[[], Any], n_pads: torch.Tensor | None = None) -> None:
        super().__init__()
        self.make, self.n_pads = make, n_pads
        self.states: list[Any] = []
        self._starts: list[int] = []

    def begin(self, n_rows: int, device: torch.device) -> None:
        self.states = [self.make() for _ in range(n_rows)]
        self._starts = [0] * n_rows if self.n_pads is None else self.n_pads.tolist()

    def extend(self, tokens: torch.Tensor, start: int) -> None:
        for state, row, n in zip(self.states, tokens.tolist(), self._starts, strict=True):
            for token in row[max(n - start, 0) :]:
                state.push(token)

    def rewind(self, tokens: torch.Tensor, length: int) -> None:
        end = length + tokens.shape[1]
        for state, start in zip(self.states, self._starts, strict=True):
            for _ in range(end - max(start, length)):
                state.pop()

    def take(self, index: torch.Tensor) -> None:
        taken: set[int] = set()
        states = []
        for row in index.tolist():
            states.append(self.states[row].copy() if row in taken else self.states[row])
            taken.add(row)
        self.states = states
