"""The engine: each request ends with what its own ``generate`` gives."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import hfgen
from hfgen.decoding.strategies.base import InvalidScoresError
from hfgen.engine import Engine, RequestOutput
from hfgen.engine.errors import (
    DoesNotFitError,
    EngineClosedError,
    QueueFullError,
    ResultTakenError,
    UnknownRequestError,
)
from hfgen.running.prompts import forward_part
from tests import tiny
from tests.parity.harness import FAMILIES, ours

TEXTS = (
    "def add(a, b):",
    "import os\n\n\ndef main():\n    for name in",
    "class A:\n    def __init__(self",
    "x = [",
    "def fib(n):\n    if n <",
)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 14},
    "beams": {"max_new_tokens": 8, "num_beams": 3},
    "sampled": {"max_new_tokens": 18, "do_sample": True, "seed": 3, "temperature": 0.8},
    "several": {"max_new_tokens": 9, "do_sample": True, "seed": 5, "num_return_sequences": 2},
    "penalised": {"max_new_tokens": 16, "repetition_penalty": 1.3, "stop_strings": ["\n"]},
    "drafted": {"max_new_tokens": 15, "prompt_lookup_num_tokens": 3},
    "diverse": {
        "max_new_tokens": 8,
        "num_beams": 4,
        "num_beam_groups": 2,
        "diversity_penalty": 0.5,
    },
    "constrained": {"max_new_tokens": 8, "num_beams": 3, "force_words_ids": [[300, 301]]},
    "contrastive": {"max_new_tokens": 8, "penalty_alpha": 0.6, "top_k": 4},
}


@pytest.fixture(scope="module")
def builtin() -> Any:
    model, tokenizer = hfgen.builtin_model()
    return hfgen.mix_into(model), tokenizer


def alone(model: Any, tokenizer: Any, text: str, **options: Any) -> Any:
    inputs = tokenizer(text, return_tensors="pt")
    arguments = {"return_dict_in_generate": True, "tokenizer": tokenizer, **options}
    return model.generate(**inputs, **arguments)


def check(output: RequestOutput, solo: Any) -> None:
    if output.error is not None:
        raise output.error
    assert torch.equal(output.generate_output.sequences, solo.sequences)
    assert [s.text for s in output.sequences] == solo.texts
    assert [s.finish_reason for s in output.sequences] == solo.finish_reasons


class Spoil(LogitsProcessor):
    """Rules out all tokens of some rows (NaN), once they have ``n`` generated ones."""

    def __init__(self, rows: list[int], n: int) -> None:
        self.rows, self.n, self.prompt_length = rows, n, 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.prompt_length = self.prompt_length or input_ids.shape[1]
        if input_ids.shape[1] - self.prompt_length == self.n:
            scores = scores.clone()
            scores[self.rows] = torch.nan
        return scores


def outcome(call: Any) -> Any:
    """What ``call`` returns, or the error that there was no token."""
    try:
        return call()
    except InvalidScoresError as error:
        return error


#: Options of several sequences that end one by one.
OF_COPIES: dict[str, dict[str, Any]] = {
    "eos": {"eos_token_id": [*range(4, 200)]},
    "no eos": {"eos_token_id": None, "stop_strings": ["e", "x"]},
    "log-probabilities": {"eos_token_id": [*range(4, 200)], "logprobs": 3, "top_p": 0.8},
    "processed": {"logprobs": 1, "logprobs_mode": "processed_logprobs", "temperature": 0.5},
    "asked ids": {"logprob_token_ids": [7, 9], "eos_token_id": [*range(4, 200)]},
    "penalties": {"repetition_penalty": 1.4, "eos_token_id": [*range(4, 200)]},
}


@pytest.mark.parametrize("name", OF_COPIES)
@pytest.mark.parametrize("spoiled", [(), (1,), (0, 1, 2)])
def test_sequences_of_a_request_choose_together_and_end_apart(
    builtin: Any, name: str, spoiled: tuple[int, ...]
) -> None:
    """Each equals its own call, log-probabilities included, and a row without a token ends alone."""
    model, tokenizer = builtin
    own = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 12, "top_k": 0}
    own |= OF_COPIES[name]

    def processors() -> Any:
        return LogitsProcessorList([Spoil(list(spoiled), 3)]) if spoiled else None

    engine = Engine(model, tokenizer)
    seeds = range(3 if spoiled else 6)
    requests = [
        engine.add(TEXTS[i % 5], **own, seed=i, logits_processor=processors()) for i in seeds
    ]
    events = list(engine.events())
    n_failed = 0
    for i, request in zip(seeds, requests, strict=True):
        options = {**own, "seed": i, "logits_processor": processors()}
        solo = outcome(
            lambda options=options, i=i: alone(model, tokenizer, TEXTS[i % 5], **options)
        )
        if isinstance(solo, InvalidScoresError):  # no row was left
            failure = request.result().error
            assert (type(failure), str(failure)) == (type(solo), str(solo))
            n_failed += 1
            continue
        check(output := request.result(), solo)
        if solo.get("logprobs") is None:
            continue
        for row, sequence in enumerate(output.sequences):
            expected = solo.logprobs[row]
            assert output.generate_output.logprobs[row] == sequence.logprobs
            assert [e.token_id for e in sequence.logprobs] == [e.token_id for e in expected]
            for entry, other in zip(sequence.logprobs, expected, strict=True):
                assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
                pairs = zip((*entry.top, *entry.asked), (*other.top, *other.asked), strict=True)
                assert all(a[1] == pytest.approx(b[1], abs=1e-4) for a, b in pairs)
            of_row = [e for e in events if e.request is request and e.row == row]
            assert [entry for e in of_row for entry in e.logprobs or ()] == sequence.logprobs
    if name == "processed":
        assert n_failed == (3 if len(spoiled) == 3 else 0)


@cache
def alone_by_way(text: str, way: str) -> Any:
    """What the built-in model's own call gives, which engines of all sizes are compared with."""
    model, tokenizer = hfgen.builtin_model()
    return alone(hfgen.mix_into(model), tokenizer, text, **WAYS[way])


