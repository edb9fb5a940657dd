"""The prompt: its shape, its ids, its length, and the cache that it continues."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import caches, quirks
from ..call import Call, Prompt
from .cache import check_cache


def check_prompt(model: Any, call: Call, prompt: Prompt) -> None:
    """Raise for a prompt that the model cannot take, or a cache that does not fit it.

    ``ValueError``: empty batch, empty prompt, attention mask of another shape, prompt longer than
    the rotary positions that the model was made for. ``IndexError``, as in upstream's forward: ids
    outside of the vocabulary, prompt longer than the table of learned positions.
    """
    caches.check_config(model, call)
    if prompt.batch_size == 0:
        raise ValueError(
            f"`{prompt.main_input_name}` has to hold at least one row, but has shape "
            f"{tuple(prompt.main_input.shape)}."
        )
    _check_mask(model, prompt)
    check_cache(model, call, prompt)
    ids = prompt.main_input
    if prompt.main_input_name != "input_ids" or ids.ndim != 2 or ids.is_floating_point():
        return
    is_continued = quirks.given_cache(model, prompt.model_kwargs) is not None
    if ids.shape[1] == 0:
        if not model.config.is_encoder_decoder and not is_continued:
            raise ValueError(
                f"`input_ids` has to hold at least one token per row, but has shape "
                f"{tuple(ids.shape)}. Pass a prompt, or leave `input_ids` out to start from "
                f"`bos_token_id` (which is {call.config.bos_token_id})."
            )
        return
    are_read = prompt.model_kwargs.get("encoder_outputs") is None
    if are_read and quirks.takes_only_text(model):
        _check_vocabulary(model, ids)
        _check_positions(model, ids)


def _check_mask(model: Any, prompt: Prompt) -> None:
    mask = prompt.model_kwargs.get("attention_mask")
    is_text = prompt.main_input_name in ("input_ids", "inputs_embeds")
    if not is_text or mask is None or mask.ndim != 2 or prompt.main_input.ndim < 2:
        return
    expected, given = tuple(prompt.main_input.shape[:2]), tuple(mask.shape)
    if given == expected:
        return
    # With a cache the mask also covers what is in the cache.
    is_continued = quirks.given_cache(model, prompt.model_kwargs) is not None
    if is_continued and given[0] == expected[0] and given[1] >= expected[1]:
        return
    raise ValueError(
        f"`attention_mask` has to have the shape of `{prompt.main_input_name}`, {expected}, but has "
        f"{given}."
    )


def _check_vocabulary(model: Any, ids: torch.Tensor) -> None:
    embedding = quirks.token_embedding(model)
    if embedding is None or ids.device.type == "meta":
        return
    lowest, highest = (int(bound) for bound in ids.aminmax())
    if lowest >= 0 and highest < embedding.num_embeddings:
        return
    row, column = ((ids < 0) | (ids >= embedding.num_embeddings)).nonzero()[0].tolist()
    raise IndexError(
        f"`input_ids[{row}, {column}]` is {int(ids[row, column])}, but the model's vocabulary has "
        f"the ids 0 to {embedding.num_embeddings - 1}. Is the tokenizer this model's?"
    )


def _check_positions(model: Any, ids: torch.Tensor) -> None:
    length = ids.shape[1]
    positions = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(positions, int) or length <= positions:
        return
    message = (
        f"`input_ids` has {length} tokens per row, but {type(model).__name__} has {positions} "
        "positions (`config.max_position_embeddings`). Shorten the prompt"
    )
    for name, module in model.named_modules():
        is_table = isinstance(module, nn.Embedding) and ("pos" in name or name.endswith("wpe"))
        if is_table and module.num_embeddings - getattr(module, "offset", 0) < length:
            raise IndexError(f"{message}.")
        if getattr(module, "rope_type", None) == "default":
            raise ValueError(
                f"{message}, or raise that field or set its rotary scaling if the model can go on."
            )
