"""A seed fixes what a row samples: its noise, its distribution, and whatever stands beside the row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import hfgen
from hfgen.decoding.strategies.base import NextToken
from hfgen.state import seeds
from hfgen.tools.builtin import builtin_model
from tests.tiny import llama, t5

PROMPT = torch.tensor([[5, 17, 33, 8, 61]])


@pytest.fixture(scope="module")
def model() -> Any:
    return hfgen.mix_into(llama().eval())


def sample(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    options = {"do_sample": True, "max_new_tokens": 12, "pad_token_id": 0, **options}
    return model.generate(ids, **options)


# --- the noise ---------------------------------------------------------------------------------


def test_noise_is_a_function_of_key_position_and_token() -> None:
    keys = seeds.keys_of([3, 3, 4], 2, "cpu").view(3, 2)
    assert torch.equal(keys[0], keys[1])
    assert len(keys.unique()) == 4
    tokens = torch.arange(50)
    noise = seeds.gumbel(keys[0, :1, None], 7, tokens)
    assert torch.equal(noise, seeds.gumbel(keys[1, :1, None], 7, tokens))
    assert torch.equal(noise[:, 20:30], seeds.gumbel(keys[0, :1, None], 7, tokens[20:30]))
    for other in (
        seeds.gumbel(keys[0, 1:, None], 7, tokens),
        seeds.gumbel(keys[0, :1, None], 8, tokens),
    ):
        assert not torch.isclose(noise, other).any()


def test_noise_has_the_moments_of_gumbels() -> None:
    keys = seeds.keys_of(list(range(400)), 1, "cpu")
    noise = seeds.gumbel(keys[:, None], 0, torch.arange(2000))
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.57722) < 0.005
    assert abs(noise.std() - math.pi / math.sqrt(6)) < 0.005
    for one, two in ((noise[:-1], noise[1:]), (noise[:, :-1], noise[:, 1:])):
        correlation = torch.corrcoef(torch.stack([one.flatten(), two.flatten()]))[0, 1]
        assert abs(correlation) < 0.005


def test_uniform_numbers_fill_the_open_interval() -> None:
    keys = seeds.keys_of(list(range(20_000)), 1, "cpu")
    drawn = seeds.uniform(keys, 3, torch.tensor(-1))
    assert drawn.min() > 0
    assert drawn.max() < 1
    counts = torch.histc(drawn, bins=20, min=0, max=1)
    assert chi_square(counts, torch.full((20,), 1 / 20)) < limit(19)
    assert not torch.equal(drawn, seeds.uniform(keys, 3, torch.tensor(-2)))


@pytest.mark.parametrize("share_left", [0.05, 0.9])
def test_noise_is_the_same_where_samplers_have_left_few(share_left: float) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 300, generator=generator)
    left = torch.rand(4, 300, generator=generator) < share_left
    keys = seeds.keys_of([1, 2, 3, 4], 1, "cpu")
    whole = seeds.perturbed(scores, keys, 5)
    assert torch.equal(
        seeds.perturbed(scores.masked_fill(~left, -torch.inf), keys, 5)[left], whole[left]
    )


# --- the distribution ---------------------------------------------------------------------------


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    assert counts[probabilities == 0].sum() == 0, "a token was drawn that has no probability"
    is_possible = probabilities > 0
    return float(((counts - expected)[is_possible] ** 2 / expected[is_possible]).sum())


def limit(degrees: int) -> float:
    """Chi-square of so many degrees of freedom stays below it but once in a million."""
    return degrees + 4.9 * math.sqrt(2 * degrees) + 12


SAMPLERS: dict[str, dict[str, Any]] = {
    "all tokens": {"top_k": 0},
    "temperature": {"top_k": 0, "temperature": 0.6},
    "top_k": {"top_k": 7},
    "top_p": {"top_k": 0, "top_p": 0.7},
    "min_p": {"top_k": 0, "min_p": 0.1},
    "top_h": {"top_k": 0, "top_h": 0.5},
    "typical_p": {"top_k": 0, "typical_p": 0.6},
    "epsilon_cutoff": {"top_k": 0, "epsilon_cutoff": 0.02},
    "eta_cutoff": {"top_k": 0, "eta_cutoff": 0.05},
    "penalties": {"top_k": 0, "repetition_penalty": 1.4, "sequence_bias": {(9,): 3.0}},
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
def test_draws_have_the_distribution_of_the_scores(model: Any, name: str, drafted: bool) -> None:
    n, options = 5_000, SAMPLERS[name]
    first = sample(
        model, PROMPT, max_new_tokens=1, return_dict_in_generate=True, output_scores=True, **options
    )
    probabilities = first.scores[0][0].softmax(dim=-1)
    drafting = {"prompt_lookup_num_tokens": 2} if drafted else {}
    drawn = sample(
        model,
        PROMPT.expand(n // 10, -1),
        max_new_tokens=2 if drafted else 1,
        num_return_sequences=10,
        seed=list(range(n // 10)),
        **options,
        **drafting,
    )
    counts = drawn[:, PROMPT.shape[1]].bincount(minlength=97)
    assert chi_square(counts, probabilities) < limit(int((probabilities > 0).sum()) - 1)


def test_beams_draw_as_without_a_seed(model: Any) -> None:
    """The first token of the best of two beams, against many calls with torch's generator."""
    n = 1_500
    options = {"num_beams": 2, "max_new_tokens": 1, "top_k": 5, "temperature": 2.0}
    ids = PROMPT.expand(n, -1)
    torch.manual_seed(0)
    unseeded = sample(model, ids, **options)[:, -1].bincount(minlength=97)
    seeded = sample(model, ids, seed=list(range(n)), **options)[:, -1].bincount(minlength=97)
    both = unseeded + seeded
    is_possible = both > 0
    statistic = ((unseeded - seeded)[is_possible].double() ** 2 / both[is_possible]).sum()
    assert statistic < limit(int(is_possible.sum()) - 1)


