"""Converts the prompt of a request to inputs of ``generate``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from .. import families
from ..mixin import mixed_view
from ..running.prefix import PrefixCache
from ..running.ranks import is_together
from ..running.row_states import foreign_code
from ..settings.logs import logger


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
        kinds = set(map(type, prompt))
        if bool in kinds or not all(issubclass(kind, Integral) for kind in kinds):
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
    if isinstance(ids, Tensor) and ids.ndim == 1:
        same = [n for n, v in inputs.items() if isinstance(v, Tensor) and v.shape == ids.shape]
        inputs |= {name: inputs[name][None] for name in same}
    for name in ("input_ids", "inputs_embeds"):
        rows = inputs.get(name)
        if isinstance(rows, Tensor) and rows.ndim > 1 and len(rows) != 1:
            raise ValueError(
                f"A request has one prompt, but `{name}` has {len(rows)} rows. Add one request for each."
            )
    if isinstance(ids, Tensor) and ids.numel() == 0 and "inputs_embeds" not in inputs:
        raise ValueError("The prompt is empty: it has to have at least one token.")
    return {n: v.to(device) if isinstance(v, Tensor) else v for n, v in inputs.items()}


def check_arguments(model: Any, tokenizer: Any, prefix_cache: Any) -> None:
    """Raise ``TypeError`` for a wrong argument of ``Engine``, ``ValueError`` for sharded parameters."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` has to be a model of transformers, but is {model!r:.80}.")
    if families.is_sharded(model) and not is_together(mixed_view(model)):
        raise ValueError(
            "An engine does not support sharded parameters (FSDP, ZeRO-3): each rank has other "
            "requests, but all ranks need the same number of forward passes. Call generate(), load the "
            "whole model on each rank, or train with hfgen.trl.rollout()."
        )
    if isinstance(tokenizer, str):
        raise TypeError(f"`tokenizer` has to be a tokenizer that is loaded, but is {tokenizer!r}.")
    if not isinstance(prefix_cache, PrefixCache | None):
        raise TypeError(f"`prefix_cache` has to be a PrefixCache, but is {prefix_cache!r:.80}.")


def keeps_states(model: Any) -> bool:
    """Whether code in ``model`` may keep states of its rows, so that requests cannot take turns; warns once."""
    if (code := foreign_code(model)) is None:
        return False
    logger.warning_once(
        f"The engine decodes one request at a time: {code} may keep states of its rows. If it computes "
        "each row by itself, set the attribute `is_row_wise = True` on this function or class."
    )
    return True


def check_numbers(priority: Any, timeout: Any) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a wrong ``priority`` or ``timeout`` of ``Engine.add``."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise TypeError(f"`priority` has to be an integer, but is {priority!r:.80}.")
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"`timeout` has to be a number of seconds, but is {timeout!r:.80}.")
    if math.isnan(timeout):
        raise ValueError("`timeout` has to be a number of seconds, but is NaN.")


def _needed(tokenizer: Any, what: str) -> Any:
    if tokenizer is None:
        raise ValueError(f"A prompt that is {what} needs the engine's `tokenizer`.")
    return tokenizer
