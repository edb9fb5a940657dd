"""Processors that allow or forbid given tokens, or force or forbid the end of a sequence."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import LogitsProcessor, NoBadWordsLogitsProcessor
from transformers.generation import logits_process as upstream

from ...settings.fields import require_eos
from .context import Context
from .per_row import expand


class Banning:
    """Base of processors that rule out fixed token ids, but for ids outside the vocabulary.

    Some configs have -1 for none. Models with several vocabularies have ids that a head lacks.
    """

    _place: tuple[int, torch.device] | None = None  # width and device that ``_inside`` fits

    def without(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """A copy of ``scores (..., vocab)`` with -inf at ``ids``, which have to be the same in each call."""
        place = (scores.shape[-1], scores.device)
        if self._place != place:
            ids = ids.flatten().long().to(scores.device)
            self._inside = ids[(ids >= 0) & (ids < scores.shape[-1])]
            self._place = place
        return scores.index_fill(-1, self._inside, -math.inf)


class SuppressTokensLogitsProcessor(Banning, upstream.SuppressTokensLogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.without(self.suppress_tokens, scores)


class AllowedTokens(LogitsProcessor):
    """Rules out all but given tokens at every step (vLLM's ``allowed_token_ids``)."""

    def __init__(self, tokens: list[int], device: Any) -> None:
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


class _NoEarlyEnd(Banning):
    """Rules out EOS and stop tokens in rows of fewer than ``least`` tokens from ``start`` on.

    ``least`` is a number, or a column ``(prompts, 1)``, which upstream's constructors do not take.
    """

    eos_token_id: torch.Tensor
    least: int | torch.Tensor
    start = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_short = expand(self.least, len(scores)) > input_ids.shape[-1] - self.start
        if isinstance(is_short, torch.Tensor):
            return torch.where(is_short, self.without(self.eos_token_id, scores), scores)
        # A copy in any case, as upstream's: a later edit in place then spares the logits.
        return self.without(self.eos_token_id, scores) if is_short else scores.clone()


class MinLengthLogitsProcessor(_NoEarlyEnd, upstream.MinLengthLogitsProcessor):
    """No end while the sequence, prompt and left pads included, is too short."""

    def __init__(self, least: int | torch.Tensor, ending: torch.Tensor) -> None:
        self.least, self.eos_token_id = least, ending


class MinNewTokensLengthLogitsProcessor(_NoEarlyEnd, upstream.MinNewTokensLengthLogitsProcessor):
    def __init__(self, start: int, least: int | torch.Tensor, ending: torch.Tensor) -> None:
        self.start, self.least, self.eos_token_id = start, least, ending


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
    begin = context.prompt_length + int(forced)
    return SuppressTokensAtBeginLogitsProcessor(tokens, begin, device=context.device)


def min_length(n: Any, context: Context) -> MinLengthLogitsProcessor | None:
    ending = context.ending_tokens
    return None if ending is None else MinLengthLogitsProcessor(n, ending)


def min_new_tokens(n: Any, context: Context) -> MinNewTokensLengthLogitsProcessor | None:
    ending, start = context.ending_tokens, context.prompt_length
    return None if ending is None else MinNewTokensLengthLogitsProcessor(start, n, ending)


def exponential_decay(penalty: Any, context: Context) -> upstream.ExponentialDecayLengthPenalty:
    require_eos(context.eos, penalty)
    return upstream.ExponentialDecayLengthPenalty(penalty, context.eos, context.prompt_length)


def watermark(config: Any, context: Context) -> LogitsProcessor:
    vocab_size = context.model.config.get_text_config().vocab_size
    return config.construct_processor(vocab_size, context.device)
