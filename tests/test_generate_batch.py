"""transformers' continuous batching by its own names, on hfgen's engine."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import (
    ContinuousMixin,
    RequestStatus,
)
from transformers.generation.continuous_batching.requests import GenerationOutput

import hfgen
from hfgen.engine import upstream
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


def alone(model: Any, prompt: list[int], **options: Any) -> list[int]:
    """What the prompt's own ``generate()`` adds to it."""
    out = model.generate(torch.tensor([prompt]), **options)[0].tolist()
    return out[1:] if model.config.is_encoder_decoder else out[len(prompt) :]


def tokens_of(results: dict[str, GenerationOutput]) -> list[list[int]]:
    assert [result.error for result in results.values()] == [None] * len(results)
    return [result.generated_tokens for result in results.values()]


class Raises(transformers.LogitsProcessor):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= self.length:
            raise RuntimeError("the processor has had enough")
        return scores


NO_EOS = {"ignore_eos": True}


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


def test_its_signature_is_upstreams() -> None:
    ours, theirs = (
        [p for p in inspect.signature(f).parameters.values() if p.kind is not p.VAR_KEYWORD]
        for f in (upstream.generate_batch, ContinuousMixin.generate_batch)
    )
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs]


def test_upstreams_own_manager_serves_a_mixed_model() -> None:
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1)
    options: dict[str, Any] = {
        "generation_config": config,
        "continuous_batching_config": ContinuousBatchingConfig(**PAGES),
    }
    found = []
    for model in (tiny.llama(), hfgen.mix_into(tiny.llama())):
        with model.continuous_batching_context_manager(**options) as manager:
            manager.add_requests(PROMPTS)
            results = [manager.get_result() for _ in PROMPTS]
        found.append({result.request_id: result.generated_tokens for result in results})
    assert found[0] == found[1]


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
    for prompt, own in zip([*PROMPTS, PROMPTS[0]], each, strict=True):
        rows = llama.generate(torch.tensor([prompt]), max_new_tokens=12, **own)
        results = llama.generate_batch([prompt], max_new_tokens=12, **own)
        found = [results[name] for name in sorted(results, reverse=True)]
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


# ---------------------------------------------------------------- cancelling, failing, stopping


def test_a_request_that_fails_fails_alone(llama: Any) -> None:
    found = llama.generate_batch([PROMPTS[0], [], PROMPTS[1]], max_new_tokens=4)
    assert [result.error is None for result in found.values()] == [True, False, True]
    options: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": -1}
    found = llama.generate_batch(PROMPTS, logits_processor=[Raises(10)], **options)
    errors = [result.error for result in found.values()]
    assert errors[1] == "the processor has had enough"
    assert errors[0] is None
    assert found["req_1"].status == RequestStatus.FAILED
    assert found["req_1"].generated_tokens == alone(llama, PROMPTS[1], max_new_tokens=1, **NO_EOS)
    assert found["req_0"].generated_tokens == alone(llama, PROMPTS[0], max_new_tokens=6, **NO_EOS)


@pytest.mark.parametrize(
    "wrong", [{"temprature": 1.0}, {"max_new_tokens": "many"}, {"repetition_penalty": -1.0}]
)
def test_what_no_prompt_could_be_decoded_with(llama: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))[:5]):
        llama.generate_batch(PROMPTS, **wrong)


# ---------------------------------------------------------------- configs


def test_fields_that_do_not_apply_are_named_once(
    llama: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.Logger.warning_once.cache_clear()
    seen: dict[str, Any] = {}
    engine = upstream.Engine
    monkeypatch.setattr(
        upstream, "Engine", lambda model, **options: seen.update(options) or engine(model)
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


@pytest.mark.parametrize("pad", [None, 5, torch.tensor(6)])
def test_paged_takes_a_config_for_each_prompt_and_pads_as_it_is_told(llama: Any, pad: Any) -> None:
    ids = tiny.prompt(2)
    configs = [GenerationConfig(max_new_tokens=n, eos_token_id=90) for n in (2, 5)]
    options = {"generation_config": configs, **({} if pad is None else {"pad_token_id": pad})}
    assert paged(llama, ids, **options).tolist() == llama.generate(ids, **options).tolist()
    configs[1].logprobs = 1
    with pytest.raises(NotImplementedError, match="`logprobs`"):
        paged(llama, ids, **options)


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
