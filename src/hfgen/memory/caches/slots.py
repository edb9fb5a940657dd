"""How the rows of one layer join, leave and lose columns, for each class of layer.

Of a layer of transformers' kinds, ``STATES`` lists what it keeps of a row. A layer of another class has
the methods of ``Slots``.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from ... import families
from .dynamic import KINDS, upstream_kind
from .growing import GrowableTensor, is_nothing, padded

#: The kinds of layers whose rows join and leave. A subclass of them may have more states than ``STATES``.
DECLARED = (*KINDS, LinearAttentionLayer, *families.EMPTY_LAYERS)

#: What a layer keeps of a row, by the name of the attribute, which is a tensor or a dict of tensors: the
#: dimension of the rows, and that of the tokens; ``None`` for a state of all tokens at once.
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


#: The methods of ``Slots``.
METHODS = ("join_rows", "trim_tokens", "bytes_of_row")


def has_methods(layer: Any) -> bool:
    return all(callable(getattr(layer, name, None)) for name in METHODS)


def is_declared(layer: Any) -> bool:
    """Whether it is known how rows join the layer and leave it."""
    return has_methods(layer) or upstream_kind(layer) in DECLARED


def states_of(layer: Any) -> dict[Place, Tensor]:
    """The states that a layer of transformers' kinds holds."""
    states: dict[Place, Tensor] = {}
    for name in STATES:
        held = getattr(layer, name, None)
        tensors = held if isinstance(held, dict) else {None: held}
        for index, tensor in tensors.items():
            if tensor is not None and not is_nothing(tensor):
                states[name, index] = tensor
    return states


def growables_of(layer: Any) -> dict[Place, GrowableTensor]:
    """The storage of the states that grow in place. No other tensor of them may be held meanwhile."""
    storages = {(name, i): vars(layer).get(f"_{name}") for name, i in states_of(layer)}
    return {place: s for place, s in storages.items() if isinstance(s, GrowableTensor)}


def set_state(layer: Any, place: Place, tensor: Tensor) -> None:
    name, index = place
    if index is None:
        setattr(layer, name, tensor)
    else:
        getattr(layer, name)[index] = tensor


def take_state(layer: Any, place: Place, index: Tensor) -> None:
    """Row ``i`` of a state becomes old row ``index[i]``."""
    tensor = states_of(layer)[place]
    set_state(layer, place, tensor.index_select(STATES[place[0]][0], index.to(tensor.device)))


def form(layer: Any) -> dict[str, Any]:
    """What two layers have to have in common: sizes that are neither rows nor tokens."""
    if has_methods(layer):
        return dict(layer.form_of_rows()) if hasattr(layer, "form_of_rows") else {}
    common: dict[str, Any] = {"window": getattr(layer, "sliding_window", None)}
    for (name, index), tensor in states_of(layer).items():
        free = {dim % tensor.ndim for dim in STATES[name] if dim is not None}
        sizes = [size for dim, size in enumerate(tensor.shape) if dim not in free]
        common[name if index is None else f"{name}[{index}]"] = (*sizes, tensor.dtype)
    return common


def join(layer: Any, other: Any) -> None:
    """Append the rows of ``other``, whose ``form`` is the same."""
    if has_methods(layer):
        layer.join_rows(other)
        return
    has_keys = isinstance(layer, DynamicLayer) and layer.is_initialized
    longest = max(layer.get_seq_length(), other.get_seq_length()) if has_keys else 0
    n_kept = min(longest, getattr(layer, "sliding_window", longest + 1) - 1) or longest
    growables = growables_of(layer)
    for place, added in states_of(other).items():
        if (growable := growables.get(place)) is not None:
            # A window that records what leaves it holds more than it shows.
            growable.drop_first(growable.view.shape[-2] - n_kept)
            spare = getattr(layer, "_spare", layer._growth.spare)
            growable.join(added[..., -n_kept:, :], spare)
            continue
        row_dim, token_dim = STATES[place[0]]
        held = states_of(layer)[place]
        both = [held, added.to(held.device)]
        if token_dim is not None:
            length = max(tensor.shape[token_dim] for tensor in both)
            both = [padded(tensor, token_dim, length) for tensor in both]
        set_state(layer, place, torch.cat(both, row_dim))
    if has_keys and isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = longest


def move(layer: Any, index: Tensor, changed: Tensor) -> None:
    """Row ``i`` becomes old row ``index[i]``, of no more rows; ``changed`` lists those that differ then."""
    if has_methods(layer):
        layer.reorder_cache(index)
        return
    growables = growables_of(layer)
    for place in states_of(layer).keys() - growables.keys():
        take_state(layer, place, index)
    for states in growables.values():
        states.move(index, changed)


def arrange(layer: Any, columns: Tensor) -> None:
    """Token ``j`` of row ``i`` becomes its old token ``columns[i, j]``, in a layer of full attention."""
    for states in growables_of(layer).values():
        states.arrange(columns)


def extract(layer: Any, index: Tensor) -> Any:
    """A layer of the rows ``index (wanted,)`` alone, which shares no memory with ``layer``."""
    if has_methods(layer):
        twin = copy.deepcopy(layer)
        twin.reorder_cache(index)
        return twin
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):  # of tensors, which are replaced below
            setattr(twin, name, dict(value))
    for place in states_of(twin):
        take_state(twin, place, index)
    return twin


def trim(layer: Any, n_tokens: int, length: int) -> None:
    """Drop the first ``n_tokens`` of the ``length`` columns that the rows of a cache have."""
    if has_methods(layer):
        layer.trim_tokens(n_tokens)
        return
    # Another length: keys of an image, which have columns of their own.
    if not isinstance(layer, DynamicLayer) or layer.get_seq_length() != length:
        return
    if layer.keys is None:  # the model does not use its cache
        return
    # A window may have dropped some already.
    n_dropped = layer.keys.shape[-2] - min(layer.keys.shape[-2], length - n_tokens)
    for states in growables_of(layer).values():
        states.drop_first(n_dropped)
    if getattr(layer, "indexer_position_ids", None) is not None:
        layer.indexer_position_ids = layer.indexer_position_ids[..., n_tokens:]
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = length - n_tokens


def bytes_of_row(layer: Any, n_tokens: int, length: int) -> int:
    """Bytes of a row of ``n_tokens`` without spare room, extrapolated from rows of ``length`` tokens."""
    if hasattr(layer, "bytes_of_row"):
        return int(layer.bytes_of_row(n_tokens))
    total = 0
    grows = isinstance(layer, DynamicLayer) and layer.get_seq_length() == length
    most = getattr(layer, "sliding_window", n_tokens + 1) - 1 or n_tokens
    for (name, index), tensor in states_of(layer).items():
        row_dim, token_dim = STATES[name]
        of_row = tensor.nbytes // max(tensor.shape[row_dim], 1)
        if grows and index is None and token_dim is not None:
            of_row = of_row // max(tensor.shape[token_dim], 1) * min(n_tokens, most)
        total += of_row
    return total
