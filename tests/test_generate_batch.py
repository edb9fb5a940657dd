"""transformers' continuous batching by its own names, on hfgen's engine."""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from tqdm import TMonitor
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import (
    ContinuousBatchingManager,
    ContinuousMixin,
    RequestStatus,
)
from transformers.generation.continuous_batching.requests import GenerationOutput

import hfgen
from hfgen.engine import manager as manager_module
from hfgen.engine import upstream
from hfgen.engine.manager import Manager
from tests import tiny
from tests.parity.harness import FAMILIES

LENGTHS = (3, 9, 5, 7)
PROMPTS = [tiny.prompt(1, length, seed=length)[0].tolist() for length in LENGTHS]
#: Upstream cannot do without these on a CPU.
PAGES = {"page_size": 16, "num_blocks": 16, "max_batch_tokens": 64}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def llama() -> Any:
    return hfgen.mix_into(tiny.llama())


def running() -> set[threading.Thread]:
    """The threads there are, but for the one that tqdm keeps."""
    return {thread for thread in threading.enumerate() if not isinstance(thread, TMonitor)}


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = running()
    yield
    deadline = time.monotonic() + 5
    while (left := running() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == set()


def alone(model: Any, prompt: list[int], **options: Any) -> list[int]:
    """What the prompt's own ``generate()`` adds to it."""
    out = model.generate(torch.tensor([prompt]), **options)[0].tolist()
    return out[1:] if model.config.is_encoder_decoder else out[len(prompt) :]


def tokens_of(results: dict[str, GenerationOutput]) -> list[list[int]]:
    assert [result.error for result in results.values()] == [None] * len(results)
    return [result.generated_tokens for result in results.values()]


class Slow(transformers.LogitsProcessor):
    """Leaves the scores alone, and sets ``seen`` once it has been called ``after`` times."""

    def __init__(self, after: int = 1, seconds: float = 0.005) -> None:
        self.after, self.seconds, self.seen = after, seconds, threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.after -= 1
        if self.after <= 0:
            self.seen.set()
        time.sleep(self.seconds)
        return scores


class Raises(transformers.LogitsProcessor):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= self.length:
            raise RuntimeError("the processor has had enough")
        return scores


METHODS = (
    "init_continuous_batching",
    "continuous_batching_context_manager",
    "generate_batch",
)

NO_EOS = {"ignore_eos": True}
LONG: dict[str, Any] = {"max_new_tokens": 200, "ignore_eos": True}


# ---------------------------------------------------------------- beside upstream


def test_results_are_upstreams(llama: Any) -> None:
    config = GenerationConfig(max_new_tokens=8, eos_token_id=[2, 69], do_sample=False)
    batching = {"return_logprobs": True, **PAGES}
    options = {"generation_config": config, "record_timestamps": True}
    theirs, ours = (
        model.generate_batch(
            PROMPTS, continuous_batching_config=ContinuousBatchingConfig(**batching), **options
        )
        for model in (tiny.llama(), llama)
    )
    assert list(ours) == list(theirs)
    for name, expected in theirs.items():
        result = ours[name]
        assert type(result) is GenerationOutput
        for field in ("request_id", "prompt_ids", "generated_tokens", "error", "status"):
            assert getattr(result, field) == getattr(expected, field), field
        assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert result.is_finished()
        assert len(result.timestamps) == len(result.generated_tokens)
        assert result.timestamps == sorted(result.timestamps)
        start, end = result.lifespan
        assert result.created_time <= start <= result.timestamps[0] <= end


@pytest.mark.filterwarnings("ignore:The `paged|` prefix:FutureWarning")
@pytest.mark.parametrize("attention", ["paged|eager", "paged|sdpa", "eager"])
def test_attention_for_continuous_batching(attention: str) -> None:
    upstream, model = tiny.llama(), hfgen.mix_into(tiny.llama())
    options: dict[str, Any] = {
        "generation_config": GenerationConfig(max_new_tokens=6, do_sample=False),
        "continuous_batching_config": ContinuousBatchingConfig(**PAGES),
    }
    for each in (upstream, model):
        each.set_attn_implementation(attention)
    before = model.config._attn_implementation
    expected = tokens_of(upstream.generate_batch(PROMPTS, **options))
    assert tokens_of(model.generate_batch(PROMPTS, **options)) == expected
    assert model.config._attn_implementation == before
    with model.continuous_batching_context_manager(**options) as manager:
        assert tokens_of(model.generate_batch(PROMPTS, **options)) == expected
        request = manager.add_request(PROMPTS[1])
        assert manager.get_result(request).generated_tokens == expected[1]
    assert model.config._attn_implementation == before


def test_ids_of_several_sequences_are_upstreams(llama: Any) -> None:
    config = GenerationConfig(
        max_new_tokens=4, eos_token_id=2, do_sample=True, num_return_sequences=3
    )
    theirs, ours = (
        model.generate_batch(
            PROMPTS, config, continuous_batching_config=ContinuousBatchingConfig(**PAGES)
        )
        for model in (tiny.llama(), llama)
    )
    assert list(ours) == list(theirs)
    assert [r.prompt_ids for r in ours.values()] == [r.prompt_ids for r in theirs.values()]
    assert len({tuple(result.generated_tokens) for result in ours.values()}) > len(PROMPTS)


def test_signatures_are_upstreams() -> None:
    names = inspect.getmembers(ContinuousBatchingManager, inspect.isfunction)
    pairs = [
        (getattr(Manager, name), theirs)
        for name, theirs in names
        if not name.startswith("_") and getattr(Manager, name) is not theirs
    ]
    pairs += [(getattr(upstream, name), getattr(ContinuousMixin, name)) for name in METHODS]
    assert len(pairs) > 12
    for ours, theirs in pairs:
        mine, yours = (
            [p for p in inspect.signature(f).parameters.values() if p.kind is not p.VAR_KEYWORD]
            for f in (ours, theirs)
        )
        assert [(p.name, p.default) for p in mine] == [(p.name, p.default) for p in yours], ours


def test_whatever_upstreams_manager_has_is_there(llama: Any) -> None:
    theirs = tiny.llama().init_continuous_batching(
        continuous_batching_config=ContinuousBatchingConfig(**PAGES)
    )
    ours = llama.init_continuous_batching()
    #: Of its cache and graphs, which are not here.
    internal = {"logit_processor", "distributed_helper", "current_batch"}
    missing = {n for n in dir(theirs) if not n.startswith("_") and not hasattr(ours, n)}
    assert missing <= internal
    assert isinstance(ours, ContinuousBatchingManager)


# ---------------------------------------------------------------- what a request may ask for


def test_each_request_is_its_solo_call(llama: Any) -> None:
    words = tiny.ascii_tokenizer()
    each: list[dict[str, Any]] = [
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 5},
        {"stop_strings": ["a", "Q"], "tokenizer": words},
        {"num_beams": 2},
        {"do_sample": True, "num_return_sequences": 2, "seed": 1, "min_p": 0.1},
    ]
    prompts = [*PROMPTS, PROMPTS[0]]
    with llama.continuous_batching_context_manager() as manager:
        names = [
            manager.add_request(prompt, max_new_tokens=12, **own)
            for prompt, own in zip(prompts, each, strict=True)
        ]
        manager.stop(block=False)
        results = {output.request_id: output for output in manager}
    assert names == [f"req_{i}" for i in range(5)]
    for name, prompt, own in zip(names, prompts, each, strict=True):
        rows = llama.generate(torch.tensor([prompt]), max_new_tokens=12, **own)
        found = [results[n] for n in sorted(results, reverse=True) if n.split("__")[0] == name]
        for row, result in zip(rows.tolist(), found, strict=True):
            there = result.generated_tokens
            assert row[len(prompt) :][: len(there)] == there
            assert set(row[len(prompt) :][len(there) :]) <= {0}


