"""Where each row stands in its grammar: a function of the tokens that it has generated.

What was computed for the rows of the last call is gone on from: a row that got longer, that was
taken back, or that is now the continuation of another one (beams, candidates).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .matcher import Matcher


@dataclass(slots=True)
class Followed:
    """One row: the generated ``tokens (n,)``, of which the grammar took the first ``n_consumed``."""

    prompt: int
    matcher: Matcher
    tokens: torch.Tensor
    n_consumed: int

    @property
    def is_over(self) -> bool:
        """Whether the row has ended, by an EOS or by what else is no text of its grammar."""
        return self.n_consumed < len(self.tokens)


class Follower:
    """The rows of a call. Lists have an entry per prompt.

    ``starts``: matchers at the beginning, ``None`` without a grammar. ``begins``: the lengths at which
    the text begins. ``n_tokens``: ids from there on are no tokens.
    """

    def __init__(
        self,
        starts: Sequence[Matcher | None],
        eos: Sequence[frozenset[int]],
        begins: Sequence[int],
        n_tokens: int,
    ) -> None:
        self.starts, self.eos, self.begins, self.n_tokens = starts, eos, begins, n_tokens
        self.rows: list[Followed | None] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Follower:
        other = Follower(self.starts, self.eos, self.begins, self.n_tokens)
        other.rows = [
            row and Followed(row.prompt, row.matcher.copy(), row.tokens, row.n_consumed)
            for row in self.rows
        ]
        return other

    def follow(self, ids: torch.Tensor, lengths: Sequence[int] | None = None) -> list[Any]:
        """Where the rows of ``ids (rows, length)`` stand; of row ``r``, the first ``lengths[r]`` ids.

        Rows are those of the prompts, in their order, each repeated equally often. Rows without a
        grammar are ``None``.
        """
        first = min(self.begins)
        generated = ids[:, first:].to("cpu", copy=True)
        n_rows, n_repeats = len(ids), len(ids) // len(self.starts)
        new: list[Followed | None] = [None] * n_rows
        tokens, sources = [], []
        for row in range(n_rows):
            prompt = row // n_repeats
            end = None if lengths is None else max(lengths[row] - first, 0)
            tokens.append(generated[row, self.begins[prompt] - first : end])
            has_grammar = self.starts[prompt] is not None
            sources.append(self._source(row, prompt, tokens[row]) if has_grammar else -1)
        users = Counter(sources)
        for row, source in enumerate(sources):
            prompt = row // n_repeats
            if (start := self.starts[prompt]) is None:
                continue
            old = self.rows[source] if source >= 0 else None
            if old is None:
                old = Followed(prompt, start.copy(), tokens[row][:0], 0)
            users[source] -= 1
            if users[source] > 0:  # others go on from it as well
                old = Followed(prompt, old.matcher.copy(), old.tokens, old.n_consumed)
            new[row] = self._moved(old, tokens[row])
        self.rows = new
        return new

    def is_open(self, row: Followed | None) -> bool:
        """Whether a grammar decides what comes next in a row."""
        return row is not None and not row.is_over and not self.has_ended(row)

    def has_ended(self, row: Followed | None) -> bool:
        """Whether nothing can follow in a row, and there is no EOS token to say so."""
        return row is not None and not self.eos[row.prompt] and row.matcher.is_stopped

    def _source(self, row: int, prompt: int, tokens: torch.Tensor) -> int:
        """The row of the last call, of the same prompt, that shares most with ``tokens``; -1: none."""
        n_repeats = len(self.rows) // len(self.starts)
        others = range(prompt * n_repeats, (prompt + 1) * n_repeats)
        best, n_best = -1, 0
        for other in (row, *others) if row in others else others:
            if (old := self.rows[other]) is None:
                continue
            n = n_common(old.tokens, tokens)
            if n == len(old.tokens) or n == len(tokens):
                return other
            if n > n_best:
                best, n_best = other, n
        return best

    def _moved(self, old: Followed, tokens: torch.Tensor) -> Followed:
        """``old``, taken back to what it shares with ``tokens`` and then on to their end."""
        n = n_common(old.tokens, tokens)
        if n > old.n_consumed:  # the token after these was refused, and is still there
            return Followed(old.prompt, old.matcher, tokens, old.n_consumed)
        if n < old.n_consumed:
            old.matcher.rollback(old.n_consumed - n)
        n_taken = self.consume(old, tokens[n:].tolist())
        return Followed(old.prompt, old.matcher, tokens, n + n_taken)

    def consume(self, row: Followed, tokens: list[int]) -> int:
        """Let a row's matcher follow ``tokens``, up to an EOS; returns how many it took."""
        eos = self.eos[row.prompt]
        ends = (i for i, t in enumerate(tokens) if t in eos or not 0 <= t < self.n_tokens)
        end = next(ends, len(tokens))
        return row.matcher.consume(tokens[:end]) if end else 0

    def n_allowed(self, row: Followed, tokens: list[int]) -> int:
        """How many of ``tokens`` may follow in a row; it stays where it is."""
        n = self.consume(row, tokens)
        is_end = n < len(tokens) and tokens[n] in self.eos[row.prompt] and row.matcher.is_accepting
        if n:
            row.matcher.rollback(n)
        return n + is_end


def n_common(one: torch.Tensor, two: torch.Tensor) -> int:
    """How many tokens at the start two sequences ``(n,)`` have in common."""
    n = min(len(one), len(two))
    one, two = one[:n], two[:n]
    return n if torch.equal(one, two) else int((one != two).int().argmax())
