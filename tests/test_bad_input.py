"""Bad input: a clear exception before the first forward, and nothing changed by it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BatchEncoding,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LlamaForCausalLM,
    TopKLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

import hfgen
from hfgen.families import CACHE
from hfgen.settings.logs import logger
from tests import tiny
from tests.parity.harness import FAMILIES
from tests.versions import since_5_23


class Recorder(BaseStreamer):
    """Keeps what it is given; raises at the ``fails_at``-th ``put``."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.puts: list[torch.Tensor] = []
        self.ends = 0
        self.fails_at = fails_at

    def put(self, value: torch.Tensor) -> None:
        if len(self.puts) == self.fails_at:
            raise OSError("the terminal is gone")
        self.puts.append(value)

    def end(self) -> None:
        self.ends += 1


class Untouched:
    """A mixed model that counts its forwards, and knows whether anything about it changed."""

    def __init__(self, build: Callable[[], Any] = tiny.llama) -> None:
        self.model = hfgen.mix_into(build())
        self.forwards = 0
        self.model.register_forward_pre_hook(self._count)
        if self.model.config.is_encoder_decoder:
            self.model.get_encoder().register_forward_pre_hook(self._count)
        self.before = self._state()

    def _count(self, *_: Any) -> None:
        self.forwards += 1

    def _state(self) -> tuple[Any, ...]:
        model = self.model
        return (
            copy.deepcopy(model.config.to_dict()),
            copy.deepcopy(model.generation_config.to_dict()),
            sorted(model.__dict__),
            model.training,
        )

    def check(self) -> None:
        assert self.forwards == 0, "an input that cannot be used was computed on"
        assert self._state() == self.before


def name(value: Any) -> str | None:
    """A test id that is the same in every process: names, never addresses."""
    if isinstance(value, dict):
        return ",".join(value)
    return getattr(value, "__name__", value if isinstance(value, str) else None)


IDS = tiny.prompt()
NOT_FIELDS = [
    (TypeError, {"max_new_tokens": "5"}, "`max_new_tokens` has to be an integer, but is '5'"),
    (TypeError, {"max_new_tokens": 2.5}, "`max_new_tokens` has to be an integer, but is 2.5"),
    (TypeError, {"num_beams": [2]}, "`num_beams` has to be an integer, but is [2]"),
    (TypeError, {"num_beams": None}, "`num_beams` has to be an integer, but is None"),
    (TypeError, {"num_return_sequences": None}, "`num_return_sequences` has to be an integer, but"),
    (TypeError, {"length_penalty": None, "num_beams": 2}, "`length_penalty` has to be a number"),
    (TypeError, {"max_length": None, "max_new_tokens": None}, "`max_length` has to be an integer"),
    (TypeError, {"top_p": "0.9", "do_sample": True}, "`top_p` has to be a number, but is '0.9'"),
    (TypeError, {"do_sample": "False"}, "`do_sample` has to be True or False, but is 'False'"),
    (TypeError, {"eos_token_id": "</s>"}, "`eos_token_id` has to be a token id or a list of them"),
    (ValueError, {"max_new_tokens": -1}, "`max_new_tokens` has to be at least 0, but is -1"),
    (ValueError, {"min_new_tokens": -1}, "`min_new_tokens` has to be at least 0, but is -1"),
    (ValueError, {"num_beams": 0}, "`num_beams` has to be at least 1, and at most"),
    (ValueError, {"num_return_sequences": 0}, "`num_return_sequences` has to be at least 1"),
    (ValueError, {"prefill_chunk_size": 0}, "`prefill_chunk_size` has to be at least 1, but is 0"),
    (
        ValueError,
        {"stop_strings": []},
        "`stop_strings` has to be a non-empty string of Unicode or a list",
    ),
    (
        ValueError,
        {"stop_strings": "x"},
        "`stop_strings` (='x') needs text: pass the model's tokenizer",
    ),
    (ValueError, {"repetition_penalty": -1.0}, "`repetition_penalty` has to be a float above 0"),
    (ValueError, {"repetition_penalty": 2}, "`repetition_penalty` has to be a float above 0"),
    (ValueError, {"bad_words_ids": [3]}, "`bad_words_ids` has to be a list of lists"),
    (ValueError, {"sequence_bias": {}}, "`sequence_bias` has to be a non-empty dictionary"),
    (
        ValueError,
        {"early_stopping": "soon", "num_beams": 2},
        "`early_stopping` has to be True, False or 'never', but is 'soon'",
    ),
    (ValueError, {"cache_implementation": "fast"}, "`cache_implementation` has to be one of"),
    (TypeError, {"top_k": True}, "`top_k` has to be an integer, but is True"),
    (
        TypeError,
        {"assistant_confidence_threshold": "2"},
        "`assistant_confidence_threshold` has to be a",
    ),
    (
        TypeError,
        {"exponential_decay_length_penalty": 2.5},
        "has to be a pair (start, factor), but is",
    ),
    (
        TypeError,
        {"watermarking_config": 0},
        "`watermarking_config` has to be a WatermarkingConfig or",
    ),
    (
        TypeError,
        {"suppress_tokens": 2.5},
        "`suppress_tokens` has to be a list of token ids, but is 2.5",
    ),
    (
        ValueError,
        {"speculation_type": "dflsh"},
        "`speculation_type` has to be 'dflash', but is 'dflsh'",
    ),
    (ValueError, {"guidance_scale": float("inf")}, "`guidance_scale` has to be finite, but is inf"),
    (
        ValueError,
        {"length_penalty": 400, "num_beams": 2},
        "`length_penalty` has to be between -128 and 128",
    ),
    (
        ValueError,
        {"length_penalty": 10**12, "num_beams": 2},
        "between -128 and 128, but is 1000",
    ),
    (
        ValueError,
        {"length_penalty": 100, "num_beams": 2, "max_new_tokens": 3000},
        "scores are divided by: 3000 to the power",
    ),
    (ValueError, {"low_memory": True, "num_beams": 2}, "`low_memory=True` is no longer supported"),
    (ValueError, {"bad_words_ids": [[5, 97]]}, "`bad_words_ids` has the token 97, but the model's"),
    (
        ValueError,
        {"sequence_bias": [[[97], 1.0]]},
        "`sequence_bias` has the token 97, but the model's",
    ),
    (
        IndexError,
        {"forced_eos_token_id": 97},
        "`forced_eos_token_id` has the token 97, but the model's",
    ),
    (
        ValueError,
        {"num_assistant_tokens_schedule": "fast", "prompt_lookup_num_tokens": 2},
        "`num_assistant_tokens_schedule` has to be one of",
    ),
    (
        ValueError,
        {"prompt_lookup_num_tokens": 2, "assistant_early_exit": 1},
        "`prompt_lookup_num_tokens` and `assistant_early_exit` are given, but only one",
    ),
]
NOT_SAMPLED = [
    ({"temperature": -1.0}, "`temperature` has to be a float above 0"),
    ({"top_k": -3}, "`top_k` has to be a positive integer"),
    ({"top_p": -0.5}, "`top_p` has to be between 0 and 1"),
    ({"min_p": -0.1}, "`min_p` has to be between 0 and 1"),
    ({"typical_p": 0}, "`typical_p` has to be above 0"),
    ({"top_h": 0.0}, "`top_h` has to be above 0"),
]


