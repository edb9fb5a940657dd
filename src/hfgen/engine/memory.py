"""Estimates of the memory of requests, for admission."""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from typing import Any

import torch

from ..memory.caches import joining

#: Lengths of rows whose bytes are measured; what lies between is interpolated.
LENGTHS = [0, *(2**power for power in range(25))]


class Memory:
    """The bytes that KV caches may take (``limit``), and how many a row needs.

    ``memory``: bytes, or up to 1.0 a share of the bytes that are free now. Padding and the spare room of
    buffers are not counted.
    """

    def __init__(self, memory: float, device: torch.device) -> None:
        if isinstance(memory, bool) or not isinstance(memory, int | float) or not memory > 0:
            raise ValueError(
                f"`memory` has to be a number of bytes, or a share of what is free up to 1.0, but is "
                f"{memory!r}."
            )
        self.limit = memory if memory > 1 else memory * free_bytes(device)
        #: Bytes of a row at each of ``LENGTHS``; empty until a cache with tokens has been seen.
        self.measured: list[int] = []

    def measure(self, cache: Any) -> None:
        """Set the bytes of a row of each length, from a cache that holds tokens."""
        self.measured = [joining.bytes_of_row(cache, n) for n in LENGTHS]

    def needed(self, n_rows: int, n_tokens: int) -> float:
        """Bytes of ``n_rows`` of ``n_tokens`` each; 0 before ``measure``."""
        if not self.measured:
            return 0.0
        place = min(max(bisect_left(LENGTHS, n_tokens), 1), len(LENGTHS) - 1)
        low, high = LENGTHS[place - 1 : place + 1]
        n_bytes, more = self.measured[place - 1 : place + 1]
        return n_rows * (n_bytes + (more - n_bytes) * (n_tokens - low) / (high - low))


def free_bytes(device: torch.device) -> float:
    """Free memory of a GPU, or of the host; infinity where the system does not say."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return math.inf
