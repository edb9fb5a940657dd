"""Finish reasons."""

from __future__ import annotations


class FinishReason(str):
    """A word for why a row ended, as ``"eos"``; ``stop`` has what stopped it.

    * ``"eos"``: ``stop`` is the token's id.
    * ``"stop"``: ``stop`` is the stop string, the pattern, or the token's id.
    * ``"length"``, ``"time"``, ``"repetition"``, ``"cancelled"``.
    * ``"error"``: no token could be chosen, since the row's scores were NaN or infinite.
    * ``"unfinished"``: a beam search found fewer ends than it returns sequences.
    * The name of a criterion of the caller's, or what it says as its ``finish_reason``.
    """

    stop: str | int | None

    def __new__(cls, reason: str, stop: str | int | None = None) -> FinishReason:
        self = super().__new__(cls, reason)
        self.stop = stop
        return self

    def __repr__(self) -> str:
        return super().__repr__() if self.stop is None else f"{super().__repr__()} ({self.stop!r})"