def test_a_list_has_a_value_for_each_prompt(llama: Any) -> None:
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 6}
    seeds = [1, 2, 3, 4]
    found = tokens_of(llama.generate_batch(PROMPTS, seed=seeds, **options))
    pairs = zip(PROMPTS, seeds, strict=True)
    assert found == [alone(llama, prompt, seed=seed, **options) for prompt, seed in pairs]
    with pytest.raises(ValueError, match=r"one value for each prompt.*3 values and 4 prompts"):
        llama.generate_batch(PROMPTS, seed=seeds[:3], **options)


@pytest.mark.parametrize("family", ["qwen3_next", "t5", "mamba", "bart"])
def test_models_that_upstream_refuses(family: str) -> None:
    model = hfgen.mix_into(FAMILIES[family].build())
    prompts = [
        FAMILIES[family].inputs(model, 1, False, seed)["input_ids"][0, seed:].tolist()
        for seed in range(3)
    ]
    options = {"max_new_tokens": 5, "do_sample": False}
    found = tokens_of(model.generate_batch(prompts, **options))
    assert found == [alone(model, prompt, **options)[:5] for prompt in prompts]


def test_seed_of_the_batching_config(llama: Any) -> None:
    config = GenerationConfig(do_sample=True, max_new_tokens=6)
    batching = ContinuousBatchingConfig(seed=7)
    found = tokens_of(llama.generate_batch(PROMPTS, config, batching))
    expected = [
        alone(llama, p, generation_config=config, seed=7 + i) for i, p in enumerate(PROMPTS)
    ]
    assert found == expected


