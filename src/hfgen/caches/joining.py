"""Appending the rows of one cache to another."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import EncoderDecoderCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from .. import families
from .dynamic import KINDS, upstream_kind
from .layers import decoder_cache

#: The kinds of layers to which rows can be appended; a subclass may have more states.
APPENDABLE = (*KINDS, LinearAttentionLayer, *families.EMPTY_LAYERS)

#: What a layer keeps of a row, and the dimension of its tokens: ``None`` if states are of all at once.
TOKEN_DIMS = {
    "keys": -2,
    "values": -2,
    "indexer_keys": -2,
    "conv_states": -1,  # an earlier token is zero where there is none
    "recurrent_states": None,
}


def append(cache: Any, other: Any) -> tuple[int, int]:
    """Put the rows of ``other`` behind those of ``cache``, in place; ``other`` stays as it is.

    The shorter cache is padded with zeros on the left, which attention masks have to hide. Returns by how
    many columns the rows of ``cache`` and those of ``other`` were padded: of an encoder-decoder's, in the
    decoder's part; the other part is padded by itself. Raises ``ValueError``, before anything is changed,
    for layers that are not ``APPENDABLE``, or differ in number, kind, heads, size, window or dtype.
    """
    parts = [(decoder_cache(cache), decoder_cache(other))]
    if isinstance(cache, EncoderDecoderCache) and isinstance(other, EncoderDecoderCache):
        parts.append((cache.cross_attention_cache, other.cross_attention_cache))
    pairs = [pair for one, two in parts for pair in _matched(one, two)]
    lengths = [int(part.get_seq_length()) for part in parts[0]]
    for layer, added in pairs:
        _append_layer(layer, added)
    return max(lengths) - lengths[0], max(lengths) - lengths[1]


def _matched(cache: Any, other: Any) -> list[tuple[Any, Any]]:
    """The layers of both, in pairs whose rows can be joined."""
    if len(cache.layers) != len(other.layers):
        raise ValueError(
            f"Rows of a cache of {len(other.layers)} layers cannot be put into one of "
            f"{len(cache.layers)} layers."
        )
    pairs = list(zip(cache.layers, other.layers, strict=True))
    for layer, added in pairs:
        kinds = upstream_kind(layer), upstream_kind(added)
        for kind in kinds:
            if kind not in APPENDABLE:
                raise ValueError(f"Rows cannot be appended to layers of kind {kind.__name__}.")
        forms = _form(layer), _form(added)
        if kinds[0] is not kinds[1] or forms[0] != forms[1]:
            raise ValueError(
                f"Rows of a {kinds[1].__name__} with {forms[1]} cannot be put into a "
                f"{kinds[0].__name__} with {forms[0]}."
            )
    return pairs


def _states(layer: Any) -> dict[tuple[str, int | None], Tensor]:
    """The states of a layer, by attribute, and by number where the attribute is a dict."""
    found: dict[tuple[str, int | None], Tensor] = {}
    for name in TOKEN_DIMS:
        states = getattr(layer, name, None)
        each = states if isinstance(states, dict) else {None: states}
        found |= {(name, index): state for index, state in each.items() if state is not None}
    return found


def _form(layer: Any) -> dict[str, Any]:
    """What two layers have to have in common: sizes that are neither rows nor tokens."""
    form: dict[str, Any] = {"window": getattr(layer, "sliding_window", None)}
    for (name, index), states in _states(layer).items():
        tokens = range(states.ndim)[TOKEN_DIMS[name] or 0]
        sizes = [size for dim, size in enumerate(states.shape) if dim not in (0, tokens)]
        form[name if index is None else f"{name}[{index}]"] = (*sizes, states.dtype)
    return form


def _append_layer(layer: Any, added: Any) -> None:
    has_keys = isinstance(layer, DynamicLayer) and layer.is_initialized
    longest = max(layer.get_seq_length(), added.get_seq_length()) if has_keys else 0
    kept = min(longest, getattr(layer, "sliding_window", longest + 1) - 1) or longest
    theirs = _states(added)
    for (name, index), own in _states(layer).items():
        rows, dim = [own, theirs[name, index]], TOKEN_DIMS[name]
        if dim == -2:  # a window that records what leaves it holds more than it shows
            rows = [states[..., -kept:, :] for states in rows]
        joined = _joined(rows[0], rows[1], dim)
        if index is None:
            setattr(layer, name, joined)
        else:
            getattr(layer, name)[index] = joined
    if has_keys and isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = longest


def _joined(states: Tensor, others: Tensor, dim: int | None) -> Tensor:
    """The rows of both, the shorter along ``dim`` (-1 or -2) with zeros before it."""
    others = others.to(states.device)
    if dim is not None:
        longest = max(states.shape[dim], others.shape[dim])
        before = [0, 0] * (-dim - 1)
        states, others = (
            F.pad(s, [*before, longest - s.shape[dim], 0]) if s.shape[dim] < longest else s
            for s in (states, others)
        )
    return torch.cat([states, others])
