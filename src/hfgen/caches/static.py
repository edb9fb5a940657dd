"""The static cache: kept between calls, and compiled once.

The cache is transformers' ``StaticCache``; its layers (``static_layers.py``) have their memory from a
pool (``pool.py``).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx.experimental import _config as fx_config
from transformers import EncoderDecoderCache, GenerationConfig, StaticCache
from transformers.cache_utils import Cache, StaticLayer, StaticSlidingWindowLayer
from transformers.generation.configuration_utils import STATIC_CACHE_IMPLEMENTATIONS

from .. import families
from ..call import ModelKwargs
from ..logs import logger
from . import offloaded
from .layers import layers_of
from .pool import Lease, Size, pool_of
from .static_layers import PooledLayer, PooledSlidingWindowLayer, SlicedStaticLayer, VisibleLength

if TYPE_CHECKING:
    from .table import CacheRequest

#: What forward may take tokens as.
IDS = ("decoder_input_ids", "input_ids", "inputs_embeds")


def make_static(request: CacheRequest) -> Cache:
    """Of fixed length, as ``torch.compile`` needs it, in memory that is kept; ``offloaded_static`` too."""
    config = request.config
    max_length = request.max_length
    pool_of(request.model).longest = _longest(request)
    if config.max_cache_len is not None:  # sized for the worst call to come
        if config.max_cache_len < max_length:
            logger.warning_once(
                f"`max_cache_len`={config.max_cache_len} is less than the {max_length} tokens that "
                "this call may reach: its cache is made that long."
            )
        max_length = max(max_length, int(config.max_cache_len))
    cache: Cache = request.model._prepare_static_cache(
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


def _longest(request: CacheRequest) -> int | None:
    """What a call may reach at most, as far as somebody says."""
    positions = getattr(request.decoder_config, "max_position_embeddings", None)
    longest = request.config.max_cache_len or positions
    return int(longest) if isinstance(longest, int | float) else None


def make_deprecated_static(request: CacheRequest) -> Cache:
    """The former names of ``static``."""
    logger.warning_once(
        f"`cache_implementation={request.config.cache_implementation!r}` is deprecated: use one of "
        f"{STATIC_CACHE_IMPLEMENTATIONS}, which follow the layers of the model."
    )
    return make_static(request)


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
        visible = VisibleLength(is_whole or not quirks.masks_filled_static_cache(self))
        makers = {
            StaticLayer: lambda length: SlicedStaticLayer.new(length, visible),
            StaticSlidingWindowLayer: lambda length: PooledSlidingWindowLayer(length, length),
        }
        _fill(cache, lease, makers)
        if cross is not None:
            _fill(cross, lease, {StaticLayer: PooledLayer})
    if cross is not None:
        cache = EncoderDecoderCache(cache, cross)
    elif prefill_chunk_size is not None and (shape := self._get_static_cache_init_shape()):
        # The prefill is compiled too, and would be again if the first chunk found no tensors.
        heads, head_size = shape
        cache.early_initialization(
            batch_size=batch_size,
            num_heads=heads,
            head_dim=head_size,
            dtype=self.dtype,
            device=self.device,
        )
    return cache


def _fill(cache: Cache, lease: Lease, makers: Mapping[type, Callable[[int], Any]]) -> None:
    """Put layers that have their memory from ``lease`` in place of upstream's in ``makers``."""
    for index, layer in enumerate(cache.layers):
        if (make := makers.get(type(layer))) is not None:
            pooled = make(layer.max_cache_len)
            pooled._lease, pooled._index = lease, index
            cache.layers[index] = pooled


def filled_layers(cache: Any) -> list[SlicedStaticLayer]:
    """The layers of ``cache`` that show attention what is filled."""
    return [layer for layer in layers_of(cache) if isinstance(layer, SlicedStaticLayer)]


def fit_to_call(cache: Any, config: GenerationConfig) -> None:
    """Show as much as upstream does where the caller gets to see it.

    Attentions then have upstream's shapes, and cache and hidden states its values at padding.
    """
    for layer in filled_layers(cache):
        layer._visible.is_whole_to_prompts |= bool(config.return_dict_in_generate)
        layer._visible.is_whole |= bool(config.output_attentions)


class Compiled:
    """A compiled forward that is not compiled again for another batch or another filled length."""

    def __init__(self, forward: Callable, cache: Any) -> None:
        self.forward = forward
        for layer in filled_layers(cache):
            layer._visible.is_coarse = True

    def __call__(self, **inputs: Any) -> Any:
        from torch._dynamo.utils import counters  # takes a second: not for those who do not compile

        for value in inputs.values():
            for tensor in value.values() if isinstance(value, dict) else (value,):
                if isinstance(tensor, Tensor):
                    _mark_sizes(tensor)
        ids = next((inputs[n] for n in IDS if inputs.get(n) is not None), None)
        n_graphs = counters["stats"]["unique_graphs"]
        with nullcontext() if ids is None or len(ids) == 1 else _one_is_not_special():
            outputs = self.forward(**inputs)
        if counters["stats"]["unique_graphs"] != n_graphs:
            gc.collect()  # the compiler leaves cycles behind, and the cache would wait in them
        for layer in filled_layers(inputs.get("past_key_values")):
            visible = layer._visible
            if visible.is_open:  # else the graph was left, and update() has counted
                layer._note(visible.total)
        for layer in filled_layers(inputs.get("past_key_values")):
            layer._visible.is_open = False
        return outputs


def _mark_sizes(tensor: Tensor) -> None:
    """Tell the compiler which sizes of an input differ from call to call.

    Rows; of a mask ``(rows, 1, 1, keys)`` the keys, of what the encoder said the length.
    """
    dims = {4: (0, 3), 3: (0, 1), 2: (0, 1), 1: (0,)}.get(tensor.ndim, ())
    for dim in dims:
        if tensor.shape[dim] > 1:  # one row or one token is a graph of its own
            torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _one_is_not_special() -> AbstractContextManager[Any]:
    """Let a graph that was compiled for several rows take a single one."""
    try:
        context: AbstractContextManager[Any] = fx_config.patch(  # type: ignore[attr-defined]
            backed_size_oblivious=True
        )
    except AttributeError:  # an older torch compiles once more for a single row
        return nullcontext()
    return context
