"""What limits repetition: penalties on tokens that occurred, and processors that rule out n-grams."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import LogitsProcessor
from transformers.generation import logits_process as upstream

from ... import families
from .context import Context
from .per_row import expand, quotient


@dataclass(frozen=True, slots=True)
class Counted:
    """Which ids of a row count: those from column ``first`` on, or the last ``window`` of these.

    ``first`` may be a tensor ``(rows,)``, such as the numbers of pads. ``excluded (n,)`` never count.
    """

    first: int | torch.Tensor = 0
    window: int | None = None
    excluded: torch.Tensor | None = None

    def tokens(self, ids: torch.Tensor, vocab: int) -> torch.Tensor:
        """``(rows, n)`` of ``ids (rows, length)``, with ``vocab`` in place of what does not count."""
        length, first = ids.shape[1], self.first
        start = max(0, length - self.window) if self.window else 0
        start = start if isinstance(first, torch.Tensor) else max(start, first)
        tokens = ids[:, start:].clamp(max=vocab)
        if self.excluded is not None:
            tokens = tokens.masked_fill(torch.isin(tokens, self.excluded.to(ids.device)), vocab)
        if isinstance(first, torch.Tensor):
            columns = torch.arange(start, length, device=ids.device)
            tokens = tokens.masked_fill(columns < first.to(ids.device)[:, None], vocab)
        return tokens


class RepetitionPenaltyLogitsProcessor(upstream.RepetitionPenaltyLogitsProcessor):
    """Divides positive and multiplies negative scores of tokens that occurred by the penalty."""

    def __init__(
        self,
        penalty: float | torch.Tensor,
        prompt_ignore_length: int | torch.Tensor | None = None,
        window: int | None = None,
        excluded: torch.Tensor | None = None,
    ) -> None:
        """``penalty`` may be a column ``(prompts, 1)``.

        ``prompt_ignore_length``: tokens at the start that do not count, also per row ``(rows,)``.
        ``window``: only the last so many count. ``excluded (n,)``: tokens that never do.
        """
        ignored = prompt_ignore_length
        if isinstance(ignored, torch.Tensor) and ignored.dim() != 1:
            raise ValueError(
                "`prompt_ignore_length` has to be an integer or a tensor of shape (rows,), but has "
                f"the shape {tuple(ignored.shape)}."
            )
        first = None if isinstance(ignored, torch.Tensor) else ignored
        super().__init__(1.0 if isinstance(penalty, torch.Tensor) else penalty, first)
        self.penalty, self.prompt_ignore_length = penalty, ignored
        self.window, self.excluded = window, excluded

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.dim() != 2 or input_ids.dim() != 2:
            return super().__call__(input_ids, scores)
        # Some models assign another one, as Dia, which has other rows.
        vocab, ignored = scores.shape[-1], self.prompt_ignore_length
        if isinstance(ignored, torch.Tensor) and len(ignored) not in (1, len(input_ids)):
            raise ValueError(
                f"`prompt_ignore_length` has {len(ignored)} rows, the input ids {len(input_ids)}."
            )
        counted = Counted(0 if ignored is None else ignored, self.window, self.excluded)
        tokens = counted.tokens(input_ids, vocab)
        penalty = expand(self.penalty, len(scores))
        values = scores.gather(1, tokens.clamp(max=vocab - 1))
        values = torch.where(values < 0, values * penalty, quotient(values, penalty))
        return put(scores, tokens, values)


class OccurrencePenalty(LogitsProcessor):
    """Takes ``penalty`` off a score for each time that its token has occurred, or once if ``of_presence``.

    As in OpenAI's API. ``penalty`` is a number, or a column ``(prompts, 1)``; 0 changes nothing.
    """

    def __init__(
        self, penalty: float | torch.Tensor, counted: Counted, of_presence: bool = False
    ) -> None:
        self.penalty, self.counted, self.of_presence = penalty, counted, of_presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens = self.counted.tokens(input_ids, scores.shape[1])
        padded = pad(scores, (0, 1))  # a column for ids that do not count
        token_scores = scores.gather(1, tokens.clamp(max=scores.shape[1] - 1))
        counts = torch.ones_like(token_scores)
        if not self.of_presence:  # count in the place of the scores, which saves memory
            padded.scatter_(1, tokens, 0.0).scatter_add_(1, tokens, counts)
            counts = padded.detach().gather(1, tokens)
        penalties = counts * expand(self.penalty, len(scores))
        return padded.scatter_(1, tokens, token_scores - penalties)[:, :-1]


class DiversityPenalty(LogitsProcessor):
    """Takes ``penalty`` off a score for each beam of earlier groups that chose its token at this step."""

    def __init__(self, penalty: float) -> None:
        self.penalty = penalty

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores

    def penalised(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``scores (rows, vocab)`` for prompts whose earlier groups chose ``tokens (prompts, n)``."""
        counts = scores.new_zeros(len(tokens), scores.shape[1])
        counts.scatter_add_(1, tokens, scores.new_ones(1).expand_as(tokens))
        by_prompt = scores.unflatten(0, (len(tokens), -1))
        return (by_prompt - self.penalty * counts[:, None]).flatten(0, 1)


