"""What is computed of a few tokens is what is computed of all: scores, draws, and the generator's state."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from transformers import (
    GenerationConfig,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import hfgen
from benchmarks.side_by_side import unmixed
from hfgen.decoding.strategies.base import InvalidScores, InvalidScoresError
from hfgen.logits.processors import LogitsProcessorList, fused
from hfgen.logits.processors.per_row import MinPPerRow, TemperaturePerRow, TopKPerRow, TopPPerRow
from hfgen.state import seeds, survivors
from tests import tiny

NO = -math.inf
LARGE = 16_401  # of no whole number of blocks


@pytest.fixture
def small() -> Iterator[None]:
    """Vocabularies of a few tokens count as large, and blocks are as small."""
    with (
        mock.patch.object(survivors, "LARGE", 0),
        mock.patch.object(survivors, "MANY", 0),
        mock.patch.object(survivors, "BLOCKS", ((30, 4), (0, 1))),
        mock.patch.object(survivors, "FEW", 1),
        mock.patch.object(fused, "FIRST", 2),
    ):
        yield


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(rows: int, vocab: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=generator(seed)) * 3


def rounded(dtype: torch.dtype) -> Any:
    return lambda rows, vocab, seed: normal(rows, vocab, seed).to(dtype).float()


def with_value(value: float) -> Any:
    def make(rows: int, vocab: int, seed: int) -> torch.Tensor:
        scores = normal(rows, vocab, seed)
        scores[-1, seed % vocab] = value
        return scores

    return make


def masked(share: float) -> Any:
    def make(rows: int, vocab: int, seed: int) -> torch.Tensor:
        scores = normal(rows, vocab, seed)
        drops = torch.rand(rows, vocab, generator=generator(seed + 1)) < share
        drops[:, seed % vocab] = False
        return scores.masked_fill(drops, NO)

    return make


def no_row(rows: int, vocab: int, seed: int) -> torch.Tensor:
    scores = normal(rows, vocab, seed)
    scores[0] = NO
    return scores


#: Kinds of scores. Logits of half precision have many ties.
SCORES: dict[str, Any] = {
    "normal": normal,
    "flat": lambda *given: normal(*given) / 30,
    "steep": lambda *given: normal(*given) * 30,
    "bfloat16": rounded(torch.bfloat16),
    "float16": rounded(torch.float16),
    "two values": lambda *given: normal(*given).sign(),
    "equal": lambda *given: torch.zeros_like(normal(*given)),
    "masked": masked(0.9),
    "one left": masked(1.0),
    "no row": no_row,
    "NaN": with_value(math.nan),
    "inf": with_value(math.inf),
}


def chain(choose: random.Random) -> list[Any]:
    """Upstream's samplers in a random order, with random values."""
    keep = choose.choice([1, 1, 1, 2, 3])
    makers = [
        lambda: TemperatureLogitsWarper(choose.choice([0.01, 0.3, 0.7, 1.3, 1e4, 1e-30, 1e-44])),
        lambda: TopKLogitsWarper(choose.choice([1, 2, 5, 50, 20_000]), min_tokens_to_keep=keep),
        lambda: TopPLogitsWarper(
            choose.choice([0.0, 0.1, 0.5, 0.9, 0.99, 0.99999, 1.0]), min_tokens_to_keep=keep
        ),
        lambda: MinPLogitsWarper(choose.choice([0.0, 0.02, 0.3, 1.0]), min_tokens_to_keep=keep),
    ]
    return [make() for make in choose.sample(makers, choose.randint(1, 4))]


def plain(processors: list[Any], scores: torch.Tensor) -> torch.Tensor:
    for processor in processors:
        scores = processor(None, scores)
    return scores


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def check_chain(processors: list[Any], scores: torch.Tensor) -> None:
    before = scores.clone()
    same(LogitsProcessorList(processors)(None, scores), plain(processors, scores))
    same(scores, before)


