"""The static cache: kept between calls and compiled once."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from transformers import EncoderDecoderCache, GenerationConfig, StaticCache
from transformers.cache_utils import Cache, StaticLayer, StaticSlidingWindowLayer
from transformers.generation import configuration_utils

from ... import families
from ...settings.logs import logger
from ...state.call import ModelKwargs
from . import offloaded
from .dynamic import CacheRequest
from .layers import layers_of
from .pool import Lease, Size, pool_of
from .static_layers import PooledLayer, PooledSlidingWindowLayer, SlicedStaticLayer, VisibleLength

#: Names of static caches that transformers still takes.
OLD_NAMES = configuration_utils.DEPRECATED_STATIC_CACHE_IMPLEMENTATIONS


def make_static(request: CacheRequest) -> Cache:
    """Of fixed length, as ``torch.compile`` needs it, in memory that is kept; ``offloaded_static`` too."""
    config, max_length = request.config, request.max_length
    if config.cache_implementation in OLD_NAMES:
        logger.warning_once(
            f"`cache_implementation={config.cache_implementation!r}` is deprecated: use one of "
            f"{configuration_utils.STATIC_CACHE_IMPLEMENTATIONS}, which follow the layers of the model."
        )
    if config.max_cache_len is not None:  # sized for the worst call to come
        if config.max_cache_len < max_length:
            logger.warning_once(
                f"`max_cache_len`={config.max_cache_len} is less than the {max_length} tokens that "
                "this call may reach: its cache is made that long."
            )
        max_length = max(max_length, int(config.max_cache_len))
    cache = request.model._prepare_static_cache(
        cache_implementation=config.cache_implementation,
        batch_size=request.rows,
        max_cache_len=max_length,
        prefill_chunk_size=config.prefill_chunk_size,
        model_kwargs=request.model_kwargs,
    )
    for layer in layers_of(cache):
        if (lease := getattr(layer, "_lease", None)) is not None:
            lease.needed = request.max_length
    fit_to_call(cache, config)
    return cache


def prepare_static_cache(
    self: Any,
    cache_implementation: str,
    batch_size: int,
    max_cache_len: int,
    prefill_chunk_size: int | None,
    model_kwargs: ModelKwargs,
) -> Cache:
    """A static cache, no shorter than earlier calls needed: a new length may mean a new compilation."""
    length = max(max_cache_len, pool_of(self).needed)
    config = self.config.get_text_config(decoder=True)
    is_offloaded = "offloaded" in cache_implementation and offloaded.is_on_cuda(self)
    cache: Cache = StaticCache(config=config, max_cache_len=length, offloading=is_offloaded)
    cross, source_length = None, 0
    if self.config.is_encoder_decoder:
        source_length = model_kwargs["encoder_outputs"][0].shape[1]
        cross = StaticCache(config=config, max_cache_len=source_length, offloading=is_offloaded)
    if cache_implementation != "offloaded_static":
        lease = pool_of(self).lend(Size(batch_size, length, source_length))
        kinds = {type(layer) for layer in cache.layers if isinstance(layer, StaticLayer)}
        # Layers of a kind that is not known here attend to everything, and all share one mask.
        is_whole = not kinds <= {StaticLayer, StaticSlidingWindowLayer}
        visible = VisibleLength(is_whole or not families.masks_filled_static_cache(self))
        _fill(cache, lease, visible)
        if cross is not None:
            _fill(cross, lease)
    if cross is not None:
        cache = EncoderDecoderCache(cache, cross)
    elif prefill_chunk_size is not None:
        # The prefill is compiled too, and would be again if the first chunk found no tensors.
        shape = None
        with suppress(AttributeError):  # heads under other names, as of BLT: the first update tells
            shape = self._get_static_cache_init_shape()
        if shape is not None:
            cache.early_initialization(batch_size, *shape, dtype=self.dtype, device=self.device)
    return cache


def _fill(cache: Cache, lease: Lease, visible: VisibleLength | None = None) -> None:
    """Put layers that have their memory from ``lease`` in place of upstream's; ``visible``: of a decoder."""
    for index, layer in enumerate(cache.layers):
        length = getattr(layer, "max_cache_len", 0)
        pooled: Any
        if type(layer) is StaticLayer:
            pooled = PooledLayer(length) if visible is None else SlicedStaticLayer(length, visible)
        elif type(layer) is StaticSlidingWindowLayer and visible is not None:
            pooled = PooledSlidingWindowLayer(length, length)
        else:
            continue
        pooled._lease, pooled._index = lease, index
        cache.layers[index] = pooled


def visible_length(cache: Any) -> VisibleLength | None:
    """What the layers of ``cache`` that show attention what is filled share; ``None`` without such."""
    layers = [layer for layer in layers_of(cache) if isinstance(layer, SlicedStaticLayer)]
    return layers[0]._visible if layers else None


def fit_to_call(cache: Any, config: GenerationConfig) -> None:
    """Show as much as upstream does where the caller sees shapes of attentions, or values at padding."""
    if (visible := visible_length(cache)) is not None:
        visible.is_whole_to_prompts |= bool(config.return_dict_in_generate)
        visible.is_whole |= bool(config.output_attentions)
