"""The state of each row in its grammar: a function of the tokens generated so far.

Each call continues from the states of the last one: of a row that got longer, that was rolled back,
or that now continues another one (beams, candidates).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from ..thinking import Thinking, last

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(slots=True)
class Followed:
    """One row: the ``tokens (n,)`` of its text, of which its matcher consumed the first ``n_consumed``."""

    prompt: int
    matcher: LLMatcher
    tokens: Any  # a numpy array, which is faster than a tensor for few tokens
    n_consumed: int = 0
    is_thinking: bool = False  # the ``tokens`` are thoughts; the text has not begun
    #: The next token of the marker that opens a section of thoughts, if the row has begun to write it.
    opening: int | None = None

    @property
    def is_text(self) -> bool:
        """Whether all tokens are text of the grammar."""
        return self.n_consumed == len(self.tokens) and not self.is_thinking

    @property
    def is_over(self) -> bool:
        """Whether the row has ended: by an EOS, or by a token that its grammar does not allow."""
        return not self.is_text and not self.is_thinking and self.opening is None


@dataclass(eq=False)
class Follower:
    """The rows of a call. Lists have an entry per prompt."""

    starts: Sequence[LLMatcher | None]  # matchers at the beginning; without a grammar, none
    eos: Sequence[frozenset[int]]
    begins: Sequence[int]  # the lengths at which the text, or thoughts before it, begin
    n_tokens: int  # ids from there on are no tokens
    thinking: Sequence[Thinking | None] = ()  # nobody thinks
    #: Which prompts end inside a section of thoughts, once that was looked up.
    is_open_prompt: dict[int, bool] = field(default_factory=dict)
    rows: list[Followed | None] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> Follower:
        rows = [row and replace(row, matcher=row.matcher.deep_copy()) for row in self.rows]
        return replace(self, rows=rows)

    def follow(self, ids: torch.Tensor, lengths: Sequence[int] | None = None) -> list[Any]:
        """The states of the rows of ``ids (rows, length)``; of row ``r``, after ``lengths[r]`` ids.

        Each prompt has the same number of rows, next to each other. Rows without a grammar are ``None``.
        """
        first = min(self.begins)
        generated = ids[:, first:].to("cpu", copy=True).numpy()
        targets = []
        for row, new in enumerate(generated):
            prompt = row * len(self.starts) // len(ids)
            end = None if lengths is None else max(lengths[row] - first, 0)
            tokens = new[self.begins[prompt] - first : end]
            targets.append(self._target(prompt, ids[row], tokens))
        sources = [self._source(row, target) for row, target in enumerate(targets)]
        users = [0] * (len(self.rows) + 1)  # the last counts those without a source
        for source, _ in sources:
            users[source] += 1
        for target, (source, n_shared) in zip(targets, sources, strict=True):
            if target is None or target.is_thinking:
                continue
            old = self.rows[source] if source >= 0 else None
            users[source] -= 1
            if old is None or users[source] > 0:  # other rows continue it as well
                target.matcher = (old or target).matcher.deep_copy()
            else:
                target.matcher = old.matcher
            self._move(target, n_shared, 0 if old is None else old.n_consumed)
        self.rows = targets
        return targets

    def _target(self, prompt: int, ids: torch.Tensor, tokens: Any) -> Followed | None:
        """A row that has generated ``tokens``, with the matcher of an empty text."""
        if (start := self.starts[prompt]) is None:
            return None
        thinking = self.thinking[prompt] if self.thinking else None
        if thinking is None:
            return Followed(prompt, start, tokens)
        if prompt not in self.is_open_prompt:
            before = ids[None, : self.begins[prompt]].cpu()
            is_open = last(before, thinking.start) > last(before, thinking.end)
            self.is_open_prompt[prompt] = bool(is_open)
        n, opening = thinking.split(torch.from_numpy(tokens), self.is_open_prompt[prompt])
        return Followed(prompt, start, tokens[max(n, 0) :], 0, n < 0, opening)

    def is_open(self, row: Followed | None) -> bool:
        """Whether a grammar decides what comes next in a row."""
        return not (row is None or row.is_over or row.is_thinking or self.has_ended(row))

    def has_ended(self, row: Followed | None) -> bool:
        """Whether nothing can follow in a row, and there is no EOS token to say so."""
        if row is None or not row.is_text or self.eos[row.prompt]:
            return False
        return row.matcher.is_stopped()

    def _source(self, row: int, target: Followed | None) -> tuple[int, int]:
        """The row of the last call with the longest common prefix, and its length; -1 for no row.

        Rows of other prompts do not count.
        """
        if target is None or target.is_thinking:
            return -1, 0
        n_repeats = len(self.rows) // len(self.starts)
        others = range(target.prompt * n_repeats, (target.prompt + 1) * n_repeats)
        best, n_best = -1, 0
        for other in (row, *others) if row in others else others:
            old = self.rows[other]
            if old is None or old.is_thinking:
                continue
            n = n_common(old.tokens, target.tokens)
            if n == len(old.tokens) or n == len(target.tokens):
                return other, n
            if n > n_best:
                best, n_best = other, n
        return best, n_best

    def _move(self, target: Followed, n_shared: int, n_consumed: int) -> None:
        """Bring the target's matcher, which has consumed ``n_consumed`` tokens, to the target's tokens.

        Of these, the first ``n_shared`` were tokens of the row that the matcher comes from.
        """
        if n_shared > n_consumed:  # the first shared token that was not consumed is still refused
            target.n_consumed = n_consumed
            return
        if n_shared < n_consumed:
            target.matcher.rollback(n_consumed - n_shared)
        rest = target.tokens[n_shared:].tolist()
        target.n_consumed = n_shared + self.consume(target, rest)

    def consume(self, row: Followed, tokens: list[int]) -> int:
        """Feed ``tokens`` up to an EOS to a row's matcher; returns how many are allowed."""
        eos = self.eos[row.prompt]
        ends = (i for i, t in enumerate(tokens) if t in eos or not 0 <= t < self.n_tokens)
        end = next(ends, len(tokens))
        return row.matcher.try_consume_tokens(tokens[:end]) if end else 0

    def n_allowed(self, row: Followed, tokens: list[int]) -> int:
        """How many of ``tokens`` may follow in a row, which stays as it is."""
        n = self.consume(row, tokens)
        is_eos = n < len(tokens) and tokens[n] in self.eos[row.prompt]
        is_end = is_eos and row.matcher.is_accepting()
        if n:
            row.matcher.rollback(n)
        return n + is_end


def n_common(one: Any, two: Any) -> int:
    """How many tokens at the start two arrays ``(n,)`` have in common."""
    n = min(len(one), len(two))
    differs = one[:n] != two[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n