# --- the promise --------------------------------------------------------------------------------


def test_a_row_does_not_depend_on_its_neighbours(model: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    others = torch.randint(10, 97, (5, 5), generator=generator)
    alone = sample(model, PROMPT, seed=11)
    for n in (1, 3, 5):
        for place in range(n + 1):
            ids = torch.cat([others[:place], PROMPT, others[place:n]])
            each = [100 + i for i in range(place)] + [11] + [200 + i for i in range(n - place)]
            assert torch.equal(sample(model, ids, seed=each)[place, : alone.shape[1]], alone[0])


def test_one_seed_for_all_rows_is_the_seed_of_each(model: Any) -> None:
    together = sample(model, PROMPT.expand(3, -1), seed=5)
    assert torch.equal(together, sample(model, PROMPT, seed=5).expand(3, -1))


def test_copies_have_noise_of_their_own_and_keep_it(model: Any) -> None:
    five = sample(model, PROMPT, seed=5, num_return_sequences=5)
    assert len({tuple(row.tolist()) for row in five}) == 5
    two = sample(model, PROMPT, seed=5, num_return_sequences=2)
    width = min(two.shape[1], five.shape[1])
    assert torch.equal(two[:, :width], five[:2, :width])


def test_the_global_generator_neither_decides_nor_moves(model: Any) -> None:
    torch.manual_seed(0)
    first = sample(model, PROMPT, seed=5)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert torch.equal(sample(model, PROMPT, seed=5), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_without_a_seed_follow_torchs(model: Any) -> None:
    """Beside rows with one, and where greedy rows stand among sampled ones."""
    ids = PROMPT.expand(3, -1)
    outputs = []
    for number in (0, 0, 1):
        torch.manual_seed(number)
        outputs.append(sample(model, ids, seed=[5, None, 7]))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0][[0, 2]], outputs[2][[0, 2]])
    assert not torch.equal(outputs[0][1], outputs[2][1])


class Nines(hfgen.Drafter):
    """Drafts a nine, always."""

    def draft(self, context: hfgen.DraftContext) -> hfgen.Draft:
        return hfgen.Draft(torch.full((len(context.known), context.n_tokens), 9))