# --- samplers in a row --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_samplers_of_a_large_vocabulary_are_upstreams(kind: str, rows: int) -> None:
    choose = random.Random(f"{kind} {rows}")
    for seed in range(12):
        check_chain(chain(choose), SCORES[kind](rows, LARGE + seed, seed))


@pytest.mark.parametrize("kind", SCORES)
def test_samplers_of_few_tokens_are_upstreams(kind: str, small: None) -> None:
    choose = random.Random(kind)
    for seed in range(150):
        vocab = choose.choice([1, 2, 5, 29, 30, 41, 64])
        check_chain(chain(choose), SCORES[kind](choose.choice([1, 3]), vocab, seed))


def test_of_a_long_row_little_is_sorted() -> None:
    """The usual samplers go through the scores once, and never ask upstream's classes."""
    processors = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(50), TopPLogitsWarper(0.9)]
    for chosen in (processors, processors[1:], processors[::2], [MinPLogitsWarper(0.1)]):
        scores = normal(2, 30_000, 0)
        expected = plain(chosen, scores)
        with mock.patch.object(torch, "sort", side_effect=AssertionError):
            same(LogitsProcessorList(chosen)(None, scores), expected)


def test_sums_at_the_bound_are_decided_by_upstream() -> None:
    scores = torch.full((3, LARGE), NO)
    scores[:, 30:36] = normal(3, 6, 0)
    sums = scores.sort().values.softmax(dim=-1).cumsum(dim=-1)
    for n in range(1, 6):
        for nudge in (0.0, 1e-8, -1e-8):
            top_p = min(max(1 - sums[1, n - 6].item() + nudge, 0.0), 1.0)
            check_chain([TopPLogitsWarper(top_p)], scores)
    p = scores.softmax(dim=-1)
    for n in range(30, 36):
        check_chain([MinPLogitsWarper((p[1, n] / p[1].max()).item())], scores)


#: Values of four prompts; 0, or a mass of 1, is off.
COLUMNS: dict[str, list[float]] = {
    "temperature": [0.6, 1.0, 1.7, 0.2],
    "top_k": [20, 7, 1, 50],
    "top_p": [0.9, 1.0, 0.3, 0.0],
    "min_p": [0.1, 0.0, 0.3, 1.0],
}


def of_columns(names: list[str], values: dict[str, list[float]]) -> list[Any]:
    columns = {name: torch.tensor(values[name])[:, None] for name in names}
    makers = {
        "temperature": lambda: TemperaturePerRow(columns["temperature"]),
        "top_k": lambda: TopKPerRow(columns["top_k"].long()),
        "top_p": lambda: TopPPerRow(values["top_p"], "cpu"),
        "min_p": lambda: MinPPerRow(columns["min_p"]),
    }
    return [makers[name]() for name in names]


