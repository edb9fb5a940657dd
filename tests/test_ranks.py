"""Models that several processes forward together: sharded (FSDP 2), tensor parallel, replicas in step."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import hfgen
from tests import processes, rank_cases, tiny
from tests.rank_cases import ENDS, MODES, generated, prompt


@pytest.fixture(scope="module")
def alone() -> Any:
    return hfgen.mix_into(tiny.llama())


# ---------------------------------------------------------------- FSDP


@pytest.fixture(scope="module")
def sharded() -> list[dict[str, Any]]:
    return processes.run(rank_cases.fsdp)


@pytest.mark.parametrize("mode", MODES)
def test_sharded_models_give_the_tokens_of_whole_ones(sharded: Any, alone: Any, mode: str) -> None:
    """The ranks have prompts of their own, and end after 2 and 6 tokens."""
    for rank, results in enumerate(sharded):
        ids = prompt(0) if mode == "chunks" else prompt(rank)
        assert results[mode] == generated(alone, ids, ENDS[rank], mode)


def test_replicas_keep_each_other_company(sharded: Any, alone: Any) -> None:
    for rank, results in enumerate(sharded):
        assert results["replicas"] == generated(alone, prompt(rank), ENDS[rank], "greedy")


def test_prompts_are_forwarded_before_drafts_on_all_ranks(sharded: Any, alone: Any) -> None:
    """Where one rank's prompt may not be forwarded with a draft, and the other's may."""
    for rank, results in enumerate(sharded):
        mask = torch.ones_like(prompt(0))
        mask[0] = rank
        expected = generated(alone, prompt(0), 6, "greedy", attention_mask=mask)
        assert results["a masked row"] == expected


@pytest.mark.parametrize("rest", rank_cases.RESTS)
@pytest.mark.parametrize("mode", ["greedy", "dola"])
def test_what_is_beside_the_layers_may_be_kept_in_any_way(
    sharded: Any, alone: Any, mode: str, rest: str
) -> None:
    """Dola reads the head between forwards."""
    for rank, results in enumerate(sharded):
        expected = generated(alone, prompt(rank), ENDS[rank], mode)
        assert results[f"{mode}, {rest}"] == expected


@pytest.fixture(scope="module")
def failed() -> list[dict[str, Any]]:
    return processes.run(rank_cases.fsdp_errors)


#: Calls that fail on rank 1 alone, and how.
OF_ONE = {
    "a processor": "KeyError: 'step three'",
    "a processor, beams": "KeyError: 'step three'",
    "a processor, drafts": "KeyError: 'step three'",
    "a processor, contrastive": "KeyError: 'step three'",
    "a processor, guided": "KeyError: 'step three'",
    "a processor, early exit": "KeyError: 'step three'",
    "a streamer": "OSError: nobody listens",
    "an argument": "ValueError: `temperature` has to be",
    "a field": "ValueError: The following `model_kwargs` are not used by the model: `no_such_field`",
}


@pytest.mark.parametrize("case", OF_ONE)
def test_an_error_of_one_rank_ends_all_with_its_message(failed: Any, case: str) -> None:
    assert failed[1][case].startswith(OF_ONE[case])
    assert failed[0][case].startswith("RankError: The call ended on all ranks")
    assert f"rank 1: {OF_ONE[case]}" in failed[0][case]


def test_a_failure_within_a_forward_ends_the_others(failed: Any) -> None:
    """Once the connections of its process are closed."""
    assert failed[1]["within a forward"].startswith("MemoryError: no room")
    assert failed[0]["within a forward"].startswith("RankError: Ranks cannot reach each other")


def test_a_stream_that_is_left_ends_on_all_ranks(failed: Any) -> None:
    assert failed[1]["a stream that is left"] == 2
    assert "rank 1: nobody asks for its tokens any more" in failed[0]["a stream that is left"]


#: What the ranks cannot do together, and what all of them say.
OF_ALL = {
    "another mode": "RankError: .* differ in the mode. rank 0: greedy search; rank 1: beam search",
    "chunks": "RankError: .* differ in the number of parts of the prompt. rank 0: 1; rank 1: 2",
    "room": "RankError: A rank may generate 12 tokens, .* but rank 0 has cache or positions for 4",
    "versions": "RankError: .* differ in the versions. rank 0: hfgen 0.0, .*; rank 1: hfgen 0.1,",
    "guided contrastive search": "ValueError: .*`guidance_scale` is refused, since contrastive",
    "guided drafts": "ValueError: .*`guidance_scale` is refused, since drafts",
    "an engine": "ValueError: An engine does not support sharded parameters",
}


@pytest.mark.parametrize("case", OF_ALL)
def test_what_ranks_cannot_do_together_is_named(failed: Any, case: str) -> None:
    for results in failed:
        assert_matches(results[case], OF_ALL[case])


def assert_matches(text: Any, pattern: str) -> None:
    with pytest.raises(AssertionError, match=f"^{pattern}"):
        raise AssertionError(text)


def test_after_errors_the_ranks_decode_as_before(failed: Any, alone: Any) -> None:
    for rank, results in enumerate(failed):
        assert results["greedy"] == generated(alone, prompt(rank), ENDS[rank], "greedy")
        assert results["why no prefix"] == ["devices have to forward in step"]


# ---------------------------------------------------------------- tensor parallelism


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folders = []
    for n_heads in (2, 1):
        folders.append(str(tmp_path_factory.mktemp("model")))
        tiny.llama(num_key_value_heads=n_heads).save_pretrained(folders[-1])
    return processes.run(rank_cases.tensor_parallel, *folders)


@pytest.mark.parametrize("mode", MODES)
def test_divided_models_give_the_tokens_of_whole_ones(divided: Any, alone: Any, mode: str) -> None:
    expected = generated(alone, prompt(0), 6, mode)
    assert [results[mode] for results in divided] == [expected] * 2


def test_layers_are_divided_and_prefixes_found(divided: Any, alone: Any) -> None:
    expected = generated(alone, prompt(0), 6, "greedy")
    assert [results["prefix cache"] for results in divided] == [expected] * 2
    assert [results["parts"] for results in divided] == [32, 32]  # of 64
    assert all(results["prefix hits"] > 0 for results in divided)


def test_an_engine_decodes_on_all_ranks_alike(divided: Any, alone: Any) -> None:
    expected = [row[7:] for row in generated(alone, prompt(0), 6, "greedy")]
    assert [results["engine"] for results in divided] == [expected] * 2


def test_a_seed_gives_all_ranks_the_same_draws(divided: Any, alone: Any) -> None:
    """Although torch's random states differ."""
    ids = alone.generate(prompt(0), max_new_tokens=12, eos_token_id=None, do_sample=True, seed=4)
    assert [results["a seed"] for results in divided] == [ids.tolist()] * 2