DRAFTERS: dict[str, Any] = {
    "lookup": lambda: {"prompt_lookup_num_tokens": 4},
    "assistant": lambda: {"assistant_model": llama(num_hidden_layers=1).eval()},
    "itself": lambda: {"assistant_model": llama().eval()},
    "early exit": lambda: {"assistant_early_exit": 1},
    "one's own": lambda: {"assistant_model": Nines()},
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rows", [1, 3])
def test_drafts_do_not_show(model: Any, drafter: str, rows: int) -> None:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(10, 97, (rows, 6), generator=generator)
    for seed in range(2):
        each = [seed + 10 * row for row in range(rows)]
        plain = sample(model, ids, seed=each, temperature=0.8)
        drafted = sample(model, ids, seed=each, temperature=0.8, **DRAFTERS[drafter]())
        assert torch.equal(plain, drafted)


def test_an_assistant_draws_with_the_same_noise() -> None:
    """A draft by the model itself is accepted as a whole: its draws are the target's."""
    model, _ = builtin_model()
    ids = torch.randint(20, 2000, (2, 8), generator=torch.Generator().manual_seed(3))
    output = sample(
        model,
        ids,
        seed=[1, 2],
        assistant_model=model,
        assistant_confidence_threshold=0.0,
        output_speculation=True,
        return_dict_in_generate=True,
        eos_token_id=None,
    )
    assert output.speculation.acceptance_rate == 1.0


def test_rows_that_leave_do_not_show(model: Any) -> None:
    ids = torch.randint(10, 97, (6, 4), generator=torch.Generator().manual_seed(4))
    options = {"seed": list(range(6)), "eos_token_id": list(range(2, 30)), "max_new_tokens": 20}
    assert torch.equal(
        sample(model, ids, **options), sample(model, ids, drop_finished=True, **options)
    )


def test_an_encoder_decoder_is_fixed_too() -> None:
    model: Any = hfgen.mix_into(t5().eval())
    together = sample(model, PROMPT.expand(3, -1), seed=[1, 2, 3])
    for row, seed in enumerate((1, 2, 3)):
        alone = sample(model, PROMPT, seed=seed)[0]
        assert torch.equal(together[row, : len(alone)], alone)


@pytest.mark.parametrize("way", [{}, {"prompt_lookup_num_tokens": 3}], ids=["plain", "drafted"])
@pytest.mark.parametrize("seed", [3, None])
def test_a_row_without_a_token_to_draw_is_named(model: Any, way: Any, seed: int | None) -> None:
    """With drafts as without them; nothing is chosen in silence."""
    everything = {"suppress_tokens": list(range(97))}
    with pytest.raises(hfgen.InvalidScoresError, match="row 0"):
        sample(model, PROMPT, seed=seed, **everything, **way)


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "7", True + 0.5])
def test_seeds_out_of_range_are_named(model: Any, seed: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="`seed` has to be"):
        sample(model, PROMPT, seed=seed)


def test_a_seed_for_each_prompt(model: Any) -> None:
    with pytest.raises(ValueError, match="for each prompt: `seed` has 2, and the batch has 3"):
        sample(model, PROMPT.expand(3, -1), seed=[1, 2])


def test_a_seed_and_a_weight_of_the_assistants(model: Any) -> None:
    with pytest.raises(ValueError, match="`assistant_ensemble_weight` lets drafts decide"):
        sample(model, PROMPT, seed=1, assistant_model=llama().eval(), assistant_ensemble_weight=0.5)


def test_a_strategy_that_draws_by_itself_has_no_seed(model: Any) -> None:
    class Own(NextToken):
        pass

    recipe = hfgen.recipe(_complete(Own))
    with pytest.raises(ValueError, match="`seed` fixes what a row samples, but Own"):
        sample(model, PROMPT, seed=1, custom_generate=recipe)


def _complete(kind: Any) -> Any:
    """``kind`` with the methods that a strategy has to have; none is called."""
    for name in ("step", "stop", "result"):
        setattr(kind, name, lambda *arguments: None)
    return kind
