"""Processors that allow, forbid or favour given tokens and token sequences."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import LogitsProcessor, NoBadWordsLogitsProcessor
from transformers.generation import logits_process as upstream

from .context import Context


class Banning:
    """Base of processors that rule out fixed token ids, but for ids outside the vocabulary.

    Some configs have -1 for none. Models with several vocabularies have ids that a head lacks.
    """

    #: Width and device of the scores that ``_inside`` fits.
    _place: tuple[int, torch.device] | None = None

    def without(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """A copy of ``scores (..., vocab)`` with -inf at ``ids``, which have to be the same in each call."""
        place = (scores.shape[-1], scores.device)
        if self._place != place:
            ids = ids.flatten().long().to(scores.device)
            self._inside = ids[(ids >= 0) & (ids < scores.shape[-1])]
            self._place = place
        return scores.index_fill(-1, self._inside, -math.inf)


class SuppressTokensLogitsProcessor(Banning, upstream.SuppressTokensLogitsProcessor):
    """Rules out given tokens at every step."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.without(self.suppress_tokens, scores)


class AllowedTokens(LogitsProcessor):
    """Rules out all but given tokens at every step (vLLM's ``allowed_token_ids``)."""

    def __init__(self, tokens: list[int], device: Any) -> None:
        """``tokens``: the ids that may be generated."""
        self.tokens = torch.tensor(sorted(set(tokens)), device=device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        allowed = scores.index_select(1, self.tokens)
        return torch.full_like(scores, -torch.inf).index_copy(1, self.tokens, allowed)


class SuppressTokensAtBeginLogitsProcessor(Banning, upstream.SuppressTokensAtBeginLogitsProcessor):
    """Rules out given tokens where the sequence is ``begin_index`` tokens long."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[-1] != self.begin_index:
            return scores
        return self.without(self.begin_suppress_tokens, scores)


class BadWordsOfAnswer(NoBadWordsLogitsProcessor):
    """Rules out tokens that would complete a bad word behind the prompt."""

    prompt_length = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return super().__call__(input_ids[:, self.prompt_length :], scores)


def bad_words(words: str | list[str], context: Context) -> NoBadWordsLogitsProcessor:
    """Rules out words, at the start of a text and after a space (vLLM's ``bad_words``)."""
    words = [words] if isinstance(words, str) else words
    texts = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
    encoded = (context.tokenizer.encode(text, add_special_tokens=False) for text in texts)
    ids = {tuple(tokens) for tokens in encoded if tokens}
    processor = BadWordsOfAnswer([list(tokens) for tokens in sorted(ids)], context.eos)
    processor.prompt_length = context.prompt_length
    return processor


def begin_suppress_tokens(tokens: Any, context: Context) -> SuppressTokensAtBeginLogitsProcessor:
    # A forced BOS takes the first place, so the sequence proper begins one token later.
    forced = context.prompt_length <= 1 and context.config.forced_bos_token_id is not None
    return SuppressTokensAtBeginLogitsProcessor(
        tokens, context.prompt_length + int(forced), device=context.device
    )


def watermark(config: Any, context: Context) -> LogitsProcessor:
    vocab_size = context.model.config.get_text_config().vocab_size
    return config.construct_processor(vocab_size, context.device)
