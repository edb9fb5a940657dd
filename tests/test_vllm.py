"""vLLM's parameters: every field is taken, with what it means there, or refused with a reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hfgen
from hfgen import GenerationConfig, SamplingParams, grammar
from hfgen.settings.fields import FIELDS
from hfgen.settings.vllm import PARAMS
from tests import tiny, vllm_objects
from tests.tiny import bart, gpt2, llama

PROMPT = torch.tensor([[5, 17, 33, 8, 61], [9, 9, 8, 8, 7]])

#: A value of each field that is taken, and the fields that it becomes.
TAKEN: dict[str, tuple[Any, dict[str, Any]]] = {
    "n": (3, {"num_return_sequences": 3}),
    "presence_penalty": (0.5, {"presence_penalty": 0.5}),
    "frequency_penalty": (-0.5, {"frequency_penalty": -0.5}),
    "repetition_penalty": (1.2, {"repetition_penalty": 1.2}),
    "temperature": (0.7, {"temperature": 0.7, "do_sample": True}),
    "top_p": (0.9, {"top_p": 0.9}),
    "top_k": (-1, {"top_k": -1}),
    "min_p": (0.1, {"min_p": 0.1}),
    "seed": (7, {"seed": 7}),
    "stop": (["a", "b"], {"stop_strings": ["a", "b"]}),
    "stop_token_ids": ([4, 5], {"stop_token_ids": [4, 5]}),
    "ignore_eos": (True, {"ignore_eos": True}),
    "max_tokens": (9, {"max_new_tokens": 9}),
    "min_tokens": (2, {"min_tokens": 2}),
    "logprobs": (4, {"logprobs": 4}),
    "prompt_logprobs": (2, {"prompt_logprobs": 2}),
    "logprob_token_ids": ([1, 2], {"logprob_token_ids": [1, 2]}),
    "skip_special_tokens": (False, {"skip_special_tokens": False}),
    "include_stop_str_in_output": (True, {"include_stop_str_in_output": True}),
    "flat_logprobs": (True, {}),
    "detokenize": (False, {}),
    "output_kind": (1, {}),
    "skip_clone": (True, {}),
    "output_text_buffer_length": (3, {}),
    "skip_reading_prefix_cache": (True, {}),
    "structured_outputs": ({"regex": "a+"}, {"grammar": grammar.regex("a+")}),
    "guided_decoding": ({"choice": ["a"]}, {"grammar": grammar.choice(["a"])}),
    "logit_bias": ({"5": 2, 6: -1.5}, {"sequence_bias": {(5,): 2.0, (6,): -1.5}}),
    "allowed_token_ids": ([7, 8], {"allowed_token_ids": [7, 8]}),
    "bad_words": (["no"], {"bad_words": ["no"]}),
    "thinking_token_budget": (30, {"thinking_token_budget": 30}),
    "repetition_detection": (
        {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3},
        {"repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3}},
    ),
}

#: Values that are off, and become nothing.
OFF: dict[str, Any] = {
    "stop": [],
    "stop_token_ids": [],
    "logit_bias": {},
    "thinking_token_budget": -1,
    "repetition_detection": {"max_pattern_size": 0, "min_pattern_size": 0, "min_count": 0},
    "structured_outputs": None,
    "min_tokens": 0,
    "seed": -1,
    "watermarking": False,
    "extra_args": {},
    "temperature": None,
}


@pytest.mark.parametrize("name", PARAMS)
def test_every_field_is_taken_or_refused_with_a_reason(name: str) -> None:
    if name in TAKEN:
        value, becomes = TAKEN[name]
        config = SamplingParams(**{name: value})
        assert {field: getattr(config, field) for field in becomes} == becomes
        assert all(field in FIELDS for field in becomes)
    else:
        with pytest.raises(ValueError, match=f"`{name}`.* is not supported: ."):
            SamplingParams(**{name: ["no default"]})


@pytest.mark.parametrize("name", OFF)
def test_what_is_off_there_is_off_here(name: str) -> None:
    assert SamplingParams(**{name: OFF[name]}).to_dict() == SamplingParams().to_dict()


def test_the_defaults_are_vllms() -> None:
    config = SamplingParams()
    expected = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": 16,
    }
    assert {name: getattr(config, name) for name in expected} == expected


def test_a_temperature_of_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).do_sample is False


def test_the_kinds_of_structured_outputs() -> None:
    schema = {"type": "object"}
    for given, made in (
        ({"json": schema}, grammar.json(schema)),
        ({"json_object": True}, grammar.json_object()),
        ({"grammar": "start: /a/"}, grammar.lark("start: /a/")),
        (SimpleNamespace(json=None, regex="b", choice=None), grammar.regex("b")),
    ):
        assert SamplingParams(structured_outputs=given).grammar == made
    compact = SamplingParams(structured_outputs={"json": schema, "disable_any_whitespace": True})
    assert compact.grammar == grammar.json(schema, whitespace=False)
    with pytest.raises(ValueError, match="`structured_outputs` has to have one of"):
        SamplingParams(structured_outputs={"json": schema, "regex": "a"})


@pytest.mark.parametrize("arguments", vllm_objects.ARGUMENTS, ids=str)
def test_objects_of_vllms_class_say_what_their_arguments_say(arguments: dict[str, Any]) -> None:
    config = GenerationConfig.from_vllm(vllm_objects.recorded(arguments))
    assert config.to_dict() == SamplingParams(**arguments).to_dict()
    assert GenerationConfig.from_vllm(arguments).to_dict() == config.to_dict()


def test_the_recording_has_the_fields_of_the_installed_class() -> None:
    pytest.importorskip("vllm", reason="vLLM needs CUDA or a build of its own")
    for arguments in vllm_objects.ARGUMENTS:
        params = vllm_objects.installed(arguments)
        recorded = vllm_objects.fields_of(vllm_objects.recorded(arguments))
        assert recorded == vllm_objects.fields_of(params)
        assert GenerationConfig.from_vllm(params).to_dict() == SamplingParams(**arguments).to_dict()


def test_fields_of_the_recorded_class() -> None:
    public = [n for n in vllm_objects.recorded({}).__struct_fields__ if not n.startswith("_")]
    assert public == list(PARAMS)[: len(public)]


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(ValueError, match=r"`max_token` \(did you mean `max_tokens`\?\)"):
        SamplingParams(max_token=3)


def test_each_prompt_has_its_own() -> None:
    model: Any = hfgen.mix_into(llama().eval())
    params = [
        SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=[11, 12, 13]),
        SamplingParams(seed=3, logit_bias={20: 100.0}, max_tokens=6, ignore_eos=True),
    ]
    ids = model.generate(PROMPT, generation_config=params, pad_token_id=0)[:, 5:]
    assert set(ids[0, :4].tolist()) <= {11, 12, 13}
    assert ids[0, 4:].tolist() == [0, 0]
    assert ids[1].tolist() == [20] * 6


def test_bad_words_are_banned_at_starts_and_after_spaces() -> None:
    model, tokenizer = hfgen.builtin_model()
    inputs = tokenizer("def add(a, b):\n    return", return_tensors="pt")
    options = {"max_new_tokens": 3, "do_sample": False, "tokenizer": tokenizer}
    plain = tokenizer.decode(model.generate(**inputs, **options)[0])
    word = plain.removeprefix("def add(a, b):\n    return").split()[0]
    banned = tokenizer.decode(model.generate(**inputs, bad_words=[word], **options)[0])
    assert not banned.removeprefix("def add(a, b):\n    return").lstrip().startswith(word)
    with pytest.raises(ValueError, match=r"`bad_words`.*pass the model's tokenizer"):
        model.generate(**inputs, bad_words=[word])


def test_bad_words_and_their_parts_in_the_prompt_do_not_count() -> None:
    model, tokenizer = hfgen.builtin_model()
    inputs = tokenizer("def add(a, b):\n    return a +", return_tensors="pt")
    options = {"max_new_tokens": 2, "tokenizer": tokenizer}
    plain = tokenizer.decode(model.generate(**inputs, **options)[0])
    continued = plain.removeprefix("def add(a, b):\n    return")
    free = model.generate(**inputs, **options, bad_words=[continued.strip()])
    assert tokenizer.decode(free[0]) == plain  # the prompt has its first word


def test_greedy_parameters_come_without_those_of_sampling(caplog: pytest.LogCaptureFixture) -> None:
    config = SamplingParams(temperature=0.0, top_p=0.5, seed=3)
    assert (config.do_sample, config.top_p, config.seed) == (False, None, 3)
    assert caplog.text == ""


@pytest.mark.parametrize("make", [llama, gpt2, bart])
def test_without_a_maximum_a_row_ends_at_the_models_positions(make: Any) -> None:
    model: Any = hfgen.mix_into(make().eval())
    n_positions = model.config.max_position_embeddings
    config = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    config.pad_token_id = 0
    assert model.generate(PROMPT, generation_config=config).shape[1] == n_positions
    each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (None, 3)]
    ids = model.generate(PROMPT, generation_config=each, pad_token_id=0)
    assert ids.shape[1] == n_positions
    engine = hfgen.Engine(model)
    request = engine.add(PROMPT[0], generation_config=config)
    assert len(request.result().token_ids) == len(ids[0]) - (1 if make is bart else 5)


def test_without_a_maximum_or_positions_it_is_an_error() -> None:
    model: Any = hfgen.mix_into(tiny.t5().eval())
    with pytest.raises(ValueError, match=r"`max_tokens=None`.*T5.* has no number of them"):
        model.generate(PROMPT, generation_config=SamplingParams(max_tokens=None))
