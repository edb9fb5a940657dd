"""Processors where hfgen's differ from upstream's, and lists of them; ``test_processors_match`` has the rest."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    ClassifierFreeGuidanceLogitsProcessor,
    GenerationConfig,
    LogitsProcessor,
)

import hfgen
from hfgen.logits import processors
from hfgen.logits.processors import LogitsProcessorList
from hfgen.logits.processors.guidance import EncoderDecoderGuidance
from hfgen.logits.processors.lists import public_type
from hfgen.logits.processors.repetition import RepetitionPenaltyLogitsProcessor
from tests import tiny
from tests.versions import since_5_23


class Model:
    """As much of a model as the builders read."""

    _get_logits_processor = processors.get_logits_processor
    _merge_criteria_processor_list = processors.merge_criteria_processor_list

    def __init__(self, *, is_encoder_decoder: bool = False) -> None:
        text = SimpleNamespace(vocab_size=8)
        self.config = SimpleNamespace(
            is_encoder_decoder=is_encoder_decoder, get_text_config=lambda: text
        )


def build(
    config: dict[str, Any], *, model: Any = None, prompt_length: int = 1, **context: Any
) -> LogitsProcessorList:
    """The list for a config; ``eos`` in it is the tensor that special token handling would set."""
    eos = config.pop("eos", None)
    generation_config = GenerationConfig(**config)
    generation_config._eos_token_tensor = None if eos is None else torch.tensor(eos)
    return (model or Model())._get_logits_processor(
        generation_config, input_ids_seq_length=prompt_length, **context
    )


def check(processors: Any, ids: list[list[int]], scores: Any, expected: Any) -> None:
    given = torch.tensor(scores, dtype=torch.float32)
    before = given.clone()
    result = processors(torch.tensor(ids), given)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float32))
    torch.testing.assert_close(given, before, equal_nan=True, msg="the given scores were changed")


# Warpers


@pytest.mark.parametrize(
    "option", ["top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"]
)
@pytest.mark.parametrize(("eos", "n_kept"), [(None, 2), ([0], 2), ([0, 1], 3)])
def test_beams_keep_one_token_more_than_there_are_eos_ids(
    option: str, eos: list[int] | None, n_kept: int
) -> None:
    value = {"top_k": 1, "min_p": 1.0, "epsilon_cutoff": 0.9, "eta_cutoff": 0.9}.get(option, 0.1)
    config = {"do_sample": True, "top_k": 0, "num_beams": 2, "eos": eos, option: value}
    scores = torch.tensor([[0.9, 0.06, 0.03, 0.01]]).log()
    kept = build(config)(torch.zeros(1, 1, dtype=torch.long), scores).isfinite()
    assert int(kept.sum()) == n_kept


def test_warpers_are_for_sampling_only() -> None:
    assert build({"do_sample": False, "top_k": 5}) == []


# Repetition


@since_5_23
def test_repetition_penalty_leaves_left_pads_out() -> None:
    mask = torch.tensor([[0, 1], [1, 1]])
    inputs = {"prompt_length": 2, "model_kwargs": {"attention_mask": mask}}
    processor = build({"repetition_penalty": 2.0}, **inputs)
    check(processor, [[0, 1], [0, 1]], [[4.0, 4.0, 4.0]] * 2, [[4.0, 2.0, 4.0], [2.0, 2.0, 4.0]])
    with pytest.raises(ValueError, match=r"has 2 rows, the input ids 3"):
        processor(torch.zeros(3, 2, dtype=torch.long), torch.zeros(3, 3))
    with pytest.raises(ValueError, match=r"prompt_ignore_length.*\(2, 2\)"):
        RepetitionPenaltyLogitsProcessor(2.0, mask)


@since_5_23
def test_repetition_penalty_of_an_encoder_decoder_reads_the_decoder_mask() -> None:
    masks = {
        "attention_mask": torch.tensor([[0, 0, 1]]),
        "decoder_attention_mask": torch.tensor([[0, 1]]),
    }
    inputs = {"prompt_length": 2, "model_kwargs": masks}
    processor = build({"repetition_penalty": 2.0}, model=Model(is_encoder_decoder=True), **inputs)
    check(processor, [[0, 1]], [[4.0, 4.0]], [[4.0, 2.0]])


@pytest.mark.parametrize("option", ["encoder_repetition_penalty", "encoder_no_repeat_ngram_size"])
@pytest.mark.parametrize("encoder_input", [None, torch.zeros(1, 2, 3), torch.tensor([[1, -100]])])
def test_encoder_penalties_without_ids_are_left_out(
    option: str, encoder_input: torch.Tensor | None
) -> None:
    with pytest.warns(UserWarning, match=option):
        assert build({option: 2}, encoder_input_ids=encoder_input) == []


@pytest.mark.parametrize(
    ("option", "value"), [("repetition_penalty", 2.0), ("no_repeat_ngram_size", 2)]
)
def test_embeddings_as_the_prompt_are_warned_about(option: str, value: float) -> None:
    with pytest.warns(UserWarning, match=option):
        assert len(build({option: value}, prompt_length=0)) == 1
    assert len(build({option: value}, prompt_length=0, model=Model(is_encoder_decoder=True))) == 1


# Lengths


@pytest.mark.parametrize("option", ["min_length", "min_new_tokens"])
def test_minimum_lengths_need_an_eos_token(option: str) -> None:
    assert build({option: 5}) == []


def test_exponential_decay_without_eos_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match=r"exponential_decay_length_penalty.*eos_token_id"):
        build({"exponential_decay_length_penalty": (1, 2.0)})


# Guidance


class Constant(Model):
    """A decoder-only model with the same logits everywhere; it records what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[list[list[int]], list[list[int]]]] = []

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> Any:
        self.calls.append((input_ids.tolist(), attention_mask.tolist()))
        logits = torch.tensor([math.log(3.0), 0.0]).expand(*input_ids.shape, 2)
        return transformers.modeling_outputs.CausalLMOutput(logits=logits)


