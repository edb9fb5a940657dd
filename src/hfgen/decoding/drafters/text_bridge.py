"""Converting ids between two tokenizers through text."""

from __future__ import annotations

from collections.abc import Sequence

from ...state.vocabularies import INCOMPLETE, Spelling


class Row:
    """One sequence of the target in the assistant's ids; each round encodes a window of new tokens."""

    def __init__(
        self,
        target: Spelling,
        own: Spelling,
        lookbehind: int,
        own_lookbehind: int,
        opening: Sequence[int] = (),
    ) -> None:
        """``opening``: ids that the assistant's begin with."""
        self.target, self.own = target, own
        self.lookbehind, self.own_lookbehind = lookbehind, own_lookbehind
        self.tokens: list[int] = []
        self.begin = 0  # of the window, in `tokens`
        self.limit = 2 * lookbehind  # tokens in a window that is about to move
        #: The assistant's ids up to the window; how many that begin the window's encoding are theirs.
        self.before = list(opening)
        self.n_overlap = 0
        self.newest: list[int] = []  # the end of the last context

    def read(self, tokens: list[int]) -> None:
        self.tokens += tokens

    def context(self) -> list[int]:
        window = self.encoded(self.begin)
        context = self.before + window[self.n_overlap :]
        self.move(window)
        self.newest = context[-self.own_lookbehind :]
        return context

    def encoded(self, begin: int) -> list[int]:
        """The assistant's ids of the text from token ``begin`` on, up to an incomplete character."""
        return self.own.ids(self.target.text(self.tokens[begin:]).rstrip(INCOMPLETE))

    def move(self, window: list[int]) -> None:
        """Begin the window later, once it has grown to its limit.

        The encodings of both windows end alike; ids before that are kept as they are.
        """
        if len(self.tokens) - self.begin <= self.limit:
            return
        begin = len(self.tokens) - self.lookbehind
        later = self.encoded(begin)
        n_common = common_prefix(window[self.n_overlap :][::-1], later[::-1])
        if 2 * n_common <= len(later):  # hardly: try again further on
            self.limit *= 2
            return
        self.before += window[self.n_overlap : len(window) - n_common]
        self.begin, self.n_overlap = begin, len(later) - n_common
        self.limit = 2 * self.lookbehind

    def follow(self, drafted: list[int]) -> list[int]:
        old = self.own.text(self.newest)
        text = self.own.text(self.newest + drafted).rstrip(INCOMPLETE)
        return self.appended(text[len(old) :]) if text.startswith(old) else []

    def appended(self, text: str) -> list[int]:
        """The target's ids of ``text`` behind what is known."""
        if not text:
            return []
        known_ids = self.tokens[-self.lookbehind :]
        known = self.target.text(known_ids)
        complete = known.rstrip(INCOMPLETE)
        ids = self.target.ids(complete + text)
        if ids[: len(known_ids)] == known_ids:
            return ids[len(known_ids) :]
        if complete != known:  # amid a character
            return []
        as_encoded = self.target.ids(known)  # which the target may have chosen to write otherwise
        if ids[: len(as_encoded)] == as_encoded:
            return ids[len(as_encoded) :]
        ids = self.target.ids(text)  # what is known ends amid a token
        return ids if self.target.text(known_ids + ids) == known + text else []


def common_prefix(first: list[int], second: list[int]) -> int:
    """How many elements two lists begin with alike. Fast if they differ near the shorter one's end."""
    n = min(len(first), len(second))
    while first[:n] != second[:n]:
        n -= 1
    return n
