"""Processors that rule out n-grams of the sequence or of the encoder's input."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad
from transformers.generation import logits_process as upstream

from .context import Context
from .repetition import encoder_ids, warn_without_prompt


def completions(ngrams: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """The tokens ``(rows, n)`` that would complete ``ngrams (rows, n, size)``, -1 where one has not begun."""
    start = input_ids.shape[1] + 1 - ngrams.shape[2]
    has_begun = (ngrams[..., :-1] == input_ids[:, None, start:]).all(dim=-1)
    return torch.where(has_begun, ngrams[..., -1], -1)


def without(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A copy of ``scores (rows, vocab)`` with -inf at ``tokens (rows, n)``, but for those outside."""
    vocab = scores.shape[1]
    tokens = tokens.masked_fill(tokens < 0, vocab).clamp(max=vocab)
    return pad(scores, (0, 1)).scatter_(1, tokens, -math.inf)[:, :-1]


class NoRepeatNGramLogitsProcessor(upstream.NoRepeatNGramLogitsProcessor):
    """Rules out tokens that would repeat an n-gram."""

    def __init__(self, ngram_size: int, n_pads: torch.Tensor | None = None) -> None:
        """``n_pads (rows,)``: how many pads, which are in no n-gram, each row begins with."""
        super().__init__(ngram_size)
        self.n_pads = n_pads

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        length, n_pads = input_ids.shape[-1], self.n_pads
        if length < self.ngram_size:
            return scores
        if input_ids.ndim != 2 or (n_pads is not None and len(n_pads) != len(input_ids)):
            return super().__call__(input_ids, scores)  # of several codebooks
        if n_pads is not None:
            columns = torch.arange(length, device=input_ids.device)
            is_pad = columns < n_pads.to(input_ids.device)[:, None]
            input_ids = input_ids.masked_fill(is_pad, -1)
        return without(completions(input_ids.unfold(1, self.ngram_size, 1), input_ids), scores)


class EncoderNoRepeatNGramLogitsProcessor(upstream.EncoderNoRepeatNGramLogitsProcessor):
    """Rules out tokens that would complete an n-gram of the encoder's input."""

    def __init__(self, encoder_ngram_size: int, encoder_input_ids: torch.Tensor) -> None:
        """``encoder_input_ids (batch, length)``, with -1 for padding."""
        super().__init__(encoder_ngram_size, encoder_input_ids)
        self.encoder_ids = encoder_input_ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.ndim != 2:  # of several codebooks
            return super().__call__(input_ids, scores)
        rows, vocab = scores.shape
        if rows % self.batch_size:  # the classes are upstream's
            raise (IndexError if rows > self.batch_size else ZeroDivisionError)(
                f"`encoder_no_repeat_ngram_size` needs as many sequences for each row of encoder input, but there "
                f"are {rows} sequences and {self.batch_size} rows."
            )
        if min(input_ids.shape[1] + 1, self.encoder_ids.shape[1]) < self.ngram_size:
            return scores.clone()  # as upstream's: a later edit in place spares the logits
        ngrams = self.encoder_ids.to(scores.device).unfold(1, self.ngram_size, 1)
        tokens = completions(ngrams.repeat_interleave(rows // self.batch_size, dim=0), input_ids)
        if tokens.is_cpu and (tokens >= vocab).any():  # elsewhere, to look is to wait
            raise IndexError(
                f"`encoder_no_repeat_ngram_size` rules out the token {int(tokens.max())}, but there are scores of "
                f"{vocab} tokens alone."
            )
        return without(tokens, scores)


def no_repeat_ngram(size: int, context: Context) -> NoRepeatNGramLogitsProcessor:
    warn_without_prompt(context, "no_repeat_ngram_size")
    return NoRepeatNGramLogitsProcessor(size, context.n_pads)


def encoder_no_repeat_ngram(size: int, context: Context) -> upstream.LogitsProcessor | None:
    if (ids_and_mask := encoder_ids(context, "encoder_no_repeat_ngram_size")) is None:
        return None
    ids = ids_and_mask[0].where(ids_and_mask[1], -1)
    # transformers' constructor takes longer for a larger size, also above the length, which has no n-gram.
    return EncoderNoRepeatNGramLogitsProcessor(min(size, ids.shape[1] + 1), ids)
