"""How the model is run: the prefill, whole or in chunks, the next-token forward, and eager or compiled."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation.utils import (
    ALL_CACHE_NAMES,
    MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL,
)
from transformers.masking_utils import create_masks_for_generate
from transformers.pytorch_utils import move_to_device
from transformers.utils import ModelOutput
from transformers.utils.generic import is_flash_attention_requested

from . import buffers
from .caches.rows import decoder_cache
from .caches.static import Compiled
from .call import ModelKwargs, Run
from .logs import logger

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


def executor(model: Any, config: GenerationConfig, model_kwargs: ModelKwargs) -> Callable:
    """The model's forward, compiled where cache and device allow it."""
    if model._valid_auto_compile_criteria(model_kwargs, config):
        cache = model_kwargs.get("past_key_values")
        compiled = getattr(vars(model).get("_compiled_call"), "_torchdynamo_orig_callable", None)
        if getattr(compiled, "__self__", model) is not model:
            del model._compiled_call  # a copied model has that of the one that it is a copy of
        return Compiled(model.get_compiled_call(config.compile_config), cache)
    return model.__call__


def next_token(run: Run, execute: Callable, ids: torch.Tensor | None = None) -> ModelOutput:
    """Forward what the cache does not hold yet: the newest token, or all without a cache.

    ``ids`` stand for ``run.ids``, if they are not those of all rows.
    """
    model_inputs = run.model.prepare_inputs_for_generation(
        run.ids if ids is None else ids,
        next_sequence_length=1 if run.model_kwargs["use_cache"] else None,
        **run.model_kwargs,
    )
    return execute(**model_inputs, return_dict=True)


def candidates(
    run: Run,
    ids: torch.Tensor,
    n_new: int,
    *,
    is_first: bool,
    **overrides: Any,
) -> ModelOutput:
    """Forward ``ids (rows, length)``, of which ``n_new`` come after ``run.ids``.

    Logits are those of the last known token and of the ``n_new`` ones. The first forward takes what
    the cache does not hold of the prompt, too. ``run.model_kwargs`` are left as they are: what of
    them grows with the ids is grown for this forward alone. ``overrides``: other arguments.
    """
    model_kwargs = resized(run, n_new)
    n_fed: int | None = n_new + 1
    if is_first:
        n_fed = _uncached_length(run.model, run.ids, run.config, run.model_kwargs)
        n_fed = None if n_fed in (None, run.ids.shape[1]) else n_fed + n_new
    model_inputs = run.model.prepare_inputs_for_generation(
        ids, next_sequence_length=n_fed, is_first_iteration=is_first, **model_kwargs
    )
    if "logits_to_keep" in model_inputs:
        model_inputs["logits_to_keep"] = n_new + 1
    outputs: ModelOutput = run.model(**model_inputs | overrides)
    return outputs


def resized(run: Run, n_new: int) -> ModelKwargs:
    """A copy of the model kwargs for ids that are ``n_new`` longer, or shorter if that is negative."""
    model_kwargs = dict(run.model_kwargs)
    prefix = "decoder_" if run.is_encoder_decoder else ""
    fillers = {
        prefix + "attention_mask": buffers.ones,
        prefix + "position_ids": buffers.count_on,
        "token_type_ids": buffers.repeat_last,
        "mm_token_type_ids": buffers.zeros,
    }
    for name, fill in fillers.items():
        if (tensor := model_kwargs.get(name)) is not None and n_new:
            grows = n_new > 0
            model_kwargs[name] = buffers.grow(tensor, n_new, fill) if grows else tensor[..., :n_new]
    if model_kwargs.get(prefix + "attention_mask") is not None and n_new:
        for name in ("cross_attention_mask", "image_attention_mask"):  # (rows, length, …)
            tensor = model_kwargs.get(name)
            if tensor is not None and tensor.shape[1]:
                more = tensor[:, -1:].expand(-1, max(n_new, 0), *tensor.shape[2:])
                length = tensor.shape[1] + n_new
                model_kwargs[name] = torch.cat([tensor, more], dim=1)[:, :length]
    return model_kwargs


def last_logits(outputs: ModelOutput, device: torch.device) -> torch.Tensor:
    """Logits ``(rows, vocab)`` of the last position, float32.

    A copy, since a view would keep the logits of the whole prompt alive.
    """
    return outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=device)


# --- hooks --------------------------------------------------------------------------------------


