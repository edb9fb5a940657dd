"""The memory of requests: estimates for admission, and rows that move to the host when memory runs out.

Nothing is computed twice: a request that comes back continues with the next token.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

import torch

from ..memory.batch import Batch
from ..memory.caches import slots
from .scheduler import Chunk

if TYPE_CHECKING:
    from .steps import Steps

HOST = torch.device("cpu")

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
        self.measured = [slots.bytes_of_row(cache, n) for n in LENGTHS]

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


def make_way(steps: Steps) -> None:
    """Move requests out of the batch, to the host, until the next token of each row fits."""
    scheduler = steps.scheduler
    with steps.lock:
        for request in scheduler.decoding:
            decoding = request.decoding
            if decoding is not None and decoding.joins:  # its cache lacks the newest token as yet
                n_bytes = steps.memory.needed(request.n_rows, decoding.length)
                scheduler.resize(request, request.n_bytes, n_bytes)
        victims = scheduler.victims()
    for request in victims:
        with steps.failures_of(request):
            decoding = request.decoding
            joined = next((rows for rows in steps.joined if decoding in rows.moves), None)
            if joined is None:  # in prefill
                run = decoding.run
                decoding.waiting_rows = Batch(run.ids, run.model_kwargs, run.model)
            else:
                decoding.waiting_rows = joined.extract(decoding)
                steps.joined = [rows for rows in steps.joined if len(rows)]
            for cache in decoding.waiting_rows.caches.values():
                slots.move_to(cache, HOST)
            with steps.lock:
                scheduler.readmit(request)
            steps.stats.n_taken_out += 1


def put_back(steps: Steps, chunk: Chunk) -> bool:
    """Continue a request that was taken out; returns whether nothing is left to prefill."""
    request, decoding = chunk.item, chunk.item.decoding
    if decoding is None or decoding.waiting_rows is None:
        return False
    decodes = request.n_left == 0
    with steps.failures_of(request):
        batch, decoding.waiting_rows = decoding.waiting_rows, None
        for cache in batch.caches.values():
            slots.move_to(cache, decoding.run.ids.device)
        if decodes:
            steps.place(decoding, batch)
            steps.scheduler.advance(request, 0)
    return bool(decodes or request.done)
