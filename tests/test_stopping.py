"""Each stopping criterion that a generation config can ask for, on ids written by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
)
from transformers.utils import logging

import hfgen
from hfgen.logits import stopping
from hfgen.logits.processors import merge_criteria_processor_list
from hfgen.logits.processors.lists import public_type
from hfgen.logits.stopping import StoppingCriteriaList
from tests import tiny


class Model:
    """As much of a model as the builders read."""

    _get_stopping_criteria = stopping.get_stopping_criteria
    _merge_criteria_processor_list = merge_criteria_processor_list
    config = SimpleNamespace(max_position_embeddings=16)


def build(
    config: dict[str, Any],
    *,
    custom: list[StoppingCriteria] | None = None,
    tokenizer: Any = None,
    prompt_length: int | None = None,
    eos: list[int] | None = None,
) -> StoppingCriteriaList:
    generation_config = GenerationConfig(**config)
    generation_config._eos_token_tensor = None if eos is None else torch.tensor(eos)
    if prompt_length is not None:
        generation_config._call = SimpleNamespace(prompt_length=prompt_length)
    return Model()._get_stopping_criteria(generation_config, custom or [], tokenizer)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter, and the tokens ``bc`` and ``cd``."""
    vocab = {letter: index for index, letter in enumerate("abcdefg")}
    merges = [("b", "c"), ("c", "d")]
    vocab |= {"bc": 7, "cd": 8}
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def done(criteria: Any, ids: list[list[int]], scores: Any = None) -> list[bool]:
    return criteria(torch.tensor(ids), scores).tolist()


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(ValueError, match=r"stop_strings.*tokenizer"):
        build({"stop_strings": ["x"]})


def test_order_of_all_criteria(tokenizer: PreTrainedTokenizerFast) -> None:
    config = {
        "max_length": 3,
        "max_time": 60.0,
        "stop_strings": ["cd"],
        "is_assistant": True,
        "assistant_confidence_threshold": 0.4,
    }
    built = build(config, tokenizer=tokenizer, eos=[1], custom=[Never()])
    assert [public_type(criterion).__name__ for criterion in built] == [
        "MaxLengthCriteria",
        "MaxTimeCriteria",
        "StopStringCriteria",
        "EosTokenCriteria",
        "ConfidenceCriteria",
        "Never",
    ]
    assert type(built) is StoppingCriteriaList


