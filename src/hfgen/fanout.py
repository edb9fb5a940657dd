"""Prefill once, fan out: beams and samples of one prompt share its forward pass.

The hooks see expanded inputs, as upstream's do: one row per beam or returned sequence. What the prompts
were before is kept, the prefill runs on that, and its outputs and cache are expanded in place of the
inputs. Tokens are the same; a prompt for eight samples is computed once and not eight times.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import EncoderDecoderCache
from transformers.cache_utils import Cache, StaticLayer
from transformers.utils import ModelOutput

from . import quirks
from .types import ModelKwargs, Run

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
    if unexpanded is None or not _can_fan_out(run, unexpanded, cache):
        return _prefill(run, run.ids, run.model_kwargs, is_first_iteration)
    run.config._unexpanded = None
    given = unexpanded.model_kwargs
    added = {name: value for name, value in run.model_kwargs.items() if name not in given}
    kwargs = given | added
    if kwargs.get("encoder_outputs") is not None:
        # Some decoders write to what they get, and the encoder's hidden states may be the same.
        kwargs["encoder_outputs"] = _copied(kwargs["encoder_outputs"])
    outputs = _prefill(run, unexpanded.ids, kwargs, is_first_iteration)
    if name in outputs:  # else the model takes no cache, and forwards all ids again
        rows = torch.arange(len(unexpanded.ids), device=run.ids.device)
        expand_cache(outputs[name], rows.repeat_interleave(unexpanded.n))
    _expand_outputs(outputs, unexpanded.n, quirks.rows_of_states(run.model))
    return outputs


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


def _can_fan_out(run: Run, unexpanded: Unexpanded, cache: Any) -> bool:
    """Whether all that the prefill leaves behind is in a cache that can be expanded."""
    is_shared = (
        len(run.ids) == len(unexpanded.ids) * unexpanded.n
        and run.ids.shape[1] == unexpanded.ids.shape[1]
    )
    is_own = isinstance(cache, Cache) and not getattr(cache, "_is_user_defined", False)
    if not (is_shared and is_own) or _is_allocated(cache) or _has_foreign_layers(cache):
        return False
    # RAG reorders documents, too; some models keep states elsewhere.
    plain = (torch.Tensor, ModelOutput, bool, int, float, str, dict, list, tuple, type(None))
    others = (value for name, value in unexpanded.model_kwargs.items() if name != "past_key_values")
    return (
        all(_is_librarys(run.model, name) for name in EXPANDING)
        and not hasattr(run.model, "_reorder_cache")
        and not quirks.keeps_other_state(run.model)
        and all(isinstance(value, plain) for value in others)
    )


def _is_librarys(model: Any, hook: str) -> bool:
    """Whether a hook is not the caller's own, which may do more than repeat rows."""
    owner = next(cls for cls in type(model).__mro__ if hook in vars(cls))
    return owner.__module__.partition(".")[0] in ("transformers", __name__.partition(".")[0])


def _has_foreign_layers(cache: Any) -> bool:
    """Whether a model brings layers of its own, whose rows may be in more than is reordered."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    modules = {type(layer).__module__ for layer in cache.layers}
    return not all(m == StaticLayer.__module__ or m.startswith("hfgen.") for m in modules)


def _is_allocated(cache: Any) -> bool:
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    return any(isinstance(layer, StaticLayer) and layer.is_initialized for layer in cache.layers)


def expand_cache(cache: Any, rows: torch.Tensor) -> None:
    """Let row ``i`` of the cache become what row ``rows[i]`` was: ``rows (wanted,)``."""
    if isinstance(cache, EncoderDecoderCache):
        expand_cache(cache.self_attention_cache, rows)
        expand_cache(cache.cross_attention_cache, rows)
        return
    for layer in cache.layers:
        if getattr(layer, "is_initialized", True):
            layer.reorder_cache(rows)
        if isinstance(layer, StaticLayer) and layer.is_initialized:
            layer.batch_size = len(rows)


def _expand_outputs(outputs: Any, n: int, rows_of_states: int) -> None:
    """Repeat each row of what a step reads of a model's outputs, in place.

    ``rows_of_states``: which dimension of four-dimensional hidden states has the rows.
    """
    for name, value in outputs.items():
        if name.startswith("encoder_"):
            continue
        if isinstance(value, torch.Tensor) and value.ndim > 1:
            outputs[name] = value.repeat_interleave(n, dim=0)
        elif isinstance(value, tuple):
            dim = rows_of_states if name.endswith("hidden_states") else 0
            outputs[name] = tuple(
                v.repeat_interleave(n, dim=dim if v.ndim == 4 else 0)
                if isinstance(v, torch.Tensor)
                else v
                for v in value
            )
