"""Stage 4: the KV cache that a call decodes with. ``CACHES`` has the kinds by ``cache_implementation``."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, MaxLengthCriteria
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    QuantizedCache,
    StaticCache,
)
from transformers.generation import utils as generation
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS, GenerationMode

from ... import families
from ...families import CACHE
from ...settings import cache_settings
from ...settings.logs import logger
from ...state.call import Call, ModelKwargs, Prompt
from . import layers, offloaded, quantized, static
from .dynamic import CacheRequest, GrowingCache
from .static import OLD_NAMES, fit_to_call
from .static import prepare_static_cache as prepare_static_cache


@dataclass(frozen=True, slots=True)
class CacheKind:
    """A kind of cache. What it does not declare is not assumed: calls that need it are refused.

    Args:
        name: Its ``cache_implementation``.
        factory: Makes the cache of a call.
        settings: Raises ``ValueError`` for a ``cache_config`` and a decoder's config that do not fit.
        make_cross_attention: Makes the encoder's part, unless ``factory`` returns both.
        compiles: Keys have fixed shapes, so decoding steps may be compiled.
        loses_rows: ``reorder_cache(rows)`` of its layers takes fewer rows (for ``drop_finished``).
        rolls_back: ``crop(-n)`` takes the newest tokens out (for drafting and contrastive search).
        may_hold_prefix: A ``PrefixCache`` may fill it.
    """

    name: str
    factory: Callable[[CacheRequest], Cache]
    settings: Callable[[Any, Any], None] | None = None
    make_cross_attention: Callable[[CacheRequest], Cache] = lambda request: generation.DynamicCache(
        config=request.decoder_config
    )
    compiles: bool = False
    loses_rows: bool = False
    rolls_back: bool = False
    may_hold_prefix: bool = False


def make_dynamic(request: CacheRequest) -> Cache:
    """Grows with the sequences; sliding-window and linear-attention layers keep only their state."""
    if (cache := generation.DynamicCache) is not DynamicCache:  # a library has replaced it
        return cache(config=request.decoder_config)
    return GrowingCache(config=request.decoder_config, max_length=request.max_length)


_growing = partial(CacheKind, loses_rows=True, rolls_back=True)
_static = partial(CacheKind, factory=static.make_static, rolls_back=True)
_KINDS = (
    _growing("dynamic", make_dynamic, may_hold_prefix=True),
    _growing("quantized", quantized.make_quantized, cache_settings.check_quantized),
    _growing(
        "offloaded",
        offloaded.make_offloaded,
        offloaded.check_settings,
        offloaded.make_cross_attention,
    ),
    _growing("paged", make_dynamic),  # of a config; as an argument, it means continuous batching
    _static("static", compiles=True, may_hold_prefix=True),
    _static("offloaded_static", settings=cache_settings.check_none),
    *map(_static, OLD_NAMES),
)

#: The kinds by name. To add one, assign a ``CacheKind``, or only its factory.
CACHES: dict[str, CacheKind | Callable[[CacheRequest], Cache]] = {k.name: k for k in _KINDS}


def cache_kind(name: str | None) -> CacheKind:
    """The kind of that name, ``None`` being the default; a plain factory declares nothing."""
    kind = CACHES["dynamic" if name is None else name]
    return kind if isinstance(kind, CacheKind) else CacheKind(str(name), kind)


def is_upstreams(name: str | None) -> bool:
    """Whether transformers' own ``GenerationConfig`` takes that name."""
    return name is None or name in (*ALL_CACHE_IMPLEMENTATIONS, "paged")


def names() -> list[str]:
    """The names that error messages offer."""
    return sorted({*CACHES} - {*OLD_NAMES, "paged"})


def check_config(model: Any, call: Call) -> None:
    """Raise ``ValueError`` for a ``cache_config`` or a kind of cache that the call cannot use."""
    kind = cache_kind(call.config.cache_implementation)
    if kind.settings is not None:
        kind.settings(call.config.cache_config, model.config.get_text_config(decoder=True))
    if getattr(call.strategy, "rolls_back", False) and not kind.rolls_back:
        raise ValueError(
            f"{call.mode.name.capitalize()} takes tokens back out of the cache, and "
            f"`cache_implementation={kind.name!r}` does not declare `rolls_back`. Use another cache, "
            "or register it as a CacheKind with `rolls_back=True`."
        )


def prepare(model: Any, call: Call, prompt: Prompt, will_fan_out: bool) -> None:
    """Put a cache with room for the whole call into the model kwargs, or fit the caller's to it."""
    config, model_kwargs = call.config, prompt.model_kwargs
    max_length = _max_length(model, call, prompt)
    name = families.cache_argument(model)
    cache = model_kwargs.get(name)
    if isinstance(cache, Cache) and config.cache_implementation is None:
        if getattr(call.strategy, "rolls_back", False):
            layers.check_rolls_back(cache)
        cache = _fit_rows(cache, prompt.batch_size, prompt.ids.shape[0], will_fan_out)
        if isinstance(decoder_cache := layers.decoder_cache(cache), GrowingCache):
            decoder_cache.expect(max_length)
        fit_to_call(cache, config)
        model_kwargs[name] = cache
    if config.cache_implementation == "offloaded_static" and not offloaded.is_on_cuda(model):
        config = copy.copy(config)
        config.cache_implementation = "static"  # some models read the name, and make their own
    model._prepare_cache_for_generation(
        config, model_kwargs, call.mode.kind, prompt.batch_size, max_length
    )
    families.rename_cache(model_kwargs, stacklevel=2)
    cache = model_kwargs.get(name)
    if hasattr(model, "exactness") and isinstance(layers.decoder_cache(cache), QuantizedCache):
        raise ValueError(
            "exact: a quantised cache rounds keys in groups of columns, padding included. Use another cache."
        )