class Never(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        return False


class Always(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        return True


def test_one_criterion_suffices() -> None:
    assert done(StoppingCriteriaList(), [[5], [6]]) == [False, False]
    assert done(StoppingCriteriaList([Never(), EosTokenCriteria(6)]), [[5], [6]]) == [False, True]
    assert done(StoppingCriteriaList([EosTokenCriteria(6), Always()]), [[5], [6]]) == [True, True]


def test_a_custom_criterion_takes_the_place_of_its_default(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    limit = MaxLengthCriteria(max_length=9)
    string = transformers.StopStringCriteria(tokenizer, ["ab"])
    config = {"max_length": 3, "max_time": 60.0, "stop_strings": ["cd"]}
    built = build(config, tokenizer=tokenizer, custom=[string, limit, Never()])
    assert [type(criterion) for criterion in built] == [
        MaxLengthCriteria,
        MaxTimeCriteria,
        transformers.StopStringCriteria,
        Never,
    ]
    assert built[0] is limit
    assert built[2] is string
    assert built.max_length == 9


def test_the_warning_of_a_replaced_default_begins_as_in_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        logging.get_logger("transformers.generation.utils"), "warning_once", said.append
    )
    for model in (tiny.llama(), hfgen.mix_into(tiny.llama())):
        model.generate(tiny.prompt(), stopping_criteria=[MaxLengthCriteria(9)], max_length=10)
    upstream, own = (text.partition(", given its parameterization") for text in said)
    assert own[:2] == upstream[:2]
    assert own[1]  # transformers' own tests look for this part


def test_length_only() -> None:
    class Mine(MaxLengthCriteria):
        pass

    assert StoppingCriteriaList([MaxLengthCriteria(3), MaxLengthCriteria(4)]).length_only
    assert not StoppingCriteriaList([MaxLengthCriteria(3), EosTokenCriteria(1)]).length_only
    assert not StoppingCriteriaList([Mine(3)]).length_only
    assert not StoppingCriteriaList().length_only


def test_the_shortest_of_several_lengths_counts() -> None:
    limits = StoppingCriteriaList([MaxLengthCriteria(20), MaxLengthCriteria(11)])
    assert limits.max_length == 11
    assert StoppingCriteriaList([EosTokenCriteria(1)]).max_length is None
    model, upstream = hfgen.mix_into(tiny.llama()), tiny.llama()
    for options in ({}, {"do_sample": True}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}):
        kwargs = {"stopping_criteria": limits, "eos_token_id": None, "pad_token_id": 0} | options
        results = []
        for one in (upstream, model):
            torch.manual_seed(0)
            results.append(one.generate(tiny.prompt(1), max_new_tokens=30, **kwargs))
        assert results[1].shape[1] == 11
        assert torch.equal(results[1], results[0][:, :11])  # upstream's drafts overshoot


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "NoneType"),
        (torch.zeros(2, 1, dtype=torch.bool), r"shape \(2, 1\)"),
        (torch.zeros(3, dtype=torch.bool), r"shape \(3,\)"),
        (0.0, "float"),
        (torch.zeros(2), "a tensor of torch.float32 on cpu"),
        (torch.zeros(2, dtype=torch.bool, device="meta"), "a tensor of torch.bool on meta"),
    ],
)
def test_a_criterion_that_does_not_say_which_rows_end(returned: Any, words: str) -> None:
    class Wrong(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return returned

    with pytest.raises(ValueError, match=rf"Wrong returned {words}.*\(2,\)"):
        StoppingCriteriaList([EosTokenCriteria(1), Wrong()])(torch.zeros(2, 3).long(), None)


@pytest.mark.parametrize(
    "returned", [torch.tensor([0, 2]), torch.tensor([0, 1], dtype=torch.uint8), 1, torch.tensor(1)]
)
def test_a_criterion_that_returns_integers(returned: Any) -> None:
    class Counts(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return returned

    is_done = StoppingCriteriaList([Counts()])(torch.zeros(2, 3).long(), None)
    expected = [False, True] if getattr(returned, "ndim", 0) else [True, True]
    assert is_done.dtype == torch.bool
    assert is_done.tolist() == expected


def test_a_row_of_the_table_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """One builder and one line add a criterion."""

    class AtMost(StoppingCriteria):
        def __init__(self, n: int) -> None:
            self.n = n

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> torch.Tensor:
            return (input_ids == input_ids[:, -1:]).sum(dim=1) >= self.n

    def at_most(context: Any) -> AtMost | None:
        n = getattr(context.config, "ends_at_repetition", None)
        return None if n is None else AtMost(n)

    monkeypatch.setattr(stopping, "CRITERIA", [*stopping.CRITERIA])
    stopping.CRITERIA.append(at_most)
    model, config = hfgen.mix_into(tiny.llama()), GenerationConfig(max_new_tokens=6)
    config.ends_at_repetition = 1
    ids = tiny.prompt(1)
    assert model.generate(ids, generation_config=config).shape[1] == ids.shape[1] + 1
    assert model.generate(ids, max_new_tokens=6, eos_token_id=None).shape[1] == ids.shape[1] + 6


def test_may_end_rows() -> None:
    assert stopping.may_end_rows([MaxLengthCriteria(3), EosTokenCriteria(1)])
    assert not stopping.may_end_rows([MaxLengthCriteria(3), MaxTimeCriteria(1.0)])
