"""Diverse beam search: against sums done by hand, by its rules, and on inputs it cannot take.

Against transformers 4.49: `tests/test_golden.py`.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from transformers import StoppingCriteriaList

import hfgen
from tests import tiny
from tests.markov import Markov
from tests.test_bad_input import Untouched

GROUPS: dict[str, Any] = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}
FULL = {"return_dict_in_generate": True, "output_scores": True}
#: After 1 comes 2, 3 or 4, and so on; a penalty of log 4 divides a chance by 4.
TABLE = [
    [0.2, 0.2, 0.2, 0.2, 0.2],
    [0.0, 0.0, 0.5, 0.3, 0.2],
    [0.0, 0.0, 0.9, 0.08, 0.02],
    [0.0, 0.0, 0.9, 0.06, 0.04],
    [0.0, 0.0, 0.6, 0.3, 0.1],
]


@pytest.fixture(params=["llama", "gpt2", "t5", "bart"])
def model(request: pytest.FixtureRequest) -> Any:
    return hfgen.mix_into(getattr(tiny, request.param)())


def chances(output: Any) -> list[float]:
    return [round(chance, 5) for chance in output.sequences_scores.exp().tolist()]


def test_one_beam_per_group_by_hand():
    output = Markov(TABLE).generate(
        torch.tensor([[1]]),
        num_beams=2,
        num_beam_groups=2,
        diversity_penalty=math.log(4),
        max_new_tokens=2,
        num_return_sequences=2,
        length_penalty=0.0,
        **FULL,
    )
    # The second group: 2 costs 0.5 / 4, so 3 is taken; then 2 at 0.9 / 4 all the same.
    assert output.sequences.tolist() == [[1, 2, 2], [1, 3, 2]]
    assert chances(output) == [0.45, round(0.3 * 0.9 / 4, 5)]
    assert output.beam_indices.tolist() == [[0, 0], [1, 1]]


def test_each_beam_of_an_earlier_group_counts():
    output = Markov(TABLE).generate(
        torch.tensor([[1]]),
        num_beams=4,
        num_beam_groups=2,
        diversity_penalty=math.log(4),
        max_new_tokens=2,
        num_return_sequences=4,
        length_penalty=0.0,
        **FULL,
    )
    # First 2 and 3, then 4 at 0.2 and 2 at 0.5 / 4. Both beams of the first group go on with 2, so
    # for the second group it costs 16 times its chance: 0.2 * 0.6 / 16 < 0.2 * 0.1.
    assert output.sequences.tolist() == [[1, 2, 2], [1, 3, 2], [1, 4, 3], [1, 4, 4]]
    assert chances(output) == [0.45, 0.27, 0.06, 0.02]


def test_a_group_that_has_ended_counts_with_the_pad():
    a, b, eos, c, pad, e = range(2, 8)
    table = [[1 / 8] * 8 for _ in range(8)]
    table[1] = [0.0, 0.0, 0.6, 0.4, 0.0, 0.0, 0.0, 0.0]
    table[a] = [0.0, 0.1, 0.0, 0.0, 0.9, 0.0, 0.0, 0.0]
    table[b] = [0.0, 0.4, 0.0, 0.0, 0.0, 0.6, 0.0, 0.0]
    table[c] = [0.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.5, 0.3]
    output = Markov(table, eos).generate(
        torch.tensor([[1]]),
        num_beams=2,
        num_beam_groups=2,
        diversity_penalty=math.log(4),
        max_new_tokens=3,
        num_return_sequences=2,
        pad_token_id=pad,
    )
    assert output.tolist() == [[1, a, eos, pad], [1, b, c, e]]  # 0.5 / 4 < 0.3


def test_early_stopping_takes_the_first_that_end(model):
    options = GROUPS | {"max_new_tokens": 12, "eos_token_id": list(range(2, 97, 3))} | FULL
    first, best = (
        model.generate(tiny.prompt(8), early_stopping=early, length_penalty=2.0, **options)
        for early in (True, "never")
    )
    assert (best.sequences_scores >= first.sequences_scores).all()
    assert (best.sequences_scores > first.sequences_scores).any()


def test_processors_after_the_penalty_see_what_it_made_of_the_scores():
    # A repetition penalty doubles log-probabilities, that of the diversity penalty included.
    seen = []

    def watch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(scores.clone())
        return scores * 2

    output = Markov(TABLE).generate(
        torch.tensor([[1], [1]]),
        num_beams=2,
        num_beam_groups=2,
        diversity_penalty=math.log(4),
        max_new_tokens=1,
        num_return_sequences=2,
        logits_processor=[watch],
        **FULL,
    )
    assert [len(scores) for scores in seen] == [4, 4]  # all rows, once per group
    penalised = (seen[0] - seen[1])[:, 2]
    torch.testing.assert_close(penalised, torch.full((4,), math.log(4)))
    torch.testing.assert_close(output.scores[0], 2 * torch.stack(seen, 1)[range(4), [0, 1, 0, 1]])


def test_a_prefix_function_gets_the_rows_of_the_batch(model):
    ids = tiny.prompt(2)
    first_of = {0: [11, 12, 13], 1: [21, 22, 23]}
    output = model.generate(
        ids,
        max_new_tokens=3,
        num_return_sequences=4,
        eos_token_id=None,
        prefix_allowed_tokens_fn=lambda row, _: first_of[row],
        **GROUPS,
    )
    assert set(output[:4, -3:].flatten().tolist()) <= set(first_of[0])
    assert set(output[4:, -3:].flatten().tolist()) <= set(first_of[1])


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_scores_of_sequences_are_those_of_their_tokens(model, early_stopping):
    output = model.generate(
        tiny.prompt(3),
        max_new_tokens=12,
        num_return_sequences=4,
        eos_token_id=list(range(2, 97, 3)),
        early_stopping=early_stopping,
        **GROUPS,
        **FULL,
    )
    transitions = model.compute_transition_scores(
        output.sequences, output.scores, output.beam_indices
    )
    lengths = (output.beam_indices >= 0).sum(dim=1)
    assert lengths.min() < lengths.max()
    torch.testing.assert_close(output.sequences_scores, transitions.sum(dim=1) / lengths)
    by_prompt = output.sequences_scores.view(3, 4)
    assert (by_prompt[:, :-1] >= by_prompt[:, 1:]).all()
    rows = output.beam_indices[:, 0].view(3, 4) // 4
    assert rows.tolist() == [[0] * 4, [1] * 4, [2] * 4]


def test_groups_differ_where_beams_do_not(model):
    ids = tiny.prompt(1)
    options: dict[str, Any] = {"max_new_tokens": 6, "num_return_sequences": 4}
    alike = model.generate(ids, num_beams=4, eos_token_id=None, **options)[:, -6:]
    groups = GROUPS | {"num_beam_groups": 4, "diversity_penalty": 50.0}
    apart = model.generate(ids, eos_token_id=None, **options | groups)[:, -6:]
    assert [len(set(column)) for column in apart.T.tolist()] == [4] * 6
    assert min(len(set(column)) for column in alike.T.tolist()) < 4


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2, tiny.bart])
def test_a_row_of_a_padded_batch_is_as_alone(build):
    model = hfgen.mix_into(build())
    ids = tiny.prompt(3, 8)
    mask = torch.ones_like(ids)
    is_right = model.config.is_encoder_decoder
    for row, pads in ((1, 3), (2, 5)):
        padding = slice(8 - pads, None) if is_right else slice(pads)
        ids[row, padding], mask[row, padding] = 0, 0
    options = GROUPS | {"max_new_tokens": 8, "num_return_sequences": 3, "eos_token_id": [2, 7, 9]}
    prompt = 0 if is_right else 8
    together = model.generate(ids, attention_mask=mask, **options)[:, prompt:]
    for row in range(3):
        alone = model.generate(ids[row][mask[row].bool()][None], **options)
        alone = alone[:, 0 if is_right else int(mask[row].sum()) :]
        assert together[3 * row : 3 * row + 3, : alone.shape[1]].tolist() == alone.tolist()
        assert (together[3 * row : 3 * row + 3, alone.shape[1] :] == 0).all()


@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"use_cache": False}])
def test_the_kind_of_cache_makes_no_difference(model, options):
    ids = tiny.prompt(2)
    shared = GROUPS | {"max_new_tokens": 8, "num_return_sequences": 4, "diversity_penalty": 0.3}
    assert (
        model.generate(ids, **shared, **options).tolist() == model.generate(ids, **shared).tolist()
    )


def test_a_criterion_ends_single_hypotheses(model):
    def at_small(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        return ids[:, -1] < 40

    options = GROUPS | {"max_new_tokens": 8, "num_return_sequences": 4, "eos_token_id": None}
    criteria = StoppingCriteriaList([at_small])
    output = model.generate(tiny.prompt(2), stopping_criteria=criteria, **options, **FULL)
    lengths = (output.beam_indices >= 0).sum(dim=1)
    prompt = output.sequences.shape[1] - int(lengths.max())
    assert lengths.min() < 8
    for ids, length in zip(output.sequences[:, prompt:].tolist(), lengths.tolist(), strict=True):
        assert all(token >= 40 for token in ids[: length - 1])
        assert ids[length - 1] < 40 or length == 8


def test_guidance_sees_all_rows_once_per_step():
    model = hfgen.mix_into(tiny.llama())
    ids, negative = tiny.prompt(2), tiny.prompt(2, seed=1)
    options = GROUPS | {"max_new_tokens": 6, "num_return_sequences": 2, "guidance_scale": 1.5}
    output = model.generate(ids, negative_prompt_ids=negative, **options)
    alone = [
        model.generate(ids[row : row + 1], negative_prompt_ids=negative[row : row + 1], **options)
        for row in range(2)
    ]
    assert output.tolist() == torch.cat(alone).tolist()
    assert output.tolist() != model.generate(ids, **options | {"guidance_scale": 1.0}).tolist()


BAD = [
    (
        {"num_beams": 4, "num_beam_groups": 3},
        "`num_beam_groups` has to divide `num_beams`, but they are 3 and 4",
    ),
    (
        {"num_beams": 2, "num_beam_groups": 4},
        "`num_beam_groups` has to divide `num_beams`, but they are 4 and 2",
    ),
    ({"diversity_penalty": 0.0}, "`diversity_penalty` has to be above 0"),
    ({"diversity_penalty": None}, "`diversity_penalty` has to be above 0"),
    ({"diversity_penalty": -1.0}, "`diversity_penalty` has to be above 0"),
    (
        {"do_sample": True},
        "`num_beam_groups`=2 asks for diverse beam search, which does not sample",
    ),
    ({"num_return_sequences": 5}, "`num_return_sequences` (5) has to be smaller"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
@pytest.mark.parametrize("build", [tiny.llama, tiny.t5])
def test_bad_input(build, options, message):
    untouched = Untouched(build)
    with pytest.raises(ValueError, match=re.escape(message)):
        untouched.model.generate(tiny.prompt(), max_new_tokens=4, **GROUPS | options)
    untouched.check()


def test_a_penalty_that_is_no_number():
    untouched = Untouched()
    with pytest.raises(TypeError, match="`diversity_penalty` has to be a number, but is 'high'"):
        untouched.model.generate(tiny.prompt(), **GROUPS | {"diversity_penalty": "high"})
    untouched.check()