def of_prompt(names: list[str], values: dict[str, list[float]], prompt: int) -> list[Any]:
    kinds = {
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    own = [(name, values[name][prompt]) for name in names]
    return [kinds[n](v) for n, v in own if v not in ((0,) if n != "top_p" else (1,))]


@pytest.mark.parametrize("kind", ["normal", "bfloat16", "two values", "equal", "masked", "NaN"])
@pytest.mark.parametrize("is_off", [False, True], ids=["on", "off"])
def test_a_value_for_each_prompt(kind: str, is_off: bool) -> None:
    choose = random.Random(kind)
    values = {**COLUMNS, "top_k": [20, 0, 1, 50]} if is_off else COLUMNS
    for seed in range(12):
        names = choose.sample(list(COLUMNS), choose.randint(1, 4))
        scores = SCORES[kind](8, LARGE, seed)
        ours = LogitsProcessorList(of_columns(names, values))(None, scores)
        for row in range(8):
            own = scores[row : row + 1]
            same(ours[row : row + 1], plain(of_prompt(names, values, row // 2), own))


def test_processors_between_samplers_see_what_is_left() -> None:
    class Note(transformers.LogitsProcessor):
        def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
            seen.append(scores)
            return scores - 1

    seen: list[torch.Tensor] = []
    processors = [TopKLogitsWarper(9), Note(), TopPLogitsWarper(0.5), Note(), MinPLogitsWarper(0.2)]
    ids, scores = torch.zeros(2, 1, dtype=torch.long), normal(2, LARGE, 0)
    same(LogitsProcessorList(processors)(ids, scores), plain(processors, scores))
    for ours, theirs in zip(seen[:2], seen[2:], strict=True):
        same(ours, theirs)


def test_another_filter_value_is_upstreams() -> None:
    processors = [TopKLogitsWarper(5, filter_value=-7.0), TopPLogitsWarper(0.5, filter_value=-9.0)]
    check_chain(processors, normal(2, LARGE, 0))


# --- torch's draws ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(1,), (7,), (15,), (17,), (3, 16), (8, 33), (1, 151_936), (3, 50_257), (5, 9_001)]
)
def test_torchs_exponentials_are_made_of_uniform_numbers(shape: tuple[int, ...]) -> None:
    ours, theirs = generator(3), generator(3)
    uniform = torch.empty(shape, dtype=torch.float64).uniform_(generator=ours)
    expected = torch.empty(shape).exponential_(generator=theirs)
    torch.testing.assert_close((-torch.log1p(-uniform)).float(), expected, rtol=1e-6, atol=0)
    assert torch.equal(ours.get_state(), theirs.get_state())


def drawn(draw: Any, scores: torch.Tensor, n: int, seed: int) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(seed)
    return draw(scores, n), torch.get_rng_state()


def by_torch(scores: torch.Tensor, n: int) -> torch.Tensor:
    return torch.multinomial(scores.softmax(dim=-1), n)


def check_draws(scores: torch.Tensor, n: int, seed: int) -> bool:
    """Whether a draw from few tokens was made; ``AssertionError`` unless it was torch's."""
    before, (ours, after) = torch.get_rng_state(), drawn(survivors.draw, scores, n, seed)
    theirs, expected = drawn(by_torch, scores, n, seed)
    if ours is None:
        torch.manual_seed(seed)
        assert torch.equal(after, torch.get_rng_state())
    else:
        assert torch.equal(ours, theirs)
        assert torch.equal(after, expected)
    torch.set_rng_state(before)
    return ours is not None


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("n", [1, 2, 6])
@pytest.mark.parametrize("kind", ["normal", "flat", "steep", "bfloat16", "equal"])
def test_draws_of_few_are_torchs(rows: int, n: int, kind: str) -> None:
    n_made = 0
    for seed in range(20):
        scores = SCORES[kind](rows, LARGE + seed, seed)
        keep = torch.rand(scores.shape, generator=generator(seed)) < 40 / LARGE
        keep[:, :8] = True
        n_made += check_draws(scores.masked_fill(~keep, NO), n, seed)
    assert n_made == 20 or kind == "steep"  # of steep ones most are 0 in float32


def test_draws_of_few_of_a_small_vocabulary_are_torchs(small: None) -> None:
    for seed in range(300):
        scores = masked(0.5)(1 + seed % 4, 1 + seed % 40, seed)
        n_left = int((scores > NO).sum(dim=1).min())
        check_draws(scores, 1 + seed % n_left, seed)


def test_no_draw_of_few_where_torch_has_to_be_asked() -> None:
    few = TopKLogitsWarper(5)(None, normal(2, LARGE, 0))
    assert check_draws(few, 1, 0)
    assert check_draws(few, 5, 0)
    assert not check_draws(normal(2, LARGE, 0), 1, 0)  # nothing was ruled out
    assert not check_draws(few.double(), 1, 0)
    assert not check_draws(few[:, :100].masked_fill(few[:, :100] == NO, -1), 1, 0)
    with mock.patch.object(survivors, "MARGIN", 1.0):
        assert not check_draws(few, 1, 0)
    with mock.patch.object(survivors, "draws_by_uniforms", return_value=False):
        assert not check_draws(few, 1, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_with_other_defaults_torch_is_asked(dtype: torch.dtype, device: str) -> None:
    """Tensors are made of torch's default dtype and device: scripts set them to build a model."""
    scores, before = normal(2, LARGE, 0), torch.get_default_dtype()
    list_of_all = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.8)])
    expected = list_of_all(None, scores)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            assert torch.equal(list_of_all(None, scores), expected)
            assert survivors.draw(TopKLogitsWarper(5)(None, scores), 1) is None
    finally:
        torch.set_default_dtype(before)


def test_beams_with_another_default_dtype() -> None:
    model, dtypes = tiny.llama(), []
    torch.set_default_dtype(torch.float64)
    try:
        for one in (model, hfgen.mix_into(tiny.llama())):
            options = {"return_dict_in_generate": True, "output_scores": True, "num_beams": 2}
            output = one.generate(tiny.prompt(2), max_new_tokens=3, **options)
            dtypes.append(output.sequences_scores.dtype)
    finally:
        torch.set_default_dtype(torch.float32)
    assert dtypes == [torch.float32, torch.float32]


def test_torchs_function_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    few = TopKLogitsWarper(5)(None, normal(2, LARGE, 0))
    monkeypatch.setattr(torch, "multinomial", lambda p, n: p.topk(n).indices)
    assert InvalidScores().draw(few, 1, 0).tolist() == few.argmax(dim=1, keepdim=True).tolist()


def test_another_torch_is_noticed() -> None:
    def other(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        return tensor.copy_(exponential(tensor.double(), **options) * 1.001)

    exponential = torch.Tensor.exponential_
    assert survivors.draws_by_uniforms.__wrapped__()
    with mock.patch.object(torch.Tensor, "exponential_", other):
        assert not survivors.draws_by_uniforms.__wrapped__()


def test_trying_it_out_draws_nothing() -> None:
    state = torch.get_rng_state()
    survivors.draws_by_uniforms.__wrapped__()
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("kind", ["no row", "NaN", "inf"])
def test_invalid_rows_are_named(kind: str) -> None:
    scores = SCORES[kind](3, LARGE, 5)
    scores[1] = TopKLogitsWarper(5)(None, scores[1:2])[0]
    row = 0 if kind == "no row" else 2
    with pytest.raises(InvalidScoresError, match="row 0 are NaN"):
        InvalidScores().draw(scores[row : row + 1], 1, 4)
    (invalid := InvalidScores()).draw(scores, 1, 4)
    assert invalid.since is not None
    assert (invalid.since == 4).tolist() == [other == row for other in range(3)]


# --- noise of a seed ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["normal", "bfloat16", "equal"])
@pytest.mark.parametrize("is_sampled", [None, torch.tensor([True, False, True])])
def test_what_a_seed_chooses_of_few_is_what_it_chooses_of_all(
    kind: str, is_sampled: torch.Tensor | None
) -> None:
    choice = seeds.RowChoice(seeds.keys_of([1, 2, 3], 1, "cpu"), is_sampled, 4)
    for length in range(5, 25):
        scores = SCORES[kind](3, LARGE, length)
        scores = scores.masked_fill(torch.rand_like(scores) < 0.999, NO)
        scores[:, length] = 0.0
        few = choice.choose(scores, length), choice.perturbed(scores, length)
        with mock.patch.object(survivors, "LARGE", 10**6):
            all_of_them = choice.choose(scores, length), choice.perturbed(scores, length)
        assert torch.equal(few[0][0], all_of_them[0][0])
        assert not few[0][1].any()
        same(few[1], all_of_them[1])


def test_of_equal_sums_the_first_token_is_chosen() -> None:
    scores = torch.full((2, LARGE), NO)
    scores[:, [8000, 17, 4000]] = 1.0
    choice = seeds.RowChoice(torch.arange(2), None, 4)
    with mock.patch.object(seeds, "gumbel", return_value=torch.zeros(2, 3)):
        assert choice.choose(scores, 5)[0].tolist() == [17, 17]


# --- generate -----------------------------------------------------------------------------------


CALLS: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 50},
    "all": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "top-p": {"top_k": 0, "top_p": 0.5, "temperature": 0.02},
    "min-p": {"top_k": 0, "min_p": 0.3},
    "nothing": {"top_k": 0},
    "normalised": {"top_k": 20, "top_p": 0.8, "renormalize_logits": True},
    "several": {"top_k": 30, "num_return_sequences": 3},
    "beams": {"top_k": 30, "top_p": 0.9, "num_beams": 3, "num_return_sequences": 2},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_generate_is_upstreams(name: str, dtype: torch.dtype) -> None:
    model = hfgen.mix_into(tiny.llama(vocab_size=LARGE).to(dtype).eval())
    ids = torch.randint(10, LARGE, (2, 5), generator=generator(0))
    config = GenerationConfig(
        do_sample=True,
        max_new_tokens=6,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
        **CALLS[name],
    )

    def call(seed: int) -> tuple[Any, torch.Tensor]:
        torch.manual_seed(seed)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return output, torch.get_rng_state()

    for seed in range(3):
        ours, state = call(seed)
        with unmixed(model):
            theirs, expected = call(seed)
        assert torch.equal(ours.sequences, theirs.sequences)
        assert torch.equal(state, expected)
        for our_scores, their_scores in zip(ours.scores, theirs.scores, strict=True):
            same(our_scores, their_scores)


DEFAULTS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3, "output_scores": True},
    "drawn beams": {"num_beams": 2, "do_sample": True},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7},
    "forced words": {"num_beams": 3, "force_words_ids": [[20]]},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "DoLa": {"dola_layers": "low"},
    "drafts": {"prompt_lookup_num_tokens": 3, "do_sample": True, "seed": [1, 2]},
    "mirostat": {"do_sample": True, "seed": 3, "mirostat": 2},
    "penalties": {"frequency_penalty": [0.31, 0.0], "repetition_penalty": [1.13, 1.7]},
    "top-p": {"do_sample": True, "top_p": 0.71, "top_k": 0},
    "top-p of rows": {"do_sample": True, "top_p": [0.71, 0.93], "top_k": 0},
    "min-p": {"do_sample": True, "min_p": 0.011},
    "min-p of rows": {"do_sample": True, "min_p": [0.011, 0.03]},
    "seeds": {"do_sample": True, "seed": 3, "top_p": 0.71},
    "XTC": {"do_sample": True, "seed": 3, "xtc_probability": 0.5},
    "temperatures": {"do_sample": True, "temperature": 0.71, "dynatemp_range": [0.31, None]},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("vocabulary", ["large", "ordinary"])
@pytest.mark.parametrize("options", DEFAULTS.values(), ids=DEFAULTS)
def test_torchs_default_dtype_changes_nothing(
    options: dict[str, Any], vocabulary: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """People set it to load a model, and leave it."""
    if vocabulary == "large":
        request.getfixturevalue("small")
    model, found = hfgen.mix_into(tiny.llama()), []
    for default in (torch.float32, dtype):
        survivors.draws_by_uniforms.cache_clear()
        torch.set_default_dtype(default)
        torch.manual_seed(0)
        try:
            kwargs = {"max_new_tokens": 8, "return_dict_in_generate": True, "output_scores": True}
            found.append(model.generate(tiny.prompt(), **kwargs | options))
        finally:
            torch.set_default_dtype(torch.float32)
    expected, output = found
    assert torch.equal(output.sequences, expected.sequences)
    torch.testing.assert_close(output.scores, expected.scores, rtol=0, atol=0)
    if "num_beams" in options:
        assert output.sequences_scores.dtype == expected.sequences_scores.dtype == torch.float32
