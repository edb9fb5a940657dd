"""Prompts that are forwarded once for all of their beams and samples, and prompts that are forwarded in parts.

The hooks see one row per beam or returned sequence, as upstream's do. The prefill runs on the inputs
as they were before that; its outputs and cache are expanded instead. Parts are for ``prefill_chunk_size``,
a stored prefix, and the engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeGuard
from weakref import WeakSet

import torch
from transformers import GenerationConfig, StaticCache
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from .. import families
from ..families import CACHE
from ..memory.batch import map_outputs
from ..memory.caches import layers
from ..state.call import Call, ModelKwargs, Prompt, SharedPrompt
from ..state.run import Run
from .row_states import (
    Draws,
    generator_states,
    has_list_of_rows,
    have_changed,
    module_tensors,
    set_generator_states,
)
from .step_inputs import MEDIA, TOKEN_TYPES

#: Classes of models of which a forward has drawn, or left states of its rows outside of the cache.
_NOT_SHARED: WeakSet[type] = WeakSet()


def prefill(run: Run, is_first_iteration: bool) -> ModelOutput:
    """Forward the prompt of each row, once where rows have the same one.

    A forward that draws, or leaves states elsewhere than in the cache, is undone; all rows follow.
    """
    assert run.call is not None
    # Its tensors are not needed after this.
    shared, run.call.shared_prompt = run.call.shared_prompt, None
    cache, device = run.model_kwargs.get(CACHE), run.ids.device

    def forward(ids: torch.Tensor, kwargs: ModelKwargs) -> Any:
        return run.model._prefill(ids, run.config, kwargs, is_first_iteration=is_first_iteration)

    if not _can_fan_out(shared, run.model, run.ids, cache):
        return forward(run.ids, run.model_kwargs)
    prompts = torch.arange(len(shared.ids), device=device).repeat_interleave(shared.n)
    states, spare = module_tensors(run.model), copy.deepcopy(cache)
    before = generator_states(device)
    kwargs = run.model_kwargs | shared.model_kwargs | {CACHE: cache}
    outputs = forward(shared.ids, with_own_states(kwargs))
    after = generator_states(device)
    others = (value for name, value in outputs.items() if name != CACHE)
    is_kept = not have_changed(run.model, states) and all(
        isinstance(value, torch.Tensor | tuple | ModelOutput | None) for value in others
    )
    if is_kept and not all(map(torch.equal, before, after)):  # it has drawn, or another thread has
        with Draws() as draws:
            again = kwargs | {CACHE: copy.deepcopy(spare)}
            forward(shared.ids, with_own_states(again))
        is_kept = not draws.has_drawn
    if is_kept:
        del spare
        if CACHE in outputs or layers.count(cache) is not None:  # XLM fills it, and returns none
            layers.repeat(outputs.get(CACHE, cache), prompts)
            run.shares_prompts = True

        # Without a cache, the model forwards all ids again at the next step.
        def repeat(part: torch.Tensor, dim: int) -> torch.Tensor:
            return part.repeat_interleave(shared.n, dim=dim)

        map_outputs(outputs, repeat, families.rows_of_states(run.model))
        # Idefics feeds its images again: since transformers 5.24, all images of all rows, one after the other.
        if isinstance(images := outputs.get("image_hidden_states"), torch.Tensor):
            outputs["image_hidden_states"] = repeat(images, 0)
        elif run.model.config.model_type == "idefics" and (images := outputs.get("image_outputs")):
            of_rows = images.last_hidden_state.unflatten(0, (len(shared.ids), -1))
            images.last_hidden_state = repeat(of_rows, 0).flatten(0, 1)
        return outputs
    set_generator_states(device, before)
    _NOT_SHARED.add(type(run.model))
    vars(cache).clear()
    vars(cache).update(vars(spare))
    if layers.count(cache) is not None:
        layers.take(cache, prompts)
    outputs = forward(run.ids, run.model_kwargs)
    if all(map(torch.equal, before, generator_states(device))):
        set_generator_states(device, after)  # drawn once: BigBird's first forward makes layers
    return outputs


def with_own_states(kwargs: ModelKwargs) -> ModelKwargs:
    """``kwargs`` with a copy of the encoder's states: some decoders write to what they get."""
    if (states := kwargs.get("encoder_outputs")) is None:
        return kwargs
    copies = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in states.items()}
    return kwargs | {"encoder_outputs": type(states)(**copies)}


