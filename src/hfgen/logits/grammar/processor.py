"""Grammars as a logits processor, and as a stopping criterion if there is no EOS token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from .follower import Followed, Follower
from .matcher import Library

#: The score of every token of a beam that has ended: it stays below all that go on.
LOWEST = -1e30


class GrammarProcessor(LogitsProcessor):
    """Leaves the tokens that the grammar of a row allows, and an EOS where its text is complete.

    Its state is a function of the ids, so that it follows beams, drafts and what was taken back.
    Rows that have ended keep their scores; among beams, they get the lowest.
    """

    is_row_wise = True

    def __init__(self, library: Library, follower: Follower, is_search: bool = False) -> None:
        """``is_search``: rows are beams, of which those that have ended must not win."""
        self.masks, self.follower, self.is_search = library, follower, is_search

    def __deepcopy__(self, memo: dict[int, Any]) -> GrammarProcessor:
        return GrammarProcessor(self.masks, deepcopy(self.follower, memo), self.is_search)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = self.follower.follow(input_ids)
        is_open = [self.follower.is_open(row) for row in rows]
        bits = self.masks.bits(len(rows))
        places = [i for i, is_it in enumerate(is_open) if is_it]
        self.masks.fill(bits, [(i, rows[i].matcher) for i in places if rows[i].is_text])
        bits = widened(bits, (scores.shape[1] + 7) // 8, is_open)
        for row, own, is_it in zip(rows, bits.numpy(), is_open, strict=True):  # a view
            if row is not None and (is_it or row.is_thinking):
                self.complete(row, own)
        limits = as_limits(bits, scores)
        over = [i for i, row in enumerate(rows) if row is not None and row.is_over]
        if self.is_search and over:
            limits[over] = LOWEST
        if limits.shape[1] > scores.shape[1]:
            return torch.minimum(scores, limits[:, : scores.shape[1]])
        return torch.minimum(scores, limits, out=limits)

    def complete(self, row: Followed, bits: Any) -> None:
        """Add to a row's ``bits (n_bytes,)``, a numpy array, what its matcher does not know.

        An EOS may follow what is complete, and nothing else; a section of thoughts may be opened.
        """
        if not row.is_text and not row.is_thinking:
            bits[:] = 0
        is_complete = row.is_text and row.matcher.is_accepting
        for token in self.follower.eos[row.prompt]:
            set_bit(bits, token, is_complete)
        if row.opening is not None:
            set_bit(bits, row.opening, True)


def set_bit(bits: Any, token: int, is_on: bool) -> None:
    """Set the bit of an id in ``bits (n_bytes,)``; those of ids behind the end are left out."""
    byte, bit = divmod(token, 8)
    if 0 <= byte < len(bits):
        bits[byte] = bits[byte] & (255 - (1 << bit)) | (is_on << bit)


def widened(bits: torch.Tensor, n_bytes: int, is_open: Sequence[bool]) -> torch.Tensor:
    """``bits (rows, any)`` as ``(rows, n_bytes)``: open rows are allowed no id that is no token."""
    n_rows, n = bits.shape
    if n >= n_bytes:
        return bits[:, :n_bytes].contiguous()
    wide = bits.new_zeros(n_rows, n_bytes)
    array = wide.numpy()
    array[:, :n] = bits.numpy()
    array[[not is_it for is_it in is_open], n:] = 255
    return wide


def as_limits(bits: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """What scores may be at most, ``(rows, 8 * n_bytes)``: infinity where an id is allowed, or -infinity.

    The least of two numbers is many times faster than a masked copy.
    """
    table = _table(scores.device, scores.dtype)
    index = bits.to(scores.device).flatten().int()
    return table.index_select(0, index).view(len(bits), -1)


@lru_cache(maxsize=8)
def _table(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """``(256, 8)``: the limits that the bits of a byte stand for."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    limits = torch.where(bits > 0, math.inf, -math.inf)
    return limits.to(device, dtype)


class NoTokenLeft(LogitsProcessor):
    """Makes scores NaN, which every strategy reports, where a grammar and other processors leave no token.

    Of ``n_rows`` that search together (beams), one token for any of them is enough.
    """

    is_row_wise = True

    def __init__(self, n_rows: int = 1) -> None:
        self.n_rows = n_rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_empty = scores.amax(dim=-1) == -math.inf
        if self.n_rows > 1:
            together = is_empty.view(-1, self.n_rows).all(dim=1)
            is_empty = together.repeat_interleave(self.n_rows)
        if is_empty.is_cpu and not is_empty.any():
            return scores
        return scores.masked_fill(is_empty[:, None], math.nan)


class GrammarCriterion(StoppingCriteria):
    """Ends a row where nothing can follow, if the call has no EOS token that would."""

    is_row_wise = True
    #: Rows end before others do, so that they are padded.
    ends_rows = True
    finish_reason = "grammar"

    def __init__(self, follower: Follower) -> None:
        self.follower = follower

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """``(rows,)`` bools for ``input_ids (rows, length)``; ``scores`` are not used."""
        rows = self.follower.follow(input_ids)
        ends = [self.follower.has_ended(row) for row in rows]
        return torch.tensor(ends, device=input_ids.device)
