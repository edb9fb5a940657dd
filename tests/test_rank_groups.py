"""Three processes with a sharded model, four with a divided one: encoders, options that differ, a killed rank."""

from __future__ import annotations

from typing import Any

import pytest

import hfgen
from tests import processes, rank_groups, tiny
from tests.rank_cases import generated, prompt
from tests.rank_groups import ENDS, FAMILIES, MODES, completed, inputs_of
from tests.test_ranks import assert_matches


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = str(tmp_path_factory.mktemp("model"))
    tiny.llama().save_pretrained(folder)
    return processes.run(rank_groups.of_three, folder, n=3, killed=2)


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return {name: hfgen.mix_into(FAMILIES[name].build()) for name in rank_groups.NAMES}


@pytest.mark.parametrize(("name", "mode"), rank_groups.CASES, ids=str)
def test_sharded_models_with_encoders(three: Any, whole: Any, name: str, mode: str) -> None:
    for rank, results in enumerate(three[:2]):
        inputs = inputs_of(name, rank)
        assert results[name, mode] == completed(whole[name], inputs, ENDS[rank], **MODES[mode])


@pytest.mark.parametrize("draws", [False, True], ids=["greedy", "sampled"])
def test_a_sharded_assistant_drafts(three: Any, draws: bool) -> None:
    model, small = hfgen.mix_into(tiny.llama()), tiny.llama(num_hidden_layers=1)
    seed = {"do_sample": True, "seed": 3} if draws else {}
    for rank, results in enumerate(three[:2]):
        ids = {"input_ids": prompt(rank)}
        expected = completed(model, ids, ENDS[rank], assistant_model=small, **seed)
        assert results["a sharded assistant", draws] == expected


def test_all_ranks_forward_the_same_layers_in_the_same_order(three: Any) -> None:
    model = hfgen.mix_into(tiny.llama())
    for rank, results in enumerate(three[:2]):
        ids = {"input_ids": prompt(rank)}
        greedy = completed(model, ids, ENDS[rank])
        guided = completed(model, ids, ENDS[rank], guidance_scale=1.5)
        contrastive = completed(model, ids, ENDS[rank], penalty_alpha=0.5, top_k=2)
        assert results["in one order"] == [greedy, greedy, guided, contrastive]


#: What three ranks cannot do together, and what all of them say.
OF_THREE = {
    "an image for one": "RankError: .* differ in the kinds of input. rank 0: text; rank 1: pixel",
    "guidance for one": "RankError: .* in what is forwarded besides. rank 0: nothing; rank 1: the s",
    "other layers": "RankError: .* besides. rank 0: the first 2 layers; rank 1: the first 1 layers",
    "a guided encoder-decoder": "ValueError: .*`guidance_scale` is refused, since the second branch",
    "an early exit beside images": "ValueError: .*`assistant_early_exit` is refused, since",
    "heads": "ValueError: .*`num_key_value_heads`=2, which 3 ranks",
}


@pytest.mark.parametrize("rank", [0, 1])
def test_what_three_ranks_cannot_do_is_named(three: Any, rank: int) -> None:
    for case, pattern in OF_THREE.items():
        assert_matches(three[rank][case], pattern)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = str(tmp_path_factory.mktemp("model"))
    tiny.llama(num_key_value_heads=4).save_pretrained(folder)
    return processes.run(rank_groups.of_four, folder, n=4, killed=2)


def test_four_ranks_divide_a_model(four: Any) -> None:
    model = hfgen.mix_into(tiny.llama(num_key_value_heads=4))
    for mode in rank_groups.OF_FOUR:
        expected = generated(model, prompt(0), 6, mode)
        assert [results[mode] for results in four if results] == [expected] * 3, mode


def test_all_ranks_of_a_divided_model_end_with_the_first(four: Any) -> None:
    expected = generated(hfgen.mix_into(tiny.llama(num_key_value_heads=4)), prompt(0), 3, "greedy")
    assert [results["one ends"] for results in four if results] == [expected] * 3


def test_what_four_ranks_cannot_do_is_named(four: Any) -> None:
    for results in filter(None, four):
        assert_matches(results["other options"], "RankError: .* rank 3: .*max_new_tokens=12")
        assert_matches(results["times of their own"], "ValueError: `max_time` .* for all prompts")


def test_ranks_end_when_one_is_killed(three: Any, four: Any) -> None:
    assert [results is None for results in (*three, *four)].count(True) == 2
    for results in filter(None, (*three, *four)):
        message, seconds = results["killed"]
        assert message.startswith("RankError: ")
        assert seconds < processes.LIMIT / 2