def test_a_batching_config_within_the_config(llama: Any) -> None:
    config = GenerationConfig(do_sample=True, max_new_tokens=6)
    config.continuous_batching_config = ContinuousBatchingConfig(seed=7, return_logprobs=True)
    results = llama.generate_batch(PROMPTS, config)
    assert tokens_of(results)[1] == alone(
        llama, PROMPTS[1], do_sample=True, max_new_tokens=6, seed=8
    )
    assert all(len(r.logprobs) == len(r.generated_tokens) for r in results.values())


def test_no_length_means_as_many_as_there_are_positions(llama: Any) -> None:
    (result,) = llama.generate_batch(PROMPTS[:1], eos_token_id=-1).values()
    assert len(result.generated_tokens) == 256 - len(PROMPTS[0])


@pytest.mark.parametrize("eos", [-1, [-1, -2], [-1, 69]])
def test_negative_eos_tokens_stand_for_none(llama: Any, eos: Any) -> None:
    config = GenerationConfig(max_new_tokens=8, eos_token_id=eos, do_sample=False)
    theirs, ours = (
        model.generate_batch(
            PROMPTS, config, continuous_batching_config=ContinuousBatchingConfig(**PAGES)
        )
        for model in (tiny.llama(), llama)
    )
    assert tokens_of(ours) == tokens_of(theirs)
    assert config.eos_token_id == eos


def test_a_config_without_eos_ends_at_the_models(llama: Any) -> None:
    config = GenerationConfig(max_new_tokens=20, do_sample=False)
    found = tokens_of(llama.generate_batch(PROMPTS, config))
    assert found == [alone(llama, prompt, generation_config=config) for prompt in PROMPTS]
    assert any(tokens[-1] == 2 for tokens in found)
    assert config.eos_token_id is None  # upstream writes to it


def test_prompts_that_are_text(llama: Any) -> None:
    words = tiny.ascii_tokenizer()
    (result,) = llama.generate_batch(["Hello!"], tokenizer=words, max_new_tokens=4).values()
    assert result.prompt_ids == words("Hello!").input_ids
    assert result.generated_tokens == alone(llama, result.prompt_ids, max_new_tokens=4)


def test_nothing_to_do(llama: Any) -> None:
    assert llama.generate_batch([]) == {}


# ---------------------------------------------------------------- results


def test_streaming(llama: Any) -> None:
    with llama.continuous_batching_context_manager() as manager:
        name = manager.add_request(PROMPTS[0], max_new_tokens=5, streaming=True, eos_token_id=-1)
        other = manager.add_request(PROMPTS[1], max_new_tokens=3, eos_token_id=-1)
        outputs = list(manager.request_id_iter(name))
        (result,) = manager.request_id_iter(other)
    assert [len(output.generated_tokens) for output in outputs] == [1, 2, 3, 4, 5]
    assert [output.status for output in outputs] == [RequestStatus.DECODING] * 4 + [
        RequestStatus.FINISHED
    ]
    assert outputs[-1].generated_tokens[:4] == outputs[-2].generated_tokens
    assert len(result.generated_tokens) == 3


def test_results_that_are_left_come_after_the_end(llama: Any) -> None:
    manager = llama.init_continuous_batching()
    assert manager.get_result(timeout=1) is None  # it does not run, so none will come
    names = manager.add_requests(PROMPTS, max_new_tokens=3)
    manager.start()
    assert manager.is_running()
    manager.stop()
    assert not manager.is_running()
    assert {output.request_id for output in manager} == set(names)
    assert manager.get_result() is None


