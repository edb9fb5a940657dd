"""The positions of tokens in a padded batch, and which rows to forward from which column.

Columns are positions in the padded batch. States of row ``i`` before column ``starts[i]`` are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...state.call import ModelKwargs
from .eligibility import Reason

#: What a forward pass costs besides its tokens, in tokens.
FORWARD = 64

#: Where a first token is: ``("position", n)``, or ``("column", n)`` if the model takes no positions.
Offset = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """Row ``i`` has ``ids[i, pads[i]:]``, from ``offsets[i]`` on. ``ids (rows, length)`` on the CPU."""

    ids: Tensor
    pads: list[int]
    offsets: list[Offset]

    @classmethod
    def of(cls, ids: Tensor, model_kwargs: ModelKwargs) -> Layout | Reason:
        rows, length = ids.shape
        mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        pads = [0] * rows
        if mask is not None:
            mask = mask.cpu()
            pads = [int(pad) for pad in length - mask.sum(dim=1)]
            is_left = torch.arange(length) >= torch.tensor(pads)[:, None]
            if not torch.equal(mask, is_left.to(mask.dtype)):
                return Reason("`attention_mask` masks more than padding on the left")
            if max(pads) == length:
                return Reason("`attention_mask` masks a whole row")
        if positions is None:
            return cls(ids.cpu(), pads, [("column", pad) for pad in pads])
        if positions.ndim == 3 and (positions == positions[0]).all():
            positions = positions[0]  # multimodal rotary positions, of text alone
        if positions.ndim != 2 or positions.shape[1] != length:
            return Reason("`position_ids` is not one position per token")
        offsets: list[Offset] = []
        for row, pad in zip(positions.cpu().expand(rows, -1), pads, strict=True):
            first = int(row[pad])
            offsets.append(("position", first))
            if not torch.equal(row[pad:], torch.arange(first, first + length - pad)):
                return Reason("`position_ids` does not count on from token to token")
        return cls(ids.cpu(), pads, offsets)

    def tokens(self, row: int, end: int | None = None) -> Tensor:
        return self.ids[row, self.pads[row] : end].long()


def lagging(starts: Sequence[int], end: int) -> dict[int, list[int]]:
    """Rows that start before column ``end``, by the column from which on they catch up together."""
    groups: dict[int, list[int]] = {}
    for start, row in sorted((start, row) for row, start in enumerate(starts) if start < end):
        last = max(groups, default=-FORWARD)
        groups.setdefault(start if start - last >= FORWARD else last, []).append(row)
    return groups


def best_end(starts: Sequence[int], length: int) -> int:
    """Up to which column to fill the cache, so that the least is forwarded."""

    def cost(end: int) -> int:
        groups = lagging(starts, end).items()
        caught_up = sum(FORWARD + len(rows) * (end - start) for start, rows in groups)
        return caught_up + len(starts) * (length - end)

    return min((0, *sorted(set(starts))), key=cost)
