"""Stage 4: the KV cache that a call decodes with.

``CACHES`` says which implementation stands behind which ``cache_implementation``. To add one, write
a factory and add a row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig
from transformers import QuantizedCache as UpstreamQuantizedCache
from transformers.cache_utils import Cache
from transformers.configuration_utils import get_head_shapes
from transformers.distributed.tensor_parallel import get_kv_heads_per_rank
from transformers.generation.configuration_utils import (
    DEPRECATED_STATIC_CACHE_IMPLEMENTATIONS,
    GenerationMode,
)

from .. import quirks
from ..call import Call, ModelKwargs, Prompt
from ..logs import logger
from . import offloaded, rows
from .dynamic import GrowingCache
from .quantized import QuantizedCache, left_padding
from .quantized_settings import Settings, upstream_backend
from .static import (
    check_room,
    fit_to_call,
    make_deprecated_static,
    make_static,
)
from .static import prepare_static_cache as prepare_static_cache


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """What a factory has to go by."""

    model: Any
    config: GenerationConfig
    model_kwargs: ModelKwargs
    #: Sequences that the cache will hold.
    rows: int
    #: Tokens per sequence, at most.
    max_length: int

    @property
    def decoder_config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)


def make_dynamic(request: CacheRequest) -> Cache:
    """Grows with the sequences; sliding-window and linear-attention layers keep only their state."""
    return GrowingCache(config=request.decoder_config, max_length=request.max_length)


def cross_attention(request: CacheRequest) -> Cache:
    """The encoder's keys and values, which come once and do not grow."""
    return DynamicCache(config=request.decoder_config)


def make_quantized(request: CacheRequest) -> Cache:
    """Keys and values in few bits: hfgen's own, or the backend that ``cache_config`` names."""
    options = request.config.cache_config
    backend = upstream_backend(options)
    if backend is None:
        settings = Settings.of(options, request.decoder_config)
        is_encoder_decoder = request.model.config.is_encoder_decoder
        mask = request.model_kwargs.get(
            "decoder_attention_mask" if is_encoder_decoder else "attention_mask"
        )
        return QuantizedCache(request.decoder_config, settings, left_padding(mask))
    if request.model.config.is_encoder_decoder:
        raise ValueError(
            f"The backend {backend!r} of `cache_implementation='quantized'` does not work with "
            f"encoder-decoder models such as {type(request.model).__name__}. Leave `backend` out."
        )
    options = copy.deepcopy(options)
    options.setdefault("config", request.decoder_config)
    return UpstreamQuantizedCache(**options)


CACHES: dict[str | None, Callable[[CacheRequest], Cache]] = {
    None: make_dynamic,
    "dynamic": make_dynamic,
    "offloaded": offloaded.make_offloaded,
    "static": make_static,
    "offloaded_static": make_static,
    "quantized": make_quantized,
    "paged": make_dynamic,  # of a config; as an argument, it means continuous batching
    **dict.fromkeys(DEPRECATED_STATIC_CACHE_IMPLEMENTATIONS, make_deprecated_static),
}


def check_config(model: Any, config: GenerationConfig) -> None:
    """Raise ``ValueError`` for a ``cache_config`` that cannot be used; nothing is allocated."""
    if config.cache_implementation == "quantized" and upstream_backend(config.cache_config) is None:
        Settings.of(config.cache_config, model.config.get_text_config(decoder=True))
    if config.cache_implementation in offloaded.IMPLEMENTATIONS:
        offloaded.check_settings(config.cache_config, config.cache_implementation)