def prepare_inputs_for_generation(
    self: Any,
    input_ids: torch.Tensor,
    next_sequence_length: int | None = None,
    past_key_values: Cache | None = None,
    attention_mask: torch.Tensor | None = None,
    inputs_embeds: torch.Tensor | None = None,
    is_first_iteration: bool | None = False,
    **kwargs: Any,
) -> dict[str, Any]:
    """The arguments of the next forward.

    ``input_ids (rows, length)`` are cut to the last ``next_sequence_length`` tokens, and so is
    everything that goes with them token by token. Embeddings stand in for the ids of the first
    forward only. With a compilable cache the mask becomes four-dimensional here, so that the
    compiled graph sees one shape. All other kwargs are passed on.
    """
    is_encoder_decoder = self.config.is_encoder_decoder
    prefix = "decoder_" if is_encoder_decoder else ""
    ids_name, positions_name = prefix + "input_ids", prefix + "position_ids"
    mask_name = prefix + "attention_mask"

    # Clones, so that strides are the same at every step whatever the ids are a view of.
    inputs: dict[str, Any] = {}
    if inputs_embeds is not None and is_first_iteration and not is_encoder_decoder:
        tensor = _last(inputs_embeds, next_sequence_length)
        inputs[ids_name], inputs["inputs_embeds"] = None, _contiguous_clone(tensor)
    else:
        tensor = _last(input_ids, next_sequence_length)
        inputs[ids_name] = _contiguous_clone(tensor)
    batch_size, length = tensor.shape[:2]

    if past_key_values is not None:
        inputs["past_key_values"] = past_key_values
    for name in (positions_name, *TOKEN_TYPES):
        if (value := kwargs.pop(name, None)) is not None:
            if value.shape[-1] != length:
                value = _contiguous_clone(value[..., -length:])
            inputs[name] = value

    encoder_mask = attention_mask if is_encoder_decoder else None
    mask = kwargs.pop("decoder_attention_mask", None) if is_encoder_decoder else attention_mask
    if (
        isinstance(past_key_values, Cache)
        and past_key_values.is_compileable
        and (mask is None or mask.ndim == 2)
    ):
        create_masks = getattr(self, "create_masks_for_generate", create_masks_for_generate)
        mask = create_masks(
            config=self.config,
            # Only shape, dtype and device of the embeddings are read.
            inputs_embeds=torch.empty(
                (batch_size, length, 0), dtype=self.dtype, device=input_ids.device
            ),
            attention_mask=mask,
            past_key_values=past_key_values,
            position_ids=inputs.get(positions_name),
            # Read by the models that have their own create_masks_for_generate.
            block_sequence_ids=inputs.get("block_sequence_ids"),
            token_type_ids=inputs.get("token_type_ids"),
            mm_token_type_ids=inputs.get("mm_token_type_ids"),
            is_first_iteration=is_first_iteration,
        )
        if isinstance(mask, dict):
            mask = {kind: m if m is None else m.contiguous() for kind, m in mask.items()}
        elif mask is not None:
            mask = mask.contiguous()
    if mask is not None:
        inputs[mask_name] = mask
    if encoder_mask is not None:
        inputs["attention_mask"] = encoder_mask

    has_cached_media = not is_first_iteration and kwargs.get("use_cache", True)
    for name, value in kwargs.items():
        if name in inputs or name in ("labels", "next_sequence_length"):
            continue
        if has_cached_media and name in MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL:
            continue
        inputs[name] = value

    if self.is_remote_code() and "cache_position" in inspect.signature(self.forward).parameters:
        logger.warning_once(
            f"{type(self).__name__} is remote code whose forward takes `cache_position`, which "
            "transformers no longer has. It is passed for now; ask the author to remove it."
        )
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        inputs["cache_position"] = torch.arange(length, device=input_ids.device) + past

    # Ids may live on the CPU while the model is elsewhere; what is forwarded follows the model.
    fed = inputs.get("inputs_embeds", inputs[ids_name])
    if fed is not None and fed.device != (device := self.device) and device.type != "meta":
        inputs = move_to_device(inputs, device)
    return inputs


def _last(tensor: torch.Tensor, count: int | None) -> torch.Tensor:
    return tensor if count is None else tensor[:, -count:]


def _contiguous_clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def update_model_kwargs_for_generation(
    self: Any,
    outputs: ModelOutput,
    model_kwargs: ModelKwargs,
    is_encoder_decoder: bool = False,
    num_new_tokens: int = 1,
) -> ModelKwargs:
    """Take the cache from ``outputs``; add ``num_new_tokens`` to mask, positions and token types.

    Nothing is cut here; ``prepare_inputs_for_generation`` cuts.
    """
    for name in ALL_CACHE_NAMES:
        if name in outputs:
            # XLNet and Reformer return their caches under names that they do not take them by.
            is_renamed = name in ("past_buckets_states", "mems")
            model_kwargs["past_key_values" if is_renamed else name] = getattr(outputs, name)
            break

    prefix = "decoder_" if is_encoder_decoder else ""
    fillers = {
        prefix + "attention_mask": buffers.ones,
        prefix + "position_ids": buffers.count_on,
        "mm_token_type_ids": buffers.zeros,
    }
    for name, fill in fillers.items():
        if (tensor := model_kwargs.get(name)) is not None:
            model_kwargs[name] = buffers.grow(tensor, num_new_tokens, fill)
    if (types := model_kwargs.get("token_type_ids")) is not None:
        model_kwargs["token_type_ids"] = (
            buffers.grow(types, 1, buffers.repeat_last)
            if num_new_tokens == 1
            else torch.cat([types, types[:, -num_new_tokens:]], dim=-1)
        )
    return model_kwargs