@pytest.mark.parametrize(("error", "options", "message"), NOT_FIELDS, ids=name)
@pytest.mark.parametrize("build", [tiny.llama, tiny.t5], ids=["llama", "t5"])
def test_fields_of_wrong_type_or_range(build, error, options, message):
    untouched = Untouched(build)
    with pytest.raises(error, match=re.escape(message)):
        untouched.model.generate(IDS, **{"max_new_tokens": 4} | options)
    untouched.check()


@pytest.mark.parametrize(
    "options",
    [{"top_p": 2}, {"typical_p": 1.5}, {"epsilon_cutoff": 5}, {"eta_cutoff": -1}],
    ids=name,
)
def test_values_that_upstream_takes_for_off_are_off_with_a_warning(options, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(logger, "warning_once", said.append)
    found = []
    for model in (tiny.llama(), hfgen.mix_into(tiny.llama())):
        torch.manual_seed(0)
        found.append(model.generate(IDS, do_sample=True, max_new_tokens=6, **options))
    assert torch.equal(*found)
    assert ["counts as off" in text and f"`{next(iter(options))}`" in text for text in said] == [
        True
    ]
    each = {field: [value, 0.5] for field, value in options.items()}
    model = hfgen.mix_into(tiny.llama())
    alone = model.generate(IDS[:1], do_sample=True, seed=1, max_new_tokens=6, **options)
    rows = model.generate(IDS, do_sample=True, seed=1, max_new_tokens=6, **each)
    assert torch.equal(rows[:1], alone)


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_processor_may_return_the_scores_of_the_first_tokens(do_sample):
    found = []
    for model in (tiny.llama(), hfgen.mix_into(tiny.llama())):
        torch.manual_seed(0)
        options = {"do_sample": do_sample, "max_new_tokens": 6}
        options["logits_processor"] = [lambda ids, scores: scores[:, :10]]
        found.append(model.generate(IDS, **options))
    assert torch.equal(*found)
    if not do_sample:
        assert torch.equal(model.generate(IDS, prompt_lookup_num_tokens=3, **options), found[0])


@pytest.mark.parametrize(("options", "message"), NOT_SAMPLED, ids=name)
def test_sampling_fields_out_of_range(options, message):
    untouched = Untouched()
    with pytest.raises(ValueError, match=re.escape(message)):
        untouched.model.generate(IDS, do_sample=True, max_new_tokens=4, **options)
    untouched.check()


CONTRADICTIONS = [
    (
        {"dola_layers": "low", "penalty_alpha": 0.6, "top_k": 3},
        "`dola_layers`='low' each ask for a mode",
    ),
    (
        {"prompt_lookup_num_tokens": 2, "assistant_model": tiny.llama()},
        "`assistant_model` are given",
    ),
    ({"token_healin": True}, "(did you mean `token_healing`?)"),
    ({"frequency_penality": 0.5}, "(did you mean `frequency_penalty`?)"),
    (
        {"pixel_values": IDS},
        "`model_kwargs` are not used by the model: `pixel_values`. Neither the generation",
    ),
    ({"num_beams": 2, "num_return_sequences": 3}, "`num_return_sequences` (3) has to be smaller"),
    ({"num_return_sequences": 2}, "Greedy methods"),
    (
        {
            "num_beams": 4,
            "num_beam_groups": 2,
            "diversity_penalty": 1.0,
            "streamer": Recorder(),
        },
        "`streamer` cannot follow group beam search",
    ),
    ({"max_length": 4}, "`input_ids` has 7 tokens and `max_length` is 4"),
    ({"input_ids": IDS}, "The prompt was passed twice, as `inputs` of shape (2, 7)"),
    ({"max_new_token": 4}, "`max_new_token` (did you mean `max_new_tokens`?)"),
    ({"suppress_tokens": [2], "forced_eos_token_id": 2}, "`forced_eos_token_id`"),
    ({"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": None}, "`eos_token_id`"),
    ({"token_healing": True}, "`token_healing` (=True) needs text"),
]


def test_a_missing_eos_is_noticed_before_an_encoder_runs():
    untouched = Untouched(tiny.t5)
    options = {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": None}
    with pytest.raises(ValueError, match="there is none: set `eos_token_id`"):
        untouched.model.generate(IDS, max_new_tokens=4, **options)
    untouched.check()


@pytest.mark.parametrize(("options", "message"), CONTRADICTIONS, ids=name)
def test_contradictory_arguments(options, message):
    untouched = Untouched()
    length = {} if "max_length" in options else {"max_new_tokens": 4}
    with pytest.raises(ValueError, match=re.escape(message)):
        untouched.model.generate(IDS, **length | options)
    untouched.check()


ARGUMENTS = [
    (
        {"generation_config": {"max_new_tokens": 4}},
        "`generation_config` has to be a GenerationConfig",
    ),
    ({"logits_processor": TopKLogitsWarper(3)}, "`logits_processor` has to be a list"),
    ({"logits_processor": [3]}, "`logits_processor` has to hold callables, but holds int"),
    ({"stopping_criteria": len}, "`stopping_criteria` has to be a list"),
    ({"streamer": print}, "`streamer` has to have the methods put() and end()"),
    ({"prefix_allowed_tokens_fn": [1, 2]}, "`prefix_allowed_tokens_fn` has to be callable"),
    ({"custom_generate": 3}, "`custom_generate` has to be a callable or"),
    ({"attention_mask": [[1, 1]]}, "`attention_mask` has to be a tensor, but is list"),
    (
        {"tokenizer": "gpt2"},
        "`tokenizer` has to be a tokenizer, as AutoTokenizer.from_pretrained()",
    ),
]


@pytest.mark.parametrize(("options", "message"), ARGUMENTS, ids=name)
def test_arguments_of_the_wrong_kind(options, message):
    untouched = Untouched()
    with pytest.raises(TypeError, match=re.escape(message)):
        untouched.model.generate(IDS, **options)
    untouched.check()


def test_prompts_that_are_no_tensors():
    untouched = Untouched()
    with pytest.raises(TypeError, match=re.escape("`inputs` has to be a tensor, but is list")):
        untouched.model.generate([[5, 6]])
    with pytest.raises(TypeError, match=re.escape("Unpack it: generate(**inputs)")):
        untouched.model.generate(BatchEncoding({"input_ids": IDS}))
    with pytest.raises(
        TypeError, match=re.escape("generate(**tokenizer(text, return_tensors='pt'))")
    ):
        untouched.model.generate("Hello")
    with pytest.raises(
        IndexError, match=re.escape("`inputs` has to be (batch, …), but is one number")
    ):
        untouched.model.generate(torch.tensor(3))
    untouched.check()


def _prompts() -> list[tuple[Callable[[], Any], type[Exception], dict[str, Any], str]]:
    ones = torch.ones_like(IDS)
    holes = ones.index_fill(1, torch.tensor([2]), 0)
    outside = IDS.clone()
    outside[1, 3] = tiny.VOCAB
    negative = IDS.clone()
    negative[0, 6] = -1
    long = tiny.prompt(1, 70)
    decoders = [tiny.llama, tiny.gpt2]
    everyone = [*decoders, tiny.t5, tiny.bart]
    return [
        *((m, ValueError, {"input_ids": IDS[:0]}, "at least one row, but has shape (0, 7)") for m in everyone),
        *((m, ValueError, {"input_ids": IDS[:, :0]}, "at least one token per row") for m in decoders),
        *((m, IndexError, {"input_ids": outside}, "`input_ids[1, 3]` is 97, but the model's vocabulary has the ids 0 to 96") for m in everyone),
        *((m, IndexError, {"input_ids": negative}, "`input_ids[0, 6]` is -1") for m in everyone),
        *((m, ValueError, {"input_ids": IDS, "attention_mask": holes[:, 1:]}, "shape of `input_ids`, (2, 7), but has shape (2, 6)") for m in everyone),
        *((m, ValueError, {"input_ids": IDS, "attention_mask": holes[:1]}, "(2, 7), but has shape (1, 7)") for m in everyone),
        (tiny.llama, ValueError, {"input_ids": IDS, "attention_mask": ones[:, None]}, "(batch, length), but has shape (2, 1, 7)"),
        *((m, IndexError, {"input_ids": long}, "70 tokens per row") for m in (tiny.gpt2, tiny.bart)),
        *((m, IndexError, {"input_ids": IDS[0]}, "`input_ids` has to be (batch, length), but has shape (7,)") for m in everyone),
        *((m, RuntimeError, {"input_ids": IDS[None]}, "(batch, length), but has shape (1, 2, 7)") for m in everyone),
        *((m, RuntimeError, {"input_ids": IDS.float()}, "`input_ids` has to hold token ids, int64 or int32, but holds torch.float32") for m in everyone),
        (FAMILIES["voxtral"].build, RuntimeError, {"input_ids": IDS.float()}, "`input_ids` has to hold token ids"),
        (FAMILIES["voxtral"].build, RuntimeError, {"input_ids": torch.rand(1, 8, 32)}, "(batch, length), but has shape (1, 8, 32)"),
        *((FAMILIES[name].build, ValueError, {"input_ids": IDS[None]}, "(batch, length), but has shape (1, 2, 7)") for name in ("voxtral", "qwen2_vl")),
        *((m, RuntimeError, {"input_ids": IDS > 50}, "but holds torch.bool") for m in everyone),
        *((m, RuntimeError, {"input_ids": IDS.to(torch.int8)}, "but holds torch.int8") for m in everyone),
        *((m, IndexError, {"input_ids": IDS, "attention_mask": ones[0]}, "`attention_mask` has to be (batch, length), but has shape (7,)") for m in everyone),
        *((m, RuntimeError, {"inputs_embeds": torch.rand(2, 7, 31)}, "`inputs_embeds` has to be (batch, length, 32), but has shape (2, 7, 31)") for m in everyone),
        *((m, RuntimeError, {"input_ids": IDS, "position_ids": torch.arange(6)[None]}, "`position_ids` has to be (batch, length), (2, 7) here, but has shape (1, 6)") for m in decoders),
        *((m, IndexError, {"input_ids": IDS, "guidance_scale": 2.0, "negative_prompt_ids": outside}, "`negative_prompt_ids[1, 3]` is 97") for m in everyone),
        *((m, RuntimeError, {"inputs_embeds": torch.rand(2, 7, 32), "guidance_scale": 2.0}, "`guidance_scale` needs `negative_prompt_ids` or `input_ids`") for m in decoders),
        *((m, IndexError, {"input_ids": IDS, "decoder_input_ids": outside}, "`decoder_input_ids[1, 3]` is 97") for m in (tiny.t5, tiny.bart)),
        *((m, RuntimeError, {"input_ids": IDS, "decoder_input_ids": tiny.prompt(3, 4)}, "`decoder_input_ids` has to hold 2 rows of tokens") for m in (tiny.t5, tiny.bart)),
        *((m, ValueError, {"input_ids": IDS, "decoder_start_token_id": [7, 8, 9]}, "one id or 2, one per row, but has 3") for m in (tiny.t5, tiny.bart)),
    ]  # fmt: skip


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2, tiny.t5])
@pytest.mark.parametrize("shape", [(2, 9), (1, 7), (1, 1)])
@pytest.mark.parametrize("options", [{}, {"do_sample": True}], ids=["greedy", "sample"])
def test_a_mask_of_ones_may_have_another_shape(build, shape, options):
    found = []
    for model in (build(), hfgen.mix_into(build())):
        torch.manual_seed(0)
        mask = torch.ones(shape, dtype=torch.long)
        found.append(model.generate(IDS, attention_mask=mask, max_new_tokens=4, **options))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}, {"do_sample": True, "seed": 1}],
    ids=name,
)
@pytest.mark.parametrize("kind", ["streamer", "logits_processor", "stopping_criteria"])
def test_a_stop_iteration_reaches_the_caller(kind, options):
    def stop(*arguments: Any, **kwargs: Any) -> Any:
        raise StopIteration("of the caller's code")

    streamer, puts = Recorder(), iter(["the prompt"])
    streamer.put = lambda tokens: next(puts, None) or stop()
    given = streamer if kind == "streamer" else [stop]
    with pytest.raises(StopIteration, match="of the caller's code"):
        hfgen.mix_into(tiny.llama()).generate(IDS[:1], max_new_tokens=3, **{kind: given}, **options)


