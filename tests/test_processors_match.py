"""hfgen's processors give what upstream's classes of the same name give, bit for bit."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, LogitsProcessor, WatermarkingConfig

from hfgen.logits import processors
from hfgen.logits.processors import repetition, vocabulary
from hfgen.logits.processors.lists import public_type
from tests.versions import IS_5_23

VOCAB = 12

repeatable = settings(derandomize=True, deadline=None, max_examples=60)
rows = st.integers(1, 3)
lengths_of_ids = st.integers(1, 7)
seeds = st.integers(0, 2**16)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
eos_ids = st.lists(st.sampled_from([-1, 0, 3, VOCAB - 1, VOCAB, 99]), min_size=1, max_size=3)
token = st.integers(0, VOCAB - 1)


def draw_scores(count: int, seed: int, dtype: torch.dtype, vocab: int = VOCAB) -> torch.Tensor:
    """Scores ``(count, vocab)`` with many ties, some -inf and, in some, rows of -inf."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(count, vocab, generator=random)
    scores = (scores * 2).round() / 2 if seed % 3 else scores
    scores[torch.rand(count, vocab, generator=random) < 0.2] = -math.inf
    if seed % 11 == 0:
        scores[0] = -math.inf
    return scores.to(dtype)


def draw_ids(count: int, length: int, seed: int) -> torch.Tensor:
    """Ids ``(count, length)``, from a few tokens, so that they repeat."""
    return torch.randint(0, 5, (count, length), generator=torch.Generator().manual_seed(seed))


def assert_same(
    ours: LogitsProcessor, theirs: LogitsProcessor, ids: torch.Tensor, scores: torch.Tensor
) -> None:
    before = scores.clone()
    result, expected = ours(ids, scores), theirs(ids, scores.clone())
    assert public_type(ours) is type(theirs)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(scores, before, rtol=0, atol=0, equal_nan=True)


@repeatable
@given(rows, lengths_of_ids, seeds, dtypes, eos_ids, st.integers(0, 8))
def test_minimum_lengths(
    count: int, length: int, seed: int, dtype: torch.dtype, eos: list[int], wanted: int
) -> None:
    ids, scores = draw_ids(count, length, seed), draw_scores(count, seed, dtype)
    for name, start in (
        ("MinLengthLogitsProcessor", []),
        ("MinNewTokensLengthLogitsProcessor", [2]),
    ):
        ours, theirs = (
            getattr(module, name)(*start, wanted, torch.tensor(eos))
            for module in (vocabulary, transformers)
        )
        assert_same(ours, theirs, ids, scores)


@repeatable
@given(rows, lengths_of_ids, seeds, dtypes, st.lists(st.integers(-1, VOCAB + 2), max_size=4))
def test_suppressed_tokens(
    count: int, length: int, seed: int, dtype: torch.dtype, tokens: list[int]
) -> None:
    ids, scores = draw_ids(count, length, seed), draw_scores(count, seed, dtype)
    for name, start in (
        ("SuppressTokensLogitsProcessor", []),
        ("SuppressTokensAtBeginLogitsProcessor", [3]),
    ):
        ours, theirs = (
            getattr(module, name)(tokens, *start) for module in (vocabulary, transformers)
        )
        assert_same(ours, theirs, ids, scores)


@repeatable
@given(
    rows,
    lengths_of_ids,
    seeds,
    dtypes,
    st.sampled_from([0.5, 1.3]),
    st.sampled_from(["none", "int", "tensor"] if IS_5_23 else ["none", "int"]),
)
def test_repetition_penalty(
    count: int, length: int, seed: int, dtype: torch.dtype, penalty: float, ignored: str
) -> None:
    ids = draw_ids(count, length, seed)
    ids[:, 0] = VOCAB + 3  # a placeholder that no head scores
    lengths = {"none": None, "int": 1, "tensor": draw_ids(count, length, seed + 1)[:, 0]}
    ours, theirs = (
        module.RepetitionPenaltyLogitsProcessor(penalty, lengths[ignored])
        for module in (repetition, transformers)
    )
    assert_same(ours, theirs, ids, draw_scores(count, seed, dtype))


def test_repetition_penalty_of_packed_rows_is_upstreams() -> None:
    scores = draw_scores(2, 1, torch.float32)[:, None].repeat(1, 2, 1)
    ids = draw_ids(2, 3, 0)
    ours, theirs = (
        module.RepetitionPenaltyLogitsProcessor(1.3) for module in (repetition, transformers)
    )
    assert torch.equal(ours(ids, scores.clone()), theirs(ids, scores.clone()))


