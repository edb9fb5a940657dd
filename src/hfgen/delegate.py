"""Calls that run elsewhere: a repository's own generate, and batching."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from . import prefix, rows
from .call import Request
from .fields import OWN_FIELDS
from .logs import logger


def runs_elsewhere(request: Request) -> Callable[[Any, Request], Any] | None:
    """The function that runs the call elsewhere, if its arguments ask for that."""
    if isinstance(request.custom_generate, str):
        return generate_from_repository
    return generate_paged if request.kwargs.get("cache_implementation") == "paged" else None


def generate_from_repository(model: Any, request: Request) -> Any:
    """Run ``custom_generate/generate.py`` of a repository, if ``trust_remote_code=True`` allows that."""
    kwargs = dict(request.kwargs)
    # Never None, for which transformers asks on standard input.
    trust = {"trust_remote_code": bool(kwargs.pop("trust_remote_code", False))}
    function = model.load_custom_generate(request.custom_generate, **trust, **kwargs)
    names = (name for name in request.__slots__ if name not in ("kwargs", "custom_generate"))
    return function(model=model, **{name: getattr(request, name) for name in names}, **kwargs)


def get_deprecated_gen_repo(
    self: Any, generation_mode: Any, trust_remote_code: bool | None, custom_generate: Any = None
) -> None:
    """The hub repository that upstream moved a mode to: none, since every mode runs here."""


#: Arguments of ``generate`` that continuous batching does not take.
NOT_BATCHED = (
    "stopping_criteria prefix_allowed_tokens_fn assistant_model streamer negative_prompt_ids "
    "negative_prompt_attention_mask"
).split()


def generate_paged(model: Any, request: Request) -> torch.Tensor:
    """Continue the prompts by continuous batching (``cache_implementation="paged"``).

    Returns ``(1, batch, length)``, as upstream does, without masked tokens and padded on the right.
    Raises ``NotImplementedError`` for arguments in ``NOT_BATCHED``.
    """
    logger.warning(
        "`cache_implementation='paged'` means continuous batching: generate_batch() does it directly."
    )
    prefix.take_argument(model, request)  # which is refused
    kwargs = {name: v for name, v in request.kwargs.items() if name != "prefix_cache"}
    ids = request.inputs if request.inputs is not None else kwargs.get("input_ids")
    if ids is None:
        raise ValueError("Continuous batching needs a prompt: pass `inputs` or `input_ids`.")
    if ids.ndim not in (1, 2):
        raise ValueError(
            f"`input_ids` has to be (length,) or (batch, length), but has shape {tuple(ids.shape)}."
        )
    for name in NOT_BATCHED:
        if (value := getattr(request, name)) is not None:
            raise NotImplementedError(f"Continuous batching does not take `{name}` (={value}).")
    if rows.split(request) is not None:
        raise NotImplementedError("Continuous batching takes one value of each field for all rows.")
    if request.synced_gpus is not None:
        logger.warning(f"Continuous batching ignores `synced_gpus` (={request.synced_gpus}).")
    if kwargs.get("num_beams", 1) > 1:
        logger.warning(f"Continuous batching ignores `num_beams` (={kwargs['num_beams']}).")

    ids = torch.atleast_2d(ids)
    mask = kwargs.pop("attention_mask", None)
    keep = torch.ones_like(ids, dtype=torch.bool) if mask is None else torch.atleast_2d(mask).bool()
    prompts = [row[kept].tolist() for row, kept in zip(ids, keep, strict=True)]
    config, _ = model._prepare_generation_config(request.generation_config, **kwargs)
    for name, default in OWN_FIELDS.items():
        if (value := getattr(config, name)) not in (None, default):
            raise NotImplementedError(f"Continuous batching does not take `{name}` (={value}).")
    results = model.generate_batch(inputs=prompts, generation_config=config, **kwargs)
    found = [results[f"req_{i}"] for i in range(len(results))]
    sequences = [torch.tensor(row.prompt_ids + row.generated_tokens) for row in found]
    pad = config.eos_token_id if config.pad_token_id is None else config.pad_token_id
    pad = (pad[0] if isinstance(pad, list) else pad) or 0
    return pad_sequence(sequences, True, pad).to(model.device).unsqueeze(0)