def test_get_result_of_one_request(llama: Any) -> None:
    with llama.continuous_batching_context_manager() as manager:
        first = manager.add_request(PROMPTS[0], max_new_tokens=2)
        second = manager.add_request(PROMPTS[1], request_id="mine", max_new_tokens=9)
        assert manager.get_result("mine").request_id == second == "mine"
        assert manager.get_result(first).request_id == first
        assert manager.get_result("nobody's", timeout=0.05) is None


def test_handlers_on_two_loops(llama: Any) -> None:
    async def collect(manager: Any, names: list[str]) -> list[GenerationOutput]:
        finished: asyncio.Queue[GenerationOutput] = asyncio.Queue()
        for name in names:
            manager.register_result_handler(name, finished.put_nowait)
        return [await asyncio.wait_for(finished.get(), 30) for _ in names]

    found: list[list[GenerationOutput]] = []
    manager = llama.init_continuous_batching()
    names = manager.add_requests(PROMPTS, max_new_tokens=4)
    workers = [
        threading.Thread(target=lambda mine=mine: found.append(asyncio.run(collect(manager, mine))))
        for mine in (names[:2], names[2:])
    ]
    for worker in workers:
        worker.start()
    manager.start()
    for worker in workers:
        worker.join()
    manager.stop()
    assert sorted(o.request_id for outputs in found for o in outputs) == names
    assert manager.get_result() is None
    assert manager.output_router.result_handlers == {}


def test_a_handler_that_comes_late_gets_what_waits(llama: Any) -> None:
    async def collect() -> list[int]:
        with llama.continuous_batching_context_manager() as manager:
            name = manager.add_request(
                PROMPTS[0], max_new_tokens=5, streaming=True, eos_token_id=-1
            )
            manager.stop()
            seen: list[int] = []
            manager.register_result_handler(name, lambda o: seen.append(len(o.generated_tokens)))
            await asyncio.sleep(0)
        return seen

    assert asyncio.run(collect()) == [1, 2, 3, 4, 5]


def test_a_loop_that_is_closed_cancels_its_requests(llama: Any) -> None:
    async def register(manager: Any, name: str) -> None:
        manager.register_result_handler(name, lambda output: None)

    with llama.continuous_batching_context_manager() as manager:
        manager.add_request(
            PROMPTS[0], "gone", streaming=True, logits_processor=[slow := Slow()], **LONG
        )
        slow.seen.wait(30)
        asyncio.run(register(manager, "gone"))
        assert manager.get_result("gone", timeout=30).error is not None
        name = manager.add_request(PROMPTS[1], max_new_tokens=2)
        assert manager.get_result(name).error is None


# ---------------------------------------------------------------- cancelling, failing, stopping


def test_cancelling_in_every_state(llama: Any) -> None:
    one_row = ContinuousBatchingConfig(max_requests_per_batch=1)
    manager = llama.init_continuous_batching(continuous_batching_config=one_row)
    manager.add_request(PROMPTS[0], "before the start", max_new_tokens=5)
    manager.cancel_request("before the start")
    slow = Slow(after=3)
    manager.add_request(PROMPTS[0], "decoding", logits_processor=[slow], **LONG)
    manager.add_request(PROMPTS[1], "waiting", max_new_tokens=5)
    manager.add_request(PROMPTS[2], "last", max_new_tokens=5)
    manager.start()
    slow.seen.wait(30)
    for name in ("waiting", "decoding", "unknown"):
        manager.cancel_request(name)
    last = manager.get_result("last", timeout=30)
    manager.cancel_request("last")  # is done
    manager.stop()
    results = {output.request_id: output for output in manager}
    assert last.generated_tokens == alone(llama, PROMPTS[2], max_new_tokens=5)
    assert set(results) == {"before the start", "decoding", "waiting"}
    assert all(r.status == RequestStatus.FAILED for r in results.values())
    assert all("cancelled" in r.error for r in results.values())
    assert len(results["decoding"].generated_tokens) >= 2
    assert results["waiting"].generated_tokens == []


def test_cancelling_one_of_the_sequences(llama: Any) -> None:
    with llama.continuous_batching_context_manager() as manager:
        slow = Slow()
        manager.add_request(
            PROMPTS[0],
            "a",
            num_return_sequences=2,
            do_sample=True,
            logits_processor=[slow],
            max_new_tokens=30,
            eos_token_id=-1,
        )
        slow.seen.wait(30)
        manager.cancel_request("a__child#0")
        child, parent = (manager.get_result(name, timeout=30) for name in ("a__child#0", "a"))
    assert child.error is not None
    assert parent.error is None
    assert len(parent.generated_tokens) == 30