def completions(ngrams: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """The tokens ``(rows, n)`` that would complete ``ngrams (rows, n, size)``, -1 where one has not begun."""
    start = input_ids.shape[1] + 1 - ngrams.shape[2]
    has_begun = (ngrams[..., :-1] == input_ids[:, None, start:]).all(dim=-1)
    return torch.where(has_begun, ngrams[..., -1], -1)


def ruled_out(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A copy of ``scores (rows, vocab)`` with -inf at ``tokens (rows, n)``, but for those outside."""
    vocab = scores.shape[1]
    tokens = tokens.masked_fill(tokens < 0, vocab).clamp(max=vocab)
    return put(scores, tokens, scores.new_full((1, 1), -math.inf).expand_as(tokens))


def put(scores: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of ``scores (rows, vocab)`` with ``values`` at ``tokens (rows, n)``, but for those that are ``vocab``."""
    rows, vocab = scores.shape
    places = tokens + torch.arange(0, rows * vocab, vocab, device=tokens.device)[:, None]
    places = places.masked_fill(tokens == vocab, rows * vocab).flatten()
    flat = pad(scores.flatten(), (0, 1))  # one more, for ids that do not count
    return flat.scatter_(0, places, values.flatten())[:-1].view(rows, vocab)


class NoRepeatNGramLogitsProcessor(upstream.NoRepeatNGramLogitsProcessor):
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
        return ruled_out(completions(input_ids.unfold(1, self.ngram_size, 1), input_ids), scores)


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
        return ruled_out(tokens, scores)


def encoder_repetition_penalty(value: float, context: Context) -> upstream.LogitsProcessor | None:
    if (ids_and_mask := encoder_ids(context, "encoder_repetition_penalty")) is None:
        return None
    ids, is_token = ids_and_mask
    # In place of pads stands the first token, which counts anyhow.
    first = ids.gather(1, is_token.int().argmax(dim=1, keepdim=True))
    return upstream.EncoderRepetitionPenaltyLogitsProcessor(value, ids.where(is_token, first))


def repetition_penalty(penalty: Any, context: Context) -> RepetitionPenaltyLogitsProcessor:
    warn_without_prompt(context, "repetition_penalty")
    n_pads = context.n_pads if families.IS_5_23 else None  # before, padding counts
    return RepetitionPenaltyLogitsProcessor(penalty, n_pads, *_restriction(context))


def occurrence_penalty(
    penalty: Any, context: Context, of_presence: bool = False
) -> OccurrencePenalty:
    """Of the generated tokens, or of the last of all tokens if there is a window."""
    window, excluded = _restriction(context)
    n_pads = 0 if context.n_pads is None else context.n_pads
    counted = Counted(n_pads if window else context.prompt_length, window, excluded)
    return OccurrencePenalty(penalty, counted, of_presence)


def diversity_penalty(penalty: float, context: Context) -> DiversityPenalty | None:
    config = context.config
    is_grouped = (config.num_beam_groups or 1) > 1 and (config.num_beams or 1) > 1
    return DiversityPenalty(float(penalty)) if is_grouped else None


def _restriction(context: Context) -> tuple[int | None, torch.Tensor | None]:
    """The window of a penalty, and the tokens that it spares."""
    excluded = context.own("penalty_exclude_ids")
    if excluded is not None:
        excluded = torch.tensor(excluded, dtype=torch.long, device=context.device).flatten()
    return context.own("penalty_window"), excluded


def encoder_ids(context: Context, argument: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """``context.encoder_ids()``, with a warning if the input is not ids."""
    if (ids_and_mask := context.encoder_ids()) is None:
        message = "is ignored: it works on token ids, and the input of this call has none."
        warnings.warn(f"`{argument}` {message}", stacklevel=2)
    return ids_and_mask


def warn_without_prompt(context: Context, argument: str) -> None:
    if not context.model.config.is_encoder_decoder and context.prompt_length == 0:
        reason = "the prompt was given as `inputs_embeds`, without `input_ids`."
        warnings.warn(f"`{argument}` counts generated tokens only: {reason}", stacklevel=2)


def no_repeat_ngram(size: int, context: Context) -> NoRepeatNGramLogitsProcessor:
    warn_without_prompt(context, "no_repeat_ngram_size")
    return NoRepeatNGramLogitsProcessor(size, context.n_pads)


def encoder_no_repeat_ngram(size: int, context: Context) -> upstream.LogitsProcessor | None:
    if (ids_and_mask := encoder_ids(context, "encoder_no_repeat_ngram_size")) is None:
        return None
    ids = ids_and_mask[0].where(ids_and_mask[1], -1)
    # transformers' constructor takes longer for a larger size, also above the length, which has no n-gram.
    return EncoderNoRepeatNGramLogitsProcessor(min(size, ids.shape[1] + 1), ids)