@pytest.mark.parametrize(("build", "error", "inputs", "message"), _prompts(), ids=name)
def test_prompts_that_the_model_cannot_take(build, error, inputs, message):
    untouched = Untouched(build)
    with pytest.raises(error, match=re.escape(message)):
        untouched.model.generate(**inputs, max_new_tokens=4)
    untouched.check()


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"encoder_no_repeat_ngram_size": 10**12}, {}),
        ({"no_repeat_ngram_size": 10**12}, {}),
        pytest.param({"bad_words_ids": [[]]}, {}, marks=since_5_23),  # as upstream
        ({"prompt_lookup_num_tokens": 10**9, "max_matching_ngram_size": 10**9}, {}),
        ({"prefill_chunk_size": 10**12}, {}),
        ({"top_k": False, "do_sample": True}, {"top_k": 0, "do_sample": True}),
        ({"suppress_tokens": torch.tensor([5])}, {"suppress_tokens": [5]}),
    ],
    ids=name,
)
@pytest.mark.parametrize("build", [tiny.llama, tiny.t5], ids=["llama", "t5"])
def test_odd_values_that_work(build, options, same):
    model = hfgen.mix_into(build())
    torch.manual_seed(0)
    found = model.generate(IDS, max_new_tokens=6, **options)
    torch.manual_seed(0)
    assert torch.equal(found, model.generate(IDS, max_new_tokens=6, **same))


