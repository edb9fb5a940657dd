"""Index tensors that are copied to a device once, for all steps with the same rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Different ones that are kept at most: those of a few steps in which rows have joined or left.
MAX_KEPT = 256


class Indices:
    """Tensors ``(n,)`` of integers on the device where they index rows."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}

    def on(self, device: torch.device, places: Sequence[int]) -> Tensor:
        """``places`` as a tensor, which is not to be written to."""
        key = (device, tuple(places))
        if key not in self._kept:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            self._kept[key] = torch.tensor(places, device=device)
        return self._kept[key]