def prepare(
    model: Any, call: Call, prompt: Prompt, may_end_early: bool, will_fan_out: bool
) -> None:
    """Put a cache with room for the whole call into the model kwargs, or fit the caller's to it.

    Raises ``ValueError`` for a cache of the caller's that holds other rows, or that is too short:
    for the prompt, or for the whole call unless that ``may_end_early``.
    """
    config, model_kwargs = call.config, prompt.model_kwargs
    # The last token is not forwarded, unless candidates for it are tried.
    max_length = config.max_length - 1 + getattr(call.strategy, "tokens_ahead", 0)
    embeds_length = prompt.main_input.shape[1] if prompt.main_input_name == "inputs_embeds" else 0
    if not model.config.is_encoder_decoder and embeds_length != prompt.ids.shape[1]:
        max_length += embeds_length
    name = quirks.cache_argument(model)
    given = model_kwargs.get(name)
    if isinstance(given, Cache) and config.cache_implementation is None:
        given = rows.fit(given, prompt.batch_size, prompt.ids.shape[0], will_fan_out)
        _expect(given, max_length)
        check_room(given, max_length, prompt.ids.shape[1], may_end_early)
        fit_to_call(given, config)
        model_kwargs[name] = given
    config = offloaded.without_cuda(model, config)
    model._prepare_cache_for_generation(
        config, model_kwargs, call.mode.kind, prompt.batch_size, max_length
    )


def prepare_cache_for_generation(
    self: Any,
    generation_config: GenerationConfig,
    model_kwargs: ModelKwargs,
    generation_mode: GenerationMode,
    batch_size: int,
    max_cache_length: int,
) -> None:
    """Make the cache that the config asks for, unless one is given or none is wanted.

    Raises ``ValueError`` if both a cache and an implementation are given, or a tuple as a cache.
    """
    name = quirks.cache_argument(self)
    given = model_kwargs.get(name)
    if given is not None:
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"`{name}` is a cache already, and `cache_implementation`="
                f"{generation_config.cache_implementation!r} asks for another. Pass one of them."
            )
        if isinstance(given, tuple):
            raise ValueError(
                f"`{name}` has to be a Cache, but is a tuple. Pass the Cache that generate() or "
                "forward() returned."
            )
        given._is_user_defined = True  # outlives the call: read by the loops
        return
    if generation_config.use_cache is False:
        return
    if not self._supports_default_dynamic_cache():
        if generation_config.cache_implementation is not None:
            logger.warning_once(
                "This model makes its own kind of cache: `cache_implementation`="
                f"{generation_config.cache_implementation!r} is ignored."
            )
        return
    expand_size = max(generation_config.num_beams, generation_config.num_return_sequences)
    request = CacheRequest(
        self, generation_config, model_kwargs, batch_size * expand_size, max_cache_length
    )
    cache = CACHES[generation_config.cache_implementation](request)
    if self.config.is_encoder_decoder and not isinstance(cache, EncoderDecoderCache):
        is_offloaded = generation_config.cache_implementation == "offloaded"
        make_cross = offloaded.make_cross_attention if is_offloaded else cross_attention
        cache = EncoderDecoderCache(cache, make_cross(request))
    if generation_config.is_assistant:
        cache.activate_past_recording()  # what an assistant drafted may be rolled back
    model_kwargs[name] = cache


def get_static_cache_init_shape(self: Any) -> tuple[int | list[int], int | list[int]] | None:
    """Heads and head size, on this device, to allocate a static cache by before its first update.

    A list has one value per layer. ``None`` where the first update has to tell: layers on several
    devices, keys and values of different sizes (MLA), heads that the devices cannot share evenly.
    """
    if len(set(getattr(self, "hf_device_map", {}).values())) > 1:
        return None
    config = self.config.get_text_config(decoder=True)
    if any(getattr(layer, "qk_head_dim", None) is not None for layer in config.per_layer_config):
        return None
    heads, head_size = get_head_shapes(config)
    devices = getattr(self, "_tp_size", None) or 1
    if devices > 1:
        heads = get_kv_heads_per_rank(self.tp_plan, heads, devices)
    return None if heads is None else (heads, head_size)


def supports_default_dynamic_cache(cls: type) -> bool:
    """Whether forward takes a ``Cache``."""
    return not quirks.makes_its_own_cache(cls.__name__)


def _expect(cache: Cache, max_length: int) -> None:
    """Tell a cache that grows in place how far this call may go."""
    cache = rows.decoder_cache(cache)
    if isinstance(cache, GrowingCache):
        cache.expect(max_length)
