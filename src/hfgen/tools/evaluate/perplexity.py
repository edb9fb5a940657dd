"""Perplexity of texts that may be longer than the model's context: windows with a stride."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from ...families import max_positions
from ...state.text import Pieces
from ..prompts import padded
from .metrics import Interval, interval

WINDOW = 2048  # tokens of a window where none are given and the model allows more

#: Arguments of ``generate`` with which it scores a prompt, and generates nothing.
SCORING: dict[str, Any] = {"max_new_tokens": 0, "do_sample": False, "num_beams": 1}
SCORING |= {"prompt_logprobs": 0, "return_dict_in_generate": True}


@dataclass(slots=True)
class TextScore:
    """How likely a text is: for each of its windows, the nats of its scored tokens, and their number."""

    name: str
    n_bytes: int  # in UTF-8, of the scored tokens
    nats: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The perplexity of one text or of several together, and its ``interval``."""

    n_tokens: int
    n_bytes: int
    n_windows: int
    perplexity: float  # exp(nats / tokens)
    bits_per_token: float
    bits_per_byte: float
    interval: Interval | None

    @classmethod
    def of(cls, scores: list[TextScore], *, by_document: bool = False, seed: int = 0) -> Perplexity:
        """Sum ``scores`` up; the interval's units are windows, or texts if ``by_document``."""
        pairs = [pair for score in scores for pair in zip(score.nats, score.counts, strict=True)]
        if by_document:
            pairs = [(sum(score.nats), sum(score.counts)) for score in scores]
        parts = torch.tensor(pairs, dtype=torch.float64)
        nats, n_tokens = parts.sum(dim=0).tolist()
        n_bytes = sum(score.n_bytes for score in scores)
        return cls(
            int(n_tokens),
            n_bytes,
            sum(len(score.counts) for score in scores),
            _perplexity([nats, n_tokens]),
            nats / math.log(2) / n_tokens,
            nats / math.log(2) / max(n_bytes, 1),
            interval(parts, _perplexity, seed),
        )


def _perplexity(sums: list[float]) -> float:
    return float(torch.tensor(sums[0] / sums[1], dtype=torch.float64).exp())


def sizes(model: Any, window: int | None = None, stride: int | None = None) -> tuple[int, int]:
    """``window`` and ``stride``, or their defaults: what the model allows, and half of it.

    Raises ``ValueError`` for a model with an encoder, and for sizes that do not fit it or each other.
    """
    if model.config.is_encoder_decoder:
        is_wrong = f"{type(model).__name__} is an encoder-decoder"
        raise ValueError(f"Perplexity needs a decoder-only model, but {is_wrong}.")
    limit = max_positions(model) or math.inf
    window = int(min(limit, WINDOW)) if window is None else window
    if not 2 <= window <= limit:
        raise ValueError(f"`window` has to be from 2 to {limit} tokens, but is {window}.")
    stride = max(window // 2, 1) if stride is None else stride
    if not 1 <= stride < window:
        raise ValueError(
            f"`stride` has to be from 1 to {window - 1}, below `window`, so that each token has "
            f"another before it, but is {stride}."
        )
    return window, stride


def windows(n_tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield ``(start, first, end)``: the tokens ``start:end`` are a window, which scores those from ``first`` on.

    Windows start each ``stride`` tokens, and score each token but the first once.
    """
    first = 1
    for start in range(0, max(n_tokens, 1), stride):
        end = min(start + window, n_tokens)
        if end > first:
            yield start, first, end
        first = end
        if end == n_tokens:
            return


def score(
    model: Any,
    tokenizer: Any,
    name: str,
    text: str,
    *,
    window: int,
    stride: int,
    batch_size: int = 4,
    on_tokens: Callable[[int], None] = lambda n: None,
) -> TextScore:
    """The log-probabilities of a text's tokens, by ``prompt_logprobs`` of its windows.

    The text begins with what the tokenizer puts before it. The first token is not scored: where the
    tokenizer puts none before the text, that is the text's own first. ``batch_size`` windows are
    forwarded at once; ``on_tokens`` is told how many tokens were scored.

    Raises ``ValueError`` for a text of fewer than two tokens.
    """
    ids = tokenizer(text, verbose=False).input_ids
    if len(ids) < 2:
        raise ValueError(f"{name!r} has {len(ids)} tokens, but perplexity needs at least 2.")
    lead = Pieces(tokenizer)[ids[0]] if ids[0] not in tokenizer.all_special_ids else b""
    result = TextScore(name, len(text.encode()) - len(lead))
    tokens, remaining = torch.tensor(ids), windows(len(ids), window, stride)
    while batch := list(islice(remaining, batch_size)):
        inputs = padded([tokens[start:end] for start, _, end in batch], model)
        output = model.generate(**inputs, **SCORING)
        logprobs = output.prompt_logprobs.token_logprobs.cpu()  # (windows, longest)
        for row, (_, first, end) in zip(logprobs, batch, strict=True):
            n = end - first
            result.nats.append(-float(row[-n:].sum(dtype=torch.float64)))
            result.counts.append(n)
            on_tokens(n)
    return result