@pytest.mark.parametrize(("max_rows", "prefill_tokens"), [(4, 2048), (32, 4), (32, 2048)])
def test_requests_of_all_ways_equal_their_own_calls(
    builtin: Any, max_rows: int, prefill_tokens: int
) -> None:
    model, tokenizer = builtin
    engine = Engine(model, tokenizer, max_rows=max_rows, prefill_tokens=prefill_tokens)
    asked = [(text, way) for i, text in enumerate(TEXTS[:3]) for way in list(WAYS)[i % 2 :: 2]]
    requests = [engine.add(text, **WAYS[way]) for text, way in asked]
    events: dict[Any, list[Any]] = {}
    for event in engine.events():
        events.setdefault((event.request, event.row), []).append(event)
        assert engine.n_rows <= max_rows
    for request, (text, way) in zip(requests, asked, strict=True):
        output = request.result()
        check(output, alone_by_way(text, way))
        for row, sequence in enumerate(output.sequences):
            own = events[request, row]
            assert [t for event in own for t in event.token_ids] == sequence.token_ids
            assert [event.finish_reason is None for event in own[:-1]] == [True] * (len(own) - 1)
            assert own[-1].finish_reason == sequence.finish_reason
    assert engine.n_rows == engine.n_waiting == 0
    assert not engine.steps.joined
    assert engine.stats.n_finished == len(asked)


def test_a_request_joins_while_others_decode(builtin: Any) -> None:
    model, tokenizer = builtin
    with Engine(model, tokenizer) as engine:
        first = engine.add(TEXTS[0], max_new_tokens=30)
        for _ in range(5):
            engine.step()
        second = engine.add(TEXTS[1], max_new_tokens=6)
        check(second.result(), alone(model, tokenizer, TEXTS[1], max_new_tokens=6))
        assert not first.done
        check(first.result(), alone(model, tokenizer, TEXTS[0], max_new_tokens=30))


def test_a_request_is_cancelled_in_any_state(builtin: Any) -> None:
    model, tokenizer = builtin
    engine = Engine(model, tokenizer, max_rows=2)
    running, other, waiting = (engine.add(text, max_new_tokens=20) for text in TEXTS[:3])
    for _ in range(4):
        engine.step()
    assert (running.state, waiting.state) == ("decoding", "waiting")
    running.cancel()
    waiting.cancel()
    engine.step()
    assert running.done
    assert waiting.done
    solo = alone(model, tokenizer, TEXTS[0], max_new_tokens=20)
    n = len(tokenizer(TEXTS[0]).input_ids)
    output = running.result()
    assert output.finish_reason == "cancelled"
    assert 0 < len(output.token_ids) < 20
    assert output.token_ids == solo.sequences[0, n:].tolist()[: len(output.token_ids)]
    assert waiting.result().token_ids == []
    check(other.result(), alone(model, tokenizer, TEXTS[1], max_new_tokens=20))


