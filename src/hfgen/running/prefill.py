"""The forward pass of a prompt: at once, in chunks, or only the part that is not in the cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
from transformers.utils import ModelOutput

from ..state.call import ModelKwargs
from .compiled import fastest_forward
from .media import media_by_chunk
from .step_inputs import TOKEN_TYPES


def prefill(
    self: Any,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: ModelKwargs,
    is_first_iteration: bool = True,
) -> ModelOutput:
    """Forward the prompt, or as much of it as the cache does not hold; returns the last outputs.

    A continued prompt comes in full, or only its new tokens with a mask over all of it.
    """
    reads_embeds = is_first_iteration and not self.config.is_encoder_decoder
    embeds = model_kwargs.get("inputs_embeds") if reads_embeds else None
    new_length = uncached_length(self, input_ids, generation_config, model_kwargs, embeds)
    if generation_config.prefill_chunk_size is not None:
        return _prefill_in_chunks(
            self, input_ids, embeds, generation_config, model_kwargs, new_length, is_first_iteration
        )
    model_inputs = self.prepare_inputs_for_generation(
        input_ids,
        next_sequence_length=new_length,
        is_first_iteration=is_first_iteration,
        **model_kwargs,
    )
    return self(**model_inputs, return_dict=True)


def uncached_length(
    self: Any,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: ModelKwargs,
    embeds: torch.Tensor | None = None,
) -> int | None:
    """How many tokens of the prompt the cache does not hold; ``None`` for all that is given.

    Raises ``ValueError`` if it holds all that a decoder is given, so that nothing has logits.
    """
    if (cache := model_kwargs.get("past_key_values")) is None:
        return None
    if embeds is not None:
        return int(embeds.shape[1] - cache.get_seq_length())
    prefix = "decoder_" if self.config.is_encoder_decoder else ""
    mask = model_kwargs.get(prefix + "attention_mask")
    width = getattr(config, "_mask_length", -1) if mask is None else mask.shape[1]
    if input_ids.shape[1] != width:
        return None
    n_new = int(input_ids.shape[1] - cache.get_seq_length())
    if n_new < 1 and self.config.is_encoder_decoder and not config.is_assistant:
        raise ValueError(
            f"`past_key_values` holds {cache.get_seq_length()} tokens and `decoder_input_ids` has "
            f"{input_ids.shape[1]}, so that none is new. Pass all tokens from the start; or only the "
            "new ones, with a `decoder_attention_mask` over all of them."
        )
    return n_new


def _prefill_in_chunks(
    self: Any,
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
    execute = fastest_forward(self, config, model_kwargs)
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
