"""Tensors by which graphs of a layer are made: their sizes are the same in every process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Rows, new tokens, tokens seen, and room for tokens.
ROWS, NEW, SEEN, ROOM = 2, 3, 37, 53


def room_like(states: Tensor, rows: int) -> Tensor:
    """Keys or values of the stand-ins; their strides are no products of sizes."""
    _, heads, _, size = states.shape
    room = states.new_zeros((rows, heads, ROOM, size))[:, :, :SEEN]
    for dim in (0, 2):
        torch._dynamo.maybe_mark_dynamic(room, dim)
    return room


def stand_in(tensor: Tensor, stands_for: dict[int, tuple[int, int]]) -> Tensor:
    """Zeros with a size of the stand-ins where ``tensor`` has that of the call."""
    shape = list(tensor.shape)
    dims = {4: (0, 2, 3), 3: (0, 1), 2: (0, 1), 1: (1,)}.get(len(shape), ())
    changed = []
    for dim in dims:
        at = 0 if len(shape) == 1 else dim
        had, stand_in = stands_for[dim]
        if shape[at] == had:
            shape[at] = stand_in
            changed += [at] if stand_in > 1 else []
    found = tensor.new_zeros(shape)
    for dim in changed:
        torch._dynamo.maybe_mark_dynamic(found, dim)
    return found


def stand_ins(value: Any, stands_for: dict[int, tuple[int, int]]) -> Any:
    if isinstance(value, Tensor):
        return stand_in(value, stands_for)
    if isinstance(value, tuple):
        return tuple(stand_ins(part, stands_for) for part in value)
    return value


def is_plain(value: Any) -> bool:
    """Whether an argument is one for which there are stand-ins."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (Tensor, bool, str)
