"""In-place operations on a cache: rows join, rows leave, and columns that are padding in all rows go.

A cache holds the rows of a batch: all end in the same column, and shorter ones have zeros before them,
which attention masks have to hide. Its buffers have room: a row that joins writes only its own states,
and a row that leaves lets the last one move. All raise ``ValueError``, before anything is changed, for
layers that do not declare how their rows join and leave (``slots.STATES``, ``slots.Slots``).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache
from transformers.cache_utils import CacheLayerMixin

from . import slots
from .dynamic import as_growing, upstream_kind
from .growing import GrowthPolicy
from .layers import decoder_cache, is_foreign_part


def append(cache: Any, other: Any) -> None:
    """Append the rows of ``other``, which stays; zeros are put before shorter ones. Raises as ``check``."""
    check(cache, other)
    for layer, added in zip(_layers_with_room(cache), _layers(other), strict=True):
        slots.join(layer, added)


def extract(cache: Any, index: Tensor) -> Any:
    """A cache of the rows ``index (wanted,)`` alone; ``cache`` stays as it is."""
    twin = copy.copy(cache)
    if isinstance(cache, EncoderDecoderCache):
        twin.self_attention_cache = extract(cache.self_attention_cache, index)
        twin.cross_attention_cache = extract(cache.cross_attention_cache, index)
        twin.is_updated = dict(cache.is_updated)
    else:
        twin.layers = [slots.extract(layer, index) for layer in _layers_with_room(cache)]
    return twin


def move_to(cache: Any, device: torch.device) -> None:
    """Move the states to the host, or back; between the two, no rows join or leave."""
    for layer in _layers(cache):
        layer.offload() if device.type == "cpu" else layer.prefetch()


def move(cache: Any, index: Tensor, changed: Tensor) -> None:
    """Row ``i`` becomes old row ``index[i]``, of no more rows; only the rows ``changed`` are written."""
    for layer in _layers_with_room(cache):
        slots.move(layer, index, changed)


def arrange(cache: Any, columns: Tensor) -> None:
    """Reorder the tokens of each row in place: token ``j`` of row ``i`` becomes its old ``columns[i, j]``.

    All layers have to be of full attention (``layers.keeps_all_tokens``).
    """
    for layer in _layers_with_room(cache):
        slots.arrange(layer, columns)


def trim(cache: Any, n_tokens: int) -> None:
    """Drop the first ``n_tokens`` columns of the decoder, which masks have to hide. Nothing is copied."""
    check_declared(cache)
    length = _length(cache)
    if n_tokens < 0 or (length and n_tokens >= length):
        raise ValueError(f"`n_tokens`={n_tokens!r} cannot be trimmed from {length} columns.")
    for layer in _layers_with_room(decoder_cache(cache)):
        slots.trim(layer, n_tokens, length)


def bytes_of_row(cache: Any, n_tokens: int) -> int:
    """Bytes that one row of ``n_tokens`` takes in a cache like this one, which holds tokens already.

    What grows is extrapolated, windows up to their size; other states count as they are. Spare room of
    buffers comes on top (``GrowthPolicy``).
    """
    check_declared(cache)
    length = _length(cache)
    total = sum(slots.bytes_of_row(e, n_tokens, length) for e in decoder_cache(cache).layers)
    for part in _parts(cache)[1:]:
        total += sum(slots.bytes_of_row(layer, 0, -1) for layer in part.layers)
    return total


def check(cache: Any, other: Any) -> None:
    """Raise ``ValueError`` for layers of another number, kind or ``form``, or that declare nothing."""
    check_declared(cache)
    check_declared(other)
    for part, added_part in zip(_parts(cache), _parts(other), strict=True):
        if len(part.layers) != len(added_part.layers):
            raise ValueError(
                f"Rows of a cache of {len(added_part.layers)} layers cannot be put into one of "
                f"{len(part.layers)} layers."
            )
    for layer, added in zip(_layers(cache), _layers(other), strict=True):
        kind, added_kind = upstream_kind(layer), upstream_kind(added)
        form, added_form = slots.form(layer), slots.form(added)
        if kind is not added_kind or form != added_form:
            raise ValueError(
                f"Rows of a {added_kind.__name__} with {added_form} cannot be put into a "
                f"{kind.__name__} with {form}."
            )


def check_declared(cache: Any) -> None:
    """Raise ``ValueError`` for a layer that does not declare how its rows join and leave."""
    for part in _parts(cache):
        name, layers = type(part).__name__, getattr(part, "layers", None)
        if getattr(part, "offloading", False):
            unknown = f"{name} that moves layers between devices by itself"
        elif layers is None or (
            # A model's own class of cache may have more states than its layers have: MiniMax's does.
            is_foreign_part(part) and not all(map(slots.has_methods, layers))
        ):
            unknown = name
        elif undeclared := [layer for layer in layers if not slots.is_declared(layer)]:
            unknown = f"{type(undeclared[0]).__name__}, a layer of {name}"
        else:
            continue
        raise ValueError(
            f"It is not known how rows join and leave a {unknown}. Decode these prompts with "
            "`generate`, or give the layers the methods of `hfgen.memory.caches.slots.Slots`."
        )


def _parts(cache: Any) -> list[Any]:
    """The caches that have rows: of an encoder-decoder's, those of self-attention and of the encoder."""
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def _layers(cache: Any) -> list[Any]:
    return [layer for part in _parts(cache) for layer in part.layers]


def _length(cache: Any) -> int:
    """How many columns the rows have; 0 if no layer counts them."""
    decoder = decoder_cache(cache)
    counts_tokens = any(isinstance(layer, CacheLayerMixin) for layer in decoder.layers)
    return int(decoder.get_seq_length()) if counts_tokens else 0


def _layers_with_room(cache: Any) -> list[Any]:
    """The layers, as such that rows can join in place and that do not end with the first call."""
    check_declared(cache)
    for part in _parts(cache):
        growth = getattr(part, "_growth", None) or GrowthPolicy(2 * len(part.layers) or 1)
        growth.max_length = None
        part.layers = [
            layer if slots.has_methods(layer) else as_growing(layer, growth)
            for layer in part.layers
        ]
    return _layers(cache)
