"""Prefill once, fan out: beams and samples of one prompt share its forward pass.

The hooks see expanded inputs, as upstream's do: one row per beam or returned sequence. What the prompts
were before is kept, the prefill runs on that, and its outputs and cache are expanded in place of the
inputs. Tokens are the same; a prompt for eight samples is computed once and not eight times.
"""

from __future__ import annotations

import copy
from typing import Any, TypeGuard

import torch
from transformers import StaticCache
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import ModelOutput

from . import quirks
from .caches import rows
from .outputs import map_rows
from .types import ModelKwargs, Plan, Prompt, Run

#: The hooks that expand the inputs of a call.
EXPANDING = ("_expand_inputs_for_generation", "_expand_multimodal_outputs")


class Unexpanded:
    """The inputs of a call before its rows were multiplied by ``n``.

    ``ids (batch, length)``, and what forward takes besides.
    """

    def __init__(self, ids: torch.Tensor, model_kwargs: ModelKwargs, n: int) -> None:
        self.ids, self.model_kwargs, self.n = ids, model_kwargs, n

    def __deepcopy__(self, memo: dict) -> Unexpanded:
        return self  # configs are copied, prompts need not be


def prefill(run: Run, is_first_iteration: bool = True) -> ModelOutput:
    """Forward the prompt of each row, once where rows have the same one."""
    unexpanded: Unexpanded | None = getattr(run.config, "_unexpanded", None)
    name = "past_key_values"
    cache = run.model_kwargs.get(name)
    if not _can_fan_out(unexpanded, run.model, run.ids, cache):
        return _prefill(run, run.ids, run.model_kwargs, is_first_iteration)
    run.config._unexpanded = None
    given = unexpanded.model_kwargs
    added = {name: value for name, value in run.model_kwargs.items() if name not in given}
    kwargs = given | added | {name: cache}
    if kwargs.get("encoder_outputs") is not None:
        # Some decoders write to what they get, and the encoder's hidden states may be the same.
        kwargs["encoder_outputs"] = _copied(kwargs["encoder_outputs"])
    outputs = _prefill(run, unexpanded.ids, kwargs, is_first_iteration)
    if name in outputs:  # else the model takes no cache, and forwards all ids again
        prompts = torch.arange(len(unexpanded.ids), device=run.ids.device)
        rows.repeat(outputs[name], prompts.repeat_interleave(unexpanded.n))
        run.shares_prompts = True
    n, rows_of_states = unexpanded.n, quirks.rows_of_states(run.model)
    map_rows(outputs, lambda states, dim: states.repeat_interleave(n, dim=dim), rows_of_states)
    return outputs


def is_possible(run: Run) -> bool:
    """Whether ``prefill`` will forward each prompt once for several rows."""
    unexpanded = getattr(run.config, "_unexpanded", None)
    cache = run.model_kwargs.get("past_key_values")
    return _can_fan_out(unexpanded, run.model, run.ids, cache)


def _copied(outputs: Any) -> Any:
    """The encoder's outputs, with tensors of their own."""
    outputs = copy.copy(outputs)
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor):
            outputs[name] = value.clone()
    return outputs


def _prefill(run: Run, ids: torch.Tensor, kwargs: ModelKwargs, is_first: bool) -> ModelOutput:
    result: ModelOutput = run.model._prefill(ids, run.config, kwargs, is_first_iteration=is_first)
    return result


def is_ahead(model: Any, plan: Plan, prompt: Prompt, cache: Any) -> bool:
    """Whether the call's own loop will fan out after the prefill."""
    unexpanded = getattr(plan.config, "_unexpanded", None)
    return (
        # Assisted decoding may forward the prompt with a draft.
        plan.mode is not GenerationMode.ASSISTED_GENERATION
        and getattr(plan.method, "__module__", "") == f"{__package__}.mixin"
        and _can_fan_out(unexpanded, model, prompt.ids, cache)
    )


def _can_fan_out(
    unexpanded: Unexpanded | None, model: Any, ids: torch.Tensor, cache: Any
) -> TypeGuard[Unexpanded]:
    """Whether all that the prefill leaves behind is in a cache that can be expanded."""
    if unexpanded is None or not isinstance(cache, Cache):
        return False
    is_shared = (
        len(ids) == len(unexpanded.ids) * unexpanded.n and ids.shape[1] == unexpanded.ids.shape[1]
    )
    is_expanded = rows.count(cache) not in (None, len(unexpanded.ids))
    if not is_shared or is_expanded or is_foreign(cache):
        return False
    if isinstance(rows.decoder_cache(cache), StaticCache) and not quirks.masks_filled_static_cache(
        model
    ):
        return False  # NLLB-MoE's router reads another row's mask if there are fewer rows
    # RAG reorders documents, too; some models keep states elsewhere.
    plain = (torch.Tensor, ModelOutput, bool, int, float, str, dict, list, tuple, type(None))
    others = (value for name, value in unexpanded.model_kwargs.items() if name != "past_key_values")
    return (
        all(_is_librarys(model, name) for name in EXPANDING)
        and not hasattr(model, "_reorder_cache")
        and not quirks.keeps_other_state(model)
        and all(isinstance(value, plain) for value in others)
    )


def _is_librarys(model: Any, hook: str) -> bool:
    """Whether a hook is not the caller's own, which may do more than repeat rows."""
    owner = next(cls for cls in type(model).__mro__ if hook in vars(cls))
    return owner.__module__.partition(".")[0] in ("transformers", __name__.partition(".")[0])


def is_foreign(cache: Any) -> bool:
    """Whether a model brings a cache or layers of its own, with rows in more than is reordered."""
    own = rows.decoder_cache(cache)
    return any(is_foreign_part(part) for part in (own, *own.layers))


def is_foreign_part(part: Any) -> bool:
    """Whether a cache, or a layer of one, is neither of transformers' own kinds nor of hfgen's."""
    module = type(part).__module__
    return module != Cache.__module__ and not module.startswith(f"{__package__}.")
