"""Minimum-Bayes-risk decoding: which of the samples is returned, and what comes with it."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import hfgen
from hfgen.decoding.recipes import best_distinct, expected_utilities
from tests import tiny
from tests.test_bad_input import Untouched
from tests.test_streaming_beams import Recorder

SAMPLES = {"do_sample": True, "num_return_sequences": 6, "max_new_tokens": 8}


# ---------------------------------------------------------------- by hand


def test_token_f1():
    assert hfgen.token_f1((1, 2, 3), (3, 2, 9)) == pytest.approx(2 / 3)
    assert hfgen.token_f1((1, 1, 2), (1, 2, 2)) == pytest.approx(2 / 3)
    assert hfgen.token_f1((1,), (1, 2, 3)) == pytest.approx(1 / 2)
    assert hfgen.token_f1((1,), (2,)) == 0.0
    assert hfgen.token_f1((), ()) == 1.0
    assert hfgen.token_f1((), (1,)) == 0.0


def test_expected_utilities():
    samples = [(1, 2), (3, 4), (1, 4), (3, 4)]
    # F1: 12-34 0, 12-14 1/2, 34-14 1/2, equal ones 1; each against its three others.
    expected = [(0 + 1 / 2 + 0) / 3, (0 + 1 / 2 + 1) / 3, (1 / 2 + 1 / 2 + 1 / 2) / 3]
    assert expected_utilities(samples, hfgen.token_f1) == pytest.approx([*expected, expected[1]])


def test_equal_samples_are_compared_once_and_none_with_itself():
    asked = []

    def utility(hypothesis: str, reference: str) -> float:
        asked.append(hypothesis + reference)
        return len(asked)

    # a against 2 b: 2·1; b against a and the other b: 2 + 3.
    assert expected_utilities(["b", "a", "b"], utility) == [1.5, 3.0, 1.5]
    assert asked == ["bb", "ba", "ab"]


def test_the_order_of_a_utilitys_arguments():
    lengths = {"a": 1.0, "bb": 2.0, "ccc": 3.0}
    by_hypothesis = expected_utilities(list(lengths), lambda hypothesis, _: len(hypothesis))
    by_reference = expected_utilities(list(lengths), lambda _, reference: len(reference))
    assert by_hypothesis == [1.0, 2.0, 3.0]
    assert by_reference == [2.5, 2.0, 1.5]


def test_best_distinct():
    assert best_distinct(["a", "b", "c"], [1.0, 3.0, 3.0]) == [1, 2, 0]
    assert best_distinct(["a", "b", "b", "c"], [1.0, 3.0, 3.0, 2.0]) == [1, 3, 0, 2]


# ---------------------------------------------------------------- through generate


def forced(first: list[int]) -> Any:
    """A processor that lets the sample in row i begin with ``first[i]`` and go on as it says."""

    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        if not hasattr(processor, "start"):
            processor.start = ids.shape[1]
        step = ids.shape[1] - processor.start
        scores = torch.full_like(scores, -torch.inf)
        for row, tokens in enumerate(first):
            scores[row, tokens[min(step, len(tokens) - 1)]] = 0.0
        return scores

    return processor


BY_TOKENS = hfgen.minimum_bayes_risk(hfgen.token_f1, on_tokens=True)
SCRIPTED = [
    [30, 31, 32, 2],  # a batch of two, four samples each; 2 is the EOS
    [10, 11, 12, 13, 14],
    [10, 11, 19, 2],
    [10, 18, 12, 17, 2],
    [40, 2],
    [41, 42, 2],
    [40, 2],
    [41, 42, 40, 2],
]


def utilities_of(samples: list[list[int]]) -> list[float]:
    """The mean F1 of each sample against the others, the plain way."""
    cut = [tuple(token for token in sample if token != 2) for sample in samples]
    return [
        sum(hfgen.token_f1(a, b) for j, b in enumerate(cut) if j != i) / (len(cut) - 1)
        for i, a in enumerate(cut)
    ]


@pytest.mark.parametrize("build", [tiny.llama, tiny.t5])
def test_the_consensus_is_returned(build):
    model, ids = hfgen.mix_into(build()), tiny.prompt(2)
    options = {
        "do_sample": True,
        "num_return_sequences": 4,
        "max_new_tokens": 5,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    out = model.generate(
        ids,
        custom_generate=BY_TOKENS,
        logits_processor=[forced(SCRIPTED)],
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    start = ids.shape[1] if build is tiny.llama else 1
    utilities = utilities_of(SCRIPTED[:4]), utilities_of(SCRIPTED[4:])
    best = [values.index(max(values)) for values in utilities]
    assert best == [1, 3]
    assert out.sequences[:, start:].tolist() == [[10, 11, 12, 13, 14], [41, 42, 40, 2, 0]]
    assert out.sequences_scores.tolist() == pytest.approx([max(values) for values in utilities])
    assert out.beam_indices.tolist() == [[1, 1, 1, 1, 1], [7, 7, 7, 7, -1]]
    assert len(out.scores) == 5
    assert out.scores[0].shape[0] == 8
    transitions = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
    assert transitions.shape == (2, 5)
    assert (transitions == 0).all(), "the processor gives the forced tokens a score of zero"

    plain = model.generate(
        ids, custom_generate=BY_TOKENS, logits_processor=[forced(SCRIPTED)], **options
    )
    assert torch.equal(plain, out.sequences)


def test_columns_that_only_other_samples_fill_are_cut():
    out = hfgen.mix_into(tiny.llama()).generate(
        tiny.prompt(1),
        custom_generate=BY_TOKENS,
        logits_processor=[forced([[10, 11, 12, 13, 14], [20, 21, 2], [20, 21, 22, 2]])],
        do_sample=True,
        num_return_sequences=3,
        max_new_tokens=5,
    )
    assert out[:, 7:].tolist() == [[20, 21, 2]]


def test_n_best():
    model, ids = hfgen.mix_into(tiny.llama()), tiny.prompt(2)
    out = model.generate(
        ids,
        custom_generate=hfgen.minimum_bayes_risk(hfgen.token_f1, n_best=4, on_tokens=True),
        logits_processor=[forced(SCRIPTED)],
        return_dict_in_generate=True,
        do_sample=True,
        num_return_sequences=4,
        max_new_tokens=5,
    )
    # Rows 4 and 6 are equal: the second of them comes last.
    assert out.beam_indices[:, 0].tolist() == [1, 2, 3, 0, 7, 4, 5, 6]
    utilities = utilities_of(SCRIPTED[:4]) + utilities_of(SCRIPTED[4:])
    expected = [utilities[row] for row in out.beam_indices[:, 0].tolist()]
    assert out.sequences_scores.tolist() == pytest.approx(expected)
    for sequence, row in zip(out.sequences, out.beam_indices[:, 0].tolist(), strict=True):
        written = SCRIPTED[row]
        assert sequence[7 : 7 + len(written)].tolist() == written


def test_the_samples_are_those_of_sampling():
    model, ids = hfgen.mix_into(tiny.llama()), tiny.prompt(2)
    samples = model.generate(ids, **SAMPLES)
    torch.manual_seed(0)
    out = model.generate(
        ids,
        custom_generate=hfgen.minimum_bayes_risk(hfgen.token_f1, n_best=6, on_tokens=True),
        **SAMPLES,
    )
    assert sorted(out.tolist()) == sorted(samples.tolist())
    assert out.tolist() != samples.tolist()


def test_texts_and_chrf():
    """Against sacrebleu on the decoded samples, none of its scores by way of hfgen."""
    from sacrebleu import sentence_chrf

    model, tokenizer = hfgen.builtin_model(draft=True)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    prompts = ["def add(a, b):\n", "import "]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    start = inputs.input_ids.shape[1]
    options = SAMPLES | {"max_new_tokens": 12}
    torch.manual_seed(3)
    texts = tokenizer.batch_decode(
        model.generate(**inputs, **options)[:, start:], skip_special_tokens=True
    )
    torch.manual_seed(3)
    out = model.generate(
        **inputs,
        **options,
        custom_generate=hfgen.minimum_bayes_risk(),
        tokenizer=tokenizer,
        return_dict_in_generate=True,
    )
    for row, group in enumerate((texts[:6], texts[6:])):
        means = [
            sum(sentence_chrf(a, [b]).score for j, b in enumerate(group) if j != i) / 5
            for i, a in enumerate(group)
        ]
        best = means.index(max(means))
        chosen = tokenizer.decode(out.sequences[row, start:], skip_special_tokens=True)
        assert chosen == group[best]
        assert float(out.sequences_scores[row]) == pytest.approx(max(means), rel=1e-5)


def test_without_a_dictionary_nothing_but_ids_comes_back():
    model, tokenizer = hfgen.builtin_model(draft=True)
    out = model.generate(
        **tokenizer("x = ", return_tensors="pt"),
        custom_generate=hfgen.minimum_bayes_risk(lambda a, b: -len(a)),
        tokenizer=tokenizer,
        **SAMPLES,
    )
    assert isinstance(out, Tensor)
    assert out.shape[0] == 1


def test_on_an_unmixed_model():
    ids = tiny.prompt(2)
    expected = hfgen.mix_into(tiny.llama()).generate(ids, custom_generate=BY_TOKENS, **SAMPLES)
    torch.manual_seed(0)
    assert torch.equal(tiny.llama().generate(ids, custom_generate=BY_TOKENS, **SAMPLES), expected)
    with pytest.raises(ValueError, match="`utility` \\(='len'\\) needs text"):
        tiny.llama().generate(ids, custom_generate=hfgen.minimum_bayes_risk(len), **SAMPLES)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": False, "num_return_sequences": 1}, "needs `do_sample=True`"),
        ({"temperature": 0}, "(with a `temperature` above 0)"),
        ({"num_return_sequences": 1}, "`num_return_sequences`=1"),
        ({"num_beams": 6}, "`num_beams`=6"),
        ({"streamer": Recorder()}, "`streamer` cannot follow minimum_bayes_risk()"),
        ({}, "`utility` (='len') needs text: pass the model's tokenizer"),
        ({"num_return_sequences": 3}, "`n_best` (=4) of minimum_bayes_risk() has to be at most"),
    ],
    ids=["greedy", "cold", "one sample", "beams", "streamer", "no tokenizer", "n_best"],
)
@pytest.mark.parametrize("build", [tiny.llama, tiny.t5], ids=["llama", "t5"])
def test_calls_that_have_nothing_to_choose_from(build, options, message):
    untouched = Untouched(build)
    with pytest.raises(ValueError, match=re.escape(message)):
        untouched.model.generate(
            tiny.prompt(1),
            custom_generate=hfgen.minimum_bayes_risk(len, n_best=4),
            **SAMPLES | options,
        )
    untouched.check()


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (TypeError, {"utility": "bleu"}, "`utility` of minimum_bayes_risk() has to be callable"),
        (TypeError, {"utility": len, "n_best": 1.5}, "has to be an integer, but is 1.5"),
        (TypeError, {"utility": len, "n_best": True}, "has to be an integer, but is True"),
        (ValueError, {"utility": len, "n_best": 0}, "has to be at least 1, but is 0"),
        (ValueError, {"on_tokens": True}, "needs a `utility` on token ids"),
    ],
    ids=["utility", "fraction", "flag", "none", "texts only"],
)
def test_wrong_arguments(error, arguments, message):
    with pytest.raises(error, match=re.escape(message)):
        hfgen.minimum_bayes_risk(**arguments)


def test_sacrebleu_is_needed_for_the_default_only(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.chrf", None)
    with pytest.raises(ImportError, match=re.escape("pip install hfgen[mbr]")):
        hfgen.minimum_bayes_risk()
    assert hfgen.minimum_bayes_risk(hfgen.token_f1, on_tokens=True) == BY_TOKENS


def test_a_utility_that_is_no_number():
    nan = hfgen.minimum_bayes_risk(lambda a, b: float("nan"), on_tokens=True)
    with pytest.raises(ValueError, match="`utility` returned NaN for the hypothesis"):
        hfgen.mix_into(tiny.llama()).generate(tiny.prompt(1), custom_generate=nan, **SAMPLES)
