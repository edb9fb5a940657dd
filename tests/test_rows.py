"""Parameters per prompt: each row of a batch equals its solo call, whatever stands beside it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

import hfgen
from hfgen import GenerationConfig
from hfgen.decoding.strategies.base import NextToken
from hfgen.settings.logs import logger
from tests import tiny
from tests.tiny import llama, t5

LENGTHS = (7, 3, 5, 4)

#: Fields that rows differ in at random, and values of each.
CHOICES: dict[str, list[Any]] = {
    "do_sample": [True, True, False],
    "temperature": [0.5, 1.0, 1.7, 0.0],
    "top_k": [0, 3, 20, 96],
    "top_p": [1.0, 0.9, 0.4],
    "min_p": [None, 0.05, 0.3],
    "typical_p": [1.0, 0.8],
    "epsilon_cutoff": [0.0, 0.02],
    "eta_cutoff": [0.0, 0.02],
    "top_h": [None, 0.6],
    "repetition_penalty": [1.0, 1.3, 0.8],
    "no_repeat_ngram_size": [0, 2, 3],
    "bad_words_ids": [None, [[7], [8, 9]], [[11]]],
    "sequence_bias": [None, {(5,): 4.0}, {(6, 7): -3.0}],
    "suppress_tokens": [None, [3, 4, 5]],
    "begin_suppress_tokens": [None, [9, 10, 11]],
    "min_new_tokens": [None, 3, 6],
    "min_tokens": [None, 2, 5],
    "max_new_tokens": [1, 4, 9, 12],
    "eos_token_id": [2, [2, 5, 6, 7, 8, 9], [20, 21, 22, 23, 24, 25, 26, 27, 28], None],
    "forced_eos_token_id": [None, 2],
    "exponential_decay_length_penalty": [None, (2, 1.5)],
    "remove_invalid_values": [None, True],
    "renormalize_logits": [None, True],
    "frequency_penalty": [None, 0.8, -0.5],
    "presence_penalty": [None, 1.5],
    "penalty_window": [None, 3],
    "penalty_exclude_ids": [None, [11, 12, 13]],
    "dry_multiplier": [0.0, 1.0, 2.0],
    "dry_allowed_length": [1, 2],
    "dry_penalty_last_n": [None, -1, 0, 4],
    "top_n_sigma": [None, 1.0, 2.0],
    "top_a": [None, 0.3],
    "p_less": [None, True],
    "xtc_probability": [None, 0.5, 1.0],
    "xtc_threshold": [0.05, 0.2],
    "dynatemp_range": [None, 0.5],
    "dynatemp_exponent": [1.0, 2.0],
    "smoothing_factor": [None, 0.3],
    "mirostat": [0, 1, 2],
    "mirostat_tau": [1.0, 3.0],
    "adaptive_target": [None, 0.3],
}


@pytest.fixture(scope="module")
def model() -> Any:
    return hfgen.mix_into(llama().eval())


def prompts(seed: int) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """A padded batch, and its rows without padding."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(10, 97, (1, n), generator=generator) for n in LENGTHS]
    width = max(LENGTHS)
    pad = [torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows]
    mask = [torch.arange(width) >= width - row.shape[1] for row in rows]
    return {"input_ids": torch.cat(pad), "attention_mask": torch.stack(mask).long()}, rows


def random_config(draw: random.Random, **fixed: Any) -> GenerationConfig:
    names = draw.sample(sorted(CHOICES), draw.randint(1, 12))
    values = {name: draw.choice(CHOICES[name]) for name in names}
    values = {"max_new_tokens": 8, "pad_token_id": 0, "dry_sequence_breakers": [15], **values}
    if values.get("exponential_decay_length_penalty") and values.get("eos_token_id") is None:
        values["eos_token_id"] = 2
    values = {**values, **fixed}
    if fixed.get("num_beams", 1) > 1:  # they are steered by the one token that is drawn
        values |= {"mirostat": None, "adaptive_target": None}
    values.setdefault("do_sample", draw.random() < 0.7)
    return GenerationConfig(seed=draw.randrange(2**40), **values)


