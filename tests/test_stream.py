"""``stream()``: the events are what ``generate()`` returns, and nothing is left over."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import hfgen
from hfgen import StreamEvent
from hfgen.families import CACHE
from tests import tiny
from tests.parity.encoder_families import ENCODER_FAMILIES
from tests.test_hooks import is_same
from tests.versions import freed_at_once

EOS = list(range(8, 60, 4))
MODELS = {"llama": tiny.llama, "t5": tiny.t5, "bart": tiny.bart}


@pytest.fixture(scope="module")
def llama() -> Any:
    return hfgen.mix_into(tiny.llama())


def rows_of(events: Iterable[StreamEvent]) -> dict[int, list[int]]:
    """The tokens of each row; that it ends once, and with its last event, is checked."""
    rows: dict[int, list[int]] = {}
    ended = set()
    for event in events:
        assert event.row not in ended
        assert event.token_ids or event.finish_reason or event.text
        rows.setdefault(event.row, []).extend(event.token_ids)
        if event.finish_reason is not None:
            ended.add(event.row)
    assert ended == set(rows)
    return rows


def generated(sequences: Tensor, eos: list[int], n_prompt: int = 7) -> dict[int, list[int]]:
    """What each row has generated, up to and including the first EOS."""
    rows = {}
    for index, row in enumerate(sequences[:, n_prompt:].tolist()):
        end = next((i for i, token in enumerate(row, 1) if token in eos), len(row))
        rows[index] = row[:end]
    return rows


def check(model: Any, ids: Tensor, seed: int = 0, **options: Any) -> list[StreamEvent]:
    """The events of a stream, which are those of ``generate`` up to and including an EOS."""
    torch.manual_seed(seed)
    expected = model.generate(ids, **options)
    sequences = expected if isinstance(expected, Tensor) else expected.sequences
    torch.manual_seed(seed)
    stream = model.stream(ids, **options)
    events = list(stream)
    if options.get("max_new_tokens") != 0:  # a cache that nobody has filled cannot be compared
        assert is_same(stream.result, expected)
    n_prompt = 1 if model.config.is_encoder_decoder else ids.shape[1]
    eos = options.get("eos_token_id", model.generation_config.eos_token_id)
    eos = eos if isinstance(eos, list) else [eos]
    assert rows_of(events) == generated(sequences, eos, n_prompt)
    return events


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.8},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "all beams": {"num_beams": 3, "num_return_sequences": 3, "length_penalty": -1.0},
    "beam samples": {"num_beams": 3, "do_sample": True, "num_return_sequences": 2},
    "drafted": {"prompt_lookup_num_tokens": 3},
    "drafted samples": {"prompt_lookup_num_tokens": 3, "do_sample": True},
    "groups of beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive": {"penalty_alpha": 0.5, "top_k": 4},
    "static cache": {"cache_implementation": "static"},
    "outputs": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_events_are_what_generate_returns(name: str, mode: str, rows: int) -> None:
    model = hfgen.mix_into(MODELS[name]())
    for seed, (n, eos) in enumerate(
        [(0, EOS), (1, EOS), (12, EOS), (9, model.config.eos_token_id)]
    ):
        check(
            model,
            tiny.prompt(rows, seed=seed),
            seed,
            max_new_tokens=n,
            eos_token_id=eos,
            **MODES[mode],
        )


@pytest.mark.parametrize(
    "options",
    [
        {"drop_finished": True},
        {"drop_finished": True, "num_beams": 2},
        {"cache_implementation": "quantized", "cache_config": {"backend": "hfgen"}},
        {"use_cache": False},
        {"prefill_chunk_size": 3},
        {"eos_token_id": None},
        {"eos_token_id": EOS, "pad_token_id": EOS[0]},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_of_the_loop(llama: Any, options: dict[str, Any]) -> None:
    check(llama, tiny.prompt(4), **{"max_new_tokens": 14, "eos_token_id": EOS} | options)


def test_a_batch_with_padding(llama: Any) -> None:
    ids = tiny.prompt(3, 9)
    mask = torch.ones_like(ids)
    ids[0, :4], mask[0, :4] = 0, 0
    ids[2, :1], mask[2, :1] = 0, 0
    check(llama, ids, attention_mask=mask, max_new_tokens=14, eos_token_id=EOS)


def test_an_assistant(llama: Any) -> None:
    model = hfgen.mix_into(tiny.llama(num_hidden_layers=1))
    options = {"num_assistant_tokens": 5, "assistant_confidence_threshold": 0.0}
    options["num_assistant_tokens_schedule"] = "constant"
    events = check(llama, tiny.prompt(3), assistant_model=llama, max_new_tokens=20, **options)
    assert max(len(event.token_ids) for event in events) > 3
    check(llama, tiny.prompt(3), assistant_model=model, max_new_tokens=20, eos_token_id=EOS)


def test_a_prefix_cache(llama: Any) -> None:
    prefixes = hfgen.PrefixCache()
    ids = tiny.prompt(1, 40)
    rows_of(llama.stream(ids, prefix_cache=prefixes, max_new_tokens=4))
    check(llama, ids, prefix_cache=prefixes, max_new_tokens=6)
    assert prefixes.stats.tokens_saved > 70
    next(llama.stream(tiny.prompt(1, 40, seed=5), prefix_cache=prefixes, max_new_tokens=4))
    prefixes_before = prefixes.stats.tokens_saved
    check(llama, tiny.prompt(1, 40, seed=5), prefix_cache=prefixes, max_new_tokens=4)
    assert prefixes.stats.tokens_saved > prefixes_before


def test_embeddings_as_a_prompt(llama: Any) -> None:
    embeds = llama.get_input_embeddings()(tiny.prompt(2)).detach()
    expected = llama.generate(inputs_embeds=embeds, max_new_tokens=5)
    rows = rows_of(llama.stream(inputs_embeds=embeds, max_new_tokens=5))
    assert [rows[0], rows[1]] == expected.tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": [3, 9, 0, 14]},
        {"max_new_tokens": 12, "temperature": [1.0, 0.5, 2.0, 1.0], "do_sample": True, "seed": 2},
        {"max_new_tokens": [3, 9, 1, 14], "num_beams": 2},
        {"max_new_tokens": [3, 9, 1, 14], "prompt_lookup_num_tokens": 3},
        {
            "max_new_tokens": [3, 9, 0, 14],
            "do_sample": True,
            "num_return_sequences": 2,
            "seed": [4, 1, 2, 3],
        },
    ],
    ids=lambda options: "-".join(options),
)
def test_parameters_per_row(llama: Any, options: dict[str, Any]) -> None:
    ids, n = tiny.prompt(4), options.get("num_return_sequences", 1)
    rows = rows_of(llama.stream(ids, **options))
    assert len(rows) == 4 * n
    for index in range(4):
        own = {k: v[index] if isinstance(v, list) else v for k, v in options.items()}
        alone = generated(llama.generate(ids[index : index + 1], **own), [2])
        assert [rows[index * n + copy] for copy in range(n)] == list(alone.values())


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_are_those_of_generate(llama: Any, mode: str) -> None:
    options = {"max_new_tokens": 12, "eos_token_id": EOS, "logprobs": 2, **MODES[mode]}
    options |= {"return_dict_in_generate": True, "logprob_token_ids": [5]}
    torch.manual_seed(0)
    expected = llama.generate(tiny.prompt(3), **options).logprobs
    torch.manual_seed(0)
    found: dict[int, list[Any]] = {}
    for event in llama.stream(tiny.prompt(3), **options):
        assert tuple(entry.token_id for entry in event.logprobs or ()) == event.token_ids
        found.setdefault(event.row, []).extend(event.logprobs or ())
    assert found == dict(enumerate(expected))
    assert llama.stream(tiny.prompt(1), max_new_tokens=1).__next__().logprobs is None


def test_a_recipe_that_chooses_at_the_end_has_one_event_per_row(llama: Any) -> None:
    options = {
        "custom_generate": hfgen.minimum_bayes_risk(hfgen.token_f1, n_best=2, on_tokens=True),
        "do_sample": True,
        "num_return_sequences": 4,
    }
    events = check(llama, tiny.prompt(2), max_new_tokens=10, eos_token_id=EOS, **options)
    assert [event.row for event in events] == [0, 1, 2, 3]


class Threes:
    """A strategy from scratch, which says nothing of where rows end: 3, three times."""

    def __init__(self, run: Any) -> None:
        self.left = 3

    def prefill(self, run: Any) -> str:
        return "nothing"

    def decoding(self, run: Any) -> Any:
        return torch.no_grad()

    def forward(self, run: Any) -> str:
        return "nothing"

    def step(self, run: Any, outputs: Any) -> Any:
        self.left -= 1
        threes = torch.full((len(run.ids), 1), 3)
        run.ids = torch.cat([run.ids, threes], dim=1)
        return hfgen.state.run.Step(tokens=threes)

    def stop(self, run: Any) -> None:
        run.finished = self.left == 0

    def result(self, run: Any) -> dict[str, Any]:
        return {"sequences": run.ids}


def test_a_strategy_from_scratch(llama: Any) -> None:
    options = {"custom_generate": hfgen.recipe(Threes), "max_new_tokens": 9}
    assert rows_of(llama.stream(tiny.prompt(2), **options)) == {0: [3, 3, 3], 1: [3, 3, 3]}
    assert rows_of(llama.stream(tiny.prompt(1), eos_token_id=3, **options)) == {0: [3]}


# ---------------------------------------------------------------- the iterator


def test_events_come_as_they_are_decoded(llama: Any) -> None:
    n_forwards = 0

    def count(*args: Any) -> None:
        nonlocal n_forwards
        n_forwards += 1

    handle = llama.register_forward_pre_hook(count)
    try:
        stream = llama.stream(tiny.prompt(1), max_new_tokens=6)
        assert n_forwards == 0
        for n, _ in enumerate(stream, start=1):
            assert n_forwards == n
    finally:
        handle.remove()


def test_the_value_of_the_iterator_is_the_result(llama: Any) -> None:
    values = []

    def consume() -> Any:
        values.append((yield from stream))

    stream = llama.stream(tiny.prompt(2), max_new_tokens=3)
    assert stream.result is None
    assert len(list(consume())) == 6
    assert torch.equal(values[0], llama.generate(tiny.prompt(2), max_new_tokens=3))
    assert stream.result is values[0]
    assert next(stream, "over") == "over"
    assert stream.result is values[0]


@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_with_the_last_event_everything_is_done(llama: Any, mode: str) -> None:
    prefixes, ids = hfgen.PrefixCache(), tiny.prompt(1, 12)
    options = {"max_new_tokens": 9, **MODES[mode]}
    for event in (stream := llama.stream(ids, prefix_cache=prefixes, **options)):
        assert (stream.result is None) == (event.finish_reason is None)
        if event.finish_reason is not None:
            break
    assert torch.equal(stream.result, llama.generate(ids, **options))
    llama.generate(stream.result[:, :18], prefix_cache=prefixes, max_new_tokens=1)
    assert prefixes.stats.tokens_saved == 17
    with Caches(llama) as caches:
        stream = llama.stream(ids, **options)
        while next(stream).finish_reason is None:
            assert caches.n_alive > 0
        assert caches.n_alive == 0


def test_signatures_are_those_of_generate() -> None:
    mixin = hfgen.GenerationMixin
    expected = list(inspect.signature(mixin.generate).parameters)
    assert list(inspect.signature(mixin.stream).parameters) == expected
    assert list(inspect.signature(mixin.astream).parameters) == expected


def test_arguments_by_position(llama: Any) -> None:
    config = hfgen.GenerationConfig(max_new_tokens=4)
    rows = rows_of(llama.stream(tiny.prompt(1), config))
    assert rows[0] == llama.generate(tiny.prompt(1), config)[0, 7:].tolist()


def test_wrong_arguments_are_raised_at_once(llama: Any) -> None:
    with pytest.raises(ValueError, match="max_new_tokens"):
        llama.stream(tiny.prompt(1), max_new_tokens=-1)
    with pytest.raises(ValueError, match="`streamer`"):
        llama.stream(tiny.prompt(1), streamer=object())
    with pytest.raises(ValueError, match=r"`custom_generate`.*recipe"):
        llama.stream(tiny.prompt(1), custom_generate=lambda model, input_ids, **kwargs: input_ids)
    with pytest.raises(ValueError, match=r"`custom_generate`.*recipe"):
        llama.astream(tiny.prompt(1), custom_generate="owner/repository")
    with pytest.raises(ValueError, match="paged"):
        llama.stream(tiny.prompt(1), cache_implementation="paged")


def test_models_with_methods_of_their_own() -> None:
    whisper = next(family for family in ENCODER_FAMILIES if family.name == "whisper").build()
    with pytest.raises(TypeError, match=r"Whisper.* has a `generate` of its own"):
        hfgen.mix_into(whisper).stream(torch.zeros(1, 8, 40))

    class Own(hfgen.mix_into(type(tiny.llama()))):  # type: ignore[misc]
        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            return super()._sample(*args, **kwargs)

    model = tiny.llama()
    model.__class__ = Own
    with pytest.raises(TypeError, match="Own has a `_sample` of its own"):
        model.astream(tiny.prompt(1))
    options = {"custom_generate": hfgen.recipe(Threes), "max_new_tokens": 9}
    assert rows_of(model.stream(tiny.prompt(1), **options)) == {0: [3, 3, 3]}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own
def test_adapters_of_peft() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False)
    model = hfgen.mix_into(peft.get_peft_model(tiny.llama(), config).eval())
    expected = model.generate(input_ids=tiny.prompt(2), max_new_tokens=5)
    rows = rows_of(model.stream(input_ids=tiny.prompt(2), max_new_tokens=5))
    assert rows == generated(expected, [2])
    assert rows != generated(tiny.llama().generate(tiny.prompt(2), max_new_tokens=5), [2])
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = hfgen.mix_into(peft.get_peft_model(tiny.llama(), config))
    for stream in (model.stream, model.astream):
        with pytest.raises(TypeError, match="virtual tokens"):
            stream(input_ids=tiny.prompt(1))


def test_with_patched_transformers() -> None:
    model = tiny.llama()
    with hfgen.patched():
        check(model, tiny.prompt(2), max_new_tokens=4)
    assert not hasattr(model, "stream")


@pytest.mark.parametrize("mode", ["greedy", "beams", "drafted"])
def test_the_consumer_keeps_its_grad_mode(llama: Any, mode: str) -> None:
    for is_enabled in (True, False):
        with torch.set_grad_enabled(is_enabled):
            stream = llama.stream(tiny.prompt(2), max_new_tokens=4, **MODES[mode])
            assert torch.is_grad_enabled() is is_enabled
            for _ in stream:
                assert torch.is_grad_enabled() is is_enabled
    stream = llama.stream(tiny.prompt(2), max_new_tokens=4, **MODES[mode])
    with torch.no_grad():
        next(stream)
    with torch.enable_grad():
        stream.close()
        assert torch.is_grad_enabled()
        output = llama.stream(tiny.prompt(1), max_new_tokens=2, **MODES["outputs"])
        list(output)
    assert not output.result.scores[0].requires_grad


def test_two_streams_on_one_model(llama: Any) -> None:
    calls = [
        {"max_new_tokens": 9},
        {"max_new_tokens": 12, "num_beams": 2},
        {"max_new_tokens": 12, "prompt_lookup_num_tokens": 3, "cache_implementation": "static"},
        {"max_new_tokens": 7, "cache_implementation": "static"},
    ]
    expected = [llama.generate(tiny.prompt(2, seed=i), **call) for i, call in enumerate(calls)]
    streams = [llama.stream(tiny.prompt(2, seed=i), **call) for i, call in enumerate(calls)]
    events: list[list[StreamEvent]] = [[] for _ in calls]
    for _ in range(60):
        for stream, taken in zip(streams, events, strict=True):
            taken += filter(None, [next(stream, None)])
    for i, (taken, sequences) in enumerate(zip(events, expected, strict=True)):
        assert rows_of(taken) == generated(sequences, [2]), i


# ---------------------------------------------------------------- endings


class Boom(Exception):
    pass


class Failing:
    """A processor that fails at the ``n``-th step."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.n -= 1
        if self.n == 0:
            raise Boom("no more")
        return scores


