"""Log-probabilities of given tokens, with gradients: the trainer's side of a sampler's ``logprobs``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import families
from .layers import check_dropout


def token_logprobs(model: Any, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """The log-probability of each token after the tokens before it, ``(rows, length - 1)`` in float32.

    One forward of ``input_ids (rows, length)``, padded on either side; gradients are recorded where they are
    enabled. The logits are converted to float32 and normalised as ``generate`` does it for ``logprobs``, so that
    with ``hfgen.exact(model)`` both have the same bits. The value at a padding token has no meaning.

    Raises:
        TypeError: An argument is of another type.
        ValueError: Shapes differ, there are fewer than two tokens, the model has an encoder, or it is exact and
            drops values at random.
    """
    for name, value in {"input_ids": input_ids, "attention_mask": attention_mask}.items():
        if not (isinstance(value, Tensor) or (name == "attention_mask" and value is None)):
            raise TypeError(f"token_logprobs(): {name} has to be a tensor, got {value!r}.")
    if input_ids.dim() != 2 or input_ids.shape[1] < 2:
        raise ValueError(
            f"token_logprobs(): input_ids has to be (rows, 2 or more tokens), got {tuple(input_ids.shape)}."
        )
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"token_logprobs(): attention_mask has to be {tuple(input_ids.shape)} as input_ids is, "
            f"got {tuple(attention_mask.shape)}."
        )
    if model.config.is_encoder_decoder:
        raise ValueError("token_logprobs() takes decoder-only models, but this one has an encoder.")
    if hasattr(model, "exactness"):
        check_dropout(model)
    arguments: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
    if attention_mask is not None:
        arguments["attention_mask"] = attention_mask
    if (
        "position_ids" in families.parameters(model.forward)
        and families.position_pad(model) is None
    ):
        is_token = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        positions = (is_token.cumsum(dim=1) - 1).clamp(min=0)
        arguments["position_ids"] = positions + families.first_position(model)
    logits = model(**arguments).logits[:, :-1].float()
    tokens = input_ids[:, 1:, None].to(logits.device)
    logprobs: Tensor = logits.log_softmax(dim=-1).gather(2, tokens)[:, :, 0]
    return logprobs