def test_an_assistants_own_number_of_tokens_is_lowered_to_what_is_left():
    model, assistant = hfgen.mix_into(tiny.llama()), tiny.llama()
    assistant.generation_config.num_assistant_tokens = 10**9
    found = model.generate(IDS, max_new_tokens=6, assistant_model=assistant)
    assert torch.equal(found, model.generate(IDS, max_new_tokens=6))


def test_no_prompt_and_no_bos():
    untouched = Untouched()
    config = GenerationConfig(max_new_tokens=4)
    untouched.model.generation_config.bos_token_id = None
    untouched.before = untouched._state()
    with pytest.raises(ValueError, match="no `bos_token_id` to start from"):
        untouched.model.generate(generation_config=config)
    untouched.check()
    assert config == GenerationConfig(max_new_tokens=4)


def test_rotary_positions_go_beyond_those_of_the_training(monkeypatch):
    ids, said = tiny.prompt(1, 300), []
    monkeypatch.setattr(logger, "warning_once", said.append)
    expected = tiny.llama().generate(ids, max_new_tokens=3, eos_token_id=None)
    found = hfgen.mix_into(tiny.llama()).generate(ids, max_new_tokens=3, eos_token_id=None)
    assert torch.equal(found, expected)
    words = "`input_ids` has 300 tokens per row, but LlamaForCausalLM has 256 positions"
    assert [message.startswith(words) for message in said] == [True]


