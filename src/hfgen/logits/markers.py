"""Token sequences that begin and end a section, such as the thinking section of a model."""

from __future__ import annotations

from typing import Any

import torch


def marker_ids(marker: str | list[int] | None, tokenizer: Any) -> list[int]:
    """The token ids of a marker, which is text or ids."""
    if isinstance(marker, str):
        return list(tokenizer.encode(marker, add_special_tokens=False))
    return list(marker or ())


def last(ids: torch.Tensor, marker: torch.Tensor) -> torch.Tensor:
    """Where in ``ids (rows, length)`` each row's last ``marker (n,)`` ends: ``(rows,)``, -1 without one."""
    n = len(marker)
    if ids.shape[1] < n:
        return ids.new_full((len(ids),), -1)
    is_marker = (ids.unfold(1, n, 1) == marker).all(dim=2)
    ends = torch.arange(n, ids.shape[1] + 1, device=ids.device)
    return torch.where(is_marker, ends, -1).amax(dim=1)


def first(ids: torch.Tensor, marker: torch.Tensor) -> int:
    """Where in ``ids (length,)`` the first ``marker (n,)`` ends; -1 without one."""
    n = len(marker)
    if len(ids) < n:
        return -1
    places = (ids.unfold(0, n, 1) == marker).all(dim=1).nonzero()
    return int(places[0]) + n if len(places) else -1