def test_what_a_request_raises_is_its_own(builtin: Any) -> None:
    model, tokenizer = builtin
    calls = []

    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(ids.shape[1])
        if len(calls) > 3:
            raise RuntimeError("no more of this")
        return scores

    engine = Engine(model, tokenizer)
    bad = engine.add(TEXTS[0], max_new_tokens=20, logits_processor=[fails])
    good = engine.add(TEXTS[1], max_new_tokens=20)
    check(good.result(), alone(model, tokenizer, TEXTS[1], max_new_tokens=20))
    output = bad.result()
    assert output.finish_reason == "error"
    assert str(output.error) == "no more of this"
    assert len(output.token_ids) == 3
    assert engine.stats.n_failed == 1


def test_a_model_that_fails_ends_what_it_decodes(builtin: Any) -> None:
    model, tokenizer = builtin
    engine = Engine(model, tokenizer)
    requests = [engine.add(text, max_new_tokens=20) for text in TEXTS[:2]]
    engine.step()
    engine.step()

    def fail(*arguments: Any) -> None:
        raise RuntimeError("out of order")

    hook = model.model.layers[1].register_forward_hook(fail)
    try:
        engine.step()
    finally:
        hook.remove()
    assert all(request.done for request in requests)
    assert {str(request.result().error) for request in requests} == {"out of order"}
    later = engine.add(TEXTS[2], max_new_tokens=5)
    check(later.result(), alone(model, tokenizer, TEXTS[2], max_new_tokens=5))


def test_an_engines_prefix_cache_is_for_requests_that_can_use_one(builtin: Any) -> None:
    model, tokenizer = builtin
    engine = Engine(model, tokenizer, prefix_cache=hfgen.PrefixCache())
    for way in ("contrastive", "greedy", "greedy"):
        check(
            engine.add(TEXTS[1], **WAYS[way]).result(),
            alone(model, tokenizer, TEXTS[1], **WAYS[way]),
        )
    assert engine.prefix_cache.stats.hits == 1


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_what_a_request_has_said_is_a_stored_prefix_of_the_next_prompt(family: str) -> None:
    model = hfgen.mix_into(FAMILIES[family].build())
    engine = Engine(model, prefix_cache=hfgen.PrefixCache())
    # The cache of the first that joins becomes that of the batch: other rows are in it at the end.
    turns = [tiny.prompt(1, n, seed=n) % 60 for n in (4, 9, 6)]
    for n_new in (5, 3):
        options = [{"max_new_tokens": n_new + i, "eos_token_id": None} for i in range(len(turns))]
        options[2] |= {"num_beams": 2}
        asked = zip(turns, options, strict=True)
        requests = [engine.add(turn, **option) for turn, option in asked]
        outputs = [request.result() for request in requests]
        for output, turn, option in zip(outputs, turns, options, strict=True):
            solo = model.generate(turn, **option)
            assert torch.equal(output.generate_output.sequences, solo)
        turns = [output.generate_output.sequences for output in outputs]
    stats = engine.prefix_cache.stats
    assert (stats.hits, stats.lookups) == (3, 6)
    said = 5 + 6 + 7 - 3 if family == "llama" else 0  # of a window, only prompts are kept
    assert stats.tokens_saved == 4 + 9 + 6 + said


def test_tokens_are_counted_as_events_have_them(builtin: Any) -> None:
    model, tokenizer = builtin
    engine = Engine(model, tokenizer)
    requests = [engine.add(TEXTS[0], **options) for options in WAYS.values()]
    n_told = sum(len(event.token_ids) for event in engine.events())
    outputs = [request.result() for request in requests]
    assert n_told == sum(len(s.token_ids) for output in outputs for s in output.sequences)
    assert engine.stats.decoded_tokens == n_told


def test_rows_of_an_encoder_decoder_are_reserved_before_its_encoder_has_run() -> None:
    model = hfgen.mix_into(tiny.t5())
    engine, inputs = Engine(model, max_rows=4), tiny.prompt(1)
    requests = [engine.add(inputs, num_beams=3, max_new_tokens=4) for _ in range(2)]
    with pytest.raises(DoesNotFitError, match="5 rows"):
        engine.add(inputs, num_beams=5)
    engine.step()
    assert (engine.n_rows, engine.n_waiting) == (3, 1)
    solo = model.generate(inputs, num_beams=3, max_new_tokens=4)
    for request in requests:
        assert torch.equal(request.result().generate_output.sequences, solo)


