"""Which calls can use stored prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, StaticCache, cache_utils

from ... import families
from ...families import CACHE
from ...memory.caches import cache_kind
from ...memory.caches.dynamic import GrowingCache, upstream_kind
from ...state.call import Call, ModelKwargs, Prompt
from ...state.run import Run
from ..row_states import has_own_hooks
from .radix import Offset

#: Inputs whose influence on a token's keys and values is known.
KNOWN = ("attention_mask", "input_ids", "logits_to_keep", "position_ids", "use_cache")

#: Rotary positions whose frequencies change above a length, and the field that has this length.
LENGTH_DEPENDENT = {
    "longrope": "original_max_position_embeddings",
    "dynamic": "max_position_embeddings",
}

#: Models whose states depend on how many tokens were forwarded together.
UNSTEADY = {
    "moshi": "it attends to all tokens that are forwarded with a token, to a window of those cached",
    "git": "it counts positions by column, padding included",
    "kosmos-2.5": "it counts positions from the tokens that are forwarded",
    "kosmos-2": "it counts positions from the tokens that are forwarded",
    "blt": "it has states of patches, which are several tokens, not one state per token",
    "cpmant": "it puts tokens of its own before a prompt, not one state per token",
    "prophetnet": "behind a cache, it takes one token at a time",
    "xlm": "it forwards a mask token behind the ids, whose keys it keeps",
    "imagegpt": "its own mask is cut from the end of a static cache",
}

#: Arguments of PEFT's ``generate`` that become hooks which treat each row in its own way.
PER_ROW = ("adapter_names", "alora_offsets")

#: Layers whose first ``m`` tokens are what they hold after a prompt of ``m`` tokens.
CUTTABLE = (
    cache_utils.DynamicLayer,
    cache_utils.DynamicSlidingWindowLayer,
    cache_utils.StaticLayer,
    cache_utils.StaticSlidingWindowLayer,
    *families.EMPTY_LAYERS,
)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a call does not use stored prefixes. ``is_choice``: another argument, not the model."""

    text: str
    is_choice: bool = True


@dataclass(frozen=True, slots=True)
class Layout:
    """Row ``i`` has ``ids[i, pads[i]:]``, from ``offsets[i]`` on. ``ids (rows, length)`` on the CPU."""

    ids: Tensor
    pads: list[int]
    offsets: list[Offset]

    @classmethod
    def of(cls, ids: Tensor, model_kwargs: ModelKwargs) -> Layout | Reason:
        rows, length = ids.shape
        mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        pads = [0] * rows
        if mask is not None:
            mask = mask.cpu()
            pads = (length - mask.sum(dim=1)).long().tolist()
            is_left = torch.arange(length) >= torch.tensor(pads)[:, None]
            if not torch.equal(mask, is_left.to(mask.dtype)):
                return Reason("`attention_mask` masks more than padding on the left")
            if max(pads) == length:
                return Reason("`attention_mask` masks a whole row")
        if positions is None:
            return cls(ids.cpu(), pads, [("column", pad) for pad in pads])
        if positions.ndim == 3 and (positions == positions[0]).all():
            positions = positions[0]  # multimodal rotary positions, of text alone
        if positions.ndim != 2 or positions.shape[1] != length:
            return Reason("`position_ids` is not one position per token")
        offsets: list[Offset] = []
        for row, pad in zip(positions.cpu().expand(rows, -1), pads, strict=True):
            first = int(row[pad])
            offsets.append(("position", first))
            if not torch.equal(row[pad:], torch.arange(first, first + length - pad)):
                return Reason("`position_ids` does not count on from token to token")
        return cls(ids.cpu(), pads, offsets)

    def tokens(self, row: int, end: int | None = None) -> Tensor:
        return self.ids[row, self.pads[row] : end].long()


def of_arguments(model: Any, call: Call, model_kwargs: ModelKwargs) -> Reason | None:
    """What rules stored prefixes out before anything is prepared."""
    config = call.config
    if model.config.is_encoder_decoder:
        return Reason("a decoder's states depend on its encoder", is_choice=False)
    if families.given_cache(model_kwargs) is not None:
        return Reason(f"the call has a cache already (`{CACHE}`)")
    for flag in ("output_attentions", "output_hidden_states"):
        if getattr(config, flag):
            return Reason(f"`{flag}` is about the whole prompt, which is not forwarded")
    if unknown := {name for name, v in model_kwargs.items() if v is not None} - {*KNOWN}:
        return Reason(f"what `{min(unknown)}` does to the states of the prompt is not known")
    if call.request.kwargs.get("interventions"):
        return Reason("`interventions` change the states of the prompt", is_choice=False)
    if config.use_cache is False:
        return Reason("`use_cache` is False")
    if not cache_kind(config.cache_implementation).may_hold_prefix:
        return Reason(f"`cache_implementation` is {config.cache_implementation!r}")
    if config.token_healing:
        return Reason("`token_healing` changes the prompt")
    if not getattr(call.strategy, "continues_cache", False):
        return Reason(
            f"{call.who} does not declare that it continues a cache (`continues_cache`)",
            is_choice=call.request.custom_generate is not None or call.is_own_method,
        )
    reads_prompt = getattr(call.strategy, "reads_prompt", None)
    if reads_prompt is not None and reads_prompt(model, call):
        return Reason("its drafter reads what the model makes of the whole prompt")
    if call.mode_kwargs.get("synced_gpus"):
        return Reason("devices have to forward in step", is_choice=False)
    return of_model(model)


