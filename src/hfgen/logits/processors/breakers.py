"""Sequence breakers of DRY: tokens that end a repetition, such as the end of a line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

#: llama.cpp's and most front ends' default.
DEFAULT_BREAKERS = ("\n", ":", '"', "*")


class Breakers:
    """Tokens and sequences of tokens, by their ids or by their text.

    A token is a breaker if its text has one in it. Texts are looked at when a token first occurs.
    """

    def __init__(self, given: Iterable[str | int | Sequence[int]], tokenizer: Any = None) -> None:
        given = list(given)
        self.tokenizer = tokenizer
        self.strings = [item for item in given if isinstance(item, str)]
        self._is_breaker = {item: True for item in given if isinstance(item, int)}
        sequences = [list(item) for item in given if not isinstance(item, str | int)]
        sequences += [tokenizer.encode(s, add_special_tokens=False) for s in self.strings]
        self.sequences = [sequence for sequence in sequences if len(sequence) > 1]
        self._is_breaker.update((sequence[0], True) for sequence in sequences if len(sequence) == 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Breakers:
        return self

    def is_breaker(self, token: int) -> bool:
        """Whether ``token`` alone is one."""
        known = self._is_breaker.get(token)
        if known is None:
            text = self.tokenizer.decode([token]) if self.strings else ""
            known = self._is_breaker[token] = any(string in text for string in self.strings)
        return known

    def ends(self, tokens: list[int]) -> bool:
        """Whether ``tokens`` end with a breaker."""
        return self.is_breaker(tokens[-1]) or any(
            tokens[-len(sequence) :] == sequence for sequence in self.sequences
        )
