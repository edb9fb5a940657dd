"""The forward pass of a prompt in chunks, for ``prefill_chunk_size``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
from transformers.utils import ModelOutput

from ..state.call import ModelKwargs
from .media import media_by_chunk
from .step_inputs import TOKEN_TYPES


def prefill_in_chunks(
    self: Any,
    execute: Callable[..., ModelOutput],
    input_ids: torch.Tensor,
    embeds: torch.Tensor | None,
    config: GenerationConfig,
    model_kwargs: ModelKwargs,
    new_length: int | None,
    is_first_iteration: bool,
) -> ModelOutput:
    """Forward ``config.prefill_chunk_size`` tokens at a time, so that activations take less memory."""
    if (cache := model_kwargs.get("past_key_values")) is None:
        raise ValueError(
            f"`prefill_chunk_size`={config.prefill_chunk_size} needs a cache to put the chunks into, "
            "and `use_cache` is False or the model has none."
        )
    prompt = (input_ids if embeds is None else embeds)[:, -(new_length or 0) :]
    chunks = torch.split(prompt, int(config.prefill_chunk_size), dim=1)
    media_names = {*MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL} - {"mm_encoder_outputs"}
    raw_media = sorted(name for name in media_names if model_kwargs.get(name) is not None)
    if is_first_iteration and len(chunks) > 1 and raw_media:
        raise ValueError(
            f"`prefill_chunk_size` cannot cut {raw_media}, which {type(self).__name__} encodes in "
            "its forward. Leave it out."
        )
    encoded = model_kwargs.get("mm_encoder_outputs") if is_first_iteration else None
    media = media_by_chunk(self, prompt, chunks, encoded or {})
    past = cache.get_seq_length()
    for index, chunk in enumerate(chunks):
        end = past + chunk.shape[1]
        kwargs = {name: v for name, v in model_kwargs.items() if name != "mm_encoder_outputs"}
        for name in ("attention_mask", "position_ids", *TOKEN_TYPES):
            if (tensor := kwargs.pop(name, None)) is not None:
                is_cut = name == "position_ids" and tensor.shape[-1] > 1  # one is that of all
                kwargs[name] = tensor[..., past if is_cut else 0 : end]
        if embeds is not None:
            kwargs["inputs_embeds"] = chunk
        model_inputs = self.prepare_inputs_for_generation(
            chunk if embeds is None else input_ids, is_first_iteration=is_first_iteration, **kwargs
        )
        if index in media:
            model_inputs["mm_encoder_outputs"] = media[index]
        outputs = execute(**model_inputs, return_dict=True)
        model_kwargs["past_key_values"] = outputs.past_key_values
        past = end
    model_kwargs.setdefault("attention_mask", None)
    model_kwargs.setdefault("position_ids", None)
    return outputs