@repeatable
@given(rows, seeds, dtypes, st.integers(1, 4), st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_no_repeat_ngram(
    count: int, seed: int, dtype: torch.dtype, size: int, lengths: list[int]
) -> None:
    ours, theirs = (
        module.NoRepeatNGramLogitsProcessor(size) for module in (repetition, transformers)
    )
    ids = draw_ids(count, 12, seed) % 3  # so few tokens that most n-grams repeat
    for length in lengths:  # as of one call after another: longer, shorter, other rows
        assert_same(ours, theirs, ids[:, :length], draw_scores(count, seed, dtype))
        ids = ids.flip(0)


@repeatable
@given(rows, lengths_of_ids, seeds, dtypes, st.integers(1, 4), st.integers(1, 6))
def test_encoder_no_repeat_ngram(
    count: int, length: int, seed: int, dtype: torch.dtype, size: int, n_sequences: int
) -> None:
    encoder_ids = draw_ids(count, 9, seed + 1)
    ours, theirs = (
        module.EncoderNoRepeatNGramLogitsProcessor(size, encoder_ids)
        for module in (repetition, transformers)
    )
    ids, scores = draw_ids(n_sequences, length, seed), draw_scores(n_sequences, seed, dtype)
    if n_sequences % count == 0:
        assert_same(ours, theirs, ids, scores)
        return
    with pytest.raises((IndexError, ZeroDivisionError)) as error:
        theirs(ids, scores)
    with pytest.raises(error.type, match=f"{n_sequences} sequences and {count} rows"):
        ours(ids, scores)


# Whole lists: any combination of options, upstream's builder against hfgen's


class Upstream:
    """As much of a model as upstream's builder reads."""

    _get_logits_processor = transformers.GenerationMixin._get_logits_processor
    _merge_criteria_processor_list = transformers.GenerationMixin._merge_criteria_processor_list

    def __init__(self, is_encoder_decoder: bool) -> None:
        text = SimpleNamespace(vocab_size=VOCAB)
        self.config = SimpleNamespace(
            is_encoder_decoder=is_encoder_decoder, get_text_config=lambda: text
        )


class Hfgen(Upstream):
    _get_logits_processor = processors.get_logits_processor  # type: ignore[assignment]
    _merge_criteria_processor_list = processors.merge_criteria_processor_list  # type: ignore[assignment]


options = st.fixed_dictionaries(
    {"num_beams": st.sampled_from([1, 2]), "do_sample": st.booleans(), "max_length": st.just(6)},
    optional={
        "sequence_bias": st.just({(1,): 1.5, (2, 3): -2.0}),
        "encoder_repetition_penalty": st.sampled_from([1.0, 1.4]),
        "repetition_penalty": st.sampled_from([1.0, 1.4]),
        "no_repeat_ngram_size": st.sampled_from([0, 2]),
        "encoder_no_repeat_ngram_size": st.sampled_from([0, 2]),
        "bad_words_ids": st.just([[1], [2, 4], [3]]),
        "min_length": st.sampled_from([0, 5]),
        "min_new_tokens": st.sampled_from([0, 4]),
        "forced_bos_token_id": st.just(2),
        "forced_eos_token_id": st.just([3]),
        "remove_invalid_values": st.booleans(),
        "exponential_decay_length_penalty": st.just((1, 1.3)),
        "suppress_tokens": st.just([4, 5]),
        "begin_suppress_tokens": st.just([6]),
        "temperature": st.sampled_from([0.7, 1.0]),
        "top_h": st.just(0.8),
        "top_k": st.sampled_from([0, 6]),
        "top_p": st.sampled_from([0.8, 1.0]),
        "min_p": st.just(0.05),
        "typical_p": st.sampled_from([0.9, 1.0]),
        "epsilon_cutoff": st.sampled_from([0.0, 0.02]),
        "eta_cutoff": st.sampled_from([0.0, 0.02]),
        "watermarking_config": st.just(WatermarkingConfig()),
        "renormalize_logits": st.booleans(),
    },
)


#: Here they do not count padding, upstream they do (docs/differences.md).
COUNT_NO_PADS = {
    "encoder_repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
}


@settings(repeatable, max_examples=120)
@given(
    options,
    st.lists(st.sampled_from([0, 3, 11]), min_size=1, max_size=2, unique=True),
    st.booleans(),
    st.integers(1, 5),
    seeds,
)
def test_whole_lists(
    config: dict[str, Any], eos: list[int], is_encoder_decoder: bool, length: int, seed: int
) -> None:
    count = 2 * config["num_beams"]
    mask = torch.ones(count, length, dtype=torch.long)
    if not config.keys() & COUNT_NO_PADS:
        mask[0, : length // 2] = 0
    lists = []
    for model in (Hfgen(is_encoder_decoder), Upstream(is_encoder_decoder)):
        generation_config = GenerationConfig(**config)
        generation_config._eos_token_tensor = torch.tensor(eos)
        lists.append(
            model._get_logits_processor(
                generation_config,
                input_ids_seq_length=length,
                encoder_input_ids=draw_ids(2, 4, seed + 1),
                device="cpu",
                model_kwargs={"attention_mask": mask, "decoder_attention_mask": mask},
                logits_processor=[transformers.SuppressTokensLogitsProcessor([1])],
            )
        )
    ours, theirs = lists
    assert [public_type(item) for item in ours] == [type(item) for item in theirs]
    scores = draw_scores(count, seed, torch.float32)
    scores[:, 7] = 1.0  # entropies are not defined for rows without any token
    for step in range(3):
        ids = draw_ids(count, length + step, seed)
        torch.testing.assert_close(
            ours(ids, scores), theirs(ids, scores.clone()), rtol=0, atol=0, equal_nan=True
        )