def check_room(model: Any, call: Call, prompt: Prompt) -> None:
    """Raise ``ValueError`` if a static cache of the caller's is certainly too short."""
    cache = prompt.model_kwargs.get(families.cache_argument(model))
    if not isinstance(cache, Cache) or not getattr(cache, "_is_user_defined", False):
        return
    if (capacity := layers.capacity(cache)) == math.inf:
        return
    criteria: Any = call.criteria
    only_length = all(type(criterion) is MaxLengthCriteria for criterion in criteria)
    may_end_early = not only_length or criteria.max_length < call.config.max_length
    n_ids, past = prompt.ids.shape[1], int(cache.get_seq_length())
    before = past if n_ids <= past else 0  # the ids that were passed may be new ones only
    longest = before + _max_length(model, call, prompt)
    shortest = before + n_ids if may_end_early else longest
    if capacity < shortest:
        raise ValueError(
            f"`{CACHE}` is a static cache of {capacity} tokens, but the call needs {shortest}"
            + (f", and may reach {longest}" if longest > shortest else "")
            + f". Make it with `max_cache_len={longest}`, or lower `max_new_tokens`."
        )


def _fit_rows(cache: Cache, batch_size: int, n_rows: int, will_fan_out: bool) -> Cache:
    """The caller's cache, for the ``n_rows`` rows that ``batch_size`` prompts are expanded to.

    Expanded caches are copies, expanded after the prefill if the call fans out then.
    """
    rows = layers.count(cache)
    if rows is None or rows == n_rows:
        return cache
    if isinstance(cache, StaticCache) and int(cache.get_seq_length()) == 0:
        for layer in layers.layers_of(cache):
            layer.is_initialized = False  # allocated anew by the next update
        return cache
    can_copy = hasattr(cache, "batch_repeat_interleave") and not layers.is_offloading(cache)
    if rows == batch_size and can_copy:
        cache = copy.deepcopy(cache)
        if not will_fan_out:
            layers.take(cache, torch.arange(rows).repeat_interleave(n_rows // batch_size))
        return cache
    raise ValueError(
        f"`{CACHE}` holds {rows} sequences, but the call has {batch_size} prompts"
        + (f", expanded to {n_rows} rows." if n_rows != batch_size else ".")
    )


def _max_length(model: Any, call: Call, prompt: Prompt) -> int:
    """Tokens per row that the cache may have to hold."""
    # The last token is not forwarded, unless candidates for it are tried.
    max_length = int(call.config.max_length) - 1 + getattr(call.strategy, "tokens_ahead", 0)
    if prompt.main_input_name == "inputs_embeds" and not model.config.is_encoder_decoder:
        n_embeds = int(prompt.main_input.shape[1])
        max_length += n_embeds if n_embeds != prompt.ids.shape[1] else 0
    return max_length


def prepare_cache_for_generation(
    self: Any,
    generation_config: GenerationConfig,
    model_kwargs: ModelKwargs,
    generation_mode: GenerationMode,
    batch_size: int,
    max_cache_length: int,
) -> None:
    """Make the cache that the config asks for, unless one is given or none is wanted."""
    name = families.cache_argument(self)
    given_cache = model_kwargs.get(name)
    implementation = generation_config.cache_implementation
    if given_cache is not None:
        if implementation is not None:
            raise ValueError(
                f"`{name}` is a cache already, and `cache_implementation`={implementation!r} asks for "
                "another. Pass one of them."
            )
        if isinstance(given_cache, tuple):
            raise ValueError(
                f"`{name}` has to be a Cache, but is a tuple. Pass the Cache that generate() or "
                "forward() returned."
            )
        given_cache._is_user_defined = True  # outlives the call: read by the loops
        return
    if generation_config.use_cache is False:
        return
    if not self._supports_default_dynamic_cache():
        if implementation is not None:
            logger.warning_once(
                f"This model uses its own kind of cache: `cache_implementation`={implementation!r} is "
                "ignored."
            )
        return
    expand_size = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    is_contrastive = generation_mode is GenerationMode.CONTRASTIVE_SEARCH
    if is_contrastive and not generation_config.low_memory:  # a row for each candidate
        expand_size *= int(generation_config.top_k)
    rows = batch_size * expand_size
    request = CacheRequest(self, generation_config, model_kwargs, rows, max_cache_length)
    kind = cache_kind(implementation)
    cache = kind.factory(request)
    if not isinstance(cache, Cache):
        raise TypeError(
            f"The factory of `cache_implementation={kind.name!r}` has to return a transformers.Cache, "
            f"but returned {cache!r}."
        )
    if self.config.is_encoder_decoder and not isinstance(cache, EncoderDecoderCache):
        cache = EncoderDecoderCache(cache, kind.make_cross_attention(request))
    if generation_config.is_assistant:
        cache.activate_past_recording()  # what an assistant drafted may be rolled back
    model_kwargs[name] = cache
