"""How much memory requests take, for admission."""

from __future__ import annotations

import math
import os
from typing import Any

import torch


class Memory:
    """The bytes that KV caches may take, and how many a request needs.

    ``limit``: in bytes; of a share of up to 1.0, that of what is free when the engine is made.
    """

    def __init__(self, memory: float, device: torch.device) -> None:
        if not memory > 0:
            raise ValueError(
                f"`memory` has to be a number of bytes or a share above 0, but is {memory}."
            )
        self.limit = memory if memory > 1 else memory * free_bytes(device)
        #: Of one row; measured when the first prompt has been forwarded.
        self.per_token: float | None = None

    def needed(self, decoding: Any) -> float:
        """Bytes of a request at its longest; 0 as long as nothing is known."""
        return (
            0.0 if self.per_token is None else self.per_token * decoding.longest * decoding.n_rows
        )


def free_bytes(device: torch.device) -> float:
    """Free memory of a GPU, or of the host; infinity where nobody tells."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return math.inf