@pytest.mark.filterwarnings("ignore")  # upstream's, of a tiny config
def test_a_model_that_keeps_states_in_its_modules_is_refused() -> None:
    engine = Engine(hfgen.mix_into(FAMILIES["recurrent_gemma"].build()))
    with pytest.raises(ValueError, match=r"RecurrentGemma.* on its modules.*`generate`"):
        engine.add(tiny.prompt(1) % 60)


def test_bad_input_is_named_and_others_go_on(builtin: Any) -> None:
    model, tokenizer = builtin
    engine = Engine(model, tokenizer, max_rows=2, max_queue=1)
    good = engine.add(TEXTS[0], max_new_tokens=5)
    with pytest.raises(QueueFullError, match="max_queue"):
        engine.add(TEXTS[1], max_new_tokens=5)
    engine.step()
    with pytest.raises(ValueError, match="empty"):
        engine.add([])
    with pytest.raises(ValueError, match="2 rows"):
        engine.add(torch.ones(2, 3, dtype=torch.long))
    with pytest.raises(TypeError, match="float"):
        engine.add(3.5)
    with pytest.raises(ValueError, match="temperature"):
        engine.add(TEXTS[1], do_sample=True, temperature=-1.0)
    with pytest.raises(DoesNotFitError, match="3 rows"):
        engine.add(TEXTS[1], num_beams=3, max_new_tokens=3)
    with pytest.raises(UnknownRequestError, match="req_77"):
        engine.cancel("req_77")
    check(good.result(), alone(model, tokenizer, TEXTS[0], max_new_tokens=5))
    with pytest.raises(ResultTakenError, match=good.id):
        good.result()
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.step()
    with pytest.raises(EngineClosedError):
        engine.add(TEXTS[0])


def test_a_request_that_never_fits_is_refused_with_the_numbers(builtin: Any) -> None:
    model, tokenizer = builtin
    engine = Engine(model, tokenizer, memory=200_000)
    with pytest.raises(DoesNotFitError, match="200,000 bytes"):
        engine.add(TEXTS[0], max_new_tokens=2000)
    fits = engine.add(TEXTS[0], max_new_tokens=4)
    check(fits.result(), alone(model, tokenizer, TEXTS[0], max_new_tokens=4))


def test_memory_bounds_what_decodes_at_once(builtin: Any) -> None:
    model, tokenizer = builtin
    engine = Engine(model, tokenizer, memory=320_000)
    requests = [engine.add(text, max_new_tokens=8) for text in TEXTS]
    most = 0
    for _ in engine.events():
        most = max(most, engine.n_rows)
        assert engine.scheduler.n_bytes <= 320_000
    assert 1 < most < len(TEXTS)
    for request, text in zip(requests, TEXTS, strict=True):
        check(request.result(), alone(model, tokenizer, text, max_new_tokens=8))


def test_what_cannot_be_joined_is_refused_by_name(builtin: Any) -> None:
    model, tokenizer = builtin
    engine = Engine(model, tokenizer)
    with pytest.raises(ValueError, match="without a cache"):
        engine.add(TEXTS[0], max_new_tokens=4, use_cache=False)
    with pytest.raises(ValueError, match="generate"):
        engine.add(TEXTS[0], max_new_tokens=4, cache_implementation="static")
    quantized = engine.add(TEXTS[0], max_new_tokens=4, cache_implementation="quantized")
    solo = alone(model, tokenizer, TEXTS[0], max_new_tokens=4, cache_implementation="quantized")
    check(quantized.result(), solo)


def test_prefixes_are_stored_at_entry_and_exit(builtin: Any) -> None:
    model, tokenizer = builtin
    prefixes = hfgen.PrefixCache()
    engine = Engine(model, tokenizer, prefix_cache=prefixes)
    first = [engine.add(text, max_new_tokens=8 + 5 * i) for i, text in enumerate(TEXTS[:3])]
    answers = [request.result() for request in first]
    for i, (answer, text) in enumerate(zip(answers, TEXTS, strict=False)):
        check(answer, alone(model, tokenizer, text, max_new_tokens=8 + 5 * i))
    # What was generated beside other rows is stored, too: a prompt that goes on from it is known.
    for answer in answers:
        ids = answer.prompt_token_ids + answer.token_ids
        saved = prefixes.stats.tokens_saved
        later = engine.add([*ids, 300], max_new_tokens=10)
        output = later.result()
        assert prefixes.stats.tokens_saved - saved >= len(ids) - 1
        solo = model.generate(
            torch.tensor([[*ids, 300]]), max_new_tokens=10, return_dict_in_generate=True
        )
        assert torch.equal(output.generate_output.sequences, solo.sequences)


