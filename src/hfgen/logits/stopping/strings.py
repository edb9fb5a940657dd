"""Criteria that read the text: stop strings and regular expressions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import regex
import torch
import transformers
from torch import Tensor
from transformers import StoppingCriteria

from ...state.text import Pieces, decode
from .reasons import FinishReason

WINDOW = 512  # ``stop_regex`` is searched for in the text of so many tokens at the end of a row


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop in the text of a row, and its place: in bytes of UTF-8 before the end of the text."""

    stop: str
    begin: int
    end: int


class TextCriteria(StoppingCriteria):
    """Ends rows by the generated text up to their newest token.

    The text is joined from the bytes of the last tokens (``Pieces``), so that characters and stops may
    span tokens. It depends on ids alone, so beams and drafts need no extra care. No row ends with one of its
    first ``min_tokens`` generated ones.
    """

    n_tokens: int  # how many tokens at the end of a row can belong to a stop

    def __init__(self, tokenizer: Any, prompt_length: int, min_tokens: int) -> None:
        """``prompt_length``: how many tokens of each row were not generated."""
        self.pieces = Pieces(tokenizer)
        self.prompt_length, self.min_tokens = prompt_length, min_tokens
        self.hits: set[int] = set()  # lengths of ``input_ids`` at which a row was ended

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        ends = input_ids.new_zeros(len(input_ids), dtype=torch.bool)
        length = input_ids.shape[1]
        if length - self.prompt_length <= self.min_tokens:
            return ends
        start = max(self.prompt_length, length - self.n_tokens)
        tails, n = input_ids[:, start:].tolist(), start - self.prompt_length
        if rows := [row for row, ids in enumerate(tails) if self.find(ids, n) is not None]:
            self.hits.add(length)
            ends[rows] = True
        return ends

    def find(self, ids: Sequence[int], n_before: int = 0) -> StopMatch | None:
        """The stop that ends a row with the last of ``ids``, which follow ``n_before`` generated tokens.

        Of several it is the one that is complete first, of those that end alike, the longest.
        """
        raise NotImplementedError

    def found(self, ids: Sequence[int], n: int) -> StopMatch | None:
        """``find`` of the first ``n`` generated ids."""
        start = max(0, n - self.n_tokens)
        return self.find(ids[start:n], start)

    def n_begun(self, ids: Sequence[int]) -> int:
        """How many bytes at the end of the text of ``ids`` may be the beginning of a stop."""
        raise NotImplementedError

    def n_open(self, ids: Sequence[int]) -> int:
        """How many tokens at the end of the generated ``ids`` may belong to a stop that is not complete."""
        tail = ids[-self.n_tokens :]
        n_bytes, n = self.n_begun(tail), 0
        while n_bytes > 0 and n < len(tail):
            n += 1
            n_bytes -= len(self.pieces[tail[-n]])
        return n

    def ends(self, ids: Sequence[int]) -> list[int]:
        return sorted(hit - self.prompt_length for hit in self.hits)

    def reason(self, ids: Sequence[int], n: int) -> FinishReason | None:
        match = None if n <= self.min_tokens else self.found(ids, n)
        return None if match is None else FinishReason("stop", match.stop)


class StopStringCriteria(TextCriteria, transformers.StopStringCriteria):
    """Ends a row whose newest token completes one of ``stop_strings`` in the generated text.

    transformers' class reads the prompt as well, and tabulates the vocabulary.
    """

    ends_rows = False  # whether rows that have ended are padded, also where the call has no EOS

    def __init__(
        self, tokenizer: Any, stop_strings: Any, prompt_length: int = 0, min_tokens: int = 0
    ) -> None:
        super().__init__(tokenizer, prompt_length, min_tokens)
        strings = [stop_strings] if isinstance(stop_strings, str) else stop_strings
        self.stop_strings = tuple(strings)
        self.spelled = [(string, string.encode()) for string in strings]
        #: A token has a byte at least, so no string begins further back.
        self.n_tokens = max(len(spelled) for _, spelled in self.spelled)

    def find(self, ids: Sequence[int], n_before: int = 0) -> StopMatch | None:
        newest = self.pieces[ids[-1]]
        strings = [pair for pair in self.spelled if pair[1][-1] in newest]
        if not strings:
            return None
        text = b"".join(self.pieces.of(ids))
        n_old = len(text) - len(newest)
        places = []
        for string, spelled in strings:
            start = text.find(spelled, max(0, n_old - len(spelled) + 1))
            if start >= 0:
                places.append((start + len(spelled), start, string))
        if not places:
            return None
        end, start, string = min(places)
        return StopMatch(string, len(text) - start, len(text) - end)

    def n_begun(self, ids: Sequence[int]) -> int:
        text = b"".join(self.pieces.of(ids))
        return max(_n_begun(text, spelled) for _, spelled in self.spelled)