def test_an_exception_reaches_the_consumer(llama: Any) -> None:
    stream = llama.stream(tiny.prompt(1), max_new_tokens=9, logits_processor=[Failing(3)])
    assert len([next(stream), next(stream)]) == 2
    with pytest.raises(Boom):
        next(stream)
    assert next(stream, None) is None
    assert stream.result is None


class Caches:
    """Weak references to the caches with which a model is called, while it is watched."""

    def __init__(self, model: Any) -> None:
        self.references: dict[int, weakref.ref[Any]] = {}
        self.handle = model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, model: Any, args: Any, kwargs: Any) -> None:
        cache = kwargs[CACHE]
        self.references[len(self.references)] = weakref.ref(cache)

    @property
    def n_alive(self) -> int:
        return sum(reference() is not None for reference in self.references.values())

    def __enter__(self) -> Caches:
        gc.collect()
        gc.disable()  # what waits for a collection is not free
        return self

    def __exit__(self, *exception: object) -> None:
        gc.enable()
        self.handle.remove()


def consume_and_fail(stream: Any) -> None:
    for _ in stream:
        raise Boom


@freed_at_once
@pytest.mark.parametrize("mode", ["greedy", "samples", "all beams", "drafted", "contrastive"])
def test_memory_is_free_at_once(llama: Any, mode: str) -> None:
    options = {"max_new_tokens": 20, **MODES[mode]}
    with Caches(llama) as caches:
        stream = llama.stream(tiny.prompt(2), **options)
        del stream  # never asked
        for _ in llama.stream(tiny.prompt(2), **options):
            break
        assert caches.n_alive == 0
        stream = llama.stream(tiny.prompt(2), **options)
        next(stream)
        assert caches.n_alive > 0
        stream.close()
        assert caches.n_alive == 0
        assert list(stream) == []
        stream.close()
        with llama.stream(tiny.prompt(2), **options) as stream:
            next(stream)
        assert caches.n_alive == 0
        list(stream := llama.stream(tiny.prompt(2), **options))
        assert caches.n_alive == 0
        with pytest.raises(Boom):
            consume_and_fail(llama.stream(tiny.prompt(2), **options))
        assert caches.n_alive == 0
        assert caches.references


@pytest.mark.parametrize("mode", ["greedy", "drafted"])
def test_a_cache_of_the_callers_goes_on_where_the_stream_was_left(llama: Any, mode: str) -> None:
    ids, cache = tiny.prompt(1), transformers.DynamicCache(config=llama.config)
    options: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": None}
    expected = llama.generate(ids, **options)
    said: list[int] = []
    for event in llama.stream(ids, past_key_values=cache, **options, **MODES[mode]):
        said += event.token_ids
        if len(said) >= 5:
            break
    assert cache.get_seq_length() == 7 + len(said) - 1
    ids = torch.cat([ids, torch.tensor([said])], dim=1)
    options["max_new_tokens"] -= len(said)
    rest = llama.generate(ids, past_key_values=cache, **options)
    assert torch.equal(rest, expected)


def n_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@freed_at_once
def test_abandoned_streams_leave_nothing(llama: Any) -> None:
    ids = tiny.prompt(1, 3)
    n_before, threads = n_tensors(), threading.active_count()
    with Caches(llama) as caches:
        for _ in range(100):
            next(llama.stream(ids, max_new_tokens=50))
        assert len(caches.references) == 100
        assert caches.n_alive == 0
    assert n_tensors() == n_before
    assert threading.active_count() == threads