def test_guidance_gives_a_negative_prompt_to_each_beam() -> None:
    model = Constant()
    negative = torch.tensor([[4, 5], [0, 6]])
    mask = torch.tensor([[1, 1], [0, 1]])
    processor = build(
        {"guidance_scale": 2.0},
        model=model,
        negative_prompt_ids=negative,
        negative_prompt_attention_mask=mask,
    )
    processor(torch.tensor([[1], [1], [1], [1]]), torch.zeros(4, 2))
    assert model.calls == [([[4, 5], [4, 5], [0, 6], [0, 6]], [[1, 1], [1, 1], [0, 1], [0, 1]])]


def test_guidance_with_a_negative_prompt_of_another_batch() -> None:
    processor = build(
        {"guidance_scale": 2.0}, model=Constant(), negative_prompt_ids=torch.zeros(2, 1).long()
    )
    with pytest.raises(ValueError, match=r"2 rows.*3 rows"):
        processor(torch.zeros(3, 1, dtype=torch.long), torch.zeros(3, 2))


@pytest.fixture(scope="module")
def t5() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=20, d_model=8, num_layers=1, num_heads=2, d_kv=4, d_ff=8
            )
        ).eval()


PROMPT = torch.tensor([[3, 4, 5, 1], [6, 7, 1, 0]])
PROMPT_MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])


@pytest.mark.parametrize("use_cache", [True, False])
@torch.no_grad()
def test_encoder_decoder_guidance_by_its_own_prompt_changes_nothing(
    t5: Any, use_cache: bool
) -> None:
    guidance = EncoderDecoderGuidance(3.0, t5, PROMPT, PROMPT_MASK, use_cache=use_cache)
    steps = [
        [[0], [0], [0], [0]],
        [[0, 3], [0, 4], [0, 5], [0, 6]],
        [[0, 4, 8], [0, 4, 9], [0, 6, 8], [0, 5, 9]],  # the beams have changed places
        [[0, 4, 8, 2], [0, 4, 9, 2], [0, 6, 8, 3], [0, 5, 9, 3]],
    ]
    prompt = PROMPT.repeat_interleave(2, dim=0)
    mask = PROMPT_MASK.repeat_interleave(2, dim=0)
    for step in steps:
        ids = torch.tensor(step)
        scores = t5(prompt, attention_mask=mask, decoder_input_ids=ids).logits[:, -1]
        torch.testing.assert_close(guidance(ids, scores), scores.log_softmax(dim=-1))


