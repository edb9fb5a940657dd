"""What a request may have as its prompt, as inputs of ``generate``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def model_inputs(prompt: Any, tokenizer: Any, device: torch.device) -> dict[str, Any]:
    """The inputs of one prompt: text, token ids, chat messages, or inputs by name, of one row each.

    Raises ``ValueError`` or ``TypeError`` for a prompt that is empty or of another kind.
    """
    if isinstance(prompt, str):
        inputs = dict(_needed(tokenizer, "text")(prompt, return_tensors="pt"))
    elif isinstance(prompt, Mapping):
        inputs = dict(prompt)
    elif isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping):
        inputs = dict(
            _needed(tokenizer, "chat messages").apply_chat_template(
                list(prompt), add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        )
    elif isinstance(prompt, Tensor):
        inputs = {"input_ids": prompt}
    elif isinstance(prompt, list | tuple):
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
            raise TypeError(
                f"A prompt that is a list has to hold token ids, but is {prompt!r:.80}."
            )
        inputs = {"input_ids": torch.tensor(prompt, dtype=torch.long)}
    else:
        raise TypeError(
            "A prompt has to be text, token ids, a list of chat messages, or a mapping of model inputs, "
            f"but is {type(prompt).__name__}."
        )
    inputs = {name: value for name, value in inputs.items() if value is not None}
    ids = inputs.get("input_ids")
    if isinstance(ids, Tensor):
        if ids.ndim == 1:
            inputs["input_ids"] = ids = ids[None]
        if ids.ndim == 2 and len(ids) != 1:
            raise ValueError(
                f"A request has one prompt, but `input_ids` has {len(ids)} rows. Add one request for each."
            )
        if ids.numel() == 0 and "inputs_embeds" not in inputs:
            raise ValueError("The prompt is empty: it has to have at least one token.")
    return {n: v.to(device) if isinstance(v, Tensor) else v for n, v in inputs.items()}


def _needed(tokenizer: Any, what: str) -> Any:
    if tokenizer is None:
        raise ValueError(f"A prompt that is {what} needs the engine's `tokenizer`.")
    return tokenizer