def of_model(model: Any) -> Reason | None:
    """What rules stored prefixes out whatever the call is."""
    modules = list(families.modules_of(model))
    if not modules:
        return Reason(f"{type(model).__name__} is no module: its weights are not seen", False)
    if any(module.training for module in modules):
        return Reason("the model, or a part of it, is in training mode", is_choice=False)
    if any(tensor.is_meta for tensor in model.parameters()):
        return Reason("weights are offloaded: whether they change is not seen", is_choice=False)
    hooks = [hook for module in modules for hook in tuple(module._forward_pre_hooks.values())]
    for name in PER_ROW:
        if any(name in getattr(hook, "keywords", ()) for hook in hooks):
            return Reason(f"`{name}` gives rows adapters of their own")
    if has_own_hooks(model):
        return Reason("forward hooks would not see the stored part of a prompt", is_choice=False)
    if families.keeps_other_state(model):
        return Reason(f"{type(model).__name__} keeps states elsewhere", is_choice=False)
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        return Reason(f"{type(model).__name__} attends to later tokens", is_choice=False)
    if (kind := model.config.model_type) in UNSTEADY:
        return Reason(f"{type(model).__name__}: {UNSTEADY[kind]}", is_choice=False)
    return None


def of_prompt(model: Any, call: Call, prompt: Prompt) -> Reason | None:
    """What rules stored prefixes out once the prompt and its cache are prepared."""
    cache: Any = prompt.model_kwargs.get(CACHE)
    config = call.config
    unsuitable = Reason(f"{type(model).__name__} has layers whose states cannot be cut", False)
    if type(cache) not in (GrowingCache, StaticCache) or cache.offloading or not cache.layers:
        return unsuitable
    added = {name for name, v in prompt.model_kwargs.items() if v is not None} - {*KNOWN, CACHE}
    if prompt.model_kwargs.get("mm_encoder_outputs") == {}:  # no images, no sound
        added.remove("mm_encoder_outputs")
    if added:
        return Reason(f"{type(model).__name__} adds `{min(added)}` to its inputs", is_choice=False)
    ring = cache_utils.StaticSlidingWindowLayer
    windows = (layer for layer in cache.layers if upstream_kind(layer) is ring)
    if any(window.max_cache_len < config.max_length for window in windows):
        return Reason("a static cache overwrites what leaves its sliding windows")
    if not all(upstream_kind(layer) in CUTTABLE for layer in cache.layers):
        return unsuitable
    if prompt.main_input_name != "input_ids" or prompt.ids.ndim != 2:
        return Reason("the prompt is not one of token ids")
    if any(torch.isin(prompt.ids, i).any() for i in families.placeholder_tokens(model)):
        return Reason("the prompt has placeholders of images or sound")
    if is_length_dependent(model, config.max_length):
        return Reason("rotary positions change once the sequence is long", is_choice=False)
    mask = prompt.model_kwargs.get("attention_mask")
    width = getattr(config, "_mask_length", -1) if mask is None else mask.shape[1]
    if width != prompt.ids.shape[1]:  # by which a prefill tells what the cache holds already
        return Reason(f"{type(model).__name__} takes no mask", is_choice=False)
    return None


def can_be_cut(run: Run) -> bool:
    """Whether a prompt may be forwarded in parts: as one whose first part is in a ``PrefixCache``."""
    call = run.call
    if call is None or call.prompt is None:
        return False
    arguments = {n: v for n, v in run.model_kwargs.items() if not isinstance(v, Cache)}
    reason = of_arguments(run.model, call, arguments) or of_prompt(run.model, call, call.prompt)
    return reason is None


def is_length_dependent(model: Any, max_length: int) -> bool:
    """Whether the call may reach a length from which on all positions are rotated otherwise."""
    return any(max_length >= limit for _, limit in rotary_limits(model))


def rotary_limits(model: Any) -> list[tuple[str, int]]:
    """The ``LENGTH_DEPENDENT`` kinds of rotary positions in the model, each with the length above which it changes."""
    config = model.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    is_by_layer = all(isinstance(p, dict) for p in parameters.values())
    return [
        (kind, rope.get(name) or getattr(config, name, 0) or 0)
        for rope in (parameters.values() if is_by_layer else [parameters])
        for kind, name in LENGTH_DEPENDENT.items()
        if kind in str(rope.get("rope_type"))
    ]
