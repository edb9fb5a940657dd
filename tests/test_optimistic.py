"""Optimistic admission: what is taken out of the batch comes back, and no request can tell."""

from __future__ import annotations

import random
from typing import Any

import pytest

import hfgen
from hfgen.engine import Engine
from hfgen.families import CACHE
from tests import tiny
from tests.parity.decoder_families import DECODER_FAMILIES
from tests.test_length_classes import WAYS, check, prompt, solo

DECODERS = {family.name: family for family in DECODER_FAMILIES}
BESIDE: tuple[dict[str, Any], ...] = (*WAYS, {"prompt_lookup_num_tokens": 3}, {"logprobs": 2})


def held(engine: Engine) -> float:
    """Bytes of the tokens that are in caches of decoding rows."""
    needed = engine.steps.memory.needed
    joined = [decoding for rows in engine.steps.joined for decoding in rows.members]
    return sum(needed(each.n_rows, each.length - 1) for each in joined)


def small(model: Any, n_tokens: int, **options: Any) -> Engine:
    """An engine with memory for ``n_tokens`` tokens."""
    of_token = Engine(model).steps.memory.needed(1, 64) / 64
    return Engine(model, memory=of_token * n_tokens, optimistic=True, **options)


def asked_at_random(chance: random.Random, ways: tuple[dict[str, Any], ...], n: int) -> list[Any]:
    asked = []
    for number in range(n):
        options = chance.choice(ways) | {"eos_token_id": None}
        asked.append(
            (
                prompt(chance.randint(3, 20), number),
                options | {"max_new_tokens": chance.randint(5, 24)},
            )
        )
    return asked


def same_as_alone(model: Any, engine: Engine, asked: list[Any]) -> None:
    requests = [engine.add(ids, **options) for ids, options in asked]
    most_steps, n_steps = 40 * len(asked), 0
    while engine.has_work:
        engine.step()
        n_steps += 1
        assert held(engine) <= engine.scheduler.max_bytes
        assert n_steps < most_steps
        out = [
            each
            for each in requests
            if each.decoding is not None and each.decoding.waiting_rows is not None
        ]
        assert all(each.state == "waiting" for each in out)
    assert engine.stats.n_taken_out > 0
    assert not engine.steps.joined
    assert engine.scheduler.n_bytes == 0
    for request, (ids, options) in zip(requests, asked, strict=True):
        output, alone = request.result(), solo(model, ids, options)
        check(output, alone)
        if "logprobs" in options:
            for entry, expected in zip(output.logprobs or (), alone.logprobs[0], strict=True):
                assert entry.logprob == pytest.approx(expected.logprob, abs=1e-4)


