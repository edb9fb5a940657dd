"""Stage 2: compute the ids, mask and positions of the prompt from the caller's arguments."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from transformers import GenerationConfig, StaticCache
from transformers.utils.generic import is_flash_attention_requested

from .. import families
from ..families import CACHE, parameters
from ..memory.batch import row_dim
from ..memory.caches import cache_kind
from ..running.row_states import is_row_wise
from ..settings.fields import require_tokenizer
from ..settings.logs import logger
from ..state.call import Call, ModelKwargs, Prompt, SharedPrompt
from . import rows, validate
from .healing import follow_length, heal_tokens


def prepare(model: Any, call: Call, model_kwargs: ModelKwargs) -> Prompt:
    """The prompt, ready to be decoded: main input, special tokens, mask, positions, encoder, ids."""
    has_mask = model_kwargs.get("attention_mask") is not None
    main_input, name, model_kwargs = model._prepare_model_inputs(
        call.request.inputs, call.config.bos_token_id, model_kwargs
    )
    prompt = Prompt(main_input, name, main_input.shape[0], model_kwargs)
    if "inputs_tensor" in parameters(call.method):
        call.mode_kwargs["inputs_tensor"] = main_input
    model._prepare_special_tokens(
        call.config, has_mask, device=main_input.device, batch_size=prompt.batch_size
    )
    if call.rows is not None:
        rows.check_call(call, call.rows, prompt)
        rows.prepare_special_tokens(model, call, call.rows, prompt)
    validate.check_prompt(model, call, prompt)
    # An overridden ``heal_tokens`` may do without a tokenizer.
    if call.config.token_healing and getattr(model.heal_tokens, "__func__", None) is heal_tokens:
        require_tokenizer(call.mode_kwargs.get("tokenizer"), "token_healing", True)
        if model.config.is_encoder_decoder and model_kwargs.get("decoder_input_ids") is None:
            raise ValueError(
                "`token_healing` has nothing to heal: pass text as `decoder_input_ids`."
            )
    if not model.config.is_encoder_decoder:  # these infer their own masks and positions
        if prompt.batch_size > 1:
            _warn_of_right_padding(call, prompt)
        if name == "inputs_embeds":  # without a cache, the embeddings would be fed at every step
            call.config.use_cache = True
        _prepare_mask_and_positions(model, call, prompt, has_mask)
    elif model_kwargs.get("position_ids") is None:  # Whisper, Moonshine pass it on beside theirs
        model_kwargs.pop("position_ids", None)
    is_encoded = model_kwargs.get("encoder_outputs") is not None
    if not is_encoded or model_kwargs.get("mm_encoder_outputs") is None:
        with nullcontext() if call.ranks is None else call.ranks.encoding(model, call, prompt):
            prompt.model_kwargs = model._maybe_prepare_encoder_kwargs_for_generation(
                main_input, model_kwargs, name, call.config
            )
    prepare_ids(model, call, prompt)
    return prompt


def _prepare_mask_and_positions(model: Any, call: Call, prompt: Prompt, has_mask: bool) -> None:
    """Infer the attention mask and the positions, if forward takes them; drop a mask of ones."""
    config, model_kwargs = call.config, prompt.model_kwargs
    accepted = parameters(model.forward)
    if not has_mask and "attention_mask" in accepted:
        model_kwargs["attention_mask"] = model._prepare_attention_mask_for_generation(
            prompt.main_input, config, model_kwargs
        )
    if model_kwargs.get("position_ids") is None and "position_ids" in accepted:
        model_kwargs["position_ids"] = model._prepare_position_ids_for_generation(
            prompt.main_input, model_kwargs
        )

    # Kernels are faster without a mask. Flash attention needs one to unpad a static cache.
    is_static = isinstance(model_kwargs.get(CACHE), StaticCache)
    is_static = is_static or cache_kind(config.cache_implementation).compiles
    needs_mask = is_flash_attention_requested(model.config) and is_static
    mask = model_kwargs["attention_mask"] if "attention_mask" in accepted else None
    if mask is not None and not needs_mask and (mask == 1).all():
        config._mask_length = mask.shape[1]  # tells the prefill what a cache already covers
        model_kwargs["attention_mask"] = None


def prepare_ids(model: Any, call: Call, prompt: Prompt) -> None:
    """The ids to decode from, one row per beam or returned sequence, healed if asked for."""
    config = call.config
    if model.config.is_encoder_decoder:
        ids, prompt.model_kwargs = model._prepare_decoder_input_ids_for_generation(
            batch_size=prompt.batch_size,
            model_input_name=prompt.main_input_name,
            model_kwargs=prompt.model_kwargs,
            decoder_start_token_id=config._decoder_start_token_tensor,
            device=prompt.main_input.device,
        )
    else:
        is_ids = prompt.main_input_name == "input_ids"
        ids = prompt.main_input if is_ids else prompt.model_kwargs.pop("input_ids")
    expand_size = max(config.num_beams, config.num_return_sequences)
    if expand_size > 1 and not config.token_healing and is_row_wise(model):
        call.shared_prompt = SharedPrompt(ids, dict(prompt.model_kwargs), expand_size)
    prompt.ids, prompt.model_kwargs = model._expand_inputs_for_generation(
        input_ids=ids,
        expand_size=expand_size,
        is_encoder_decoder=model.config.is_encoder_decoder,
        **prompt.model_kwargs,
    )
    if config.token_healing:
        ids = prompt.ids
        prompt.ids = model.heal_tokens(ids, call.mode_kwargs.get("tokenizer"))
        follow_length(model, prompt, ids, config._pad_token_tensor)


def _warn_of_right_padding(call: Call, prompt: Prompt) -> None:
    pad, ids = call.config._pad_token_tensor, prompt.main_input
    if pad is None or ids.ndim != 2:
        return
    mask = prompt.model_kwargs.get("attention_mask")
    if mask is None or mask.shape != ids.shape:
        mask = ids != pad  # a guess, since the pad may be an ordinary token
    if (mask[:, -1] == 0).any():
        logger.warning(
            "Some rows end in padding. A decoder-only model continues from the last token: set "
            "`padding_side='left'` on the tokenizer."
        )


def prepare_model_inputs(
    self: Any,
    inputs: torch.Tensor | None,
    bos_token_id: torch.Tensor | None,
    model_kwargs: ModelKwargs,
) -> tuple[torch.Tensor, str | None, ModelKwargs]:
    """The main input, its name, and the model kwargs without it.

    It comes as ``inputs``, by name, or as ``inputs_embeds``; else it is one BOS token per row.
    """
    is_encoder_decoder = self.config.is_encoder_decoder
    has_encoder = is_encoder_decoder and hasattr(self, "encoder")
    name = (self.encoder if has_encoder else self).main_input_name
    named = model_kwargs.pop(name, None)
    if named is not None and inputs is not None:
        raise ValueError(
            f"The prompt was passed twice, as `inputs` of shape {tuple(inputs.shape)} and as `{name}` of "
            f"shape {tuple(named.shape)}. Pass one of them."
        )
    inputs = named if inputs is None else inputs

    embeds = model_kwargs.get("inputs_embeds")
    if name == "input_ids" and embeds is None:
        model_kwargs.pop("inputs_embeds", None)
    elif name == "input_ids":
        if not is_encoder_decoder:
            if "inputs_embeds" not in parameters(self.prepare_inputs_for_generation):
                raise ValueError(
                    f"{type(self).__name__} does not generate from `inputs_embeds`: its "
                    "prepare_inputs_for_generation() has no such argument. Pass `input_ids`."
                )
            # The ids stay in the kwargs: what comes after the prompt is appended to them.
            model_kwargs["input_ids"] = self._maybe_initialize_input_ids_for_generation(
                inputs, bos_token_id, model_kwargs=model_kwargs
            )
        elif inputs is not None:
            raise ValueError(
                "Both `inputs_embeds` and `input_ids` were passed to the encoder. Pass one of them."
            )
        inputs, name = embeds, "inputs_embeds"
    inputs = self._maybe_initialize_input_ids_for_generation(inputs, bos_token_id, model_kwargs)
    return inputs, name, model_kwargs


def maybe_initialize_input_ids_for_generation(
    self: Any,
    inputs: torch.Tensor | None,
    bos_token_id: torch.Tensor | None,
    model_kwargs: ModelKwargs,
) -> torch.Tensor:
    """``inputs``, or ids in their place: none beside embeddings, -100 of encoded ones, else BOS."""
    if inputs is not None:
        return inputs
    hidden_state = getattr(model_kwargs.get("encoder_outputs"), "last_hidden_state", None)
    if self.config.is_encoder_decoder and hidden_state is not None:
        return torch.full(
            hidden_state.shape[:-1], -100, dtype=torch.long, device=hidden_state.device
        )
    tensors = [value for value in model_kwargs.values() if isinstance(value, torch.Tensor)]
    batch_size = len(tensors[0]) if tensors else 1
    if "inputs_embeds" in model_kwargs:
        is_meta = self.device.type == "meta"  # of an offloaded model
        device = model_kwargs["inputs_embeds"].device if is_meta else self.device
        return torch.ones((batch_size, 0), dtype=torch.long, device=device)
    if bos_token_id is None:
        raise ValueError(
            "There is no prompt, and no `bos_token_id` to start from without one. Pass `input_ids`."
        )
    ones = torch.ones((batch_size, 1), dtype=torch.long, device=families.device_of(self))
    return ones * bos_token_id


def maybe_prepare_encoder_kwargs_for_generation(
    self: Any,
    inputs_tensor: torch.Tensor,
    model_kwargs: ModelKwargs,
    model_input_name: str | None,
    generation_config: GenerationConfig,
) -> ModelKwargs:
    """Add ``encoder_outputs`` or ``mm_encoder_outputs`` to the model kwargs, if the model has such."""
    if self.config.is_encoder_decoder and model_kwargs.get("encoder_outputs") is None:
        return self._prepare_text_encoder_decoder_kwargs_for_generation(
            inputs_tensor=inputs_tensor,
            model_kwargs=model_kwargs,
            model_input_name=model_input_name,
            generation_config=generation_config,
        )
    if self._supports_mm_encoder_outputs() and any(
        modality in self.input_modalities for modality in ("image", "video")
    ):
        return self._prepare_multimodal_encoder_kwargs_for_generation(model_kwargs)
    return model_kwargs


def supports_mm_encoder_outputs(self: Any) -> bool:
    """Whether forward takes images and videos that were encoded before."""
    return "mm_encoder_outputs" in parameters(self.forward)


def prepare_attention_mask_for_generation(
    self: Any,
    inputs_tensor: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: ModelKwargs,
) -> torch.Tensor:
    """A mask ``(batch, length)``: zeros at pad tokens, if these are in the ids and are not EOS."""
    ids = model_kwargs.get("input_ids")  # beside embeddings
    ids = inputs_tensor if ids is None or ids.shape[1] == 0 else ids
    pad, eos = generation_config._pad_token_tensor, generation_config._eos_token_tensor
    is_ids = ids.ndim == 2 and ids.dtype in (torch.int, torch.long)
    is_eos = pad is not None and eos is not None and (eos == pad).any()
    if pad is None or is_eos or not is_ids:
        return torch.ones(ids.shape[:2], dtype=torch.long, device=ids.device)
    return ids.ne(pad).long()


def prepare_decoder_input_ids_for_generation(
    self: Any,
    batch_size: int,
    model_input_name: str,
    model_kwargs: ModelKwargs,
    decoder_start_token_id: torch.Tensor,
    device: torch.device | None = None,
) -> tuple[torch.Tensor, ModelKwargs]:
    """Decoder ids ``(batch, length)`` of an encoder-decoder model, starting with its start token."""
    start = decoder_start_token_id.view(-1, 1)
    if decoder_start_token_id.ndim != 1:
        start_device = self.device if device is None else device
        start = start * torch.ones((batch_size, 1), dtype=torch.long, device=start_device)
    elif len(start) != batch_size:
        raise ValueError(
            f"`decoder_start_token_id` has to be one id or {batch_size}, one per row, but has "
            f"{len(start)}."
        )
    is_named = "decoder_input_ids" in model_kwargs or model_input_name == "input_ids"
    name = "decoder_input_ids" if is_named else "input_ids"
    if (ids := model_kwargs.pop(name, None)) is None:
        return start, model_kwargs
    if not families.keeps_decoder_prompt(self) and (ids[:, 0] != start[:, 0]).all():
        ids = torch.cat([start, ids], dim=-1)
        if (mask := model_kwargs.get("decoder_attention_mask")) is not None:
            mask = torch.cat([torch.ones_like(mask[:, :1]), mask], dim=-1)
            model_kwargs["decoder_attention_mask"] = mask
    return ids, model_kwargs


def expand_inputs_for_generation(
    self: Any,
    expand_size: int = 1,
    is_encoder_decoder: bool = False,
    input_ids: torch.Tensor | None = None,
    **model_kwargs: Any,
) -> tuple[torch.Tensor | None, ModelKwargs]:
    """Repeat each row: ``(batch, …)`` to ``(batch * expand_size, …)``; encoder outputs are a copy."""
    if expand_size == 1:
        return input_ids, model_kwargs
    if (multimodal := model_kwargs.get("mm_encoder_outputs")) is not None:
        # Before the ids: their placeholders say which outputs belong to which row.
        model_kwargs["mm_encoder_outputs"] = self._expand_multimodal_outputs(
            input_ids,
            {modality: copy.copy(outputs) for modality, outputs in multimodal.items()},
            expand_size=expand_size,
            inputs_embeds=model_kwargs.get("inputs_embeds"),
        )
    if input_ids is not None:
        input_ids = input_ids.repeat_interleave(expand_size, dim=0)
    model_kwargs = _expand_tensors(model_kwargs, expand_size)
    if is_encoder_decoder:
        if model_kwargs.get("encoder_outputs") is None:
            raise ValueError(
                "`encoder_outputs` is missing: an encoder-decoder model's inputs can be expanded "
                "only after its encoder has run."
            )
        model_kwargs["encoder_outputs"] = _expand_tensors(
            copy.copy(model_kwargs["encoder_outputs"]), expand_size
        )
    return input_ids, model_kwargs


def _expand_tensors(values: Any, expand_size: int) -> Any:
    for name in values:
        if isinstance(value := values[name], torch.Tensor):
            values[name] = value.repeat_interleave(expand_size, dim=row_dim(name, value))
    return values
