"""The scheduler alone: budgets, order, chunks, and that nobody starves."""

from __future__ import annotations

import pytest

from hfgen.engine.errors import DoesNotFitError, QueueFullError
from hfgen.engine.scheduler import Item, Scheduler


def test_a_prompt_in_chunks() -> None:
    scheduler = Scheduler(max_rows=2, prefill_tokens=10)
    long, short = Item(25), Item(3)
    scheduler.add(long, 0.0)
    scheduler.add(short, 1.0)
    dealt = []
    while long.state != "decoding" or short.state != "decoding":
        chunks = scheduler.plan(2.0)
        assert 0 < sum(chunk.n_tokens for chunk in chunks) <= 10
        for chunk in chunks:
            dealt.append((chunk.item, chunk.n_tokens))
            scheduler.advance(chunk.item, chunk.n_tokens)
    assert dealt == [(long, 10), (long, 10), (long, 5), (short, 3)]
    assert (scheduler.decoding, scheduler.n_rows) == ([long, short], 2)
    scheduler.leave(long)
    scheduler.leave(long)
    assert (scheduler.decoding, scheduler.n_rows) == ([short], 1)


def test_what_can_never_fit_is_refused_with_numbers() -> None:
    scheduler = Scheduler(max_rows=2, max_bytes=1000, max_queue=1)
    with pytest.raises(DoesNotFitError, match="3 rows and 2,000 bytes; there are 2 rows and 1,000"):
        scheduler.add(Item(5, n_rows=3, n_bytes=2000), 0.0)
    scheduler.add(Item(5), 0.0)
    with pytest.raises(QueueFullError, match="1 requests wait already; max_queue is 1"):
        scheduler.add(Item(5), 0.0)