def can_share_prefill(run: Run) -> bool:
    """Whether ``prefill`` will forward each prompt once for several rows."""
    shared = None if run.call is None else run.call.shared_prompt
    return _can_fan_out(shared, run.model, run.ids, run.model_kwargs.get(CACHE))


def will_share_prefill(model: Any, call: Call, prompt: Prompt) -> bool:
    """Whether the call's own loop will fan out after the prefill."""
    cache = prompt.model_kwargs.get(CACHE)
    return (
        call.is_own_method
        and call.strategy.shares_prefill
        and _can_fan_out(call.shared_prompt, model, prompt.ids, cache)
    )


def _can_fan_out(
    shared: SharedPrompt | None, model: Any, ids: torch.Tensor, cache: Any
) -> TypeGuard[SharedPrompt]:
    """Whether all that the prefill leaves behind is in a cache that can be expanded."""
    if shared is None or not isinstance(cache, Cache):
        return False
    is_shared = len(ids) == len(shared.ids) * shared.n and ids.shape[1] == shared.ids.shape[1]
    is_expanded = layers.count(cache) not in (None, len(shared.ids))
    if not is_shared or is_expanded or layers.is_foreign(cache) or layers.is_offloading(cache):
        return False
    is_static = isinstance(layers.decoder_cache(cache), StaticCache)
    if is_static and not families.masks_filled_static_cache(model):
        return False  # NLLB-MoE's router reads another row's mask if there are fewer rows
    plain = (torch.Tensor, ModelOutput, bool, int, float, str, dict, list, tuple, type(None))
    others = (value for name, value in shared.model_kwargs.items() if name != CACHE)
    return (
        not hasattr(model, "_reorder_cache")  # RAG reorders documents, too
        and not has_list_of_rows(shared.model_kwargs, len(ids))
        and type(model) not in _NOT_SHARED
        and all(isinstance(value, plain) for value in others)
    )


# ---------------------------------------------------------------- in parts


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
    if (cache := model_kwargs.get(CACHE)) is None:
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
        model_kwargs[CACHE] = getattr(outputs, CACHE)
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
    if (deepstack := outputs.get("deepstack_features")) is not None:
        is_per_layer = isinstance(deepstack[0][0], torch.Tensor)
        taken["deepstack_features"] = list(map(take, deepstack)) if is_per_layer else deepstack
    return type(outputs)(**taken)


def forward_part(run: Run, n_tokens: int) -> None:
    """Forward the next ``n_tokens`` of a prompt, which are not its last, into the run's cache."""
    ids, kwargs = run.ids, run.model_kwargs
    shared = None if run.call is None else run.call.shared_prompt
    if shared is not None and can_share_prefill(run):  # each prompt once for its rows
        ids, kwargs = shared.ids, kwargs | shared.model_kwargs
    cache: Any = run.model_kwargs[CACHE]
    end = int(cache.get_seq_length()) + n_tokens
    part: ModelKwargs = {CACHE: cache, "use_cache": True}
    if run.model._supports_logits_to_keep():
        part["logits_to_keep"] = 1
    for name in ("attention_mask", "position_ids"):
        if (tensor := kwargs.get(name)) is not None:
            part[name] = tensor[..., :end]
    config = copy.copy(run.config)
    config._mask_length = end
    run.model._prefill(ids[:, :end], config, part, is_first_iteration=True)