def _n_begun(text: bytes, spelled: bytes) -> int:
    """How many bytes at the end of ``text`` are the first of ``spelled``, but not all of them."""
    start = text.find(spelled[0], max(0, len(text) - len(spelled) + 1))
    while start >= 0 and not spelled.startswith(text[start:]):
        start = text.find(spelled[0], start + 1)
    return len(text) - start if start >= 0 else 0


class StopRegexCriteria(TextCriteria):
    """Ends a row when a pattern of ``re`` matches in its generated text, and ends with a whole character.

    A match has to lie within the last ``WINDOW`` tokens. ``^`` is the start of the generated text.
    """

    ends_rows = True
    n_tokens = WINDOW + 1  # the token before the window is there for ``^`` and for lookbehinds

    def __init__(self, tokenizer: Any, patterns: Any, prompt_length: int = 0, min_tokens: int = 0):
        """Raises ``re.error`` for a wrong pattern."""
        super().__init__(tokenizer, prompt_length, min_tokens)
        patterns = [patterns] if isinstance(patterns, str) else patterns
        self.patterns = [re.compile(pattern) for pattern in patterns]

    @cached_property
    def partial_patterns(self) -> list[Any]:
        """The patterns for ``regex``, which finds partial matches; ``None`` for one that it refuses."""
        compiled: list[Any] = [None] * len(self.patterns)
        for place, pattern in enumerate(self.patterns):
            with suppress(regex.error):
                compiled[place] = regex.compile(pattern.pattern)
        return compiled

    def find(self, ids: Sequence[int], n_before: int = 0) -> StopMatch | None:
        pieces = self.pieces.of(ids)
        text, whole = _decoded(pieces)
        first = len(_decoded(pieces[:1])[0]) if len(pieces) > WINDOW else 0
        # No match ends within the first `min_tokens` tokens.
        held = len(_decoded(pieces[: max(self.min_tokens - n_before, 0)])[0])
        places = []
        for pattern in self.patterns:
            matches = (match for match in pattern.finditer(whole, first) if match.end() > held)
            if (match := next(matches, None)) is not None:
                places.append((match.end(), match.start(), pattern.pattern))
        if not places:
            return None
        end, start, stop = min(places)
        n_bytes = [len(text[at:].encode(errors="surrogateescape")) for at in (start, end)]
        return StopMatch(stop, *n_bytes)

    def n_begun(self, ids: Sequence[int]) -> int:
        text, whole = _decoded(self.pieces.of(ids))
        begin = len(whole)
        for pattern in self.partial_patterns:
            if pattern is None:
                begin = 0
            elif (match := pattern.search(whole, partial=True)) is not None:
                begin = min(begin, match.start())
        return len(text[begin:].encode(errors="surrogateescape"))


_SURROGATES = "".join(map(chr, range(0xDC80, 0xDD00)))


def _decoded(pieces: list[bytes]) -> tuple[str, str]:
    """The text of ``pieces``, and that text without an incomplete character at its end.

    Bytes that are no character become surrogates, so that the text can be encoded again.
    """
    text = b"".join(pieces).decode(errors="surrogateescape")
    return text, text.rstrip(_SURROGATES)


def text_until(
    pieces: Pieces, ids: Sequence[int], n_bytes: int, skips: bool, before: Sequence[int] = ()
) -> str:
    """``decode`` without the ``n_bytes`` at the end of the text, which are counted as in ``StopMatch``."""
    remaining = list(ids)
    while remaining and 0 < n_bytes >= len(pieces[remaining[-1]]):
        n_bytes -= len(pieces[remaining.pop()])
    text = decode(pieces.tokenizer, remaining, skips, before)
    if n_bytes:
        piece = pieces[remaining[-1]]
        text = text.removesuffix(piece[len(piece) - n_bytes :].decode(errors="replace"))
    return text