def test_a_request_that_fails_fails_alone(llama: Any, caplog: pytest.LogCaptureFixture) -> None:
    with llama.continuous_batching_context_manager() as manager:
        manager.add_request([], "empty", max_new_tokens=6)
        manager.add_request(PROMPTS[0], "typo", max_new_tokens=6, temprature=1.0)
        manager.add_request(PROMPTS[0], "raises", 6, logits_processor=[Raises(6)], **NO_EOS)
        manager.add_request(PROMPTS[1], "fine", max_new_tokens=6)
        manager.stop(block=False)
        results = {output.request_id: output for output in manager}
    assert results["fine"].generated_tokens == alone(llama, PROMPTS[1], max_new_tokens=6)
    assert results["empty"].status == RequestStatus.FAILED
    assert "temperature" in results["typo"].error
    assert "had enough" in results["raises"].error
    assert results["raises"].generated_tokens == alone(
        llama, PROMPTS[0], max_new_tokens=3, **NO_EOS
    )
    found = llama.generate_batch([PROMPTS[0], [], PROMPTS[1]], max_new_tokens=4)
    assert [result.error is None for result in found.values()] == [True, False, True]


@pytest.mark.parametrize(
    "wrong", [{"temprature": 1.0}, {"max_new_tokens": "many"}, {"repetition_penalty": -1.0}]
)
def test_what_no_prompt_could_be_decoded_with(llama: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))[:5]):
        llama.generate_batch(PROMPTS, **wrong)


def test_stopping_lets_requests_end(llama: Any) -> None:
    manager = llama.init_continuous_batching()
    manager.start()
    names = manager.add_requests(PROMPTS, max_new_tokens=20)
    manager.stop()
    assert manager.add_request(PROMPTS[0]) is None
    assert sorted(output.request_id for output in manager) == names
    manager.start()  # again
    name = manager.add_request(PROMPTS[0], max_new_tokens=2)
    assert manager.get_result(name).error is None
    manager.destroy()
    assert not manager.is_running()


def test_stopping_at_once(llama: Any) -> None:
    manager = llama.init_continuous_batching()
    manager.start()
    slow = Slow(after=3)
    names = manager.add_requests(PROMPTS, logits_processor=[slow], **LONG)
    slow.seen.wait(30)
    manager.stop(hard_stop=True)
    outputs = list(manager)
    assert sorted(output.request_id for output in outputs) == names
    assert all("stopped" in output.error for output in outputs)
    assert any(output.generated_tokens for output in outputs)


def test_an_exception_ends_the_context(llama: Any) -> None:
    slow, before = Slow(seconds=0.1), time.monotonic()

    def fail() -> None:
        with llama.continuous_batching_context_manager() as manager:
            manager.add_requests(PROMPTS, logits_processor=[slow], **LONG)
            slow.seen.wait(30)
            raise KeyError(manager)

    with pytest.raises(KeyError) as raised:
        fail()
    assert not raised.value.args[0].is_running()
    assert time.monotonic() - before < 20


