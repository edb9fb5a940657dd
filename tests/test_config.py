"""Which values hold for a call: precedence, plain numbers, defaults, lengths; computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

import hfgen
from hfgen.settings.fields import FIELDS
from tests import tiny


def resolved(given: GenerationConfig | None = None, own: Any = None, **kwargs: Any) -> Any:
    """The private config of a call of a tiny model whose own config has the fields ``own``."""
    model = hfgen.mix_into(tiny.llama())
    model.generation_config.update(**(own or {}))
    return model._prepare_generation_config(given, **kwargs)[0]


def test_every_field_of_upstream_has_a_row():
    upstream = {name for name in GenerationConfig().to_dict() if not name.startswith("_")}
    assert upstream <= FIELDS.keys()


def test_own_fields_have_a_default_and_are_not_saved(tmp_path: Path):
    config = hfgen.GenerationConfig(num_beams=3)
    assert (config.drop_finished, config.output_speculation) == (False, False)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert saved.keys() & {"drop_finished", "output_speculation"} == set()
    assert hfgen.GenerationConfig(drop_finished=True).drop_finished


def test_kwargs_win_over_the_config_over_the_models_over_the_default():
    own = {"top_k": 1, "num_beams": 2, "length_penalty": 3.0}
    config = resolved(GenerationConfig(top_k=4, num_beams=5), own, top_k=6)
    found = (config.top_k, config.num_beams, config.length_penalty, config.typical_p)
    assert found == (6, 5, 3.0, 1.0)


@pytest.mark.parametrize("make", [GenerationConfig, hfgen.GenerationConfig])
def test_own_fields_of_the_model_hold_where_the_call_says_nothing(make: type):
    model = hfgen.mix_into(tiny.llama())
    model.generation_config.drop_finished = True
    assert model._prepare_generation_config(make())[0].drop_finished is True
    assert model._prepare_generation_config(make(drop_finished=False))[0].drop_finished is False
    assert resolved(make()).drop_finished is False


def test_results_that_only_a_checkpoint_asks_for_are_left_out_without_an_object():
    model = hfgen.mix_into(tiny.llama())
    ids = tiny.prompt(1)
    expected = model.generate(ids, max_new_tokens=2)
    model.generation_config.logprobs, model.generation_config.output_metrics = 1, True
    assert torch.equal(model.generate(ids, max_new_tokens=2), expected)
    output = model.generate(ids, max_new_tokens=2, return_dict_in_generate=True)
    assert output.logprobs is not None
    assert output.metrics is not None
    with pytest.raises(ValueError, match="`logprobs`=1 returns its results on the output object"):
        model.generate(ids, max_new_tokens=2, logprobs=1)


def test_numbers_of_other_types_become_plain():
    config = resolved(
        max_new_tokens=8.0,
        num_beams=torch.tensor(2),
        top_k=numpy.int64(5),
        typical_p=numpy.float32(0.5),
        eos_token_id=torch.tensor([3, 4]),
        seed=torch.tensor(6),
        prefill_chunk_size=torch.tensor(4),
    )
    names = "max_new_tokens num_beams top_k seed prefill_chunk_size typical_p".split()
    found = [getattr(config, name) for name in names]
    assert found == [8, 2, 5, 6, 4, 0.5]
    assert [type(value) for value in found] == [*[int] * 5, float]
    assert config.eos_token_id == [3, 4]


@pytest.mark.parametrize("flag", [numpy.True_, numpy.array(True), torch.tensor(True)], ids=repr)
def test_flags_of_other_types_become_plain(flag: Any):
    assert resolved(do_sample=flag).do_sample is True


@pytest.mark.parametrize("value", [numpy.True_, numpy.False_, numpy.int64(1)], ids=repr)
def test_early_stopping_of_another_type_is_upstreams(value: Any):
    """Which asks whether it ``is True``."""
    options = {"num_beams": 3, "pad_token_id": 3, "early_stopping": value, "max_new_tokens": 12}
    ids = tiny.prompt(2)
    ours = hfgen.mix_into(tiny.llama()).generate(ids, **options)
    assert torch.equal(ours, tiny.llama().generate(ids, **options))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"do_sample": True, "temperature": 0}, {"do_sample": False, "temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.5}, {"do_sample": True, "temperature": 0.5}),
        ({"top_k": -1}, {"top_k": 0}),
    ],
    ids=str,
)
def test_what_switches_a_sampler_off_elsewhere(options: dict, expected: dict):
    config = resolved(**options)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("options", "prompt", "expected"),
    [
        ({"max_new_tokens": 3}, 7, (10, 0)),
        ({"max_length": 12}, 7, (12, 0)),
        ({}, 7, (27, 0)),  # the default of 20 means new tokens
        ({}, 250, (256, 0)),  # but ends with the model's positions
        ({"max_new_tokens": 3, "min_new_tokens": 2}, 7, (10, 9)),
        ({"max_length": 12, "min_length": 9}, 7, (12, 9)),
    ],
    ids=str,
)
def test_lengths_include_the_prompt(options: dict, prompt: int, expected: tuple):
    model = hfgen.mix_into(tiny.llama())
    config, _ = model._prepare_generation_config(None, **options)
    model._prepare_generated_length(
        generation_config=config,
        has_default_max_length="max_length" not in options,
        has_default_min_length="min_length" not in options,
        model_input_name="input_ids",
        inputs_tensor=tiny.prompt(1, prompt),
        input_ids_length=prompt,
    )
    assert (config.max_length, config.min_length) == expected


def test_counts_that_no_sequence_can_use_are_lowered():
    class Looking(LlamaForCausalLM):
        def _prepare_cache_for_generation(self, generation_config, *args, **kwargs):
            names = "prompt_lookup_num_tokens", "max_matching_ngram_size"
            found.extend(getattr(generation_config, name) for name in names)
            return super()._prepare_cache_for_generation(generation_config, *args, **kwargs)

    model, ids, found = hfgen.mix_into(Looking(tiny.llama().config)), tiny.prompt(1), []
    counts = {"prompt_lookup_num_tokens": 10**9, "max_matching_ngram_size": 3}
    model.generate(ids, max_new_tokens=5, **counts)
    assert found == [ids.shape[1] + 5, 3]


@pytest.mark.parametrize(
    ("given", "kwargs", "expected"),
    [
        (None, {}, {"bits": 4}),
        ({"path": "/own", "bits": 2}, {}, {"bits": 2}),  # as a pipeline hands it on
        ({"path": "/mine"}, {}, {"path": "/mine"}),
        (None, {"cache_config": {"path": "/own"}}, {"path": "/own"}),
    ],
    ids=str,
)
def test_a_checkpoint_does_not_say_where_files_go(given: Any, kwargs: Any, expected: Any):
    own = {"cache_config": {"path": "/own", "bits": 4}}
    assert resolved(GenerationConfig(cache_config=given), own, **kwargs).cache_config == expected
    assert own == {"cache_config": {"path": "/own", "bits": 4}}


def test_nothing_of_the_callers_is_written_to():
    given = hfgen.GenerationConfig(max_new_tokens=0, top_k=-1, temperature=0.0, do_sample=True)
    before = given.to_dict()
    assert resolved(given).max_new_tokens == 0
    assert given.to_dict() == before


def test_equal_arguments_give_configs_of_their_own() -> None:
    model = hfgen.mix_into(tiny.llama())

    def merged(**kwargs: Any) -> Any:
        return model._prepare_generation_config(None, **kwargs)[0]

    tokens = [3, 4]
    first = merged(stop_token_ids=tokens, max_new_tokens=7, seed=1)
    first.stop_token_ids.append(5)
    tokens.append(6)
    second = merged(stop_token_ids=[3, 4], max_new_tokens=9, seed=2)
    assert (second.stop_token_ids, second.max_new_tokens, second.seed) == ([3, 4], 9, 2)
    model.generation_config.repetition_penalty = 1.5
    assert merged(max_new_tokens=9).repetition_penalty == 1.5
    model.generation_config.repetition_penalty = None
    assert merged(max_new_tokens=9).repetition_penalty != 1.5
    merged(eos_token_id=1)
    with pytest.raises(ValueError, match="`eos_token_id`"):
        merged(eos_token_id=True)
    model.config.num_beams = 2
    with pytest.raises(ValueError, match="holds generation parameters"):
        merged(eos_token_id=1)