@pytest.mark.parametrize("options", [{}, {"prefill_tokens": 16}], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_what_is_taken_out_comes_back(seed: int, options: dict[str, Any]) -> None:
    model = hfgen.mix_into(tiny.llama())
    asked = asked_at_random(random.Random(seed), BESIDE, 14)
    same_as_alone(model, small(model, 220, **options), asked)


@pytest.mark.parametrize("family", ["mistral", "gpt2", "qwen3_next", "t5"])
def test_rows_of_all_kinds_come_back(family: str) -> None:
    model = hfgen.mix_into(tiny.t5() if family == "t5" else DECODERS[family].build()).eval()
    engine = Engine(model, optimistic=True)
    asked = asked_at_random(random.Random(5), WAYS, 8)
    asked = [(ids, options | {"max_new_tokens": 20}) for ids, options in asked]
    requests = [engine.add(ids, **options) for ids, options in asked]
    for n_steps in (4, 3, 5):
        for _ in range(n_steps):
            engine.step()
        limit, engine.scheduler.max_bytes = engine.scheduler.max_bytes, 0.6 * held(engine)
        engine.step()
        assert 0 < held(engine) <= engine.scheduler.max_bytes
        engine.scheduler.max_bytes = limit
    assert engine.stats.n_taken_out > 3
    for request, (ids, options) in zip(requests, asked, strict=True):
        check(request.result(), solo(model, ids, options))


@pytest.mark.parametrize("policy", ["fcfs", "srpt", "priority"])
def test_nobody_starves(policy: str) -> None:
    model = hfgen.mix_into(tiny.llama())
    engine = small(model, 60, policy=policy)
    options = {"max_new_tokens": 30, "eos_token_id": None}
    requests = [engine.add(prompt(8, n), priority=n % 2, **options) for n in range(9)]
    for _ in range(9 * 30 + 10):
        engine.step()
    assert all(request.done for request in requests)
    assert engine.stats.n_taken_out <= len(requests)
    for number, request in enumerate(requests):
        check(request.result(), solo(model, prompt(8, number), options))


def until_one_is_out(engine: Engine, requests: list[Any]) -> Any:
    while not (out := [each for each in requests if each.decoding and each.decoding.waiting_rows]):
        engine.step()
    return out[0]


def test_a_request_that_is_out_can_be_cancelled() -> None:
    model = hfgen.mix_into(tiny.llama())
    engine = small(model, 60)
    options = {"max_new_tokens": 40, "eos_token_id": None}
    requests = [engine.add(prompt(6, n), **options) for n in range(3)]
    out = until_one_is_out(engine, requests)
    n_tokens = len(out.sequences[0].token_ids)
    assert n_tokens > 1
    out.cancel()
    engine.step()
    output = out.result()
    assert output.finish_reason == "cancelled"
    number = requests.index(out)
    alone = solo(model, prompt(6, number), options).sequences[0, 6:].tolist()
    assert output.token_ids == alone[:n_tokens]
    for i, request in enumerate(requests):
        if request is not out:
            check(request.result(), solo(model, prompt(6, i), options))


def test_a_prompt_that_is_half_forwarded_goes_on_where_it_was() -> None:
    model = hfgen.mix_into(tiny.llama())
    engine = Engine(model, optimistic=True, prefill_tokens=8)
    options = {"max_new_tokens": 30, "eos_token_id": None}
    asked = [(prompt(n, n), options) for n in (6, 50)]
    first, long = (engine.add(ids, **options) for ids, options in asked)
    for _ in range(3):
        engine.step()
    n_done = long.n_done
    assert long.state == "prefill"
    assert 0 < n_done < 50
    limit, engine.scheduler.max_bytes = engine.scheduler.max_bytes, 2 * held(engine)
    engine.step()
    assert (first.state, long.state) == ("decoding", "waiting")
    assert long.decoding.waiting_rows.caches[CACHE].get_seq_length() == n_done
    engine.scheduler.max_bytes = limit
    engine.step()
    assert long.n_done > n_done
    for request, (ids, options) in zip((first, long), asked, strict=True):
        check(request.result(), solo(model, ids, options))
    assert engine.stats.prefill_tokens == 6 + 50


def test_without_it_nothing_is_taken_out() -> None:
    model = hfgen.mix_into(tiny.llama())
    limit = small(model, 60).scheduler.max_bytes
    with Engine(model, memory=limit) as engine:
        requests = [engine.add(prompt(6, n), max_new_tokens=40) for n in range(3)]
        assert all(request.result().error is None for request in requests)
        assert engine.stats.n_taken_out == 0


def test_the_tokens_that_are_kept_are_copied_alone() -> None:
    """What is on the host has no padding, and none of the rows beside it."""
    model = hfgen.mix_into(tiny.llama())
    engine = small(model, 100)
    requests = [engine.add(prompt(n, n), max_new_tokens=30, eos_token_id=None) for n in (30, 4, 6)]
    out = until_one_is_out(engine, requests)
    cache = out.decoding.waiting_rows.caches[CACHE]
    assert cache.get_seq_length() == out.decoding.length - 1
    assert cache.layers[0].keys.shape[0] == 1
    assert out.decoding.waiting_rows.ids[0, -1] == out.sequences[0].token_ids[-1]
    engine.close()
