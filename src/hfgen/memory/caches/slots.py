"""In-place operations on a cache: rows join, rows leave, and columns that are padding in all rows go.

A cache holds the rows of a batch: all end in the same column, and shorter ones have zeros before them, which
attention masks have to hide. Its buffers have room: a row that joins writes only its own states, and a row that
leaves lets the last one move. All operations raise ``ValueError``, before anything is changed, for layers that do
not declare how their rows join and leave: by a kind in ``DECLARED``, or by the methods of ``Slots``.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import CacheLayerMixin, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from ... import families
from .dynamic import KINDS, as_growing, upstream_kind
from .growing import GrowableTensor, GrowthPolicy, is_nothing, padded
from .layers import decoder_cache, is_foreign_part, parts_of

#: The kinds of layers whose rows join and leave. A subclass of them may have more states than ``STATES``.
DECLARED = (*KINDS, LinearAttentionLayer, *families.EMPTY_LAYERS)

#: What a layer of these kinds keeps of a row, by the name of the attribute, which is a tensor or a dict of tensors:
#: the dimension of the rows, and that of the tokens; ``None`` for a state of all tokens at once.
STATES = {
    "keys": (0, -2),
    "values": (0, -2),
    "indexer_keys": (0, -2),
    "indexer_position_ids": (1, -1),
    "conv_states": (0, -1),  # an earlier token is zero where there is none
    "recurrent_states": (0, None),
}

#: A state of a layer: a key of ``STATES``, and a key of the dict if it is one.
Place = tuple[str, int | None]


@runtime_checkable
class Slots(Protocol):
    """The methods of a custom layer whose rows join and leave, besides those of every layer.

    Rows leave by ``reorder_cache(rows)`` of fewer rows. ``form_of_rows() -> dict``, if it has that: sizes
    and dtypes, say, in which layers have to agree.
    """

    def join_rows(self, other: Any) -> None:
        """Append the rows of ``other``, a layer of the same class, which stays as it is.

        All rows end in the same column; shorter rows have zeros before them, which masks hide.
        """

    def trim_tokens(self, n_tokens: int) -> None:
        """Drop the first ``n_tokens`` columns: lengths are those of a shorter batch from then on."""

    def bytes_of_row(self, n_tokens: int) -> int:
        """Bytes that one row of ``n_tokens`` takes."""


def has_methods(layer: Any) -> bool:
    return isinstance(layer, Slots)


# ---------------------------------------------------------------- caches


def append(cache: Any, other: Any) -> None:
    """Append the rows of ``other``, which stays; zeros are put before shorter ones. Raises as ``check``."""
    check(cache, other)
    for layer, added in zip(_layers_with_room(cache), _layers(other), strict=True):
        if has_methods(layer):
            layer.join_rows(added)
        else:
            _join(layer, added)


def extract(cache: Any, index: Tensor) -> Any:
    """A cache of the rows ``index (wanted,)`` alone; ``cache`` stays as it is, and shares no memory with it."""
    twin = copy.copy(cache)
    if isinstance(cache, EncoderDecoderCache):
        twin.self_attention_cache = extract(cache.self_attention_cache, index)
        twin.cross_attention_cache = extract(cache.cross_attention_cache, index)
        twin.is_updated = dict(cache.is_updated)
        return twin
    twin.layers = []
    for layer in _layers_with_room(cache):
        if has_methods(layer):
            copied = copy.deepcopy(layer)
            copied.reorder_cache(index)
        else:
            copied = copy.copy(layer)
            dicts = {n: dict(value) for n, value in vars(layer).items() if isinstance(value, dict)}
            vars(copied).update(dicts)  # of tensors, which are replaced below
            for place in states_of(copied):
                _take_state(copied, place, index)
        twin.layers.append(copied)
    return twin


def move_to(cache: Any, device: torch.device) -> None:
    """Move the states to the host, or back; between the two, no rows join or leave."""
    for layer in _layers(cache):
        layer.offload() if device.type == "cpu" else layer.prefetch()


def move(cache: Any, index: Tensor, changed: Tensor) -> None:
    """Row ``i`` becomes old row ``index[i]``, of no more rows; only the rows ``changed`` are written."""
    for layer in _layers_with_room(cache):
        if has_methods(layer):
            layer.reorder_cache(index)
            continue
        growables = _growables_of(layer)
        for place in states_of(layer).keys() - growables.keys():
            _take_state(layer, place, index)
        for states in growables.values():
            states.move(index, changed)


def arrange(cache: Any, columns: Tensor) -> None:
    """Token ``j`` of row ``i`` becomes its old ``columns[i, j]``, in place, in layers of full attention."""
    for layer in _layers_with_room(cache):
        for states in _growables_of(layer).values():
            states.arrange(columns)


def trim(cache: Any, n_tokens: int) -> None:
    """Drop the first ``n_tokens`` columns of the decoder, which masks have to hide. Nothing is copied."""
    check_declared(cache)
    length = _length(cache)
    if n_tokens < 0 or (length and n_tokens >= length):
        raise ValueError(f"`n_tokens`={n_tokens!r} cannot be trimmed from {length} columns.")
    for layer in _layers_with_room(decoder_cache(cache)):
        if has_methods(layer):
            layer.trim_tokens(n_tokens)
        # Another length: keys of an image, which have columns of their own. No keys: the cache is not used.
        elif (
            isinstance(layer, DynamicLayer)
            and layer.get_seq_length() == length
            and layer.keys is not None
        ):
            n_held = layer.keys.shape[-2]  # a window may have dropped some already
            for states in _growables_of(layer).values():
                states.drop_first(n_held - min(n_held, length - n_tokens))
            if getattr(layer, "indexer_position_ids", None) is not None:
                layer.indexer_position_ids = layer.indexer_position_ids[..., n_tokens:]
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = length - n_tokens


def bytes_of_row(cache: Any, n_tokens: int) -> int:
    """Bytes that one row of ``n_tokens`` takes in a cache like this one, which holds tokens already.

    What grows is extrapolated, windows up to their size; other states count as they are. Spare room of
    buffers comes on top (``GrowthPolicy``).
    """
    check_declared(cache)
    length, total = _length(cache), 0
    for layer in _layers(cache):
        is_decoders = layer in decoder_cache(cache).layers
        if hasattr(layer, "bytes_of_row"):
            total += int(layer.bytes_of_row(n_tokens if is_decoders else 0))
            continue
        grows = is_decoders and isinstance(layer, DynamicLayer) and layer.get_seq_length() == length
        most = getattr(layer, "sliding_window", n_tokens + 1) - 1 or n_tokens
        for (name, index), tensor in states_of(layer).items():
            row_dim, token_dim = STATES[name]
            of_row = tensor.nbytes // max(tensor.shape[row_dim], 1)
            if grows and index is None and token_dim is not None:
                of_row = of_row // max(tensor.shape[token_dim], 1) * min(n_tokens, most)
            total += of_row
    return total


def check(cache: Any, other: Any) -> None:
    """Raise ``ValueError`` for layers of another number, kind or ``form``, or that declare nothing."""
    check_declared(cache)
    check_declared(other)
    for part, added_part in zip(parts_of(cache), parts_of(other), strict=True):
        if len(part.layers) != len(added_part.layers):
            raise ValueError(
                f"Rows of a cache of {len(added_part.layers)} layers cannot be put into one of "
                f"{len(part.layers)} layers."
            )
    for layer, added in zip(_layers(cache), _layers(other), strict=True):
        kind, added_kind = upstream_kind(layer), upstream_kind(added)
        form, added_form = _form(layer), _form(added)
        if kind is not added_kind or form != added_form:
            raise ValueError(
                f"Rows of a {added_kind.__name__} with {added_form} cannot be put into a "
                f"{kind.__name__} with {form}."
            )


def check_declared(cache: Any) -> None:
    """Raise ``ValueError`` for a layer that does not declare how its rows join and leave."""
    for part in parts_of(cache):
        name, layers = type(part).__name__, getattr(part, "layers", None)
        if getattr(part, "offloading", False):
            unknown = f"{name} that moves layers between devices by itself"
        elif layers is None or (
            # A model's own class of cache may have more states than its layers have: MiniMax's does.
            is_foreign_part(part) and not all(map(has_methods, layers))
        ):
            unknown = name
        elif undeclared := [
            layer
            for layer in layers
            if not (has_methods(layer) or upstream_kind(layer) in DECLARED)
        ]:
            unknown = f"{type(undeclared[0]).__name__}, a layer of {name}"
        else:
            continue
        raise ValueError(
            f"It is not known how rows join and leave a {unknown}. Decode these prompts with "
            "`generate`, or give the layers the methods of `hfgen.memory.caches.slots.Slots`."
        )


def _layers(cache: Any) -> list[Any]:
    return [layer for part in parts_of(cache) for layer in part.layers]


def _length(cache: Any) -> int:
    """How many columns the rows have; 0 if no layer counts them."""
    decoder = decoder_cache(cache)
    counts_tokens = any(isinstance(layer, CacheLayerMixin) for layer in decoder.layers)
    return int(decoder.get_seq_length()) if counts_tokens else 0


def _layers_with_room(cache: Any) -> list[Any]:
    """The layers, as such that rows can join in place and that do not end with the first call."""
    check_declared(cache)
    for part in parts_of(cache):
        growth = getattr(part, "_growth", None) or GrowthPolicy(2 * len(part.layers) or 1)
        growth.max_length = None
        part.layers = [
            layer if has_methods(layer) else as_growing(layer, growth) for layer in part.layers
        ]
    return _layers(cache)


# ---------------------------------------------------------------- layers of transformers' kinds


def states_of(layer: Any) -> dict[Place, Tensor]:
    """The states that a layer of transformers' kinds holds."""
    states: dict[Place, Tensor] = {}
    for name in STATES:
        value = getattr(layer, name, None)
        tensors = value if isinstance(value, dict) else {None: value}
        for index, tensor in tensors.items():
            if tensor is not None and not is_nothing(tensor):
                states[name, index] = tensor
    return states


