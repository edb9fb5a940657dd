"""Processors that rule out n-grams of the sequence or of the encoder's input."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.nn.functional import pad
from transformers.generation import logits_process as upstream

from .context import Context
from .history import Counted, Distinct, RowStates
from .repetition import encoder_ids, pads, warn_without_prompt


class NGrams:
    """The n-grams of one row, of a ``size`` of at least 2: which tokens followed each ``size - 1`` tokens."""

    def __init__(self, size: int) -> None:
        self.n_before = size - 1
        self.tokens: list[int] = []
        #: By ``n_before`` tokens: the tokens that followed, and how often.
        self.followers: dict[tuple[int, ...], dict[int, int]] = {}

    def push(self, token: int) -> None:
        if len(self.tokens) >= self.n_before:
            counts = self.followers.setdefault(self._last(), {})
            counts[token] = counts.get(token, 0) + 1
        self.tokens.append(token)

    def pop(self) -> None:
        token = self.tokens.pop()
        if len(self.tokens) >= self.n_before:
            counts = self.followers[self._last()]
            counts[token] -= 1
            if not counts[token]:
                del counts[token]

    def repeating(self) -> Iterable[int]:
        """The tokens that would repeat an n-gram."""
        return self.followers.get(self._last(), ())

    def copy(self) -> NGrams:
        other = NGrams(self.n_before + 1)
        other.tokens = self.tokens.copy()
        other.followers = {last: tokens.copy() for last, tokens in self.followers.items()}
        return other

    def _last(self) -> tuple[int, ...]:
        return tuple(self.tokens[-self.n_before :])


class NoRepeatNGramLogitsProcessor(upstream.NoRepeatNGramLogitsProcessor):
    """Rules out tokens that would repeat an n-gram.

    transformers' class compares with all n-grams of the sequence at each step. Here they are looked up, at a
    constant cost per token; but not on an accelerator, where that comparison does not wait for the device.
    """

    is_row_wise = True

    def __init__(self, ngram_size: int, n_pads: torch.Tensor | None = None) -> None:
        """``n_pads (rows,)``: how many pads, which are in no n-gram, each row begins with."""
        super().__init__(ngram_size)
        self.distinct = Distinct(Counted(n_pads=n_pads))
        self.ngrams = RowStates(lambda: NGrams(ngram_size), n_pads)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[-1] < self.ngram_size:
            return scores
        n_pads = self.ngrams.n_pads
        if input_ids.ndim != 2 or (n_pads is not None and len(n_pads) != len(input_ids)):
            return super().__call__(input_ids, scores)  # of several codebooks
        if self.ngram_size == 1:
            tokens = self.distinct.tokens(input_ids, scores.shape[-1])
            return pad(scores, (0, 1)).scatter_(1, tokens, -math.inf)[:, :-1]
        if not scores.is_cpu:
            ids = self.distinct.counted.tokens(input_ids, 0, input_ids.shape[1], scores.shape[-1])
            return super().__call__(ids, scores)
        self.ngrams.follow(input_ids)
        vocab = scores.shape[-1]
        banned = [
            (row, token)
            for row, state in enumerate(self.ngrams.states)
            for token in state.repeating()
            if token < vocab
        ]
        scores = scores.clone()  # transformers' copy too: a later edit in place spares the logits
        if banned:
            banned_rows, banned_tokens = zip(*banned, strict=True)
            scores[list(banned_rows), list(banned_tokens)] = -math.inf
        return scores

    def reorder(self, index: torch.Tensor) -> None:
        """Reorder rows: row ``i`` becomes old row ``index[i]``."""
        self.distinct.reorder(index)
        self.ngrams.reorder(index)


class EncoderNoRepeatNGramLogitsProcessor(upstream.EncoderNoRepeatNGramLogitsProcessor):
    """Rules out tokens that would complete an n-gram of the encoder's input."""

    def __init__(self, encoder_ngram_size: int, encoder_input_ids: torch.Tensor) -> None:
        """``encoder_input_ids (batch, length)``, with -1 for padding."""
        super().__init__(encoder_ngram_size, encoder_input_ids)
        #: ``(batch, n_ngrams, size)``; ``None`` if the input is shorter than one.
        self.ngrams: torch.Tensor | None = None
        if encoder_input_ids.shape[1] >= encoder_ngram_size:
            self.ngrams = encoder_input_ids.unfold(1, encoder_ngram_size, 1)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.ndim != 2:  # of several codebooks
            return super().__call__(input_ids, scores)
        rows, vocab = scores.shape
        if rows % self.batch_size:  # the classes are upstream's
            raise (IndexError if rows > self.batch_size else ZeroDivisionError)(
                f"`encoder_no_repeat_ngram_size` needs as many sequences for each row of encoder input, but there "
                f"are {rows} sequences and {self.batch_size} rows."
            )
        start = input_ids.shape[-1] + 1 - self.ngram_size
        if start < 0 or self.ngrams is None:
            return scores.clone()  # as upstream's: a later edit in place spares the logits
        self.ngrams = self.ngrams.to(scores.device)
        ngrams = self.ngrams.repeat_interleave(rows // self.batch_size, dim=0)
        has_begun = (ngrams[..., :-1] == input_ids[:, None, start:]).all(dim=-1)
        has_begun &= ngrams[..., -1] >= 0
        last = torch.where(has_begun, ngrams[..., -1], -1)
        if last.is_cpu and (last >= vocab).any():  # elsewhere, to look is to wait
            raise IndexError(
                f"`encoder_no_repeat_ngram_size` rules out the token {int(last.max())}, but there are scores of "
                f"{vocab} tokens alone."
            )
        last = torch.where(has_begun, last, vocab).clamp(max=vocab)
        return pad(scores, (0, 1)).scatter_(1, last, -math.inf)[:, :-1]


def no_repeat_ngram(size: int, context: Context) -> NoRepeatNGramLogitsProcessor:
    warn_without_prompt(context, "no_repeat_ngram_size")
    return NoRepeatNGramLogitsProcessor(size, pads(context))


def encoder_no_repeat_ngram(size: int, context: Context) -> upstream.LogitsProcessor | None:
    if (ids_and_mask := encoder_ids(context, "encoder_no_repeat_ngram_size")) is None:
        return None
    ids, is_token = ids_and_mask
    ids = ids.where(is_token, -1)
    # transformers' constructor takes longer for a larger size, also above the length, which has no n-gram.
    return EncoderNoRepeatNGramLogitsProcessor(min(size, ids.shape[1] + 1), ids)
