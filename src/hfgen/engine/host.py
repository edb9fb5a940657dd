"""Optimistic admission: when memory runs out, rows move to the host and join again later.

Requests are admitted with a share of their growth reserved only, since most end before their longest.
What was computed is kept: a request that comes back goes on with the next token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..memory.batch import Batch
from ..memory.caches import joining
from .request import EngineRequest
from .scheduler import Chunk

if TYPE_CHECKING:
    from .steps import Steps

HOST = torch.device("cpu")


def make_way(steps: Steps) -> None:
    """Take out as many requests as it takes for the next token of each row to fit."""
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
            _take_out(steps, request)
            with steps.lock:
                scheduler.readmit(item)
            request.state = "waiting"
            steps.stats.n_taken_out += 1


def _take_out(steps: Steps, request: EngineRequest) -> None:
    decoding = request.decoding
    assert decoding is not None
    for rows in steps.joined:
        if decoding in rows.moves:
            decoding.kept = rows.extract(decoding)
            break
    else:  # in prefill
        decoding.kept = Batch(decoding.run.ids, decoding.run.model_kwargs)
    steps.joined = [rows for rows in steps.joined if len(rows)]
    for cache in decoding.kept.caches.values():
        joining.move_to(cache, HOST)


def put_back(steps: Steps, chunk: Chunk) -> bool:
    """Let a request go on that was taken out; whether it decodes, so that nothing is left to prefill."""
    request = steps.requests[chunk.item]
    decoding = request.decoding
    if decoding is None or decoding.kept is None:
        return False
    decodes = chunk.item.n_left == 0
    with steps.failures_of(request):
        kept, decoding.kept = decoding.kept, None
        for cache in kept.caches.values():
            joining.move_to(cache, decoding.run.ids.device)
        request.state = "decoding" if decodes else "prefill"
        if decodes:
            steps.place(decoding, kept)
            with steps.lock:
                steps.scheduler.advance(chunk.item, 0)
    return decodes or request.done
