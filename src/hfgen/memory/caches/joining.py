"""In-place operations on a cache: rows join, rows leave, and columns that are padding in all rows are removed.

A cache holds the rows of a batch at every moment: all end in the same column, and shorter ones have zeros
before them, which attention masks have to hide. Its buffers have room, so that a row that joins writes
what is its own, and one that leaves lets the last one move.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache
from transformers.cache_utils import CacheLayerMixin

from . import slots
from .dynamic import upstream_kind
from .growing import GrowthPolicy
from .layers import decoder_cache, is_foreign_part


def append(cache: Any, other: Any) -> tuple[int, int]:
    """Put the rows of ``other`` behind those of ``cache``, in place; ``other`` stays as it is.

    The shorter cache is padded with zeros on the left. Returns by how many columns the rows of ``cache``
    and those of ``other`` were padded: of an encoder-decoder's, in the decoder's part; the other part is
    padded by itself. Raises ``ValueError``: see ``check``.
    """
    check(cache, other)
    lengths = _length(cache), _length(other)
    for part, theirs in zip(_parts(cache), _parts(other), strict=True):
        _make_room(part)
        for layer, added in zip(part.layers, theirs.layers, strict=True):
            slots.join(layer, added)
    return max(lengths) - lengths[0], max(lengths) - lengths[1]


def leave(cache: Any, row: int) -> None:
    """Let the last row take the place of ``row``, in place. The only row leaves with its cache.

    Raises ``ValueError``, before anything is changed, for a row that is not there, for the only one,
    and for layers that declare nothing.
    """
    check_declared(cache)
    counts = [slots.n_rows(layer) for part in _parts(cache) for layer in part.layers]
    n_rows = next((n for n in counts if n is not None), None)
    if n_rows is not None and (not 0 <= row < n_rows or n_rows == 1):
        raise ValueError(
            f"`row`={row!r} cannot leave a cache of {n_rows} "
            + ("row: drop the cache." if n_rows == 1 else f"rows: it has to be 0 to {n_rows - 1}.")
        )
    for part in _parts(cache):
        _make_room(part)
        for layer in part.layers:
            slots.leave(layer, row)


def extract(cache: Any, index: Tensor) -> Any:
    """A cache of the rows ``index (wanted,)`` alone; ``cache`` stays as it is.

    Raises ``ValueError`` for layers that declare nothing.
    """
    check_declared(cache)
    if isinstance(cache, EncoderDecoderCache):
        twin = copy.copy(cache)
        twin.self_attention_cache = extract(cache.self_attention_cache, index)
        twin.cross_attention_cache = extract(cache.cross_attention_cache, index)
        twin.is_updated = dict(cache.is_updated)
        return twin
    _make_room(cache)
    twin = copy.copy(cache)
    twin.layers = [slots.extract(layer, index) for layer in cache.layers]
    return twin


def move_to(cache: Any, device: torch.device) -> None:
    """Move the states to the host, or back; between, no rows join or leave. Raises as ``extract``."""
    check_declared(cache)
    for part in _parts(cache):
        for layer in part.layers:
            slots.move_to(layer, device)


def move(cache: Any, index: Tensor, changed: Tensor) -> None:
    """Let row ``i`` go on as row ``index[i]``, in place: ``index (rows,)``. Only ``changed`` is written.

    ``changed``: the rows that are others then (``growing.changed``). Raises ``ValueError``, before anything is changed, for layers that declare nothing.
    """
    check_declared(cache)
    for part in _parts(cache):
        _make_room(part)
        for layer in part.layers:
            slots.move(layer, index, changed)


def trim(cache: Any, n_tokens: int) -> None:
    """Forget the first ``n_tokens`` columns, which masks have to hide in all rows. None are copied.

    Lengths are those of a batch that was shorter from the start. Keys of an encoder, or of an image, stay.
    Raises ``ValueError``, before anything is changed, if there are not more columns than that, and for
    layers that declare nothing.
    """
    check_declared(cache)
    own, length = decoder_cache(cache), _length(cache)
    if n_tokens < 0 or (length and n_tokens >= length):
        raise ValueError(f"`n_tokens`={n_tokens!r} cannot be trimmed from {length} columns.")
    _make_room(own)
    for layer in own.layers:
        slots.trim(layer, n_tokens, length)


def bytes_of_row(cache: Any, n_tokens: int) -> int:
    """Bytes that one row of ``n_tokens`` takes in a cache like this one, which holds tokens already.

    What grows is extrapolated, windows up to their size; states that do not grow, and keys of an encoder or
    of an image, count as they are. Spare room of buffers comes on top: up to twice the rows, and a share of
    the tokens (``GrowthPolicy``). Raises ``ValueError`` for layers that declare nothing.
    """
    check_declared(cache)
    length = _length(cache)
    own = decoder_cache(cache)
    total = sum(slots.bytes_of_row(layer, n_tokens, length) for layer in own.layers)
    if isinstance(cache, EncoderDecoderCache):
        total += sum(slots.bytes_of_row(each, 0, -1) for each in cache.cross_attention_cache.layers)
    return total


def check(cache: Any, other: Any) -> None:
    """Raise ``ValueError`` if rows of ``other`` cannot join ``cache``.

    That is so for layers that do not declare how (``slots.STATES``, ``slots.Slots``), and for those that
    differ in number, kind, heads, size, window or dtype.
    """
    check_declared(cache)
    check_declared(other)
    for part, theirs in zip(_parts(cache), _parts(other), strict=True):
        if len(part.layers) != len(theirs.layers):
            raise ValueError(
                f"Rows of a cache of {len(theirs.layers)} layers cannot be put into one of "
                f"{len(part.layers)} layers."
            )
        for layer, added in zip(part.layers, theirs.layers, strict=True):
            _check_pair(layer, added)


def _check_pair(layer: Any, added: Any) -> None:
    kinds = upstream_kind(layer), upstream_kind(added)
    forms = slots.form(layer), slots.form(added)
    if kinds[0] is not kinds[1] or forms[0] != forms[1]:
        raise ValueError(
            f"Rows of a {kinds[1].__name__} with {forms[1]} cannot be put into a "
            f"{kinds[0].__name__} with {forms[0]}."
        )


def check_declared(cache: Any) -> None:
    for part in _parts(cache):
        name = type(part).__name__
        if getattr(part, "offloading", False):
            raise _unknown(f"{name} that moves layers between devices by itself")
        layers = getattr(part, "layers", None)
        by_methods = layers is not None and all(map(slots.is_declared_by_methods, layers))
        if layers is None or (
            is_foreign_part(part) and not by_methods
        ):  # MiniMax's has more states
            raise _unknown(name)
        for layer in layers:
            if not slots.is_declared(layer):
                raise _unknown(f"{type(layer).__name__}, a layer of {name}")


def _unknown(what: str) -> ValueError:
    return ValueError(
        f"It is not known how rows join and leave a {what}. Decode these prompts with `generate`, or give "
        "the layers the methods of `hfgen.memory.caches.slots.Slots`."
    )


def _parts(cache: Any) -> list[Any]:
    """The caches that have rows: of an encoder-decoder's, those of self-attention and of the encoder."""
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def _length(cache: Any) -> int:
    """How many columns the rows have; 0 if no layer counts them."""
    own = decoder_cache(cache)
    counts_tokens = any(isinstance(layer, CacheLayerMixin) for layer in own.layers)
    return int(own.get_seq_length()) if counts_tokens else 0


def _make_room(cache: Any) -> None:
    """Let the layers be such that rows join them in place, and grow beyond the call of their first row."""
    growth = getattr(cache, "_growth", None) or GrowthPolicy(2 * len(cache.layers) or 1)
    growth.max_length = None
    cache.layers = [slots.with_room(layer, growth) for layer in cache.layers]
