"""Rows that are taken, repeated and joined: what follows is what each row gets alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hfgen
from hfgen.decoding.loop import steps
from hfgen.decoding.strategies import Sample
from hfgen.families import CACHE
from hfgen.memory.batch import Batch, row_dim, take_rows
from hfgen.prepare.stages import prepare
from hfgen.state.call import Request
from hfgen.state.run import Run
from tests import tiny


def started(model: Any, n_steps: int, **inputs: Any) -> Run:
    """A greedy run of ``inputs`` after ``n_steps`` steps."""
    run = prepare(model, Request(kwargs=inputs | {"max_new_tokens": 40, "eos_token_id": None})).run(
        model
    )
    decode(run, n_steps)
    return run


def decode(run: Run, n_steps: int) -> None:
    iterator = steps(run, Sample(run))
    for _ in range(n_steps):
        next(iterator)
    iterator.close()


def batch_of(run: Run) -> Batch:
    return Batch(run.ids, dict(run.model_kwargs))


def continued(run: Run, batch: Batch, n_steps: int) -> Tensor:
    """The tokens ``(rows, n_steps)`` that follow the newest of each row of ``batch``."""
    run = Run(
        run.model, batch.ids, run.processors, run.criteria, run.config, False, batch.model_kwargs
    )
    strategy = Sample(run)
    strategy.prefill = lambda run: None  # the cache holds all but the newest token
    start, iterator = run.ids.shape[1], steps(run, strategy)
    for _ in range(n_steps):
        next(iterator)
    return run.ids[:, start:]


def test_taken_rows_go_on_as_they_would_alone() -> None:
    model = hfgen.mix_into(tiny.llama())
    ids = tiny.prompt(3)
    run = started(model, 2, input_ids=ids)
    alone = continued(run, batch_of(started(model, 2, input_ids=ids)), 5)
    batch = batch_of(run)
    batch.take(torch.tensor([2, 0]))
    assert len(batch) == 2
    assert torch.equal(continued(run, batch, 5), alone[[2, 0]])


def test_repeated_rows_stand_side_by_side() -> None:
    model = hfgen.mix_into(tiny.llama())
    run = started(model, 2, input_ids=tiny.prompt(2))
    batch = batch_of(run)
    batch.repeat(3)
    assert torch.equal(batch.ids, run.ids[[0, 0, 0, 1, 1, 1]])
    tokens = continued(run, batch, 4)
    assert torch.equal(tokens[::3], tokens[1::3])
    assert torch.equal(tokens[::3], tokens[2::3])


def test_padding_is_hidden_by_a_mask_that_was_left_out() -> None:
    model = hfgen.mix_into(tiny.llama())
    run, other = (started(model, 1, input_ids=tiny.prompt(1)[:, :n]) for n in (6, 3))
    assert run.model_kwargs["attention_mask"] is None
    batch = batch_of(run)
    batch.append(batch_of(other), pad_token_id=7)
    assert batch.ids[1].tolist()[:3] == [7, 7, 7]
    assert batch.model_kwargs["attention_mask"].tolist() == [[1] * 7, [0, 0, 0, 1, 1, 1, 1]]
    assert batch.model_kwargs["position_ids"].tolist() == [
        [0, 1, 2, 3, 4, 5, 6],
        [0, 0, 0, 0, 1, 2, 3],
    ]


def test_rows_of_equal_length_need_no_mask() -> None:
    model = hfgen.mix_into(tiny.llama())
    run, other = (started(model, 1, input_ids=tiny.prompt(1)) for _ in range(2))
    batch = batch_of(run)
    batch.append(batch_of(other))
    assert batch.model_kwargs["attention_mask"] is None


def test_the_other_batch_stays_as_it_was() -> None:
    model = hfgen.mix_into(tiny.llama())
    run, other = (started(model, 1, input_ids=tiny.prompt(1)[:, :n]) for n in (6, 3))
    tokens = continued(other, batch_of(started(model, 1, input_ids=tiny.prompt(1)[:, :3])), 4)
    batch = batch_of(run)
    batch.append(batch_of(other))
    assert torch.equal(continued(other, batch_of(other), 4), tokens)


@pytest.mark.parametrize(
    ("ours", "theirs", "named"),
    [
        ({"use_cache": True}, {"use_cache": False}, "use_cache"),
        ({"x": torch.zeros(1, 3)}, {"x": torch.zeros(1, 4)}, "x"),
        ({"x": torch.zeros(1, 3)}, {}, "x"),
    ],
)
def test_arguments_that_differ_are_named(ours: dict, theirs: dict, named: str) -> None:
    ids = torch.zeros(1, 3, dtype=torch.long)
    batch = Batch(ids, ours)
    with pytest.raises(ValueError, match=f"`{named}`"):
        batch.append(Batch(ids, theirs))
    assert batch.ids is ids
    assert batch.model_kwargs == ours


def test_a_batch_without_a_cache_cannot_join_one_with() -> None:
    model = hfgen.mix_into(tiny.llama())
    batch = batch_of(started(model, 1, input_ids=tiny.prompt(1)))
    other = Batch(batch.ids.clone(), {k: v for k, v in batch.model_kwargs.items() if k != CACHE})
    with pytest.raises(ValueError, match=CACHE):
        batch.append(other)


def test_rows_are_taken_from_tensors_that_have_them() -> None:
    index = torch.tensor([1])
    assert take_rows(torch.tensor([[1], [2]]), index, 2).tolist() == [[2]]
    shared = torch.arange(4)[None]
    assert take_rows(shared, index, 2, "position_ids") is shared
    assert take_rows(True, index, 2) is True
    rotary = torch.arange(6).view(3, 2, 1)
    assert row_dim("position_ids", rotary) == 1
    assert take_rows(rotary, index, 2, "position_ids").flatten().tolist() == [1, 3, 5]
