"""DRY ("don't repeat yourself"): a penalty that grows with the length of the repetition.

As llama.cpp's sampler of that name, after p-e-w (2024, github.com/oobabooga/text-generation-webui/pull/5677).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from transformers import LogitsProcessor

from .context import Context

_LARGEST_EXPONENT = math.log(torch.finfo(torch.float32).max)  # of powers in a float32
DEFAULT_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's and most front ends' default


class Breakers:
    """Tokens and token sequences that end a repetition, such as the end of a line, by ids or by text.

    A token is a breaker if its text contains one. It is decoded when it first occurs.
    """

    def __init__(
        self, breakers: Sequence[str | int | Sequence[int]], tokenizer: Any = None
    ) -> None:
        self.tokenizer = tokenizer
        self.strings = [item for item in breakers if isinstance(item, str)]
        self._is_breaker = {item: True for item in breakers if isinstance(item, int)}
        sequences = [list(item) for item in breakers if not isinstance(item, str | int)]
        sequences += [tokenizer.encode(s, add_special_tokens=False) for s in self.strings]
        self.sequences = [sequence for sequence in sequences if len(sequence) > 1]
        self.widest = max(map(len, self.sequences), default=1)
        self._is_breaker.update((sequence[0], True) for sequence in sequences if len(sequence) == 1)

    def is_breaker(self, token: int) -> bool:
        if token not in self._is_breaker:
            text = self.tokenizer.decode([token]) if self.strings else ""
            self._is_breaker[token] = any(string in text for string in self.strings)
        return self._is_breaker[token]

    def n_since(self, tokens: list[int], most: int) -> int:
        """How many of ``tokens`` follow the last breaker, up to ``most``."""
        most = min(most, len(tokens))
        for n in range(most):
            end = len(tokens) - n
            if self.is_breaker(tokens[end - 1]) or any(
                tokens[max(end - len(sequence), 0) : end] == sequence for sequence in self.sequences
            ):
                return n
        return most


def repeats(tokens: Any, least: int, longest: int) -> dict[int, int]:
    """The tokens that followed an earlier occurrence of the last ``n`` of ``tokens``, and the largest such ``n``.

    ``tokens`` is a numpy array ``(length,)``, ``n`` is from ``least`` to ``longest``.
    """
    places = (tokens[:-1] == tokens[-1:]).nonzero()[0]
    back = numpy.arange(min(longest, len(tokens) - 1))
    index = places[:, None] - back
    is_same = (index >= 0) & (tokens[index] == tokens[-1 - back])  # (places, tokens back)
    lengths = is_same.cumprod(axis=1).sum(axis=1)
    order = lengths.argsort()
    pairs = zip(tokens[places[order] + 1].tolist(), lengths[order].tolist(), strict=True)
    return {token: n for token, n in pairs if n >= least}


@dataclass(eq=False)
class DryPenalty(LogitsProcessor):
    """Takes ``multiplier * base ** (n - allowed)`` off tokens that would continue a repeat of ``n`` tokens.

    Repeats shorter than ``allowed`` are free. ``n_pads`` columns at the start of each row do not count.
    """

    multiplier: float
    base: float
    allowed: int
    breakers: Breakers
    n_pads: list[int] | None = None
    last_n: int | None = None

    def __post_init__(self) -> None:
        log_base = max(math.log(self.base), 1e-6) if self.base > 0 else 1e-6
        #: The penalty of longer repeats is beyond float32.
        self.longest = self.allowed + math.ceil(_LARGEST_EXPONENT / log_base)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        places: list[tuple[int, int]] = []  # rows and tokens
        penalties: list[float] = []
        n_pads = self.n_pads or [0] * len(scores)
        for row, (ids, n) in enumerate(zip(input_ids.cpu().numpy(), n_pads, strict=True)):
            for token, length in self.lengths(ids[n:]).items():
                if token < scores.shape[-1] and not self.breakers.is_breaker(token):
                    penalty = self.multiplier * self.base ** (length - self.allowed)
                    places.append((row, token))
                    penalties.append(min(penalty, torch.finfo(torch.float32).max))
        if not places:
            return scores
        index = torch.tensor(places, device=scores.device).unbind(dim=1)
        changes = -torch.tensor(penalties, dtype=scores.dtype, device=scores.device)
        return scores.index_put(index, changes, accumulate=True)

    def lengths(self, ids: Any) -> dict[int, int]:
        """By token: the length of the longest repeat in ``ids (length,)`` that it would continue."""
        tokens = ids if self.last_n is None else ids[-self.last_n :]
        if not (lengths := repeats(tokens, self.allowed, self.longest)):
            return {}
        longest = max(lengths.values())
        limit = self.breakers.n_since(ids[-longest - self.breakers.widest :].tolist(), longest)
        if limit < self.allowed:
            return {}
        return {token: min(length, limit) for token, length in lengths.items()}


def dry(multiplier: float, context: Context) -> DryPenalty | None:
    if (last_n := context.own("dry_penalty_last_n")) == 0:
        return None
    breakers = context.own("dry_sequence_breakers")
    breakers = Breakers(DEFAULT_BREAKERS if breakers is None else breakers, context.tokenizer)
    base, allowed = float(context.own("dry_base")), int(context.own("dry_allowed_length"))
    n_pads = None if context.n_pads is None else context.n_pads.tolist()
    return DryPenalty(multiplier, base, allowed, breakers, n_pads, None if last_n == -1 else last_n)
