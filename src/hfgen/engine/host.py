"""Optimistic admission: when memory runs out, rows move to the host and join again later.

Only a share of a request's growth is reserved at admission, since most end before their longest. Nothing
is computed twice: a request that comes back continues with the next token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..memory.batch import Batch
from ..memory.caches import joining
from .scheduler import Chunk

if TYPE_CHECKING:
    from .steps import Steps

HOST = torch.device("cpu")


def make_way(steps: Steps) -> None:
    """Move requests out of the batch, to the host, until the next token of each row fits."""
    scheduler = steps.scheduler
    with steps.lock:
        for item in scheduler.decoding:
            decoding = steps.requests[item].decoding
            if decoding is not None and decoding.joins:  # its cache lacks the newest token as yet
                n_bytes = steps.memory.needed(item.n_rows, decoding.length)
                scheduler.resize(item, item.n_bytes, n_bytes)
        victims = scheduler.victims()
    for item in victims:
        request = steps.requests[item]
        with steps.failures_of(request):
            decoding = request.decoding
            assert decoding is not None
            joined = next((rows for rows in steps.joined if decoding in rows.moves), None)
            if joined is None:  # in prefill
                decoding.waiting_rows = Batch(decoding.run.ids, decoding.run.model_kwargs)
            else:
                decoding.waiting_rows = joined.extract(decoding)
                steps.joined = [rows for rows in steps.joined if len(rows)]
            for cache in decoding.waiting_rows.caches.values():
                joining.move_to(cache, HOST)
            with steps.lock:
                scheduler.readmit(item)
            request.state = "waiting"
            steps.stats.n_taken_out += 1


def put_back(steps: Steps, chunk: Chunk) -> bool:
    """Continue a request that was taken out; returns whether nothing is left to prefill."""
    request = steps.requests[chunk.item]
    decoding = request.decoding
    if decoding is None or decoding.waiting_rows is None:
        return False
    decodes = chunk.item.n_left == 0
    with steps.failures_of(request):
        batch, decoding.waiting_rows = decoding.waiting_rows, None
        for cache in batch.caches.values():
            joining.move_to(cache, decoding.run.ids.device)
        request.state = "decoding" if decodes else "prefill"
        if decodes:
            steps.place(decoding, batch)
            with steps.lock:
                steps.scheduler.advance(chunk.item, 0)
    return decodes or request.done