def generated(ids: torch.Tensor, prompt_length: int, config: GenerationConfig) -> list[int]:
    """The tokens of a row up to its end."""
    eos = config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [2 if eos is None else eos])
    tokens = ids[prompt_length:].tolist()[: config.max_new_tokens]
    end = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:end]


def check_rows(model: Any, seed: int, fixed: dict[str, Any], call: dict[str, Any]) -> None:
    draw = random.Random(seed)
    batch, rows = prompts(seed)
    configs = [random_config(draw, **fixed) for _ in rows]
    together = model.generate(**batch, generation_config=configs, **call)
    n = len(together) // len(rows)
    for index, (row, config) in enumerate(zip(rows, configs, strict=True)):
        alone = model.generate(row, generation_config=config)
        for copy in range(n):
            ours = generated(together[index * n + copy], batch["input_ids"].shape[1], config)
            assert ours == generated(alone[copy], row.shape[1], config), (seed, index, copy, config)


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "returned sequences": ({"num_return_sequences": 3, "do_sample": True, "temperature": 1.1}, {}),
    "drop_finished": ({"drop_finished": True}, {}),
    "static": ({"cache_implementation": "static", "disable_compile": True}, {}),
    "quantized": ({"cache_implementation": "quantized"}, {}),
    "lookup": ({"prompt_lookup_num_tokens": 4}, {}),
    "beams": ({"num_beams": 3, "num_return_sequences": 2, "do_sample": False}, {}),
    "sampled beams": ({"num_beams": 3, "do_sample": True, "temperature": 1.0}, {}),
    "beams that never stop early": (
        {"num_beams": 3, "early_stopping": "never", "do_sample": False},
        {},
    ),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4, "do_sample": False}, {}),
    "DoLa": ({"dola_layers": "high"}, {}),
    "groups": (
        {
            "num_beams": 4,
            "num_beam_groups": 2,
            "diversity_penalty": 0.5,
            "do_sample": False,
            "eos_token_id": [2, 30, 31],
            "max_new_tokens": 7,
            "forced_eos_token_id": None,
        },
        {},
    ),
    "constrained": (
        {
            "num_beams": 3,
            "force_words_ids": [[40], [50, 51]],
            "do_sample": False,
            "eos_token_id": 2,
            "max_new_tokens": 9,
            "forced_eos_token_id": None,
        },
        {},
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("seed", range(4))
def test_rows_equal_solo_calls(model: Any, name: str, seed: int) -> None:
    fixed, call = SETTINGS[name]
    check_rows(model, 100 + seed, fixed, call)


def _favour(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor of a caller's: tokens after an even one get higher scores."""
    return scores + (input_ids[:, -1:] % 2 == 0) * torch.linspace(0, 2, scores.shape[1])


def _ends_at_five(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
    return input_ids[:, -1] % 10 == 5


@pytest.mark.filterwarnings("ignore:`min_")  # drawn above the greatest length
@pytest.mark.parametrize("seed", range(4))
def test_rows_with_things_of_the_callers(model: Any, seed: int) -> None:
    """A prefix cache that is filled, an assistant, processors and criteria."""
    cache = hfgen.PrefixCache()
    batch, _ = prompts(seed)
    model.generate(**batch, max_new_tokens=3, pad_token_id=0, prefix_cache=cache)
    check_rows(model, seed, {}, {"prefix_cache": cache})
    check_rows(model, seed, {}, {"assistant_model": llama(num_hidden_layers=1).eval()})
    functions: dict[str, Any] = {
        "logits_processor": LogitsProcessorList([_favour]),
        "stopping_criteria": StoppingCriteriaList([_ends_at_five]),
    }
    draw = random.Random(seed)
    batch, rows = prompts(seed)
    configs = [random_config(draw, eos_token_id=2) for _ in rows]
    together = model.generate(**batch, generation_config=configs, **functions)
    for index, (row, config) in enumerate(zip(rows, configs, strict=True)):
        alone = model.generate(row, generation_config=config, **functions)[0, row.shape[1] :]
        start = batch["input_ids"].shape[1]
        assert torch.equal(together[index, start : start + len(alone)], alone)


def test_each_row_has_its_own_watermark(model: Any) -> None:
    rows = tiny.prompt(4)
    greens = [WatermarkingConfig(bias=8.0, hashing_key=key) for key in (3, 5)]
    keys = [[3, 4], [90, 91]]
    tournaments = [SynthIDTextWatermarkingConfig(ngram_len=3, keys=each) for each in keys]
    values = {"max_new_tokens": 8, "do_sample": True, "seed": 4, "pad_token_id": 0}
    together = model.generate(rows, **values, watermarking_config=[*greens, *tournaments])
    for row, tokens, mark in zip(rows, together, [*greens, *tournaments], strict=True):
        alone = model.generate(row[None], **values, watermarking_config=mark)[0]
        assert torch.equal(tokens[: len(alone)], alone)


def test_texts_stops_and_reasons_of_each_prompt() -> None:
    model, tokenizer = hfgen.builtin_model()
    texts = [
        "for line in sys.stdin:\n    if",
        "import os\nimport",
        "for i in range(10):\n    print",
    ]
    rows: list[dict[str, Any]] = [
        {"stop_strings": ["\n"], "max_new_tokens": 30, "do_sample": False},
        {
            "stop_regex": r"import \w+\n",
            "include_stop_str_in_output": True,
            "seed": 3,
            "do_sample": True,
        },
        {
            "stop_strings": ["i", ")"],
            "max_new_tokens": 5,
            "seed": 4,
            "do_sample": True,
            "logprobs": 2,
        },
    ]
    configs = [hfgen.GenerationConfig(**({"max_new_tokens": 12} | row)) for row in rows]
    options = {"tokenizer": tokenizer, "return_dict_in_generate": True}
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    together = model.generate(**inputs, generation_config=configs, **options)
    for row, (text, config) in enumerate(zip(texts, configs, strict=True)):
        alone = model.generate(
            **tokenizer(text, return_tensors="pt"), generation_config=config, **options
        )
        assert together.texts[row] == alone.texts[0]
        assert together.finish_reasons[row] == alone.finish_reasons[0]
        assert together.finish_reasons[row].stop == alone.finish_reasons[0].stop
    assert together.finish_reasons[0] == "stop"


@pytest.mark.parametrize(
    "options",
    [
        {"early_stopping": False, "max_new_tokens": 2, "temperature": 3.0},
        {"early_stopping": True, "max_new_tokens": 9, "top_p": 0.9, "length_penalty": 0.0},
        {"early_stopping": "never", "max_new_tokens": 2, "top_p": 0.9, "length_penalty": -1.0},
    ],
    ids=["open", "first", "never"],
)
def test_places_that_a_search_left_empty_stay_as_they_are_alone(model: Any, options: Any) -> None:
    options = {
        "num_beams": 4,
        "num_return_sequences": 4,
        "do_sample": True,
        "eos_token_id": list(range(0, 97, 2)),
        "allowed_token_ids": [4, 5],
        "return_dict_in_generate": True,
        "output_scores": True,
        **options,
    }
    n_empty = 0
    for seed in range(4):
        ids = tiny.prompt(3, 5, seed=seed)
        mask = torch.ones_like(ids)
        together = model.generate(ids, attention_mask=mask, seed=[1, 2, 3], **options)
        for row in range(3):
            alone = model.generate(
                ids[row : row + 1], attention_mask=mask[:1], seed=row + 1, **options
            )
            places, n = slice(4 * row, 4 * row + 4), alone.beam_indices.shape[1]
            assert torch.equal(together.sequences[places, : 5 + n], alone.sequences)
            assert together.finish_reasons[places] == alone.finish_reasons
            n_empty += int((alone.sequences_scores < -1e7).sum())
    assert n_empty > 0


# --- what is a list of values -------------------------------------------------------------------


def test_lists_are_configs_of_the_prompts(model: Any) -> None:
    batch, _ = prompts(0)
    lists = {
        "temperature": [0.5, 0.0, 1.5, 1.0],
        "top_p": [0.9, 1.0, 0.5, 1.0],
        "max_new_tokens": [3, 4, 5, 6],
        "eos_token_id": [[2], [3, 4], [5], 6],
        "bad_words_ids": [None, [[7]], [[8], [9]], None],
        "seed": [1, 2, 3, 4],
    }
    configs = [
        GenerationConfig(**{name: values[i] for name, values in lists.items()}, do_sample=True)
        for i in range(4)
    ]
    given = model.generate(**batch, do_sample=True, **lists)
    assert torch.equal(given, model.generate(**batch, generation_config=configs))
    config = hfgen.GenerationConfig(do_sample=True, **lists)
    assert torch.equal(given, model.generate(**batch, generation_config=config))


@pytest.mark.parametrize("make", [llama, t5], ids=["llama", "t5"])
@pytest.mark.parametrize(
    "way", [{}, {"num_beams": 3}, {"do_sample": True}, {"prompt_lookup_num_tokens": 2}], ids=str
)
def test_guidance_of_each_row(make: Any, way: dict[str, Any]) -> None:
    mixed: Any = hfgen.mix_into(make())
    ids, negative = tiny.prompt(3), tiny.prompt(3, seed=5)
    options = {"max_new_tokens": 9, "pad_token_id": 0, **way}
    lists: dict[str, Any] = {"guidance_scale": [1.0, 2.5, None]}
    lists |= {"seed": [1, 2, 3]} if "do_sample" in way else {}
    together = mixed.generate(ids, negative_prompt_ids=negative, **options, **lists)
    for row in range(3):
        own = {name: values[row] for name, values in lists.items()}
        negative_ids = negative[row : row + 1]
        alone = mixed.generate(
            ids[row : row + 1], negative_prompt_ids=negative_ids, **options, **own
        )
        assert torch.equal(together[row, : alone.shape[1]], alone[0])


def test_none_in_a_list_leaves_the_field_to_the_config_and_the_defaults(model: Any) -> None:
    batch, _ = prompts(0)
    usual = {"do_sample": True, "max_new_tokens": 6}
    lists = {"top_k": [None, 2, 0, None], "top_p": [0.5, None, None, 0.9], "seed": [1, 2, 3, 4]}
    each = [{n: v[i] for n, v in lists.items() if v[i] is not None} for i in range(4)]
    for config in ({}, {"top_k": 3}, {"top_p": 0.2}):
        configs = [GenerationConfig(**usual | config | of_row) for of_row in each]
        expected = model.generate(**batch, generation_config=configs)
        own = GenerationConfig(**usual | config)
        assert torch.equal(model.generate(**batch, generation_config=own, **lists), expected)
        beside = model.generate(**batch, generation_config=[own] * 4, **lists)
        assert torch.equal(beside, expected)
    of_config = hfgen.GenerationConfig(**usual | lists)
    of_each = [GenerationConfig(**usual | of_row) for of_row in each]
    together = model.generate(**batch, generation_config=of_config)
    assert torch.equal(together, model.generate(**batch, generation_config=of_each))


@pytest.mark.parametrize("flags", [[True, None, False, True], [1, 0, 0, 1]], ids=str)
def test_flags_of_prompts_may_be_none_or_numbers(model: Any, flags: list[Any]) -> None:
    batch, _ = prompts(0)
    options = {"seed": [1, 2, 3, 4], "max_new_tokens": 5}
    given = model.generate(**batch, do_sample=flags, **options)
    expected = model.generate(**batch, do_sample=[True, False, False, True], **options)
    assert torch.equal(given, expected)


def test_arguments_beside_configs_hold_for_all_prompts(model: Any, monkeypatch: Any) -> None:
    def fail(message: str) -> None:
        raise AssertionError(message)

    monkeypatch.setattr(logger, "warning_once", fail)
    batch, _ = prompts(0)
    configs = [GenerationConfig(max_new_tokens=n) for n in (2, 3, 4, 5)]
    output = model.generate(
        **batch, generation_config=configs, return_dict_in_generate=True, suppress_tokens=[3]
    )
    of_configs = [GenerationConfig(max_new_tokens=n, suppress_tokens=[3]) for n in (2, 3, 4, 5)]
    assert torch.equal(output.sequences, model.generate(**batch, generation_config=of_configs))
    assert configs[0].suppress_tokens is None


def test_a_list_that_is_a_value_is_the_value_of_all_rows(model: Any) -> None:
    batch, _ = prompts(0)
    ids = model.generate(**batch, max_new_tokens=8, eos_token_id=[2, 30, 31, 32])
    assert torch.equal(
        ids, model.generate(**batch, max_new_tokens=8, eos_token_id=[[2, 30, 31, 32]] * 4)
    )


def test_the_callers_config_stays_as_it_was(model: Any) -> None:
    batch, _ = prompts(0)
    config = hfgen.GenerationConfig(
        do_sample=True, temperature=[0.5, 1.0, 1.0, 1.0], max_new_tokens=2
    )
    before = config.to_dict()
    model.generate(**batch, generation_config=config)
    assert config.to_dict() == before


@pytest.mark.parametrize("way", [{}, {"prompt_lookup_num_tokens": 3}], ids=["plain", "drafted"])
def test_a_prompt_that_gets_no_token(model: Any, way: dict[str, Any]) -> None:
    batch, _ = prompts(0)
    ids = model.generate(**batch, max_new_tokens=[0, 3, 1, 4], **way)
    plain = model.generate(**batch, max_new_tokens=4)
    start = batch["input_ids"].shape[1]
    for row, n in enumerate((0, 3, 1, 4)):
        assert torch.equal(ids[row, : start + n], plain[row, : start + n])
        assert (ids[row, start + n :] == 0).all()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too few": ({"temperature": [0.5, 1.0]}, "`temperature` has 2, and the batch has 4 prompts"),
    "none": ({"temperature": []}, "`temperature` has 0"),
    "of different lengths": (
        {"temperature": [1.0] * 4, "top_k": [1] * 3},
        "`temperature` has 4, `top_k` has 3",
    ),
    "a wrong one": (
        {"temperature": [0.5, 1.0, -3.0, 1.0], "do_sample": True},
        "`temperature` has to be a float above 0",
    ),
    "of beams": (
        {"num_beams": [1, 2, 1, 1]},
        "`num_beams` has to be an integer, but is .* holds for all rows",
    ),
    "of beams, in configs": (
        {"generation_config": [GenerationConfig(num_beams=n) for n in (1, 2, 1, 1)]},
        r"`num_beams` holds for all rows of a call.*\[1, 2, 1, 1\]. Split",
    ),
    "of modes": (
        {"top_k": [0, 5, 1, 10], "penalty_alpha": 0.6},
        "different modes.*Split them into one call for each mode",
    ),
    "nothing to search for": (
        {"num_beams": 2, "max_new_tokens": [0, 1, 1, 1]},
        "`max_new_tokens` of a prompt is 0",
    ),
    "no room": ({"max_length": [7, 9, 9, 9], "max_new_tokens": None}, "there is no room"),
    "an unknown name": ({"tempratur": [1.0] * 4}, "did you mean `temperature`"),
    "no configs": ({"generation_config": [1, 2, 3, 4]}, "has to be a GenerationConfig, or a list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_lists_are_named_before_a_forward(model: Any, name: str) -> None:
    arguments, message = WRONG[name]
    batch, _ = prompts(0)

    def fail(*args: Any) -> None:
        raise AssertionError("the model was forwarded")

    with (
        model.register_forward_pre_hook(fail),
        pytest.raises((TypeError, ValueError), match=message),
    ):
        model.generate(**batch, **({"max_new_tokens": 3} | arguments))


def test_beams_that_ignore_the_eos_are_padded_with_the_token_for_it(model: Any) -> None:
    batch, _ = prompts(0)
    options = {"num_beams": 2, "ignore_eos": True, "pad_token_id": 0}
    output = model.generate(**batch, max_new_tokens=[2, 4, 4, 4], **options)
    assert output[0, -2:].tolist() == [0, 0]


def test_a_strategy_that_does_not_declare_it_gets_no_rows(model: Any) -> None:
    class Own(NextToken):
        pass

    for name in ("step", "stop", "result"):
        setattr(Own, name, lambda *arguments: None)
    batch, _ = prompts(0)
    with pytest.raises(ValueError, match=r"Own cannot have parameters of their own.*`takes_rows`"):
        model.generate(**batch, temperature=[1.0, 0.5, 1.0, 1.0], custom_generate=hfgen.recipe(Own))
