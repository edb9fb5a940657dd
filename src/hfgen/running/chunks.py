"""Chunked prefill: some tokens of a prompt are forwarded now, the rest later."""

from __future__ import annotations

import copy
from typing import Any

from transformers.cache_utils import Cache

from ..state.call import ModelKwargs
from ..state.run import Run
from . import shared_prompt
from .executor import prefill
from .prefix import eligibility


def can_be_cut(run: Run) -> bool:
    """Whether a prompt may be forwarded in parts: as one whose first part is in a ``PrefixCache``."""
    call = run.call
    if call is None or call.prompt is None:
        return False
    arguments = {n: v for n, v in run.model_kwargs.items() if not isinstance(v, Cache)}
    return (
        eligibility.of_arguments(run.model, call, arguments) is None
        and eligibility.of_prompt(run.model, call, call.prompt) is None
    )


def forward_part(run: Run, n_tokens: int) -> None:
    """Forward the next ``n_tokens`` of a prompt, which are not its last, into the run's cache."""
    ids, kwargs = run.ids, run.model_kwargs
    shared = None if run.call is None else run.call.shared_prompt
    if shared is not None and shared_prompt.is_possible(run):  # each prompt once for its rows
        ids, kwargs = shared.ids, kwargs | shared.model_kwargs
    cache: Any = run.model_kwargs["past_key_values"]
    end = int(cache.get_seq_length()) + n_tokens
    part: ModelKwargs = {"past_key_values": cache, "use_cache": True}
    if "logits_to_keep" in run.model_kwargs:
        part["logits_to_keep"] = 1
    for name in ("attention_mask", "position_ids"):
        if (tensor := kwargs.get(name)) is not None:
            part[name] = tensor[..., :end]
    config = copy.copy(run.config)
    config._mask_length = end
    prefill(run.model, ids[:, :end], config, part)
