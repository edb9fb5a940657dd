"""Stage 2: compute the ids, mask and positions of the prompt from the caller's arguments."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, StaticCache
from transformers.tokenization_python import ExtensionsTrie
from transformers.utils.generic import is_flash_attention_requested

from .. import families
from ..families import parameters
from ..memory.caches import cache_kind
from ..running.row_states import is_row_wise
from ..settings.fields import require_tokenizer
from ..settings.logs import logger
from ..state.call import Call, ModelKwargs, Prompt, SharedPrompt
from . import rows, validate

#: transformers' functions that this module extends: ``hfgen.patch`` replaces them in transformers' class.
UPSTREAMS_MODEL_INPUTS: Any = GenerationMixin._prepare_model_inputs
UPSTREAMS_ENCODING: Any = GenerationMixin._prepare_multimodal_encoder_kwargs_for_generation
UPSTREAMS_EXPANSION: Any = GenerationMixin._expand_inputs_for_generation


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
    is_static = isinstance(model_kwargs.get("past_key_values"), StaticCache)
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
        if prompt.model_kwargs.get("decoder_attention_mask") is None:  # which the hook would extend
            prompt.model_kwargs.pop("decoder_attention_mask", None)
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
        _follow_length(model, prompt, ids, config._pad_token_tensor)


def _follow_length(model: Any, prompt: Prompt, ids: torch.Tensor, pad: Any) -> None:
    """Mask and positions for healed ``prompt.ids``, longer than ``ids`` or padded, as upstream has them."""
    model_kwargs, healed = prompt.model_kwargs, prompt.ids
    is_padded = model_kwargs.get("attention_mask") is not None
    if healed.shape == ids.shape or not (is_padded or healed.shape[1] > ids.shape[1]):
        return
    if is_padded:
        model_kwargs["attention_mask"] = healed.ne(pad).long()
    if model_kwargs.get("position_ids") is not None:
        position_ids = model._prepare_position_ids_for_generation(healed, model_kwargs)
        model_kwargs["position_ids"] = position_ids


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

    It comes as ``inputs``, by name, or as ``inputs_embeds``; else it is one BOS token per row. Raises
    ``ValueError`` if it comes twice; upstream's error prints all numbers of both tensors.
    """
    has_encoder = self.config.is_encoder_decoder and hasattr(self, "encoder")
    name = (self.encoder if has_encoder else self).main_input_name
    if inputs is not None and (named := model_kwargs.get(name)) is not None:
        raise ValueError(
            f"The prompt was passed twice, as `inputs` of shape {tuple(inputs.shape)} and as `{name}` of "
            f"shape {tuple(named.shape)}. Pass one of them."
        )
    return UPSTREAMS_MODEL_INPUTS(self, inputs, bos_token_id, model_kwargs)


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


def supports_mm_encoder_outputs(self: Any) -> bool:
    """Whether forward takes images and videos that were encoded before."""
    return "mm_encoder_outputs" in parameters(self.forward)


def prepare_multimodal_encoder_kwargs_for_generation(
    self: Any, model_kwargs: ModelKwargs
) -> ModelKwargs:
    """Encode images and videos ahead of the prefill; their raw inputs leave the kwargs.

    The caller's ``mm_encoder_outputs`` stay as they are.
    """
    model_kwargs["mm_encoder_outputs"] = dict(model_kwargs.get("mm_encoder_outputs") or {})
    return UPSTREAMS_ENCODING(self, model_kwargs)


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
    if (outputs := model_kwargs.get("encoder_outputs")) is not None:
        model_kwargs["encoder_outputs"] = copy.copy(outputs)
    if (encoded := model_kwargs.get("mm_encoder_outputs")) is not None:
        copies = {modality: copy.copy(outputs) for modality, outputs in encoded.items()}
        model_kwargs["mm_encoder_outputs"] = copies
    return UPSTREAMS_EXPANSION(self, expand_size, is_encoder_decoder, input_ids, **model_kwargs)


def heal_tokens(self: Any, input_ids: torch.Tensor, tokenizer: Any = None) -> torch.Tensor:
    """Replace the last token of each prompt by the likeliest token that starts with its text.

    Returns ids ``(rows, length)`` of the stripped and retokenised prompts, whose length may differ.
    """
    require_tokenizer(tokenizer, "token_healing", True)
    bos_id, pad_id = tokenizer.bos_token_id, tokenizer.pad_token_id
    prompts = [text.strip() for text in tokenizer.decode(input_ids, skip_special_tokens=True)]
    ids = tokenizer(prompts, return_tensors="pt", padding=True).input_ids.to(input_ids.device)
    ids = torch.where(ids == bos_id, pad_id, ids)  # healing is not to be conditioned on BOS
    if ids.numel() == 0:
        return ids

    vocabulary = tokenizer.get_vocab()
    trie = ExtensionsTrie(vocabulary)
    space_id = tokenizer.convert_tokens_to_ids(" ")
    space = None if space_id is None else tokenizer.convert_ids_to_tokens(space_id)[0]
    one_token = GenerationConfig(max_new_tokens=1, pad_token_id=pad_id)
    for row in ids:
        if (row == pad_id).all():
            continue
        tail_id = row[-1].item()
        tail = tokenizer.decode(tail_id)
        tail = tail if space is None else tail.replace(" ", space)  # as the vocabulary spells it
        # A part of a character has no spelling, and then nothing in the vocabulary extends it.
        extensions = (token for token in trie.extensions(tail) if token in vocabulary)
        bias = {(vocabulary[token],): 10.0 for token in extensions}
        if not bias.keys() - {(tail_id,)} or len(row) == 1:
            continue  # nothing to choose from, or nothing to choose by
        bias[(tail_id,)] = 11.0  # a whole word is rather kept than extended
        one_token.update(sequence_bias=bias)
        context = row[:-1]
        if (row != pad_id).sum() == 1:
            context[-1] = bos_id
        row[:] = self.generate(context.unsqueeze(0), generation_config=one_token)[0]
    return ids
