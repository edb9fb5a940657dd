"""Log-probabilities in the format of OpenAI's chat completions: text, bytes, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from ...state.text import Pieces

LEAST = -9999.0  # the least value: JSON has no infinity


def spelled(token_id: int, pieces: Pieces | None) -> str:
    """The text of a token; its number if nothing spells it."""
    return f"token_id:{token_id}" if pieces is None else pieces[token_id].decode("utf-8", "replace")


def content(tokens: Iterable[Any], pieces: Pieces | None) -> list[dict[str, Any]]:
    """One entry for each ``TokenLogprob``; positions without one are left out."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": spelled(token_id, pieces),
            "logprob": max(logprob, LEAST),
            "bytes": None if pieces is None else list(pieces[token_id]),
        }

    return [
        entry(token.token_id, token.logprob)
        | {"top_logprobs": [entry(*pair) for pair in dict.fromkeys(token.top + token.asked)]}
        for token in tokens
        if token is not None
    ]


def legacy(
    ids: Iterable[int], tokens: Iterable[Any], pieces: Pieces | None
) -> dict[str, list[Any]]:
    """The tokens ``ids`` as completions have them; of ``tokens``, the first of a prompt is ``None``."""
    texts = [spelled(token_id, pieces) for token_id in ids]
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token in tokens:
        values.append(None if token is None else max(token.logprob, LEAST))
        # Of tokens that are spelled alike, the likeliest is kept.
        pairs = () if token is None else reversed(token.top + token.asked)
        top = {spelled(token_id, pieces): max(value, LEAST) for token_id, value in pairs}
        tops.append(None if token is None else top)
    offsets = list(accumulate(map(len, texts), initial=0))[:-1]
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