def _growables_of(layer: Any) -> dict[Place, GrowableTensor]:
    """The storage of the states that grow in place. No other tensor of them may be held meanwhile."""
    storages = {(name, i): vars(layer).get(f"_{name}") for name, i in states_of(layer)}
    return {place: s for place, s in storages.items() if isinstance(s, GrowableTensor)}


def _set_state(layer: Any, place: Place, tensor: Tensor) -> None:
    name, index = place
    setattr(layer, name, tensor if index is None else getattr(layer, name) | {index: tensor})


def _take_state(layer: Any, place: Place, index: Tensor) -> None:
    """Row ``i`` of a state becomes old row ``index[i]``."""
    tensor = states_of(layer)[place]
    _set_state(layer, place, tensor.index_select(STATES[place[0]][0], index.to(tensor.device)))


def _form(layer: Any) -> dict[str, Any]:
    """What two layers have to have in common: sizes that are neither rows nor tokens."""
    if has_methods(layer):
        return dict(layer.form_of_rows()) if hasattr(layer, "form_of_rows") else {}
    common: dict[str, Any] = {"window": getattr(layer, "sliding_window", None)}
    for (name, index), tensor in states_of(layer).items():
        free = {dim % tensor.ndim for dim in STATES[name] if dim is not None}
        sizes = [size for dim, size in enumerate(tensor.shape) if dim not in free]
        common[name if index is None else f"{name}[{index}]"] = (*sizes, tensor.dtype)
    return common


def _join(layer: Any, other: Any) -> None:
    """Append the rows of ``other``, whose ``_form`` is the same."""
    has_keys = isinstance(layer, DynamicLayer) and layer.is_initialized
    longest = max(layer.get_seq_length(), other.get_seq_length()) if has_keys else 0
    n_kept = min(longest, getattr(layer, "sliding_window", longest + 1) - 1) or longest
    growables = _growables_of(layer)
    for place, added in states_of(other).items():
        if (growable := growables.get(place)) is not None:
            # A window that records what leaves it holds more than it shows.
            growable.drop_first(growable.view.shape[-2] - n_kept)
            spare = getattr(layer, "_spare", layer._growth.spare)
            growable.join(added[..., -n_kept:, :], spare)
            continue
        row_dim, token_dim = STATES[place[0]]
        former = states_of(layer)[place]
        both = [former, added.to(former.device)]
        if token_dim is not None:
            length = max(tensor.shape[token_dim] for tensor in both)
            both = [padded(tensor, token_dim, length) for tensor in both]
        _set_state(layer, place, torch.cat(both, row_dim))
    if has_keys and isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = longest