def test_rotary_scaling_goes_beyond_the_positions():
    model = tiny.llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    out = hfgen.mix_into(model).generate(tiny.prompt(1, 300), max_new_tokens=2, eos_token_id=None)
    assert out.shape == (1, 302)


# --- while decoding -----------------------------------------------------------------------------


def _nan_at(step: int, row: int, n_rows: int) -> Callable[..., torch.Tensor]:
    """A processor that makes the scores of prompt ``row`` of ``n_rows`` NaN, of all of its beams."""

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] != 7 + step:
            return scores
        scores, each = scores.clone(), len(scores) // n_rows
        scores[row * each : (row + 1) * each, 5] = float("nan")
        return scores

    processor.is_row_wise = True  # type: ignore[attr-defined]
    return processor


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"do_sample": True, "seed": 3},
    "lookup": {"prompt_lookup_num_tokens": 2},
    "seeded lookup": {"prompt_lookup_num_tokens": 2, "do_sample": True, "seed": 3},
    "beams": {"num_beams": 2},
    "sampled beams": {"num_beams": 2, "do_sample": True, "seed": 3},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constraints": {"num_beams": 3, "force_words_ids": [[40]]},
    "contrastive": {"penalty_alpha": 0.5, "top_k": 3},
    "dola": {"dola_layers": [0, 1]},
    "rows leave": {"drop_finished": True},
}