#: What all ranks say.
OF_DIVIDED = {
    "another random state": "RankError: .* the random state. rank 0: .* torch.manual_seed()",
    "another prompt": "RankError: .* differ in the prompt. rank 0: .* the same prompts",
    "another parameter": "RankError: .* the parameters. rank 0: top_k=3; rank 1: top_k=4. ",
    "a time": "ValueError: `max_time` may end one rank a token before another",
    "heads": "ValueError: .*`num_key_value_heads`=1, which 2 ranks",
    "optimize": "ValueError: optimize\\(\\) takes no sharded model",
}


@pytest.mark.parametrize("case", OF_DIVIDED)
def test_what_divided_models_cannot_do_is_named(divided: Any, case: str) -> None:
    for results in divided:
        assert_matches(results[case], OF_DIVIDED[case])


@pytest.mark.parametrize(
    ("case", "error"),
    {
        "an argument": "ValueError: `temperature` has to be",
        "a processor, in step": "KeyError: 'step three'",
        "a processor": "KeyError: 'step three'",
    }.items(),
    ids=str,
)
def test_an_error_of_one_rank_is_told_by_the_others(divided: Any, case: str, error: str) -> None:
    """Without ``synced_gpus``, once the connections of the failed process are closed."""
    assert divided[1][case].startswith(error)
    assert divided[0][case].startswith("RankError: ")
    assert (f"rank 1: {error}" in divided[0][case]) == (case != "a processor")


def test_times_may_end_ranks_that_go_in_step(divided: Any, alone: Any) -> None:
    expected = generated(alone, prompt(0), None, "greedy")
    assert [results["a time, in step"] for results in divided] == [expected] * 2


def test_ranks_forward_as_often_as_each_likes() -> None:
    """Rounds in which ranks have other numbers of forwards, as rollouts of a sharded model have: nothing hangs."""
    n_rounds = 10_000 if os.environ.get("HFGEN_FUZZ") else 150
    forwards = processes.run(rank_cases.rounds_of_any_length, n_rounds, None)
    assert forwards[0] != forwards[1]


def test_a_rank_that_fails_between_forwards_ends_the_others() -> None:
    assert processes.run(rank_cases.error_of_rounds) == ["RankError", "ArithmeticError"]