def test_a_failure_of_the_engine(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> Any:
        raise MemoryError("no memory")

    monkeypatch.setattr(manager_module.Engine, "step", fail)
    with llama.continuous_batching_context_manager() as manager:
        names = manager.add_requests(PROMPTS, max_new_tokens=3)
        outputs = list(manager)
        assert sorted(output.request_id for output in outputs) == names
        assert {output.error for output in outputs} == {"no memory"}
        assert isinstance(manager.background_thread_status.fatal_error, MemoryError)
        assert manager.add_request(PROMPTS[0]) is None
    found = llama.generate_batch(PROMPTS, max_new_tokens=3)
    assert [result.status for result in found.values()] == [RequestStatus.FAILED] * 4


def test_pausing(llama: Any) -> None:
    with llama.continuous_batching_context_manager() as manager:
        slow = Slow()
        manager.add_request(PROMPTS[0], "a", logits_processor=[slow], **LONG)
        slow.seen.wait(30)
        with manager.pause():
            calls = slow.after
            time.sleep(0.05)
            assert slow.after == calls
            with pytest.raises(RuntimeError, match="pause"):
                manager.stop()
        assert manager.get_result("a", timeout=60).error is None
    with pytest.raises(RuntimeError), manager.pause():
        pass


# ---------------------------------------------------------------- configs


def test_a_full_queue(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batching = ContinuousBatchingConfig(max_queue_size=1)
    found = llama.generate_batch(PROMPTS, continuous_batching_config=batching, max_new_tokens=3)
    assert len(tokens_of(found)) == 4
    monkeypatch.setattr(manager_module, "WAIT_FOR_ROOM", 0.01)
    manager = llama.init_continuous_batching(continuous_batching_config=batching)
    manager.add_request(PROMPTS[0], "a", max_new_tokens=2)
    with pytest.raises(queue.Full):
        manager.add_request(PROMPTS[0], "b", max_new_tokens=2)
    manager.start()
    assert manager.get_result("a").error is None
    assert manager.add_request(PROMPTS[0], "b", max_new_tokens=2) == "b"
    manager.stop()


def test_an_id_of_a_request_that_is_not_done(llama: Any) -> None:
    manager = llama.init_continuous_batching()
    manager.add_request(PROMPTS[0], "a", num_return_sequences=2, do_sample=True, max_new_tokens=2)
    for name in ("a", "a__child#0"):
        with pytest.raises(ValueError, match=f"`request_id` '{name}'"):
            manager.add_request(PROMPTS[0], name)


def test_fields_that_do_not_apply_are_named_once(
    llama: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.Logger.warning_once.cache_clear()
    seen: dict[str, Any] = {}
    engine = manager_module.Engine
    monkeypatch.setattr(
        manager_module, "Engine", lambda model, **options: seen.update(options) or engine(model)
    )
    batching = ContinuousBatchingConfig(
        page_size=16,
        use_cuda_graph=True,
        max_requests_per_batch=3,
        max_batch_tokens=5,
        max_memory_percent=0.5,
        scheduler_type="srpt",
        per_request_processors=True,
    )
    with caplog.at_level(logging.WARNING, logger="transformers"):
        for _ in range(2):
            llama.generate_batch(PROMPTS, continuous_batching_config=batching, max_new_tokens=2)
    assert seen == {"max_rows": 3, "prefill_tokens": 5, "memory": 0.5, "policy": "srpt"}
    (record,) = [r for r in caplog.records if "batching config" in r.getMessage()]
    assert "page_size, use_cuda_graph:" in record.getMessage()
    assert "max_requests" not in record.getMessage()


def test_a_manager_that_is_kept() -> None:
    model = hfgen.mix_into(tiny.llama())
    model.generate_batch(PROMPTS, persistent_manager=True, max_new_tokens=2)
    kept = model.init_continuous_batching()
    assert kept is model.init_continuous_batching(GenerationConfig(max_new_tokens=4))
    results = model.generate_batch(PROMPTS, GenerationConfig(max_new_tokens=4, eos_token_id=-1))
    assert [len(tokens) for tokens in tokens_of(results)] == [4] * 4
    model.destroy_cached_continuous_batching_manager()
    assert model.init_continuous_batching() is not kept


# ---------------------------------------------------------------- generate(cache_implementation="paged")


def paged(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return model.generate(ids, cache_implementation="paged", **options)[0]


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4, "penalty_window": 4},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "seed": [3, 4]},
        {"prompt_lookup_num_tokens": 2},
        {"stopping_criteria": [lambda ids, scores, **kwargs: ids[:, -1] % 2 == 0]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_paged_takes_what_generate_takes(llama: Any, options: dict[str, Any]) -> None:
    ids = tiny.prompt(2)
    options = {"max_new_tokens": 6, **options}
    expected = llama.generate(ids, **options)
    found = paged(llama, ids, **options)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "refused",
    [
        {"streamer": transformers.TextStreamer(None)},
        {"prefix_allowed_tokens_fn": lambda row, ids: [5]},
        {"negative_prompt_ids": tiny.prompt(2)},
        {"output_metrics": True},
    ],
    ids=lambda refused: next(iter(refused)),
)
def test_what_paged_refuses(llama: Any, refused: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=f"`{next(iter(refused))}`"):
        paged(llama, tiny.prompt(2), max_new_tokens=2, **refused)


def test_paged_says_which_prompt_fails(llama: Any) -> None:
    with pytest.raises(RuntimeError, match=r"req_0: the processor has had enough"):
        paged(llama, tiny.prompt(2), max_new_tokens=4, logits_processor=[Raises(9)])