@pytest.mark.parametrize("eos", [None, 90])
@pytest.mark.parametrize("way", WAYS)
def test_a_row_of_nan_scores_ends_and_the_others_go_on(way, eos, monkeypatch):
    warned: list[str] = []
    monkeypatch.setattr(logger, "warning", warned.append)
    model, ids = hfgen.mix_into(tiny.llama()), tiny.prompt(3)
    options: dict[str, Any] = {
        "max_new_tokens": 5,
        "eos_token_id": eos,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "attention_mask": torch.ones_like(ids),
    } | WAYS[way]
    expected = model.generate(ids, **options)
    for step in (0, 2):
        warned.clear()
        options["logits_processor"] = [_nan_at(step, row=1, n_rows=3)]
        output = model.generate(ids, **options)
        for row in (0, 2):
            assert torch.equal(output.sequences[row], expected.sequences[row])
            assert output.finish_reasons[row] == expected.finish_reasons[row]
        assert output.finish_reasons[1] == "error"
        assert (
            len([text for text in warned if f"row 1 are NaN or infinite at step {step}" in text])
            == 1
        )
        if step == 0:
            assert set(output.sequences[1, 7:].tolist()) <= {0, -1}
        events = list(stream := model.stream(ids, **options))
        assert torch.equal(stream.result.sequences, output.sequences)
        ends = {event.row: event.finish_reason for event in events if event.finish_reason}
        assert [ends[row] for row in range(3)] == output.finish_reasons


@pytest.mark.parametrize("way", WAYS)
def test_nan_scores_of_all_rows_are_named(way):
    model = hfgen.mix_into(tiny.llama())
    with pytest.raises(hfgen.InvalidScoresError, match="row 1 are NaN or infinite at step 1"):
        model.generate(
            IDS,
            max_new_tokens=6,
            eos_token_id=None,
            logits_processor=[_nan_at(1, row=1, n_rows=2), _nan_at(2, row=0, n_rows=2)],
            **WAYS[way],
        )


def test_nan_scores_end_one_sequence_of_one_request():
    model = hfgen.mix_into(tiny.llama())
    options = {"do_sample": True, "seed": 1, "max_new_tokens": 5, "eos_token_id": None}
    with hfgen.Engine(model) as engine:
        spoilt = engine.add(
            IDS[:1],
            num_return_sequences=2,
            logits_processor=[_nan_at(2, row=1, n_rows=2)],
            **options,
        )
        lost = engine.add(IDS[:1], logits_processor=[_nan_at(2, row=0, n_rows=1)], **options)
        whole = engine.add(IDS[1:], **options)
        output = engine.result(spoilt)
        assert output.error is None
        assert [s.finish_reason for s in output.sequences] == ["length", "error"]
        assert [len(s.token_ids) for s in output.sequences] == [5, 2]
        assert isinstance(engine.result(lost).error, hfgen.InvalidScoresError)
        expected = model.generate(IDS[1:], **options)[0, 7:].tolist()
        assert engine.result(whole).sequences[0].token_ids == expected


def test_nan_weights_are_found_at_the_first_step():
    model = hfgen.mix_into(tiny.llama())
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(hfgen.InvalidScoresError, match="row 0, 1 are NaN or infinite at step 0"):
        model.generate(IDS, max_new_tokens=4)