def prefill(
    self: Any,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: ModelKwargs,
    is_first_iteration: bool = True,
) -> ModelOutput:
    """Forward the prompt, or as much of it as the cache does not hold; returns the last outputs.

    A continued prompt comes in full, or only its new tokens with a mask over all of it. An
    assistant is called again and again with a growing prompt: not its first iteration.
    """
    embeds = None
    if is_first_iteration and not self.config.is_encoder_decoder:
        embeds = model_kwargs.get("inputs_embeds")
    new_length = _uncached_length(self, input_ids, generation_config, model_kwargs, embeds)
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


def _uncached_length(
    self: Any,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: ModelKwargs,
    embeds: torch.Tensor | None = None,
) -> int | None:
    """How many tokens of the prompt the cache does not hold; ``None`` for all that is given."""
    if (cache := model_kwargs.get("past_key_values")) is None:
        return None
    mask = model_kwargs.get(
        "decoder_attention_mask" if self.config.is_encoder_decoder else "attention_mask"
    )
    whole_length = getattr(config, "_mask_length", -1) if mask is None else mask.shape[1]
    if embeds is not None:
        return int(embeds.shape[1] - cache.get_seq_length())
    if whole_length == input_ids.shape[1]:
        return int(input_ids.shape[1] - cache.get_seq_length())
    return None


def _prefill_in_chunks(
    self: Any,
    input_ids: torch.Tensor,
    embeds: torch.Tensor | None,
    config: GenerationConfig,
    model_kwargs: ModelKwargs,
    new_length: int | None,
    is_first_iteration: bool,
) -> ModelOutput:
    """Forward ``config.prefill_chunk_size`` tokens of the prompt at a time.

    Activations then take the memory of a chunk, not of the prompt. Raises ``ValueError`` without
    a cache, or if raw images would have to be cut.
    """
    cache = model_kwargs.get("past_key_values")
    if cache is None:
        raise ValueError(
            f"`prefill_chunk_size`={config.prefill_chunk_size} needs a cache to put the chunks "
            "into, and `use_cache` is False or the model has none."
        )
    prompt = input_ids if embeds is None else embeds
    prompt = prompt[:, -(new_length or 0) :]
    chunks = torch.split(prompt, int(config.prefill_chunk_size), dim=1)
    raw_media = [
        name
        for name in MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
        if name != "mm_encoder_outputs" and model_kwargs.get(name) is not None
    ]
    if is_first_iteration and len(chunks) > 1 and raw_media:
        raise ValueError(
            f"`prefill_chunk_size` cannot cut {raw_media}, which {type(self).__name__} encodes in "
            "its forward. Leave it out."
        )
    execute = executor(self, config, model_kwargs)
    # Forward sees the part of these that belongs to the chunk; they are put back at the end.
    whole = {
        name: value
        for name in ("attention_mask", "position_ids", *TOKEN_TYPES, "mm_encoder_outputs")
        if (value := model_kwargs.pop(name, None)) is not None
    }
    media = _media_by_chunk(self, prompt, chunks, whole) if is_first_iteration else {}
    if embeds is not None:
        model_kwargs.pop("inputs_embeds")
    past = cache.get_seq_length()
    for index, chunk in enumerate(chunks):
        end = past + chunk.shape[1]
        for name, tensor in whole.items():
            if name == "position_ids":
                model_kwargs[name] = tensor[..., past:end]
            elif name != "mm_encoder_outputs":
                model_kwargs[name] = tensor[..., :end]
        if embeds is not None:
            model_kwargs["inputs_embeds"] = chunk
        model_inputs = self.prepare_inputs_for_generation(
            input_ids if embeds is not None else chunk,
            is_first_iteration=is_first_iteration,
            **model_kwargs,
        )
        if index in media:
            model_inputs["mm_encoder_outputs"] = media[index]
        outputs = execute(**model_inputs, return_dict=True)
        model_kwargs["past_key_values"] = outputs.past_key_values
        past = end
    if embeds is not None:
        model_kwargs["inputs_embeds"] = embeds
    model_kwargs.update({"attention_mask": None, "position_ids": None} | whole)
    return outputs