def test_prompts_of_similar_length_share_a_forward(builtin: Any) -> None:
    model, _ = builtin
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 2000, (n,), generator=generator) for n in (9, 10, 40, 12, 11, 38)]
    engine = Engine(model, max_rows=2)
    for prompt in prompts[:2]:
        engine.add(prompt, max_new_tokens=2).result()
    assert not engine.steps.classes.hides  # not tried
    engine = Engine(model, prefill_tokens=30)
    requests = [engine.add(prompt, max_new_tokens=6) for prompt in prompts]
    shapes = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        shapes.append(tuple(kwargs["input_ids"].shape))

    note.is_row_wise = True  # type: ignore[attr-defined]  # else requests decode one at a time
    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        outputs = [request.result() for request in requests]
    finally:
        hook.remove()
    assert any(rows > 1 and length > 1 for rows, length in shapes)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.error is None
        solo = model.generate(prompt[None], max_new_tokens=6)
        assert torch.equal(output.generate_output.sequences, solo)


def test_chunks_behind_the_first_are_forwarded_in_parts(
    builtin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = builtin
    monkeypatch.setattr("hfgen.engine.decoding.PART", 6)
    prompt = torch.randint(5, 2000, (43,), generator=torch.Generator().manual_seed(0))
    parts: list[int] = []

    def noting(run: Any, n_tokens: int) -> None:
        parts.append(n_tokens)
        forward_part(run, n_tokens)

    monkeypatch.setattr("hfgen.engine.decoding.forward_part", noting)
    request = Engine(model, prefill_tokens=16).add(prompt, max_new_tokens=6)
    request.engine.step()
    assert parts == [16]
    request.engine.step()
    assert parts == [16, 6, 6, 4]
    request.engine.step()  # the last part chooses a token besides
    assert parts == [16, 6, 6, 4, 6]
    solo = model.generate(prompt[None], max_new_tokens=6)
    assert torch.equal(request.result().generate_output.sequences, solo)


@pytest.mark.parametrize("family", ["bart", "t5", "qwen3_next", "mistral"])
def test_other_families_equal_their_own_calls(family: str) -> None:
    model = ours(family)
    engine = Engine(model, max_rows=4)
    prompts = [tiny.prompt(1, n) % 60 + 5 for n in (3, 9, 5, 12, 4, 7)]
    requests = [engine.add(p, max_new_tokens=4 + 3 * i) for i, p in enumerate(prompts)]
    for i, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        output = request.result()
        assert output.error is None, output.error
        solo = model.generate(prompt, max_new_tokens=4 + 3 * i)
        assert torch.equal(output.generate_output.sequences, solo)


@pytest.mark.parametrize("family", ["speech_to_text", "moonshine"])
def test_sound_of_different_length_equals_its_own_calls(family: str) -> None:
    model = ours(family)
    inputs = FAMILIES[family].inputs(model, 1, False, 0)
    name = model.main_input_name
    shorter = inputs | {name: inputs[name][:, : inputs[name].shape[1] // 2]}
    asked = [inputs, shorter, inputs]
    engine = Engine(model)
    requests = [engine.add(each, max_new_tokens=6 + i) for i, each in enumerate(asked)]
    for i, (each, request) in enumerate(zip(asked, requests, strict=True)):
        output = request.result()
        assert output.error is None, output.error
        solo = model.generate(**each, max_new_tokens=6 + i)
        assert torch.equal(output.generate_output.sequences, solo)


class Panic(BaseException):
    """What a Rust library raises: it is no ``Exception``."""


def test_a_panic_in_a_processor_ends_only_its_request() -> None:
    model = hfgen.mix_into(tiny.llama())
    n_calls = 0

    def panics(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 3:
            raise Panic("index out of bounds")
        return scores

    ids = tiny.prompt(1, 5)
    options: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": None}
    engine = Engine(model)
    failing = engine.add(ids, logits_processor=[panics], **options)
    neighbour = engine.add(ids, **options)
    assert isinstance(failing.result().error.__cause__, Panic)
    assert neighbour.result().generate_output.sequences.equal(model.generate(ids, **options))
