"""Warpers: processors that reshape the distribution before a token is drawn from it."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TypicalLogitsWarper,
)
from transformers import TopPLogitsWarper as UpstreamTopP

from .context import Context

#: Below this vocabulary size, sorting all of it takes no longer than picking a part.
SORTED_AT_ONCE = 8192


class TopPLogitsWarper(UpstreamTopP):
    """Keeps the likeliest tokens whose probabilities sum to ``top_p``.

    Upstream sorts the whole vocabulary.  Where an earlier warper (top-k) has left few tokens, only
    those are sorted here; the sums are taken over the same full rows, so that the result is equal.
    """

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``input_ids (rows, length)``, ``scores (rows, vocab)``: the latter are not changed."""
        left = self._tokens_left(scores)
        if not self.min_tokens_to_keep <= left <= scores.shape[-1] // 4:
            return super().__call__(input_ids, scores)
        values, tokens = (part.flip(-1) for part in scores.topk(left))  # ascending
        ascending = pad(values, (scores.shape[-1] - left, 0), value=-math.inf)
        drop = ascending.softmax(dim=-1).cumsum(dim=-1)[:, -left:] <= 1 - self.top_p
        drop[:, -self.min_tokens_to_keep :] = False
        # Which of equal scores fall on which side of the cut is up to the order of the full sort.
        at_cut = drop[:, :-1] & ~drop[:, 1:] & (values[:, :-1] == values[:, 1:])
        if at_cut.any():
            return super().__call__(input_ids, scores)
        return scores.scatter(1, tokens, values.masked_fill(drop, -math.inf))

    def _tokens_left(self, scores: torch.Tensor) -> int:
        """The most tokens above -inf in a row; the vocabulary's size where a full sort is as good."""
        vocab = scores.shape[-1]
        # Elsewhere than on the CPU, to count would be to wait for the device.
        if scores.device.type != "cpu" or vocab < SORTED_AT_ONCE or self.filter_value != -math.inf:
            return vocab
        return int((scores != -math.inf).sum(dim=-1).max())


def temperature(context: Context) -> TemperatureLogitsWarper | None:
    value = context.config.temperature
    return None if value is None or value == 1.0 else TemperatureLogitsWarper(value)


def top_h(context: Context) -> TopHLogitsWarper | None:
    share = context.config.top_h
    return None if share is None else TopHLogitsWarper(top_h=share)


def top_k(context: Context) -> TopKLogitsWarper | None:
    count = context.config.top_k
    if count is None or count == 0:
        return None
    return TopKLogitsWarper(top_k=count, min_tokens_to_keep=context.min_tokens_to_keep)


def top_p(context: Context) -> TopPLogitsWarper | None:
    mass = context.config.top_p
    if mass is None or mass >= 1.0:
        return None
    return TopPLogitsWarper(top_p=mass, min_tokens_to_keep=context.min_tokens_to_keep)


def min_p(context: Context) -> MinPLogitsWarper | None:
    share = context.config.min_p
    if share is None:
        return None
    return MinPLogitsWarper(min_p=share, min_tokens_to_keep=context.min_tokens_to_keep)


def typical_p(context: Context) -> TypicalLogitsWarper | None:
    mass = context.config.typical_p
    if mass is None or mass >= 1.0:
        return None
    return TypicalLogitsWarper(mass=mass, min_tokens_to_keep=context.min_tokens_to_keep)


def epsilon_cutoff(context: Context) -> EpsilonLogitsWarper | None:
    epsilon = context.config.epsilon_cutoff
    if epsilon is None or not 0.0 < epsilon < 1.0:
        return None
    return EpsilonLogitsWarper(epsilon=epsilon, min_tokens_to_keep=context.min_tokens_to_keep)


def eta_cutoff(context: Context) -> EtaLogitsWarper | None:
    epsilon = context.config.eta_cutoff
    if epsilon is None or not 0.0 < epsilon < 1.0:
        return None
    return EtaLogitsWarper(
        epsilon=epsilon, min_tokens_to_keep=context.min_tokens_to_keep, device=context.device
    )


def watermark(context: Context) -> LogitsProcessor | None:
    config = context.config.watermarking_config
    if config is None:
        return None
    vocab = context.model.config.get_text_config().vocab_size
    return config.construct_processor(vocab, context.device)


def normalize(context: Context) -> LogitNormalization | None:
    return LogitNormalization() if context.config.renormalize_logits is True else None
