"""One prefill for all beams and samples of a prompt.

The hooks see one row per beam or returned sequence, as upstream's do. The prefill runs on the inputs
as they were before that; its outputs and cache are expanded instead.
"""

from __future__ import annotations

import copy
from typing import Any, TypeGuard
from weakref import WeakSet

import torch
from transformers import StaticCache
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from .. import families
from ..memory.batch import map_outputs
from ..memory.caches import layers
from ..state.call import Call, ModelKwargs, Prompt, SharedPrompt
from ..state.run import Run
from .row_states import (
    generator_states,
    has_list_of_rows,
    have_changed,
    module_tensors,
    set_generator_states,
)

#: Classes of models of which a forward has drawn, or left states of its rows outside of the cache.
_NOT_SHARED: WeakSet[type] = WeakSet()


def prefill(run: Run, is_first_iteration: bool) -> ModelOutput:
    """Forward the prompt of each row, once where rows have the same one.

    A forward that draws, or leaves states elsewhere than in the cache, is undone; all rows follow.
    """
    assert run.call is not None
    # Its tensors are not needed after this.
    shared, run.call.shared_prompt = run.call.shared_prompt, None
    cache, device = run.model_kwargs.get("past_key_values"), run.ids.device

    def forward(ids: torch.Tensor, kwargs: ModelKwargs) -> Any:
        return run.model._prefill(ids, run.config, kwargs, is_first_iteration=is_first_iteration)

    if not _can_fan_out(shared, run.model, run.ids, cache):
        return forward(run.ids, run.model_kwargs)
    prompts = torch.arange(len(shared.ids), device=device).repeat_interleave(shared.n)
    states, spare = module_tensors(run.model), copy.deepcopy(cache)
    before = generator_states(device)
    kwargs = run.model_kwargs | shared.model_kwargs | {"past_key_values": cache}
    outputs = forward(shared.ids, with_own_states(kwargs))
    after = generator_states(device)
    others = (value for name, value in outputs.items() if name != "past_key_values")
    if (
        all(map(torch.equal, before, after))
        and not have_changed(run.model, states)
        and all(isinstance(value, torch.Tensor | tuple | ModelOutput | None) for value in others)
    ):
        del spare
        if (cache := outputs.get("past_key_values")) is not None:
            layers.repeat(cache, prompts)
            run.shares_prompts = True

        # Without a cache, the model forwards all ids again at the next step.
        def repeat(part: torch.Tensor, dim: int) -> torch.Tensor:
            return part.repeat_interleave(shared.n, dim=dim)

        map_outputs(outputs, repeat, families.rows_of_states(run.model))
        # Idefics feeds its images again.
        if isinstance(images := outputs.get("image_hidden_states"), torch.Tensor):
            outputs["image_hidden_states"] = repeat(images, 0)
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


def is_possible(run: Run) -> bool:
    """Whether ``prefill`` will forward each prompt once for several rows."""
    shared = None if run.call is None else run.call.shared_prompt
    return _can_fan_out(shared, run.model, run.ids, run.model_kwargs.get("past_key_values"))


def is_ahead(model: Any, call: Call, prompt: Prompt) -> bool:
    """Whether the call's own loop will fan out after the prefill."""
    cache = prompt.model_kwargs.get("past_key_values")
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
    if not is_shared or is_expanded or layers.is_foreign(cache):
        return False
    is_static = isinstance(layers.decoder_cache(cache), StaticCache)
    if is_static and not families.masks_filled_static_cache(model):
        return False  # NLLB-MoE's router reads another row's mask if there are fewer rows
    plain = (torch.Tensor, ModelOutput, bool, int, float, str, dict, list, tuple, type(None))
    others = (value for name, value in shared.model_kwargs.items() if name != "past_key_values")
    return (
        not hasattr(model, "_reorder_cache")  # RAG reorders documents, too
        and not has_list_of_rows(shared.model_kwargs, len(ids))
        and type(model) not in _NOT_SHARED
        and all(isinstance(value, plain) for value in others)
    )
