"""Joining and removing rows of a quantised layer: each row is packed in its own groups.

Groups of tokens begin with a row's first token, so that rows of different lengths would have to be padded
by whole groups to share one tensor. Kept one by one, each row has the codes that it has alone, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from .dynamic import UPSTREAM_KINDS
from .packing import Scratch
from .quantized import QuantizedLayer


class QuantizedRows(DynamicLayer):
    """Layers of one row each, which end in the same column. ``n_tokens``: columns of the longest."""

    def __init__(self, layer: QuantizedLayer) -> None:
        self.settings, self.scratch = layer.settings, layer.scratch
        self.dtype, self.device, self.is_initialized = layer.dtype, layer.device, True
        self.record_past = layer.record_past
        #: What the rows are unpacked into, one after the other.
        self.of_one_row = (Scratch(), Scratch())
        self.rows = [self._taken(layer, slice(i, i + 1)) for i in range(layer.n_rows)]
        self.n_tokens = layer.get_seq_length()

    def _taken(self, layer: QuantizedLayer, rows: slice | None = None) -> QuantizedLayer:
        """A layer of its own for ``rows`` of a layer, or for all of them."""
        taken = copy.copy(layer)
        taken.scratch = self.of_one_row
        taken.states = {name: copy.copy(states) for name, states in layer.states.items()}
        if rows is not None:
            taken._map_rows(lambda tensor: tensor[rows].clone())
        return taken

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The keys and values of all tokens so far, with those of the new ones; zeros before them."""
        if not self.rows:  # after a reset
            self.rows = [QuantizedLayer(self.settings, None, self.of_one_row) for _ in key_states]
        self.n_tokens += key_states.shape[2]
        new = key_states, value_states
        joined = [
            scratch.empty((*states.shape[:2], self.n_tokens, states.shape[3]), states)
            for states, scratch in zip(new, self.scratch, strict=True)
        ]
        for index, row in enumerate(self.rows):
            self._write(row.update(*(states[index : index + 1] for states in new)), joined, index)
        return joined[0], joined[1]

    def _write(self, states: Iterable[Tensor], joined: Iterable[Tensor], index: int) -> None:
        for of_row, out in zip(states, joined, strict=True):
            length = min(of_row.shape[2], self.n_tokens)  # what was trimmed is not shown
            out[index, :, : self.n_tokens - length].zero_()
            out[index, :, self.n_tokens - length :] = of_row[0, :, of_row.shape[2] - length :]

    def _joined(self, name: str) -> Tensor | None:
        if not self.rows:
            return None
        states = [row.states[name].joined() for row in self.rows]
        joined = states[0].new_empty(
            (len(states), states[0].shape[1], self.n_tokens, states[0].shape[3])
        )
        for index, of_row in enumerate(states):
            self._write([of_row], [joined], index)
        return joined

    keys: Any = property(lambda layer: layer._joined("keys"))
    values: Any = property(lambda layer: layer._joined("values"))

    # ---------------------------------------------------------------- hfgen.memory.caches.slots.Slots

    @property
    def n_rows(self) -> int:
        return len(self.rows)

    def join_rows(self, other: QuantizedLayer | QuantizedRows) -> None:
        """Put the rows of ``other`` behind the own ones: nothing is unpacked."""
        theirs = other if isinstance(other, QuantizedRows) else QuantizedRows(other)
        self.rows += map(self._taken, theirs.rows)
        self.n_tokens = max(self.n_tokens, theirs.n_tokens)

    def leave_row(self, row: int) -> None:
        """Let the last row take the place of ``row``."""
        self.rows[row] = self.rows[-1]
        self.rows.pop()

    def trim_tokens(self, n_tokens: int) -> None:
        """Show ``n_tokens`` columns less. A row that was padded before it was packed still holds them."""
        self.n_tokens -= n_tokens

    def bytes_of_row(self, n_tokens: int) -> int:
        return self.rows[0].bytes_of_row(n_tokens)

    def form_of_rows(self) -> dict[str, Any]:
        return self.rows[0].form_of_rows() if self.rows else {}

    # ---------------------------------------------------------------- transformers' DynamicLayer

    def get_seq_length(self) -> int:
        return self.n_tokens

    def activate_past_recording(self) -> None:
        self.record_past = True
        for row in self.rows:
            row.activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        for row in self.rows:
            row.crop(tokens_to_remove)
        self.n_tokens = max(0, self.n_tokens + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.rows = [self._taken(self.rows[i]) for i in beam_idx.tolist()]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.rows = [self._taken(row) for row in self.rows for _ in range(repeats)]

    def batch_select_indices(self, indices: Any) -> None:
        self.reorder_cache(torch.arange(len(self.rows))[torch.as_tensor(indices).cpu()])

    def reset(self) -> None:
        self.rows, self.n_tokens = [], 0

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


UPSTREAM_KINDS[QuantizedRows] = QuantizedLayer