@pytest.mark.parametrize("do_sample", [False, True])
def test_nan_scores_of_an_ended_row_do_not_matter(do_sample):
    model = hfgen.mix_into(tiny.llama())

    def end_row_0_then_break_it(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        if ids.shape[1] == 7:
            scores[0, 2] = 1e4  # EOS
        else:
            scores[0] = float("nan")
        return scores

    out = model.generate(
        IDS, do_sample=do_sample, max_new_tokens=4, logits_processor=[end_row_0_then_break_it]
    )
    assert out[0, 7:].tolist() == [2, 0, 0, 0][: out.shape[1] - 7]


@pytest.mark.parametrize(
    "returns",
    [lambda s: s[:, :0], lambda s: s[:1], lambda s: s[None], lambda s: None],
    ids=["no token", "fewer rows", "one more dimension", "nothing"],
)
@pytest.mark.parametrize("num_beams", [1, 2])
def test_processors_that_return_another_shape(returns, num_beams):
    class Careless:
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> Any:
            return returns(scores)

    model = hfgen.mix_into(tiny.llama())
    with pytest.raises(ValueError, match="Careless returned") as raised:
        model.generate(IDS, num_beams=num_beams, max_new_tokens=4, logits_processor=[Careless()])
    assert f"({2 * num_beams}, 97)" in str(raised.value)


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_a_streamer_that_raises_is_ended(fails_at):
    model, streamer = hfgen.mix_into(tiny.llama()), Recorder(fails_at)
    with pytest.raises(OSError, match="the terminal is gone"):
        model.generate(IDS[:1], max_new_tokens=6, eos_token_id=None, streamer=streamer)
    assert (len(streamer.puts), streamer.ends) == (fails_at, 1)


@pytest.mark.parametrize(
    "options", [{}, {"prompt_lookup_num_tokens": 2}], ids=["greedy", "assisted"]
)
def test_a_criterion_that_raises_ends_the_streamer(options):
    def criterion(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if ids.shape[1] >= 9:
            raise KeyError("out of budget")
        return torch.zeros(len(ids), dtype=torch.bool)

    model, streamer = hfgen.mix_into(tiny.llama()), Recorder()
    with pytest.raises(KeyError, match="out of budget"):
        model.generate(
            IDS[:1],
            max_new_tokens=6,
            eos_token_id=None,
            streamer=streamer,
            stopping_criteria=[criterion],
            **options,
        )
    assert streamer.ends == 1


def test_a_bad_argument_ends_the_streamer():
    streamer = Recorder()
    with pytest.raises(TypeError):
        hfgen.mix_into(tiny.llama()).generate(IDS[:1], max_new_tokens="many", streamer=streamer)
    assert (streamer.puts, streamer.ends) == ([], 1)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 2}], ids=str)
def test_an_interrupted_call_leaves_the_model_working(options):
    model = hfgen.mix_into(tiny.llama())
    torch.manual_seed(1)
    expected = model.generate(IDS, max_new_tokens=8, **options)

    def interrupt(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 10:
            raise KeyboardInterrupt
        return scores

    before = copy.deepcopy(model.generation_config.to_dict())
    with pytest.raises(KeyboardInterrupt):
        model.generate(
            IDS, max_new_tokens=8, eos_token_id=None, logits_processor=[interrupt], **options
        )
    assert model.generation_config.to_dict() == before
    torch.manual_seed(1)
    assert torch.equal(model.generate(IDS, max_new_tokens=8, **options), expected)


# --- caches of the caller's ------------------------------------------------------------------


def filled_cache(model: Any, ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"num_hidden_layers": 3}, "3 layers.* 2 that keep"),
        ({"num_hidden_layers": 1}, "1 layers.* 2 that keep"),
        ({"num_key_value_heads": 4}, "2 rows of 4 heads of size 8"),
        ({"head_dim": 16}, "2 rows of 2 heads of size 16"),
    ],
    ids=str,
)
def test_a_cache_of_another_model(other: dict[str, int], words: str) -> None:
    ids = tiny.prompt(2, 7)
    cache = filled_cache(tiny.llama(**other), ids[:, :4])
    before = [layer.keys.clone() for layer in cache.layers]
    for options in ({}, {"prompt_lookup_num_tokens": 2}, {"num_beams": 2}):
        with pytest.raises(ValueError, match=f"{CACHE}.*{words}.*another model"):
            hfgen.mix_into(tiny.llama()).generate(
                ids, past_key_values=cache, max_new_tokens=4, **options
            )
    assert len(cache.layers) == len(before)
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)


@pytest.mark.parametrize("implementation", [None, "quantized", "offloaded"])
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"num_hidden_layers": 3}, "3 layers.* 2 that keep"),
        ({"num_key_value_heads": 4}, "2 rows of 4 heads of size 8"),
    ],
    ids=str,
)
def test_a_cache_that_generate_made_for_another_model(
    other: dict[str, int], words: str, implementation: str | None
) -> None:
    ids = tiny.prompt(2, 7)
    options = {"cache_implementation": implementation, "return_dict_in_generate": True}
    outputs = hfgen.mix_into(tiny.llama(**other)).generate(ids[:, :4], max_new_tokens=2, **options)
    with pytest.raises(ValueError, match=f"{words}.*another model"):
        hfgen.mix_into(tiny.llama()).generate(
            ids, past_key_values=outputs.past_key_values, max_new_tokens=4
        )


def test_a_cache_of_cross_attention_for_a_model_without() -> None:
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with pytest.raises(ValueError, match=r"EncoderDecoderCache.*no cross-attention"):
        hfgen.mix_into(tiny.llama()).generate(tiny.prompt(), past_key_values=cache)


