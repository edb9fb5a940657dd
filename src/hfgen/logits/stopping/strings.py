"""Criteria that read the text: stop strings and regular expressions."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import regex
import torch
import transformers
from transformers import StoppingCriteria

from ...state.text import Pieces, decode
from .reasons import FinishReason

#: ``stop_regex`` is looked for in the text of so many tokens at the end of a row.
WINDOW = 512


@dataclass(frozen=True, slots=True)
class Found:
    """A stop in the text of a row, and where: in bytes of UTF-8 before the end of the text."""

    stop: str
    begin: int
    end: int


class TextCriteria(StoppingCriteria):
    """Ends rows by what their generated text has come to with the newest token.

    Text is put together from the bytes of the last tokens (``text.Pieces``), so that characters and
    stops may lie across tokens. It depends on ids alone: beams and drafts are rows like any others.
    """

    pieces: Pieces
    prompt_length: int
    #: No row ends with one of its first tokens.
    min_tokens: int = 0
    #: Lengths of ``input_ids`` at which a row was ended.
    hits: set[int]

    #: How many tokens at the end of a row can have to do with a stop.
    n_tokens: int

    def find(self, ids: Sequence[int], n_held: int = 0) -> Found | None:
        """What ends a row with the last of its generated ``ids``, and not within the first ``n_held``."""
        raise NotImplementedError

    def found(self, ids: Sequence[int], n: int) -> Found | None:
        """``find`` of the first ``n`` generated ids."""
        start = max(0, n - self.n_tokens)
        return self.find(ids[start:n], self.min_tokens - start)

    def n_begun(self, ids: Sequence[int]) -> int:
        """Bytes at the end of the text of ``ids`` with which a stop may have begun."""
        raise NotImplementedError

    def n_open(self, ids: Sequence[int]) -> int:
        """How many tokens at the end of the generated ``ids`` may belong to a stop that is to come."""
        tail = ids[-self.n_tokens :]
        n_bytes, n = self.n_begun(tail), 0
        while n_bytes > 0 and n < len(tail):
            n += 1
            n_bytes -= len(self.pieces[tail[-n]])
        return n

    def ends(self, ids: Sequence[int]) -> list[int]:
        return sorted(hit - self.prompt_length for hit in self.hits)

    def reason(self, ids: Sequence[int], n: int) -> FinishReason | None:
        found = None if n <= self.min_tokens else self.found(ids, n)
        return None if found is None else FinishReason("stop", found.stop)

    def may_end(self, input_ids: torch.Tensor) -> bool:
        """Whether ``input_ids (rows, length)`` have more generated tokens than ``min_tokens``."""
        return input_ids.shape[1] - self.prompt_length > self.min_tokens

    def ended(self, input_ids: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Bools ``(rows,)``, true for ``rows``; copies to a device only if there are any."""
        ends = input_ids.new_zeros(len(input_ids), dtype=torch.bool)
        if rows:
            self.hits.add(input_ids.shape[1])
            ends[rows] = True
        return ends


class StopStringCriteria(transformers.StopStringCriteria, TextCriteria):
    """Ends a row whose newest token completes one of ``stop_strings`` in the generated text.

    The rows are those of transformers, which reads the prompt as well, and tabulates the vocabulary.
    """

    #: Whether padding follows in a row that has ended, also where no EOS can end one.
    ends_rows = False

    def __init__(self, tokenizer: Any, stop_strings: str | list[str], prompt_length: int = 0):
        """``prompt_length``: so many tokens of each row were not generated."""
        strings = [stop_strings] if isinstance(stop_strings, str) else stop_strings
        self.stop_strings = tuple(strings)
        self.pieces, self.prompt_length, self.hits = Pieces(tokenizer), prompt_length, set()
        self.endings = _Endings(self.pieces, self.stop_strings)
        #: A token has a byte at least, so no string begins further back.
        self.n_tokens = max(len(string.encode()) for string in strings)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """``(rows,)`` bools for ``input_ids (rows, length)``; ``scores`` are not used."""
        newest = input_ids[:, self.prompt_length :][:, -1:].flatten().tolist()
        rows = [row for row, token in enumerate(newest) if self.endings[token]]
        if rows and self.may_end(input_ids):
            start = max(self.prompt_length, input_ids.shape[1] - self.n_tokens)
            tails = input_ids[:, start:].tolist()
            found = [row for row in rows if self.find(tails[row]) is not None]
            return self.ended(input_ids, found)
        return self.ended(input_ids, [])

    def find(self, ids: Sequence[int], n_held: int = 0) -> Found | None:
        """The string that is complete first; of those that end alike, the longest."""
        if not ids or not (endings := self.endings[ids[-1]]):
            return None
        text = b"".join(self.pieces.of(ids[-self.n_tokens :]))
        n_before = len(text) - len(self.pieces[ids[-1]])
        found = []
        for string, spelled in endings:
            start = text.find(spelled, max(0, n_before - len(spelled) + 1))
            if start >= 0:
                found.append((start + len(spelled), start, string))
        if not found:
            return None
        end, start, string = min(found)
        return Found(string, len(text) - start, len(text) - end)

    def n_begun(self, ids: Sequence[int]) -> int:
        text = b"".join(self.pieces.of(ids))
        return max(_n_begun(text, spelled) for _, spelled in self.endings.strings)


