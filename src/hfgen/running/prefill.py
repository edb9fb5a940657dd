"""Prompts that are forwarded in parts: for ``prefill_chunk_size``, a stored prefix, and the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from ..state.call import ModelKwargs
from ..state.run import Run
from . import shared_prompt
from .step_inputs import MEDIA, TOKEN_TYPES


def prefill_in_chunks(
    self: Any,
    execute: Callable[..., ModelOutput],
    config: GenerationConfig,
    model_kwargs: ModelKwargs,
    input_ids: torch.Tensor,
    embeds: torch.Tensor | None,
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
    raw_media = sorted(name for name in MEDIA if model_kwargs.get(name) is not None)
    if is_first_iteration and len(chunks) > 1 and raw_media:
        raise ValueError(
            f"`prefill_chunk_size` cannot cut {raw_media}, which {type(self).__name__} encodes in "
            "its forward. Leave it out."
        )
    encoded = model_kwargs.get("mm_encoder_outputs") if is_first_iteration else None
    media = _media_by_chunk(self, prompt, chunks, encoded or {})
    past = cache.get_seq_length()
    # `attention_mask` of an encoder-decoder is the encoder's, which is not cut.
    prefix = "decoder_" if self.config.is_encoder_decoder else ""
    mask_name, positions_name = prefix + "attention_mask", prefix + "position_ids"
    for index, chunk in enumerate(chunks):
        end = past + chunk.shape[1]
        kwargs = {name: v for name, v in model_kwargs.items() if name != "mm_encoder_outputs"}
        for name in (mask_name, positions_name, *TOKEN_TYPES):
            if (tensor := kwargs.pop(name, None)) is not None:
                is_cut = name == positions_name and tensor.shape[-1] > 1  # one is that of all
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


def _media_by_chunk(
    self: Any, prompt: torch.Tensor, chunks: tuple[torch.Tensor, ...], encoded: dict[str, Any]
) -> dict[int, dict[str, Any]]:
    """The encoded images and videos of each chunk: feature row ``i`` fills the ``i``-th placeholder."""
    media: dict[int, dict[str, Any]] = {}
    for modality, outputs in encoded.items():
        if outputs is None:
            continue
        is_placeholder = prompt == getattr(self.config, f"{modality}_token_id")
        feature_rows = is_placeholder.flatten().cumsum(0).view_as(is_placeholder) - 1
        widths = [chunk.shape[1] for chunk in chunks]
        parts = zip(is_placeholder.split(widths, 1), feature_rows.split(widths, 1), strict=True)
        for index, (is_filled, rows) in enumerate(parts):
            if is_filled.any():
                media.setdefault(index, {})[modality] = _take_features(outputs, rows[is_filled])
    return media


def _take_features(outputs: ModelOutput, rows: torch.Tensor) -> ModelOutput:
    """Rows of encoded features, in the container that the model reads them from."""

    def take(features: Any) -> Any:
        flat = torch.cat([feature.reshape(-1, feature.shape[-1]) for feature in features])[rows]
        return flat.unsqueeze(0) if isinstance(features, torch.Tensor) else [flat]

    taken = {"pooler_output": take(outputs["pooler_output"])}
    if (layers := outputs.get("deepstack_features")) is not None:
        is_per_layer = isinstance(layers[0][0], torch.Tensor)
        taken["deepstack_features"] = [take(layer) for layer in layers] if is_per_layer else layers
    return type(outputs)(**taken)


def forward_part(run: Run, n_tokens: int) -> None:
    """Forward the next ``n_tokens`` of a prompt, which are not its last, into the run's cache."""
    ids, kwargs = run.ids, run.model_kwargs
    shared = None if run.call is None else run.call.shared_prompt
    if shared is not None and shared_prompt.is_possible(run):  # each prompt once for its rows
        ids, kwargs = shared.ids, kwargs | shared.model_kwargs
    cache: Any = run.model_kwargs["past_key_values"]
    end = int(cache.get_seq_length()) + n_tokens
    part: ModelKwargs = {"past_key_values": cache, "use_cache": True}
    if run.model._supports_logits_to_keep():
        part["logits_to_keep"] = 1
    for name in ("attention_mask", "position_ids"):
        if (tensor := kwargs.get(name)) is not None:
            part[name] = tensor[..., :end]
    config = copy.copy(run.config)
    config._mask_length = end
    run.model._prefill(ids[:, :end], config, part, is_first_iteration=True)