@pytest.mark.parametrize("n_cached", [7, 12])
def test_a_cache_of_as_many_tokens_as_the_prompt(n_cached: int) -> None:
    model = hfgen.mix_into(tiny.llama())
    cache = filled_cache(model, tiny.prompt(2, n_cached))
    ids = tiny.prompt(2, 7)
    with pytest.raises(ValueError, match=f"{n_cached} tokens and `input_ids` has 7.*crop"):
        model.generate(ids, past_key_values=cache)
    assert cache.get_seq_length() == n_cached
    # What the message says works.
    mask = torch.ones(2, n_cached + 7, dtype=torch.long)
    model.generate(ids, past_key_values=cache, attention_mask=mask, max_new_tokens=2)


@pytest.mark.parametrize("cache", ["dynamic", [], 3], ids=str)
def test_what_is_no_cache(cache: Any) -> None:
    with pytest.raises(ValueError, match=rf"{CACHE}.*has to be a Cache"):
        hfgen.mix_into(tiny.llama()).generate(tiny.prompt(), past_key_values=cache)


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}], ids=str
)
def test_a_cache_that_holds_all_of_a_decoders_prompt(options):
    """There is no token to forward; upstream forwards all of them again, behind themselves."""
    model, ids = hfgen.mix_into(tiny.t5()), tiny.prompt(1)
    first = model.generate(ids, max_new_tokens=4, eos_token_id=None, return_dict_in_generate=True)
    cache = first.past_key_values
    if options.get("num_beams"):
        cache.batch_repeat_interleave(2)
    kwargs = {CACHE: cache, "max_new_tokens": 2, **options}
    given = first.sequences[:, :4]
    with pytest.raises(ValueError, match=r"holds 4 tokens and `decoder_input_ids` has 4"):
        model.generate(
            ids, decoder_input_ids=given, decoder_attention_mask=torch.ones_like(given), **kwargs
        )
    assert cache.get_seq_length() == 4
    given = first.sequences
    whole = model.generate(ids, decoder_input_ids=given, max_new_tokens=2, **options)
    mask = torch.ones_like(given)
    more = model.generate(ids, decoder_input_ids=given, decoder_attention_mask=mask, **kwargs)
    assert torch.equal(more, whole)


class WithSoftTokens(LlamaForCausalLM):
    """Embeds ids by a table of 200, and takes embeddings of another width."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.table, self.project = nn.Embedding(200, 32), nn.Linear(48, 32)

    def prepare_inputs_for_generation(
        self, input_ids: Any, inputs_embeds: Any = None, **kwargs: Any
    ) -> Any:
        inputs = super().prepare_inputs_for_generation(
            input_ids, inputs_embeds=inputs_embeds, **kwargs
        )
        if inputs.get("inputs_embeds") is None:
            inputs |= {"inputs_embeds": self.table(inputs["input_ids"]), "input_ids": None}
        return inputs

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        if inputs_embeds.shape[-1] == 48:
            inputs_embeds = self.project(inputs_embeds)
        return super().forward(input_ids=input_ids, inputs_embeds=inputs_embeds, **kwargs)


@pytest.mark.parametrize("name", ["input_ids", "inputs_embeds"])
def test_a_class_of_the_user_embeds_what_its_table_does_not_have(name: str) -> None:
    torch.manual_seed(0)
    theirs: Any = WithSoftTokens(tiny.llama().config).eval()
    mine = hfgen.mix_into(copy.deepcopy(theirs))
    value = torch.tensor([[150, 199, 3]]) if name == "input_ids" else torch.randn(1, 3, 48)
    expected = theirs.generate(**{name: value}, max_new_tokens=4)
    assert torch.equal(mine.generate(**{name: value}, max_new_tokens=4), expected)
    if name == "input_ids":
        with pytest.raises(IndexError):
            mine.generate(torch.tensor([[150, 200, 3]]), max_new_tokens=4)


class WithVirtualTokens(LlamaForCausalLM):
    """Takes a mask that covers two more tokens, and positions of three kinds."""

    def forward(self, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        if attention_mask is not None:
            attention_mask = attention_mask[:, 2:]
        if position_ids is not None and position_ids.ndim == 3:
            position_ids = position_ids[0]
        return super().forward(attention_mask=attention_mask, position_ids=position_ids, **kwargs)


@pytest.mark.parametrize(
    "arguments",
    [
        {"attention_mask": torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 1, 1]])},
        {"position_ids": torch.arange(3).expand(3, 2, 3)},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_a_class_of_the_user_takes_masks_and_positions_of_other_shapes(arguments: Any) -> None:
    torch.manual_seed(0)
    theirs: Any = WithVirtualTokens(tiny.llama().config).eval()
    mine, ids = hfgen.mix_into(copy.deepcopy(theirs)), torch.tensor([[5, 6, 7], [9, 8, 7]])
    expected = theirs.generate(ids, max_new_tokens=4, **arguments)
    assert torch.equal(mine.generate(ids, max_new_tokens=4, **arguments), expected)