def _media_by_chunk(
    self: Any, prompt: torch.Tensor, chunks: tuple[torch.Tensor, ...], whole: dict[str, Any]
) -> dict[int, dict[str, Any]]:
    """Which encoded images and videos go with which chunk.

    Feature row ``i`` of a modality fills its ``i``-th placeholder, counted row by row through the
    whole batch, so a chunk gets the features of the placeholders that it has.
    """
    media: dict[int, dict[str, Any]] = {}
    for modality, outputs in (whole.get("mm_encoder_outputs") or {}).items():
        if outputs is None:
            continue
        is_placeholder = prompt == getattr(self.config, f"{modality}_token_id")
        feature_rows = is_placeholder.flatten().cumsum(0).view_as(is_placeholder) - 1
        start = 0
        for index, chunk in enumerate(chunks):
            part = slice(start, start + chunk.shape[1])
            start = part.stop
            if (filled := is_placeholder[:, part]).any():
                rows = feature_rows[:, part][filled]
                media.setdefault(index, {})[modality] = _take_features(outputs, rows)
    return media


def _take_features(outputs: ModelOutput, rows: torch.Tensor) -> ModelOutput:
    """The given rows of encoded features, in the container that the model reads them from."""

    def take(features: Any) -> Any:
        flat = torch.cat([feature.reshape(-1, feature.shape[-1]) for feature in features])[rows]
        return flat.unsqueeze(0) if isinstance(features, torch.Tensor) else [flat]

    taken = {"pooler_output": take(outputs["pooler_output"])}
    if (layers := outputs.get("deepstack_features")) is not None:
        is_per_layer = isinstance(layers[0][0], torch.Tensor)
        taken["deepstack_features"] = [take(layer) for layer in layers] if is_per_layer else layers
    return type(outputs)(**taken)


def supports_logits_to_keep(self: Any) -> bool:
    """Whether forward can leave out the logits of all but the last positions."""
    return "logits_to_keep" in inspect.signature(self.forward).parameters


def valid_auto_compile_criteria(
    self: Any, model_kwargs: ModelKwargs, generation_config: GenerationConfig
) -> bool:
    """Whether to compile forward: a cache of fixed shape, and nothing offloaded.

    Accelerators compile by themselves, a CPU if there is a ``compile_config``.
    """
    compile_config = generation_config.compile_config
    if generation_config.disable_compile:
        return False
    cache = model_kwargs.get("past_key_values", model_kwargs.get("cache_params"))
    # A dynamic cache with linear attention alone has fixed shapes too, but was not asked for.
    has_fixed_shapes = (
        cache is not None
        and cache.is_compileable
        and type(decoder_cache(cache)) is not DynamicCache
    )
    can_compile = has_fixed_shapes and (
        self.device.type in ("cuda", "xpu", "neuron", "tpu")
        or bool(compile_config is not None and compile_config._compile_all_devices)
        or (compile_config is not None and self.device.type == "cpu")
    )
    if (quantizer := getattr(self, "hf_quantizer", None)) is not None:
        can_compile = can_compile and quantizer.is_compileable
    devices = set(getattr(self, "hf_device_map", {}).values())
    if "disk" in devices or ("cpu" in devices and len(devices) > 1):
        can_compile = False
    if compile_config is not None and not can_compile:
        logger.warning_once(
            "`compile_config` is set, but forward is not compiled: that takes a static cache, no "
            "offloading, and an accelerator or a CPU."
        )
    if can_compile:
        os.environ["TOKENIZERS_PARALLELISM"] = "0"  # its threads do not survive the forks
        is_flash = is_flash_attention_requested(self.config)
        if is_flash and compile_config is not None and compile_config.fullgraph:
            logger.warning_once(
                "`compile_config.fullgraph` is set to False: flash attention breaks the graph."
            )
            compile_config.fullgraph = False
    return bool(can_compile)


@contextmanager
def optimize_model_for_decode(self: Any) -> Iterator[None]:
    """Within, mixture-of-experts layers use the kernel that is faster for few tokens.

    On accelerators, that is ``batched_mm`` in place of ``grouped_mm``. Experts may sit in a
    sub-model, so the implementation of every part is read, and put back.
    """
    implementations = self.get_experts_implementation()
    if self.device.type == "cpu" or "grouped_mm" not in implementations.values():
        yield
        return
    logger.info_once("Decoding with the `batched_mm` experts instead of `grouped_mm`.")
    self.set_experts_implementation(
        {
            part: "batched_mm" if name == "grouped_mm" else name
            for part, name in implementations.items()
        }
    )
    try:
        yield
    finally:
        self.set_experts_implementation(implementations)
