"""A quantised layer whose rows join and leave: each row is packed in its own groups.

Groups of tokens begin with a row's first token, so rows of different lengths would have to be padded by
whole groups to share one tensor. Kept one by one, each row has the codes that it has alone, bit for bit.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer

from .dynamic import UPSTREAM_KINDS
from .packing import Scratch
from .quantized import QuantizedLayer


class QuantizedRows(DynamicLayer):
    """Layers of one row each, which end in the same column. ``n_tokens``: columns of the longest.

    The batches of the engine use it: tokens are never taken back, and it is never reset.
    """

    def __init__(self, layer: QuantizedLayer) -> None:
        self.scratch = layer.scratch
        self.dtype, self.device, self.is_initialized = layer.dtype, layer.device, True
        #: What the rows are unpacked into, one after the other.
        self.row_scratch = (Scratch(), Scratch())
        self.rows = [self._copied(layer, slice(i, i + 1)) for i in range(layer.n_rows)]
        self.n_tokens = layer.get_seq_length()

    def _copied(self, layer: QuantizedLayer, rows: slice | None = None) -> QuantizedLayer:
        """A copy of a layer, or of some ``rows`` of it, that unpacks into ``row_scratch``."""
        copied = copy.copy(layer)
        copied.scratch = self.row_scratch
        copied.states = {name: copy.copy(states) for name, states in layer.states.items()}
        if rows is not None:
            copied._map_rows(lambda tensor: tensor[rows].clone())
        return copied

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The keys and values of all tokens so far, with those of the new ones; zeros before them."""
        self.n_tokens += key_states.shape[2]
        keys, values = (
            scratch.empty((*states.shape[:2], self.n_tokens, states.shape[3]), states)
            for states, scratch in zip((key_states, value_states), self.scratch, strict=True)
        )
        for i, row in enumerate(self.rows):
            row_keys, row_values = row.update(key_states[i : i + 1], value_states[i : i + 1])
            _write(row_keys, keys[i])
            _write(row_values, values[i])
        return keys, values

    def _joined(self, name: str) -> Tensor:
        of_rows = [row.states[name].joined() for row in self.rows]
        _, heads, _, size = of_rows[0].shape
        joined = of_rows[0].new_empty((len(of_rows), heads, self.n_tokens, size))
        for states, out in zip(of_rows, joined, strict=True):
            _write(states, out)
        return joined

    keys: Any = property(lambda layer: layer._joined("keys"))
    values: Any = property(lambda layer: layer._joined("values"))

    # ---------------------------------------------------------------- hfgen.memory.caches.slots.Slots

    def join_rows(self, other: QuantizedLayer | QuantizedRows) -> None:
        """Append the rows of ``other``. Nothing is unpacked."""
        theirs = other if isinstance(other, QuantizedRows) else QuantizedRows(other)
        self.rows += map(self._copied, theirs.rows)
        self.n_tokens = max(self.n_tokens, theirs.n_tokens)

    def leave_row(self, row: int) -> None:
        """Remove ``row``: the last row takes its place."""
        self.rows[row] = self.rows[-1]
        self.rows.pop()

    def trim_tokens(self, n_tokens: int) -> None:
        """Show ``n_tokens`` columns less. A row that was padded before it was packed still holds them."""
        self.n_tokens -= n_tokens

    def bytes_of_row(self, n_tokens: int) -> int:
        return self.rows[0].bytes_of_row(n_tokens)

    def form_of_rows(self) -> dict[str, Any]:
        return self.rows[0].form_of_rows()

    # ---------------------------------------------------------------- transformers' DynamicLayer

    def get_seq_length(self) -> int:
        return self.n_tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.rows = [self._copied(self.rows[i]) for i in beam_idx.tolist()]

    def offload(self) -> None:
        for row in self.rows:
            row.offload()

    def prefetch(self) -> None:
        for row in self.rows:
            row.prefetch()

    @property
    def n_bytes(self) -> int:
        """Bytes of what is kept between updates."""
        return sum(row.n_bytes for row in self.rows)


def _write(states: Tensor, out: Tensor) -> None:
    """Write a row's ``states (1, heads, length, size)`` to the end of ``out (heads, columns, size)``.

    Zeros come before them. States that were trimmed, of more tokens than ``out`` has, are left out.
    """
    length = min(states.shape[2], out.shape[1])
    out[:, : out.shape[1] - length].zero_()
    out[:, out.shape[1] - length :] = states[0, :, states.shape[2] - length :]


UPSTREAM_KINDS[QuantizedRows] = QuantizedLayer
