"""Checks of a cache that the caller passes as ``past_key_values``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import Cache

from .. import families
from ..families import CACHE, repeats_layers
from ..state.call import Call, Prompt
from .caches import layers as cache_layers


def check_cache(model: Any, call: Call, prompt: Prompt) -> None:
    """Raise ``ValueError`` for a cache that another model filled, or that leaves nothing to forward."""
    name = families.cache_argument(model)
    cache = prompt.model_kwargs[name]
    if not model._supports_default_dynamic_cache():
        return
    if getattr(call.config, "drop_finished", False):
        raise ValueError(
            f"`drop_finished=True` takes rows out of the cache, and `{name}` is yours. Leave one of "
            "the two out."
        )
    for method in ("get_seq_length", "get_mask_sizes", "update"):  # what models and masks call
        if not hasattr(cache, method):
            raise ValueError(
                f"`{name}` has to be a Cache, but is a {type(cache).__name__}, which has no "
                f"`{method}`. Pass the Cache that generate() or forward() returned."
            )
    if not isinstance(cache, Cache):
        return
    decoder = cache_layers.decoder_cache(cache)
    if decoder is not cache and not model.config.is_encoder_decoder:
        modules = (kind.__module__ for kind in type(model).__mro__ if "modeling" in kind.__module__)
        if not any(hasattr(sys.modules.get(module), "EncoderDecoderCache") for module in modules):
            raise ValueError(
                f"`{name}` is an EncoderDecoderCache, but {type(model).__name__} has no cross-attention. "
                "It was filled by another model."
            )
    # A model's own class of cache decides how many layers it has.
    if decoder.layers and not cache_layers.is_foreign_part(decoder):
        config = model.config.get_text_config(decoder=True)
        expected, found = len(DynamicCache(config=config).layers), len(decoder.layers)
        # One that was made without a config has the layers that were written to.
        n_shared = getattr(config, "num_kv_shared_layers", None) or 0
        fitting = (expected, expected - n_shared, getattr(config, "num_decoder_layers", None))
        is_longer = found > expected and repeats_layers(config)
        if expected and found not in fitting and not is_longer:
            raise ValueError(
                f"`{name}` has {found} layers, but {type(model).__name__} has {expected} that "
                "keep states. It was filled by, or made for, another model."
            )
    # Without a mask over all tokens, ids begin with the first one.
    ids, mask = prompt.main_input, prompt.model_kwargs.get("attention_mask")
    is_text = prompt.main_input_name == "input_ids" and ids.ndim == 2 and ids.shape[1] > 0
    if model.config.is_encoder_decoder or not is_text or not cache_layers.counts_tokens(cache):
        return
    # CPM-Ant puts so many tokens of its own before a prompt.
    n_cached = int(cache.get_seq_length()) - int(getattr(model.config, "prompt_length", None) or 0)
    has_whole_mask = mask is not None and (mask.ndim != 2 or mask.shape[1] > ids.shape[1])
    if n_cached > 0 and n_cached >= ids.shape[1] and not has_whole_mask:
        raise ValueError(
            f"`{name}` holds {n_cached} tokens and `input_ids` has {ids.shape[1]}, so that none is new. "
            "Pass all tokens from the start; or only the new ones, with an `attention_mask` over all "
            f"of them; or cut the cache: `{name}.crop(length)`."
        )


@contextmanager
def explaining_misfit(model: Any, cache: Any) -> Iterator[None]:
    """Replace errors of updates that do not fit the caller's ``cache`` by errors that explain it."""
    layers: Any = cache_layers.layers_of(cache)

    def shape_of_keys() -> Any:
        """``(rows, heads, length, size)`` of the first layer, if it holds any."""
        keys = getattr(layers[0], "keys", None) if layers else None
        return None if keys is None or keys.ndim != 4 else tuple(keys.shape)

    shape = shape_of_keys()
    try:
        yield
    except IndexError as error:
        capacity = cache_layers.capacity(cache)
        if capacity == float("inf") or int(layers[0].get_seq_length()) < capacity:
            raise
        raise ValueError(
            f"`{CACHE}` is a static cache of {capacity} tokens, all of which are in use now, and "
            "the call has not ended. Make it longer (`max_cache_len`), or lower `max_new_tokens`."
        ) from error
    except RuntimeError as error:
        texts = ("Sizes of tensors must match", "The expanded size of the tensor")
        is_misfit = any(text in str(error) for text in texts)
        if not shape or not is_misfit or shape_of_keys() != shape:
            raise
        n_rows, heads, _, size = shape
        raise ValueError(
            f"`{CACHE}` holds {n_rows} rows of {heads} heads of size {size}, but the keys of "
            f"{type(model).__name__} have another shape. It was filled by another model."
        ) from error
