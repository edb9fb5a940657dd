"""DRY ("don't repeat yourself"): a penalty that grows with the length of the repetition.

As llama.cpp's sampler of that name, after p-e-w (2024, github.com/oobabooga/text-generation-webui/pull/5677).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor

from .context import Context
from .history import RowStates
from .repetition import pads
from .suffixes import SuffixAutomaton

#: Up to here a power fits into a float32.
_LARGEST_EXPONENT = math.log(torch.finfo(torch.float32).max)


#: llama.cpp's and most front ends' default.
DEFAULT_BREAKERS = ("\n", ":", '"', "*")


class Breakers:
    """Tokens and token sequences that end a repetition, such as the end of a line, by ids or by text.

    A token is a breaker if its text contains one. It is decoded when it first occurs.
    """

    def __init__(
        self, breakers: Iterable[str | int | Sequence[int]], tokenizer: Any = None
    ) -> None:
        breakers = list(breakers)
        self.tokenizer = tokenizer
        self.strings = [item for item in breakers if isinstance(item, str)]
        self._is_breaker = {item: True for item in breakers if isinstance(item, int)}
        sequences = [list(item) for item in breakers if not isinstance(item, str | int)]
        sequences += [tokenizer.encode(s, add_special_tokens=False) for s in self.strings]
        self.sequences = [sequence for sequence in sequences if len(sequence) > 1]
        self._is_breaker.update((sequence[0], True) for sequence in sequences if len(sequence) == 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Breakers:
        return self

    def is_breaker(self, token: int) -> bool:
        """Whether ``token`` alone is a breaker."""
        if token not in self._is_breaker:
            text = self.tokenizer.decode([token]) if self.strings else ""
            self._is_breaker[token] = any(string in text for string in self.strings)
        return self._is_breaker[token]

    def ends(self, tokens: list[int]) -> bool:
        """Whether ``tokens`` end with a breaker."""
        return self.is_breaker(tokens[-1]) or any(
            tokens[-len(sequence) :] == sequence for sequence in self.sequences
        )


class Repeats:
    """The repeats at the end of one row, and how each token would continue them.

    No repeat reaches over a breaker.
    """

    def __init__(self, allowed: int, breakers: Breakers, last_n: int | None = None) -> None:
        """``last_n``: how many tokens at the end are read; ``None`` for all."""
        self.automaton, self.breakers, self.last_n = SuffixAutomaton(allowed), breakers, last_n
        self.tokens: list[int] = []
        #: For each length, how many tokens have followed the last breaker.
        self.since_breaker = [0]

    def push(self, token: int) -> None:
        self.tokens.append(token)
        if self.last_n is None:
            self.automaton.push(token)
        ends = self.breakers.ends(self.tokens)
        self.since_breaker.append(0 if ends else self.since_breaker[-1] + 1)

    def pop(self) -> None:
        self.tokens.pop()
        if self.last_n is None:
            self.automaton.pop()
        self.since_breaker.pop()

    def copy(self) -> Repeats:
        other = Repeats(self.automaton.least, self.breakers, self.last_n)
        other.automaton = self.automaton.copy()
        other.tokens, other.since_breaker = self.tokens.copy(), self.since_breaker.copy()
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Repeats:
        return self.copy()  # faster: drafts from the text copy the processors each time

    def lengths(self, vocab: int) -> dict[int, int]:
        """Tokens below ``vocab`` that would continue a repeat, and the length of the longest of these."""
        if (limit := self.since_breaker[-1]) < self.automaton.least:
            return {}
        is_breaker = self.breakers.is_breaker
        repeats = self.automaton.repeats() if self.last_n is None else self.repeats_in(self.last_n)
        items = repeats.items()
        return {t: min(n, limit) for t, n in items if t < vocab and not is_breaker(t)}

    def repeats_in(self, n: int) -> dict[int, int]:
        """``SuffixAutomaton.repeats`` of the last ``n`` tokens, by their Z-function (Gusfield 1997)."""
        newest_first = self.tokens[: -n - 1 : -1]
        size, least = len(newest_first), self.automaton.least
        common, left, right = [0] * size, 0, 0
        longest: dict[int, int] = {}
        for i in range(1, size):
            k = min(right - i, common[i - left]) if i < right else 0
            while i + k < size and newest_first[k] == newest_first[i + k]:
                k += 1
            common[i] = k
            if i + k > right:
                left, right = i, i + k
            if k >= least:
                token = newest_first[i - 1]
                longest[token] = max(longest.get(token, 0), k)
        return longest


@dataclass(eq=False)
class DryPenalty(LogitsProcessor):
    """Takes ``multiplier * base ** (n - allowed)`` off tokens that would continue a repeat of ``n`` tokens.

    Repeats shorter than ``allowed`` are free. Pads of the prompt, ``n_pads (rows,)`` columns, do not count.
    """

    multiplier: float
    base: float
    allowed: int
    breakers: Breakers
    n_pads: torch.Tensor | None = None
    last_n: int | None = None

    is_row_wise = True

    def __post_init__(self) -> None:
        self.history = RowStates(
            lambda: Repeats(self.allowed, self.breakers, self.last_n), self.n_pads
        )
        self.largest_exponent = (
            math.inf if self.base <= 1 else _LARGEST_EXPONENT / math.log(self.base)
        )
        self._penalties: dict[int, float] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.history.follow(input_ids)
        rows: list[int] = []
        tokens: list[int] = []
        penalties: list[float] = []
        for row, state in enumerate(self.history.states):
            if lengths := state.lengths(scores.shape[-1]):
                rows += [row] * len(lengths)
                tokens += lengths
                penalties += map(self.penalty, lengths.values())
        if not rows:
            return scores
        row_index, token_index = torch.tensor([rows, tokens], device=scores.device)
        changes = -torch.tensor(penalties, dtype=scores.dtype, device=scores.device)
        return scores.index_put((row_index, token_index), changes, accumulate=True)

    def penalty(self, length: int) -> float:
        """The penalty of a token that would continue a repeat of ``length`` tokens."""
        if (penalty := self._penalties.get(length)) is None:
            exponent = min(length - self.allowed, self.largest_exponent)
            penalty = min(self.multiplier * self.base**exponent, torch.finfo(torch.float32).max)
            self._penalties[length] = penalty
        return penalty

    def reorder(self, index: torch.Tensor) -> None:
        """Reorder rows: row ``i`` becomes old row ``index[i]``."""
        self.history.reorder(index)


def dry(multiplier: float, context: Context) -> DryPenalty | None:
    last_n = context.own("dry_penalty_last_n")
    if last_n == 0:
        return None
    breakers = context.own("dry_sequence_breakers")
    breakers = Breakers(DEFAULT_BREAKERS if breakers is None else breakers, context.tokenizer)
    base, allowed = float(context.own("dry_base")), int(context.own("dry_allowed_length"))
    last_n = None if last_n == -1 else last_n
    return DryPenalty(float(multiplier), base, allowed, breakers, pads(context), last_n)