@torch.no_grad()
def test_encoder_decoder_guidance_defaults_to_the_last_token_that_is_no_pad(t5: Any) -> None:
    processor = build_for(t5, {"attention_mask": PROMPT_MASK.repeat_interleave(2, dim=0)})
    ids = torch.zeros(4, 1, dtype=torch.long)
    scores = torch.arange(80.0).view(4, 20)
    last = t5(torch.ones(4, 1).long(), decoder_input_ids=ids).logits[:, -1].log_softmax(dim=-1)
    expected = 2 * (scores.log_softmax(dim=-1) - last) + last
    torch.testing.assert_close(processor(ids, scores), expected)


def build_for(model: Any, model_kwargs: dict[str, Any]) -> LogitsProcessorList:
    config = GenerationConfig(guidance_scale=2.0)
    model._merge_criteria_processor_list = lambda defaults, custom: defaults
    return processors.get_logits_processor(
        model,
        config,
        input_ids_seq_length=1,
        encoder_input_ids=PROMPT,
        model_kwargs=model_kwargs,
    )


@torch.no_grad()
def test_encoder_decoder_guidance_masks_the_decoder_prompt(t5: Any) -> None:
    padded, plain = (
        EncoderDecoderGuidance(2.0, t5, PROMPT[:1], decoder_attention_mask=mask)
        for mask in (torch.tensor([[0, 1]]), None)
    )
    ids, scores = torch.tensor([[9, 0]]), torch.zeros(1, 20)
    changed = torch.tensor([[8, 0]])
    torch.testing.assert_close(padded(ids, scores), padded(changed, scores))
    assert not torch.allclose(plain(ids, scores), plain(changed, scores))


def test_encoder_decoder_guidance_needs_something_to_encode(t5: Any) -> None:
    with pytest.raises(ValueError, match=r"guidance_scale.*negative_prompt_ids.*T5"):
        EncoderDecoderGuidance(2.0, t5)(torch.zeros(1, 1).long(), torch.zeros(1, 20))


@torch.no_grad()
def test_encoder_decoder_guidance_stays_upstreams_where_that_works() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        bart = transformers.BartForConditionalGeneration(
            transformers.BartConfig(
                vocab_size=20,
                d_model=8,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=8,
                decoder_ffn_dim=8,
                max_position_embeddings=16,
            )
        ).eval()
    ours = EncoderDecoderGuidance(3.0, bart, PROMPT)
    theirs = transformers.UnbatchedClassifierFreeGuidanceLogitsProcessor(3.0, bart, PROMPT)
    padded = EncoderDecoderGuidance(3.0, bart, PROMPT, PROMPT_MASK)
    ours_uncached, theirs_uncached = (
        kind(3.0, bart, PROMPT, PROMPT_MASK, use_cache=False)
        for kind in (
            EncoderDecoderGuidance,
            transformers.UnbatchedClassifierFreeGuidanceLogitsProcessor,
        )
    )
    for step in ([[2], [2]], [[2, 5], [2, 6]], [[2, 5, 9], [2, 6, 9]]):
        ids, scores = torch.tensor(step), torch.arange(40.0).view(2, 20)
        assert torch.equal(ours(ids, scores), theirs(ids, scores))
        assert torch.equal(ours_uncached(ids, scores), theirs_uncached(ids, scores))
        scores = bart(PROMPT, attention_mask=PROMPT_MASK, decoder_input_ids=ids).logits[:, -1]
        torch.testing.assert_close(padded(ids, scores), scores.log_softmax(dim=-1))


# The list


