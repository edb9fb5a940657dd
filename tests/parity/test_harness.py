"""The parity harness sees what it is there to see."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from hfgen.families import CACHE
from tests.parity.family import MODES
from tests.parity.harness import (
    FAMILIES,
    Case,
    Outcome,
    check,
    compare,
    draw_case,
    ours,
    run,
    sequences,
    settle,
    upstream,
)
from tests.parity.options import ASSISTED, BY_NAME, EXCLUSIONS, OPTIONS, Recorder, tokenizer
from tests.versions import since_5_23

CASE = Case("llama", "greedy_search", 2, True, 3, {"outputs": ["scores"], "streamer": True})


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return run(upstream("llama"), CASE)


def changed(outcome: Outcome, **fields: Any) -> Outcome:
    """A copy whose output has other values."""
    returned = type(outcome.returned)(**{**outcome.returned, **fields})
    return replace(outcome, returned=returned)


def test_a_case_survives_one_line() -> None:
    assert Case.parse(str(CASE)) == CASE
    assert 'tests.parity.sweep --only \'{"family": "llama"' in CASE.command


def test_a_run_repeats_itself(outcome: Outcome) -> None:
    run(upstream("llama"), replace(CASE, seed=9, options={"cache_implementation": "static"}))
    assert compare(outcome, run(upstream("llama"), CASE)) == []


def test_both_sides_are_what_they_say() -> None:
    assert not any("hfgen" in base.__module__ for base in type(upstream("llama")).__mro__)
    assert any("hfgen" in base.__module__ for base in type(ours("llama")).__mro__)


def test_tokens_scores_and_fields_are_compared(outcome: Outcome) -> None:
    ids = outcome.returned.sequences.clone()
    ids[1, -1] += 1
    assert "sequences: 1 of" in compare(outcome, changed(outcome, sequences=ids))[0]
    scores = outcome.returned.scores
    near = tuple(score + 1e-7 for score in scores)
    assert compare(outcome, changed(outcome, scores=near)) == []
    far = (*scores[:-1], scores[-1] + 0.01)
    assert f"scores[{len(scores) - 1}]" in compare(outcome, changed(outcome, scores=far))[0]
    banned = scores[0].clone()
    banned[0, 0] = -torch.inf
    assert "scores[0]: 1 of" in compare(outcome, changed(outcome, scores=(banned, *scores[1:])))[0]
    assert "only one side" in compare(outcome, changed(outcome, logits=scores))[0]
    assert "entries" in compare(outcome, changed(outcome, scores=scores[:-1]))[0]
    assert "GenerateDecoderOnlyOutput" in compare(outcome, replace(outcome, returned=ids))[0]


def test_cache_is_compared(outcome: Outcome) -> None:
    other = run(upstream("llama"), replace(CASE, options={**CASE.options, "max_new_tokens": 4}))
    shorter = changed(outcome, **{CACHE: other.returned[CACHE]})
    assert any(f"{CACHE}.length" in line for line in compare(outcome, shorter))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("random_state", torch.zeros(3)),
        ("streamed", [None]),
        ("model_config", {"eos_token_id": 99}),
        ("warned", ["UserWarning"]),
        ("logged", ["transformers.generation.utils WARNING"]),
        ("arguments", {}),
        ("error", "ValueError"),
    ],
)
def test_side_effects_are_compared(outcome: Outcome, name: str, value: Any) -> None:
    assert compare(outcome, replace(outcome, **{name: value}))[0].startswith(
        name if name != "error" else "raised"
    )


def test_a_different_token_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = type(ours("llama")).generate

    def off_by_one(self: Any, **kwargs: Any) -> Any:
        output = generate(self, **kwargs)
        output.sequences[1, -2] += 1
        return output

    monkeypatch.setattr(type(ours("llama")), "generate", off_by_one)
    report = check(CASE)
    last = int(sequences(report.theirs).shape[1]) - 2
    assert f"row 1, position {last}, step 4; gap" in str(report)
    assert CASE.command in str(report)


def test_what_excuses_upstream_demands_greedy_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"eos_token_id": None, "max_new_tokens": 9}
    case = Case("mllama", "assisted_generation", 1, False, 0, options)
    report = check(case)
    assert (report.excused, report.differences) == ("upstream raises while it drafts", [])
    generate = type(ours("mllama")).generate
    monkeypatch.setattr(
        type(ours("mllama")), "generate", lambda self, **kwargs: generate(self, **kwargs) + 1
    )
    assert check(case).differences[0].startswith("greedy tokens: ")


def test_other_lengths_of_chunks_do_not_excuse_other_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"assistant": "same", "streamer": True, "forced_eos_token_id": 7}
    case = Case("donut", ASSISTED, seed=898, options=options)
    report = check(case)
    assert report.differences == []
    assert report.excused == "upstream's assistant goes on from a text that nobody wrote"
    put = Recorder.put
    monkeypatch.setattr(Recorder, "put", lambda self, value: put(self, value + len(self.seen)))
    assert check(case).differences[0].startswith("streamed[0]: ")


def test_limits_are_known() -> None:
    with pytest.raises(ValueError, match="beam"):
        replace(FAMILIES["llama"], unsupported={"beam": "a typing error"})
    blind = replace(FAMILIES["llama"], unsupported={"assistant": "not given the media"})
    assert not BY_NAME["assistant"].fits(blind, ASSISTED)
    assert BY_NAME["prompt_lookup_num_tokens"].fits(blind, ASSISTED)


@since_5_23
def test_random_cases_cover_modes_and_options() -> None:
    rng = random.Random(2)
    cases = [draw_case(rng) for _ in range(6000)]
    assert {case.mode for case in cases} == set(MODES)
    assert {name for case in cases for name in case.options} == {o.name for o in OPTIONS}
    assert all(settle(case) == case for case in cases)
    assert draw_case(random.Random(1), ["gpt2"]) == draw_case(random.Random(1), ["gpt2"])


def test_exclusions_name_options_and_reasons() -> None:
    names = {option.name for option in OPTIONS}
    assert {exclusion.drop for exclusion in EXCLUSIONS} <= names
    assert all(exclusion.reason for exclusion in EXCLUSIONS)


def test_tokenizer_covers_the_vocabulary() -> None:
    tokens = tokenizer(64)
    assert len(tokens) == 64
    assert tokens.decode(tokens.encode("abacabm")) == "abacabm"


def test_families_have_vocabularies_for_the_options() -> None:
    for name in ("llama", "t5", "whisper"):
        assert upstream(name).config.get_text_config(decoder=True).vocab_size >= 60, FAMILIES[name]
