"""Log-probabilities in the format of OpenAI's chat completions: text, bytes, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..text import Pieces

#: The least value: JSON has no infinity.
LEAST = -9999.0


def content(tokens: Iterable[Any], pieces: Pieces | None) -> list[dict[str, Any]]:
    """One entry for each ``TokenLogprob``; positions without one are left out."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        piece = None if pieces is None else pieces[token_id]
        return {
            "token": f"token_id:{token_id}" if piece is None else piece.decode("utf-8", "replace"),
            "logprob": max(logprob, LEAST),
            "bytes": None if piece is None else list(piece),
        }

    return [
        entry(token.token_id, token.logprob)
        | {"top_logprobs": [entry(*pair) for pair in dict.fromkeys(token.top + token.asked)]}
        for token in tokens
        if token is not None
    ]