class Custom(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def test_a_custom_processor_takes_the_place_of_its_default() -> None:
    custom = transformers.MinLengthLogitsProcessor(9, eos_token_id=1)
    other = Custom()
    config = {"min_length": 3, "repetition_penalty": 2.0, "suppress_tokens": [1], "eos": [1]}
    built = build(config, logits_processor=[other, custom])
    assert [public_type(item).__name__ for item in built] == [
        "RepetitionPenaltyLogitsProcessor",
        "MinLengthLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "Custom",
    ]
    assert built[1] is custom
    assert built[3] is other


def test_bad_words_and_sequence_bias_do_not_replace_each_other() -> None:
    custom = transformers.NoBadWordsLogitsProcessor([[1]])
    built = build({"sequence_bias": {(1,): 1.0}}, logits_processor=[custom])
    assert len(built) == 2
    assert built[1] is custom


def test_a_subclass_of_a_default_is_added() -> None:
    class Mine(transformers.MinLengthLogitsProcessor):
        pass

    assert len(build({"min_length": 3, "eos": [1]}, logits_processor=[Mine(3, 1)])) == 2


def test_a_custom_processor_replaces_its_own_type_only() -> None:
    """Two of hfgen's that no class of transformers stands behind are of different types."""
    module = "hfgen.logits.processors.made_up"
    one, other = (type(name, (Custom,), {"__module__": module}) for name in ("One", "Other"))
    one.__bases__ = other.__bases__ = (LogitsProcessor,)
    merged = processors.merge_criteria_processor_list(None, LogitsProcessorList([one()]), [other()])
    assert [type(item).__name__ for item in merged] == ["One", "Other"]
    again = one()
    merged = processors.merge_criteria_processor_list(None, LogitsProcessorList([one()]), [again])
    assert merged == [again]


def test_a_row_of_the_table_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """One builder and one line add a processor, at its place in the order."""

    def only_even(context: Any) -> Any:
        return Even() if getattr(context.config, "only_even", False) else None

    class Even(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores.index_fill(1, torch.arange(1, scores.shape[1], 2), -torch.inf)

    monkeypatch.setattr(processors, "PROCESSORS", [*processors.PROCESSORS])
    processors.PROCESSORS.append(only_even)
    model, config = hfgen.mix_into(tiny.llama()), transformers.GenerationConfig(max_new_tokens=6)
    config.only_even = True
    ids = tiny.prompt(2)
    tokens = model.generate(ids, generation_config=config)[:, ids.shape[1] :]
    assert (tokens % 2 == 0).all()
    assert not (model.generate(ids, max_new_tokens=6)[:, ids.shape[1] :] % 2 == 0).all()


class NeedsStep(LogitsProcessor):
    def __call__(  # type: ignore[override]
        self, input_ids: torch.Tensor, scores: torch.Tensor, step: int
    ) -> torch.Tensor:
        return scores + step


def test_extra_arguments_reach_the_processors_that_take_them() -> None:
    built = LogitsProcessorList([Custom(), NeedsStep()])
    result = built(torch.tensor([[0]]), torch.zeros(1, 2), step=3)
    assert result.tolist() == [[3.0, 3.0]]


def test_a_class_whose_method_is_replaced_later(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Mine", (Custom,), {})
    built, ids, zeros = LogitsProcessorList([kind()]), torch.tensor([[0]]), torch.zeros(1, 2)
    built(ids, zeros)
    monkeypatch.setattr(kind, "__call__", NeedsStep.__call__)
    assert built(ids, zeros, step=3).tolist() == [[3.0, 3.0]]


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(ValueError, match=r"NeedsStep.*'step'"):
        LogitsProcessorList([NeedsStep()])(torch.tensor([[0]]), torch.zeros(1, 2), other=1)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (torch.zeros(2, 5), r"shape \(2, 5\)"),
        (torch.zeros(1, 4), r"shape \(1, 4\)"),
        (torch.zeros(2), r"shape \(2,\)"),
        (torch.zeros(2, 4).long(), "a tensor of torch.int64 on cpu"),
        (torch.zeros(2, 4, device="meta"), "a tensor of torch.float32 on meta"),
        (None, "NoneType"),
    ],
)
def test_a_result_of_another_shape_is_an_error(returned: Any, words: str) -> None:
    class Wrong(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return returned

    with pytest.raises(ValueError, match=rf"Wrong returned {words}.*\(2, 4\)"):
        LogitsProcessorList([Wrong(), Custom()])(torch.zeros(2, 1).long(), torch.zeros(2, 4))


def test_guidance_may_fold_a_doubled_batch() -> None:
    built = LogitsProcessorList([Custom(), ClassifierFreeGuidanceLogitsProcessor(2.0), Custom()])
    result = built(torch.tensor([[0]]), torch.tensor([[1.0, 2.0], [0.0, 3.0]]))
    assert result.tolist() == [[2.0, 1.0]]
