"""Rows of similar length decode in batches of their own, where padding costs more than a forward."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

import hfgen
from hfgen.engine import Engine, RequestOutput
from hfgen.engine.classes import MAX_CLASSES, SPLIT_ABOVE, Classes
from hfgen.engine.joined import JoinedRows
from tests import tiny
from tests.parity.decoder_families import DECODER_FAMILIES
from tests.test_joining import padding_of

DECODERS = {family.name: family for family in DECODER_FAMILIES}
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "seed": 4},
    {"num_beams": 3},
    {"do_sample": True, "seed": 8, "num_return_sequences": 2},
    {"repetition_penalty": 1.4},
)


def prompt(n_tokens: int, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randint(3, 60, (1, n_tokens))


def solo(model: Any, ids: torch.Tensor, options: dict[str, Any]) -> Any:
    return model.generate(ids, return_dict_in_generate=True, **options)


def check(output: RequestOutput, solo: Any) -> None:
    if output.error is not None:
        raise output.error
    assert torch.equal(output.generate_output.sequences, solo.sequences)


def shares(rows: JoinedRows) -> tuple[int, int]:
    """The cells of padding, and all cells, counted by the batch's own mask."""
    return sum(padding_of(rows.batch)), rows.batch.ids.numel()


def best_saving(classes: Classes, rows: JoinedRows) -> float:
    """Bytes that the best of all ways to make two batches of one saves, requests kept together."""
    members = rows.members
    ways = [
        (
            [m for i, m in enumerate(members) if way >> i & 1],
            [m for i, m in enumerate(members) if not way >> i & 1],
        )
        for way in range(1, 2 ** (len(members) - 1))
    ]
    return max((classes.saved(*two) for two in ways), default=0.0)


@pytest.mark.parametrize("seed", range(3))
def test_padding_stays_below_the_bound_where_that_pays(seed: int) -> None:
    model = hfgen.mix_into(tiny.llama())
    chance = random.Random(seed)
    engine = Engine(model, max_rows=10)
    asked = []
    for number in range(16):
        n_tokens = chance.choice([chance.randint(2, 12), chance.randint(2, 180)])
        options = chance.choice(WAYS) | {
            "max_new_tokens": chance.randint(1, 24),
            "eos_token_id": None,
        }
        ids = prompt(n_tokens, number)
        asked.append((engine.add(ids, **options), ids, options))
    most = 0
    while engine.has_work:
        engine.step()
        joined = engine.steps.joined
        most = max(most, len(joined))
        assert len(joined) <= MAX_CLASSES
        if len(joined) < MAX_CLASSES:
            for rows in joined:
                padding, cells = shares(rows)
                if padding > SPLIT_ABOVE * cells:
                    assert (
                        best_saving(engine.steps.classes, rows) <= engine.steps.classes.fixed_cost
                    )
        for rows in joined:
            places = [place for request in rows.members for place in request.places]
            assert sorted(places) == list(range(len(rows)))
    assert most > 1
    assert 0 < engine.stats.padding < 0.5
    for request, ids, options in asked:
        check(request.result(), solo(model, ids, options))


def decode_apart(
    model: Any, lengths: list[int], new_tokens: list[int], fixed_cost: float | None = None
) -> list[int]:
    """How many batches there are after each step of an engine; each request equals its own call."""
    engine = Engine(model)
    engine.steps.classes.fixed_cost = fixed_cost or engine.steps.classes.fixed_cost
    asked = []
    for number, (n_tokens, n_new) in enumerate(zip(lengths, new_tokens, strict=True)):
        ids, options = prompt(n_tokens, number), {"max_new_tokens": n_new, "eos_token_id": None}
        asked.append((engine.add(ids, **options), ids, options))
    counts = []
    while engine.has_work:
        engine.step()
        counts.append(len(engine.steps.joined))
    for request, ids, options in asked:
        check(request.result(), solo(model, ids, options))
    return counts


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "qwen3_next"])
def test_batches_split_and_merge_without_a_trace(family: str) -> None:
    model = hfgen.mix_into(DECODERS[family].build()).eval()
    counts = decode_apart(model, [3, 4, 20, 22, 3], [24, 24, 5, 6, 8], fixed_cost=1.0)
    assert counts[1] == 2
    assert counts[-2] == 1


def test_a_split_that_does_not_pay_is_left_out() -> None:
    model = hfgen.mix_into(tiny.llama())
    assert max(decode_apart(model, [2, 40], [20, 20])) == 1


def test_batches_become_one_again_and_stay_it() -> None:
    model = hfgen.mix_into(tiny.llama())
    lengths, new = [5] * 6 + [160, 150], [40] * 6 + [12, 40]
    counts = decode_apart(model, lengths, new)
    changes = sum(before != after for before, after in pairwise(counts))
    assert counts[1] == 2
    assert changes <= 3


def test_rows_that_come_back_are_drawn_for_where_they_are() -> None:
    """The noise of a row depends on its position, wherever the row was in between."""
    model = hfgen.mix_into(tiny.llama())
    engine = Engine(model)
    greedy = {"max_new_tokens": 30, "eos_token_id": None}
    sampled = greedy | {"do_sample": True, "seed": 3}
    asked = [(prompt(n, n), sampled if n < 7 else greedy) for n in (5, 6, 7, 8)]
    requests = [engine.add(ids, **options) for ids, options in asked]
    for n_steps in (4, 4):
        for _ in range(n_steps):
            engine.step()
        (rows,) = engine.steps.joined
        apart = rows.split([request.decoding for request in requests[:2]])
        apart.kind = object()
        engine.steps.joined.append(apart)
        for _ in range(n_steps):
            engine.step()
        rows.absorb(apart)
        engine.steps.joined.remove(apart)
    for request, (ids, options) in zip(requests, asked, strict=True):
        check(request.result(), solo(model, ids, options))


def test_a_request_joins_the_rows_of_its_length() -> None:
    model = hfgen.mix_into(tiny.llama())
    engine = Engine(model)
    for number in range(6):
        engine.add(prompt(4, number), max_new_tokens=60, eos_token_id=None)
        engine.add(prompt(170, number), max_new_tokens=60, eos_token_id=None)
    engine.step()
    engine.step()
    short, long = sorted(engine.steps.joined, key=lambda rows: rows.batch.ids.shape[1])
    for n_tokens, rows in ((8, short), (160, long)):
        request = engine.add(prompt(n_tokens, 9), max_new_tokens=60, eos_token_id=None)
        engine.step()
        assert request.decoding in rows.members
    engine.close()
