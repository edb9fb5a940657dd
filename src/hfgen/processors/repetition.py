"""Processors that hold repetition down, of generated tokens or of the encoder's input."""

from __future__ import annotations

import math
import warnings

import torch
from transformers import EncoderRepetitionPenaltyLogitsProcessor, NoRepeatNGramLogitsProcessor
from transformers.generation import logits_process as upstream

from .. import families
from .context import Context


class RepetitionPenaltyLogitsProcessor(upstream.RepetitionPenaltyLogitsProcessor):
    """Divides positive and multiplies negative scores of tokens that occurred by the penalty."""

    prompt_ignore_length: int | torch.Tensor | None

    def __init__(
        self, penalty: float, prompt_ignore_length: int | torch.Tensor | None = None
    ) -> None:
        """``prompt_ignore_length``: tokens at the start that do not count, also per row ``(rows,)``."""
        ignored = prompt_ignore_length
        if isinstance(ignored, torch.Tensor) and ignored.dim() != 1:
            raise ValueError(
                "`prompt_ignore_length` has to be an integer or a tensor of shape (rows,), but has "
                f"the shape {tuple(ignored.shape)}."
            )
        super().__init__(penalty, None if isinstance(ignored, torch.Tensor) else ignored)
        self.prompt_ignore_length = ignored

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.dim() != 2 or input_ids.dim() != 2:
            return super().__call__(input_ids, scores)
        vocab = scores.shape[-1]
        input_ids = self._without_ignored(input_ids, vocab).clamp(max=vocab)
        padded = torch.nn.functional.pad(scores, (0, 1))  # a column for ids that do not count
        seen = padded.gather(1, input_ids)
        seen = torch.where(seen < 0, seen * self.penalty, seen / self.penalty)
        return padded.scatter_(1, input_ids, seen)[:, :vocab]

    def _without_ignored(self, input_ids: torch.Tensor, vocab: int) -> torch.Tensor:
        ignored = self.prompt_ignore_length
        if isinstance(ignored, int):
            return input_ids[:, ignored:]
        if ignored is None:
            return input_ids
        if len(ignored) != len(input_ids):
            raise ValueError(
                f"`prompt_ignore_length` has {len(ignored)} rows, the input ids {len(input_ids)}."
            )
        self.prompt_ignore_length = ignored = ignored.to(input_ids.device)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        return input_ids.masked_fill(positions < ignored[:, None], vocab)


class EncoderNoRepeatNGramLogitsProcessor(upstream.EncoderNoRepeatNGramLogitsProcessor):
    """Rules out the token that would complete an n-gram of the encoder's input."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        start = input_ids.shape[-1] + 1 - self.ngram_size
        scores = scores.clone()  # upstream's copies too: a later in-place edit spares the logits
        if start < 0:
            return scores
        beams = len(scores) // self.batch_size
        rows: list[int] = []
        tokens: list[int] = []
        for row, prefix in enumerate(input_ids[:, start:].tolist()):
            banned = self.generated_ngrams[row // beams].get(tuple(prefix), [])
            tokens += banned
            rows += [row] * len(banned)
        scores[rows, tokens] = -math.inf
        return scores


def encoder_repetition_penalty(value: float, context: Context) -> upstream.LogitsProcessor | None:
    ids = _encoder_ids(context, "encoder_repetition_penalty")
    return None if ids is None else EncoderRepetitionPenaltyLogitsProcessor(value, ids)


def repetition_penalty(penalty: float, context: Context) -> RepetitionPenaltyLogitsProcessor:
    name = "decoder_attention_mask" if context.is_encoder_decoder else "attention_mask"
    mask = context.model_kwargs.get(name) if families.penalty_spares_padding() else None
    pads = None if mask is None else (mask != 0).int().argmax(dim=1)
    _warn_without_prompt(context, "repetition_penalty")
    return RepetitionPenaltyLogitsProcessor(penalty, prompt_ignore_length=pads)


def no_repeat_ngram(size: int, context: Context) -> NoRepeatNGramLogitsProcessor:
    _warn_without_prompt(context, "no_repeat_ngram_size")
    return NoRepeatNGramLogitsProcessor(size)


def encoder_no_repeat_ngram(size: int, context: Context) -> upstream.LogitsProcessor | None:
    if (ids := _encoder_ids(context, "encoder_no_repeat_ngram_size")) is None:
        return None
    # Upstream's time grows with the size, also above the length, where no n-gram is left.
    return EncoderNoRepeatNGramLogitsProcessor(min(size, ids.shape[1] + 1), ids)


def _encoder_ids(context: Context, argument: str) -> torch.Tensor | None:
    if (ids := context.encoder_ids) is None:
        reason = "it works on token ids, and the input of this call has none."
        warnings.warn(f"`{argument}` is ignored: {reason}", stacklevel=2)
    return ids


def _warn_without_prompt(context: Context, argument: str) -> None:
    if not context.is_encoder_decoder and context.prompt_length == 0:
        reason = "the prompt was given as `inputs_embeds`, without `input_ids`."
        warnings.warn(f"`{argument}` counts generated tokens only: {reason}", stacklevel=2)
