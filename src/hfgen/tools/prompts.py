"""Texts as inputs of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .. import families


def encode(texts: Sequence[str], tokenizer: Any, model: Any) -> dict[str, Any]:
    """Inputs ``(texts, longest)`` of ``model``, on its device. Raises ``ValueError`` for a text without tokens."""
    rows = [torch.tensor(tokenizer(text).input_ids, dtype=torch.long) for text in texts]
    if empty := [text for text, ids in zip(texts, rows, strict=True) if not len(ids)]:
        raise ValueError(f"The prompt {empty[0]!r} has no tokens: give some text.")
    return padded(rows, model, getattr(tokenizer, "pad_token_id", None) or 0)


def padded(rows: list[Tensor], model: Any, pad: int = 0) -> dict[str, Tensor]:
    """Ids and mask ``(rows, longest)`` of ``rows`` of ids: padded on the right for an encoder, else on the left."""
    side, device = "right" if model.config.is_encoder_decoder else "left", families.device_of(model)
    masks = [torch.ones_like(row) for row in rows]
    return {
        "input_ids": pad_sequence(rows, True, pad, padding_side=side).to(device),
        "attention_mask": pad_sequence(masks, True, 0, padding_side=side).to(device),
    }
