"""Log-probabilities of given tokens, with gradients: the trainer's side of a sampler's ``logprobs``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ... import families


def token_logprobs(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None = None, *, temperature: float = 1.0
) -> Tensor:
    """The log-probability of each token after the tokens before it, ``(rows, length - 1)`` in float32.

    One forward of ``input_ids (rows, length)``, padded on either side; gradients are recorded where they are
    enabled. The logits are converted to float32 and normalised as ``generate`` does it for ``logprobs``, so that
    with ``hfgen.exact(model)`` both have the same bits. With a ``temperature``, logits are divided by it, as for
    ``logprobs_mode="processed_logprobs"``. The value at a padding token has no meaning.

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
    inner = families.transformers_model(model)  # PEFT's wrapper names no arguments
    return scored(inner, model, input_ids, attention_mask, input_ids.shape[1] - 1, temperature)[0]


def scored(
    model: Any,
    forward: Callable[..., Any],
    input_ids: Tensor,
    attention_mask: Tensor | None,
    n: int,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the last ``n`` of ``input_ids (rows, length)``, and entropies there, ``(rows, n)``.

    ``forward`` is that of ``model``, or of a wrapper. Float32 logits of one row at a time are in memory.
    """
    if hasattr(model, "exactness"):
        model.exactness.check(model)
    takes = families.parameters(model.forward)
    arguments: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
    if attention_mask is not None:
        arguments["attention_mask"] = attention_mask
    if "position_ids" in takes and families.position_pad(model) is None:
        is_token = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        positions = (is_token.cumsum(dim=1) - 1).clamp(min=0)
        # PaliGemma's first position is 1: its `prepare_inputs_for_generation` adds it.
        arguments["position_ids"] = positions + int(model.config.model_type == "paligemma")
    if "logits_to_keep" in takes:
        arguments["logits_to_keep"] = n + 1
    logits = forward(**arguments).logits[:, -n - 1 : -1]
    tokens = input_ids[:, -n:].to(logits.device)
    rows = [
        checkpoint(_of_row, *row, temperature, use_reentrant=False)
        for row in zip(logits, tokens, strict=True)
    ]
    logprobs, entropies = zip(*rows, strict=True)
    return torch.stack(logprobs), torch.stack(entropies)


def _of_row(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities of ``tokens (n,)`` by ``logits (n, vocab)``, and entropies ``(n,)``."""
    scores = logits.float()
    logprobs = (scores if temperature == 1 else scores / temperature).log_softmax(dim=-1)
    entropies = -(logprobs.exp() * logprobs).sum(dim=-1)
    return logprobs.gather(1, tokens[:, None])[:, 0], entropies