def _n_begun(text: bytes, spelled: bytes) -> int:
    """How many bytes at the end of ``text`` are the first of ``spelled``, but not all of them."""
    start = text.find(spelled[0], max(0, len(text) - len(spelled) + 1))
    while start >= 0 and not spelled.startswith(text[start:]):
        start = text.find(spelled[0], start + 1)
    return len(text) - start if start >= 0 else 0


class _Endings(dict[int, tuple[tuple[str, bytes], ...]]):
    """Which stop strings, and their bytes, may end within a token: those whose last byte it has."""

    def __init__(self, pieces: Pieces, strings: tuple[str, ...]) -> None:
        self.pieces = pieces
        self.strings = [(string, string.encode()) for string in strings]

    def __missing__(self, token: int) -> tuple[tuple[str, bytes], ...]:
        piece = self.pieces[token]
        self[token] = found = tuple(pair for pair in self.strings if pair[1][-1] in piece)
        return found


class StopRegexCriteria(TextCriteria):
    """Ends a row when a pattern of ``re`` is found in its generated text, and ends with a whole character.

    A match has to lie within the last ``WINDOW`` tokens. ``^`` is the start of the generated text.
    """

    ends_rows = True
    n_tokens = WINDOW + 1

    def __init__(self, tokenizer: Any, patterns: str | list[str], prompt_length: int = 0) -> None:
        """``prompt_length`` as of ``StopStringCriteria``. Raises ``re.error`` for a wrong pattern."""
        patterns = [patterns] if isinstance(patterns, str) else patterns
        self.patterns = [re.compile(pattern) for pattern in patterns]
        self.pieces, self.prompt_length, self.hits = Pieces(tokenizer), prompt_length, set()

    @functools.cached_property
    def partial_patterns(self) -> list[Any]:
        """The patterns for ``regex``, which finds what may yet become a match; ``None`` if it cannot."""
        return [_partial(pattern.pattern) for pattern in self.patterns]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """``(rows,)`` bools for ``input_ids (rows, length)``; ``scores`` are not used."""
        start = max(self.prompt_length, input_ids.shape[1] - self.n_tokens)
        tails = input_ids[:, start:].tolist() if self.may_end(input_ids) else []
        n_held = self.min_tokens - start + self.prompt_length
        rows = [row for row, ids in enumerate(tails) if self.find(ids, n_held) is not None]
        return self.ended(input_ids, rows)

    def find(self, ids: Sequence[int], n_held: int = 0) -> Found | None:
        """The match that is complete first; of those that end alike, the longest."""
        pieces = self.pieces.of(ids[-self.n_tokens :])
        if not pieces:
            return None
        # What is no character yet becomes surrogates, by which offsets stay those of bytes.
        text = b"".join(pieces).decode(errors="surrogateescape")
        whole = text.rstrip(_SURROGATES)
        # The token before the window is there for `^` and for what looks behind.
        first = len(pieces[0].decode(errors="surrogateescape")) if len(pieces) > WINDOW else 0
        held = len(b"".join(pieces[: max(n_held, 0)]).decode(errors="surrogateescape"))
        matches = [
            (match.end(), match.start(), pattern.pattern)
            for pattern in self.patterns
            for match in itertools.islice(
                (m for m in pattern.finditer(whole, first) if m.end() > held), 1
            )
        ]
        if not matches:
            return None
        end, start, pattern = min(matches)
        size = [len(text[at:].encode(errors="surrogateescape")) for at in (start, end)]
        return Found(pattern, *size)

    def n_begun(self, ids: Sequence[int]) -> int:
        pieces = self.pieces.of(ids)
        text = b"".join(pieces).decode(errors="surrogateescape")
        whole = text.rstrip(_SURROGATES)
        begin = len(whole)
        for pattern in self.partial_patterns:
            match = None if pattern is None else pattern.search(whole, partial=True)
            begin = 0 if pattern is None else begin if match is None else min(begin, match.start())
        return len(text[begin:].encode(errors="surrogateescape"))


def _partial(pattern: str) -> Any:
    try:
        return regex.compile(pattern)
    except regex.error:
        return None


_SURROGATES = "".join(map(chr, range(0xDC80, 0xDD00)))


def text_until(
    pieces: Pieces,
    ids: Sequence[int],
    n_bytes: int,
    skip_special_tokens: bool,
    before: Sequence[int] = (),
) -> str:
    """``decode`` without the ``n_bytes`` at the end of the text, which are counted as in ``Found``."""
    kept = list(ids)
    while kept and 0 < n_bytes >= len(pieces[kept[-1]]):
        n_bytes -= len(pieces[kept.pop()])
    text = decode(pieces.tokenizer, kept, skip_special_tokens, before)
    if n_bytes:
        piece = pieces[kept[-1]]
        text = text.removesuffix(piece[len(piece) - n_bytes :].decode(errors="replace"))
    return text
