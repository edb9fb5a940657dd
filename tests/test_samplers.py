"""Samplers: by llama.cpp, by hand, by upstream's classes; and a column of values against each of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hfgen
from hfgen import GenerationConfig
from hfgen.logits.processors.context import Context
from hfgen.logits.processors.samplers import (
    AdaptiveP,
    DynamicTemperature,
    ExcludeTopChoices,
    Mirostat,
    PLess,
    QuadraticSmoothing,
    TopA,
    TopNSigma,
)
from hfgen.settings.fields import PRESETS, SAMPLERS
from tests import tiny
from tests.llama_cpp import Sampler, with_llama_cpp

NO = -math.inf
VOCAB = 23
IDS = torch.zeros(1, 3, dtype=torch.long)


def logits(seed: int, rows: int = 1, vocab: int = VOCAB, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * scale


def cut(seed: int) -> torch.Tensor:
    """Scores of which an earlier sampler has left half."""
    scores = logits(seed)
    return scores.masked_fill(scores < scores.median(), NO)


def left(scores: torch.Tensor) -> dict[int, float]:
    return {token: value for token, value in enumerate(scores[0].tolist()) if value > NO}


def check_left(ours: torch.Tensor, theirs: dict[int, float]) -> None:
    found = left(ours)
    assert sorted(found) == sorted(theirs)
    assert [found[t] for t in theirs] == pytest.approx(list(theirs.values()), rel=1e-5, abs=1e-5)


# llama.cpp


@with_llama_cpp
def test_the_oracle_does_what_it_is_told() -> None:
    """By hand: a signature that does not fit would change nothing."""
    penalised, _, _ = (
        Sampler("penalties", 9, 4, 1.5, 0.5, 0.25).accept(0, 0, 1).apply([3.0, 2.5, -1.0])
    )
    assert penalised == pytest.approx({0: 3 / 1.5 - 1.25, 1: 2.5 / 1.5 - 0.75, 2: -1.0})
    after = Sampler.dry(0.8, 1.75, 2, 64, [[5]]).accept(0, 1, 2, 3, 0, 1, 2).apply([0.0] * 6)[0]
    assert after == pytest.approx({0: 0.0, 1: 0.0, 2: 0.0, 3: -0.8 * 1.75, 4: 0.0, 5: 0.0})


@with_llama_cpp
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("n", [0.3, 1.0, 2.5])
def test_top_n_sigma_is_llama_cpps(seed: int, n: float) -> None:
    scores = logits(seed)
    check_left(TopNSigma(n)(IDS, scores), Sampler("top_n_sigma", n).apply(scores[0].tolist())[0])


@with_llama_cpp
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("t", "span", "exponent"), [(0.8, 0.5, 1.0), (1.0, 1.0, 2.0), (1.3, 0.2, 0.5)]
)
def test_dynamic_temperature_is_llama_cpps(
    seed: int, t: float, span: float, exponent: float
) -> None:
    scores = logits(seed)
    theirs, _, _ = Sampler("temp_ext", t, span, exponent).apply(scores[0].tolist())
    check_left(DynamicTemperature(t, span, exponent)(IDS, scores), theirs)


@with_llama_cpp
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("threshold", [0.02, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("keep", [1, 5, 23])
def test_xtc_is_llama_cpps(seed: int, threshold: float, keep: int) -> None:
    scores = logits(seed)
    theirs, _, _ = Sampler("xtc", 1.0, threshold, keep, 7).apply(scores[0].tolist())
    check_left(ExcludeTopChoices(1.0, threshold, keep)(IDS, scores), theirs)


@with_llama_cpp
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tau", [0.5, 2.0, 4.0])
@pytest.mark.parametrize("vocab", [VOCAB, 300])
def test_mirostat_is_llama_cpps(version: int, tau: float, vocab: int) -> None:
    theirs = Sampler("mirostat", vocab, 3, tau, 0.2, 100)
    if version == 2:
        theirs = Sampler("mirostat_v2", 3, tau, 0.2)
    ours, ids = Mirostat(version, tau, 0.2), IDS
    for step in range(25):
        scores = logits(step, vocab=vocab)
        found, _, chosen = theirs.apply(scores[0].tolist())
        check_left(ours(ids, scores), found)
        assert chosen is not None
        ids = torch.cat([ids, torch.tensor([[chosen]])], dim=1)


@with_llama_cpp
@pytest.mark.parametrize(("target", "decay"), [(0.3, 0.9), (0.05, 0.5), (0.9, 0.0)])
def test_adaptive_p_is_llama_cpps(target: float, decay: float) -> None:
    theirs, ours, ids = Sampler("adaptive_p", target, decay, 5), AdaptiveP(target, decay), IDS
    for step in range(25):
        scores = logits(step)
        found, _, chosen = theirs.apply(scores[0].tolist())
        check_left(ours(ids, scores), found)
        assert chosen is not None
        theirs.accept(chosen)
        ids = torch.cat([ids, torch.tensor([[chosen]])], dim=1)


#: llama.cpp's samplers in its order, and the fields that ask for each.
CHAIN: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    (
        "penalties",
        (10**6, 6, 1.2, 0.3, -0.2),
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": -0.2},
    ),
    ("top_n_sigma", (1.8,), {"top_n_sigma": 1.8}),
    ("top_k", (15,), {"top_k": 15}),
    ("typical", (0.95, 1), {"typical_p": 0.95}),
    ("top_p", (0.9, 1), {"top_p": 0.9}),
    ("min_p", (0.05, 1), {"min_p": 0.05}),
    ("xtc", (1.0, 0.25, 1, 7), {"xtc_probability": 1.0, "xtc_threshold": 0.25}),
    ("temp_ext", (0.7, 0.3, 1.0), {"temperature": 0.7, "dynatemp_range": 0.3}),
]


@with_llama_cpp
@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_the_whole_chain_is_llama_cpps(seed: int, is_shuffled: bool) -> None:
    """Without the tokens of -inf that its top_n_sigma leaves in the list for the next sampler."""
    scores = logits(seed, vocab=40)
    ids = torch.randint(0, 40, (1, 9), generator=torch.Generator().manual_seed(seed))
    options: dict[str, Any] = {"do_sample": True, "penalty_window": 6, "sampler_order": "llama.cpp"}
    expected: Any = scores[0].tolist()
    chain_of = list(CHAIN)
    if is_shuffled:
        random.Random(seed).shuffle(chain_of)
        called = {"typical": "typical_p", "temp_ext": "temperature"}
        options["sampler_order"] = [called.get(name, name) for name, _, _ in chain_of]
    for name, arguments, fields in chain_of:
        sampler = Sampler(name, *arguments)
        if name == "penalties":
            sampler.accept(*ids[0].tolist())
        expected = sampler.apply(expected)[0]
        options |= fields
    model = hfgen.mix_into(tiny.llama())
    config = hfgen.GenerationConfig(**options)
    chain = model._get_logits_processor(config, input_ids_seq_length=2, device="cpu")
    assert len(chain) == len(CHAIN) + 2
    if len(expected) > 1:
        check_left(chain(ids, scores), expected)
    else:  # llama.cpp does not divide the score of a token that is left alone
        assert sorted(left(chain(ids, scores))) == sorted(expected)


@pytest.mark.parametrize("mirostat", [1, [1, 2], [None, 2]])
def test_llama_cpp_runs_mirostat_without_other_samplers(mirostat: Any) -> None:
    model = hfgen.mix_into(tiny.llama())
    alone: dict[str, Any] = {"do_sample": True, "seed": [1, 2], "max_new_tokens": 12, "top_k": 0}
    alone |= {"temperature": 0.8, "mirostat": mirostat, "eos_token_id": None}
    others = {
        "top_p": 0.3,
        "min_p": 0.2,
        "top_k": 2,
        "repetition_penalty": 3.0,
        "xtc_probability": 0.5,
    }
    others |= {"dry_multiplier": 3.0, "dry_sequence_breakers": [], "dynatemp_range": 0.5}
    ids, expected = tiny.prompt(2), model.generate(tiny.prompt(2), **alone)
    together = model.generate(ids, **alone | others, sampler_order="llama.cpp")
    rows = [0, 1] if mirostat != [None, 2] else [1]
    assert torch.equal(together[rows], expected[rows])
    assert not torch.equal(model.generate(ids, **alone | others)[1], expected[1])


# By hand


def test_top_n_sigma_overlooks_what_is_left_out_already() -> None:
    # Of 3, 1 and -1: mean 1, deviation sqrt(8 / 3) = 1.63.
    scores = torch.tensor([[3.0, NO, 1.0, -1.0, NO]])
    assert sorted(left(TopNSigma(1.0)(IDS, scores))) == [0]
    assert sorted(left(TopNSigma(1.3)(IDS, scores))) == [0, 2]


def test_top_a() -> None:
    scores = torch.tensor([[0.5, 0.26, 0.13, 0.11]]).log()
    assert sorted(left(TopA(0.5)(IDS, scores))) == [0, 1, 2]  # 0.5 * 0.25 = 0.125
    assert sorted(left(TopA(1.0)(IDS, scores))) == [0, 1]
    assert sorted(left(TopA(1.0, 3)(IDS, scores))) == [0, 1, 2]


def test_p_less() -> None:
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()  # squares sum to 0.365
    assert sorted(left(PLess(True)(IDS, scores))) == [0]
    assert sorted(left(PLess(True, 2)(IDS, scores))) == [0, 1]
    even = torch.zeros(1, 7)
    assert torch.equal(PLess(True)(IDS, even), even)


def test_quadratic_smoothing() -> None:
    scores = torch.tensor([[2.0, 1.0, -1.0, NO]])
    assert QuadraticSmoothing(0.5)(IDS, scores).tolist() == [[2.0, 1.5, -2.5, NO]]


def test_dynamic_temperature_at_its_ends() -> None:
    even = torch.zeros(1, 4)
    even[0, 3] = NO
    processor = DynamicTemperature(1.0, 0.5, 1.0)
    assert processor(IDS, even + 3.0)[0].tolist() == pytest.approx([2.0, 2.0, 2.0, NO])
    certain = torch.tensor([[90.0, 0.0, 0.0]])
    assert processor(IDS, certain)[0].tolist() == pytest.approx([180.0, 0.0, 0.0])
    alone = torch.tensor([[NO, 4.0, NO]])
    assert processor(IDS, alone).tolist() == [[NO, 4.0, NO]]
    assert DynamicTemperature(0.5, 0.9, 1.0)(IDS, certain).tolist() == [[90.0, NO, NO]]


def test_xtc_happens_as_often_as_it_should() -> None:
    scores = torch.zeros(4000, 3)
    torch.manual_seed(0)
    hit = (ExcludeTopChoices(0.3, 0.2)(IDS, scores) == NO).any(dim=1).float().mean()
    assert float(hit) == pytest.approx(0.3, abs=0.03)
    keys = torch.arange(4000)
    seeded = ExcludeTopChoices(0.3, 0.2, 1, keys)
    hits = (seeded(IDS, scores) == NO).any(dim=1)
    assert float(hits.float().mean()) == pytest.approx(0.3, abs=0.03)
    assert torch.equal(hits, (seeded(IDS, scores) == NO).any(dim=1))
    later = (seeded(torch.zeros(1, 4), scores) == NO).any(dim=1)
    assert 0.3 < float((hits != later).float().mean()) < 0.54  # 2 * 0.3 * 0.7 if independent


def test_xtc_leaves_one_choice_and_what_is_below() -> None:
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert sorted(left(ExcludeTopChoices(1.0, 0.15)(IDS, scores))) == [2, 3]
    assert sorted(left(ExcludeTopChoices(1.0, 0.35)(IDS, scores))) == [0, 1, 2, 3]
    ties = torch.tensor([[0.0, 0.0, NO]])
    assert len(left(ExcludeTopChoices(1.0, 0.1)(IDS, ties))) == 1
    assert len(left(ExcludeTopChoices(1.0, 0.0)(IDS, ties))) == 1


@pytest.mark.parametrize(
    "processor", [Mirostat(2, 3.0, 0.3), AdaptiveP(0.3, 0.9)], ids=["mirostat", "p"]
)
def test_other_rows_start_again(processor: Any) -> None:
    expected = processor(IDS, logits(0))
    processor(torch.cat([IDS, IDS[:, :1]], dim=1), logits(1))
    assert torch.equal(
        processor(IDS.expand(2, -1), logits(0).expand(2, -1)), expected.expand(2, -1)
    )


def test_mirostat_goes_on_from_the_length_it_is_called_with() -> None:
    torch.manual_seed(0)
    ids, scores = torch.randint(0, VOCAB, (2, 12)), [logits(i, rows=2) for i in range(12)]
    straight, back = Mirostat(2, 3.0, 0.3), Mirostat(2, 3.0, 0.3)
    expected = [straight(ids[:, :n], scores[n - 1]) for n in range(3, 12)]
    drafted = ids.clone()
    for start in range(3, 12):
        for n in range(start, min(start + 3, 12)):  # the last two columns are drafts, and rejected
            ours = back(drafted[:, :n], scores[n - 1])
            drafted[:, n] = (ids[:, n] + (n > start)) % VOCAB
            if n == start:
                assert torch.equal(ours, expected[n - 3])
        drafted[:, start + 1 :] = 0


# A value per prompt


class _Values:
    """As much of a call as a context reads: the configs of its prompts."""

    def __init__(self, configs: list[Any]) -> None:
        self.configs = configs

    def __len__(self) -> int:
        return len(self.configs)

    def differ_in(self, *names: str) -> bool:
        return any(len({str(getattr(c, name, None)) for c in self.configs}) > 1 for name in names)


#: What turns a sampler on, and the values of four prompts; ``None`` is off.
COLUMNS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "temperature": ([0.7, None, 1.3, 2.1], {}),
    "dynatemp_range": ([0.5, None, 1.3, 0.1], {"temperature": 0.9, "dynatemp_exponent": 1.5}),
    "smoothing_factor": ([0.7, None, 0.1, 2.0], {}),
    "top_n_sigma": ([0.7, None, 1.5, 2.0], {}),
    "top_h": ([0.7, None, 0.2, 1.0], {}),
    "top_k": ([7, None, 1, 300], {}),
    "top_p": ([0.9, None, 0.1, 0.37], {}),
    "min_p": ([0.1, None, 0.7, 1.0], {}),
    "top_a": ([0.1, None, 0.7, 1.0], {}),
    "typical_p": ([0.1, None, 0.7, 0.95], {}),
    "epsilon_cutoff": ([0.1, None, 0.01, 0.003], {}),
    "eta_cutoff": ([0.1, None, 0.01, 0.003], {}),
    "p_less": ([True, None, True, False], {}),
    "xtc_probability": ([1.0, None, 1.0, 0.5], {"xtc_threshold": 0.15}),
    "mirostat": ([1, None, 2, 1], {"mirostat_tau": 2.0}),
    "adaptive_target": ([0.1, None, 0.5, 0.9], {}),
    "repetition_penalty": ([1.3, None, 0.7, 2.0], {}),
    "frequency_penalty": ([0.3, None, -0.7, 2.0], {}),
    "presence_penalty": ([0.3, None, -0.7, 2.0], {"penalty_window": 5}),
    "dry_multiplier": ([0.3, None, 0.7, 2.0], {"dry_sequence_breakers": [3]}),
    "no_repeat_ngram_size": ([2, None, 3, 1], {}),
    "min_length": ([5, None, 6, 9], {}),
    "min_new_tokens": ([1, None, 3, 4], {}),
}


def built(field: str, configs: list[Any], keys: torch.Tensor, each: int) -> Any:
    """The processor of a field for prompts with ``each`` rows."""
    rows = _Values(configs) if len(configs) > 1 else None
    context = Context(None, configs[0], 2, rows=rows, seeds=keys)  # type: ignore[arg-type]
    for config in configs:
        config._eos_token_tensor = torch.tensor([2, 4])
    object.__setattr__(context, "model", type("M", (), {"config": tiny.llama().config}))
    table = [*hfgen.logits.processors.PROCESSORS, *hfgen.logits.processors.WARPERS]
    return next(row for row in table if getattr(row, "field", None) == field)(context)


@pytest.mark.parametrize("field", COLUMNS)
@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("vocab", [VOCAB, 9000])
def test_a_column_is_each_row_alone(field: str, each: int, vocab: int) -> None:
    values, others = COLUMNS[field]
    configs = [
        GenerationConfig(do_sample=True, **others, **({} if value is None else {field: value}))
        for value in values
    ]
    if field != "top_k":
        for config in configs:
            config.top_k = 0
    if field != "temperature":
        for config in configs:
            config.temperature = config.temperature if "temperature" in others else 1.0
    keys = torch.arange(4 * each) * 7919
    together = built(field, configs, keys, each)
    alone = [
        built(field, [config], keys[n * each : (n + 1) * each], each)
        for n, config in enumerate(configs)
    ]
    ids = torch.randint(0, 5, (4 * each, 4), generator=torch.Generator().manual_seed(1))
    for step in range(4):
        scores = logits(step, rows=4 * each, vocab=vocab)
        if step == 2:
            scores = scores.masked_fill(scores < 1.0, NO)
        before = scores.clone()
        ours = together(ids, scores)
        assert torch.equal(scores, before)
        for n, (value, processor) in enumerate(zip(values, alone, strict=True)):
            part = slice(n * each, (n + 1) * each)
            if value in (None, False):
                assert torch.equal(ours[part], scores[part])
            if processor is not None:
                assert torch.equal(ours[part], processor(ids[part], scores[part])), (n, step)
        ids = torch.cat([ids, ours.argmax(dim=1, keepdim=True)], dim=1)


@pytest.mark.parametrize("temperatures", [[0.7, 0.7, 0.7], [0.7, 0.8, 0.9]])
def test_the_temperature_of_a_row_with_a_dynamic_one(temperatures: list[float]) -> None:
    """A row gets its temperature once: from the dynamic one, or from the plain one."""
    spans = [None, 0.5, 0.0]
    configs = [
        GenerationConfig(do_sample=True, temperature=temperature, dynatemp_range=span)
        for temperature, span in zip(temperatures, spans, strict=True)
    ]
    keys, scores = torch.arange(3), logits(0, rows=3)
    ids = torch.zeros(3, 4, dtype=torch.long)
    dynamic, plain = (
        built(field, configs, keys, 1)(ids, scores) for field in ("dynatemp_range", "temperature")
    )
    for row, (temperature, span) in enumerate(zip(temperatures, spans, strict=True)):
        expected = DynamicTemperature(temperature, span or 0.0, 1.0)(ids, scores[row : row + 1])
        if span:
            assert torch.equal(dynamic[row : row + 1], expected)
            assert torch.equal(plain[row], scores[row])
        else:
            assert torch.equal(dynamic[row], scores[row])
            torch.testing.assert_close(plain[row : row + 1], expected)


# The order


def kinds(**config: Any) -> list[str]:
    model = hfgen.mix_into(tiny.llama())
    config = GenerationConfig(**{"do_sample": True, "top_k": 0, **config})
    found = model._get_logits_processor(config, input_ids_seq_length=1, device="cpu")
    return [type(processor).__name__ for processor in found]


EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.1,
    "dry_multiplier": 0.8,
    "dry_sequence_breakers": [],
    "temperature": 0.7,
    "top_n_sigma": 1.0,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "typical_p": 0.9,
    "xtc_probability": 0.5,
    "min_length": 3,
    "eos_token_id": 2,
}


def test_the_order_of_the_table() -> None:
    names = "RepetitionPenaltyLogitsProcessor OccurrencePenalty DryPenalty TemperatureLogitsWarper TopNSigma "
    names += (
        "TopKLogitsWarper TopPLogitsWarper MinPLogitsWarper TypicalLogitsWarper ExcludeTopChoices"
    )
    assert kinds(**EVERYTHING) == kinds(**EVERYTHING, sampler_order="hf") == names.split()


def test_the_order_of_llama_cpp() -> None:
    names = (
        "RepetitionPenaltyLogitsProcessor OccurrencePenalty DryPenalty TopNSigma TopKLogitsWarper "
    )
    names += "TypicalLogitsWarper TopPLogitsWarper MinPLogitsWarper ExcludeTopChoices TemperatureLogitsWarper"
    assert kinds(**EVERYTHING, sampler_order="llama.cpp") == names.split()


def test_the_order_of_vllm() -> None:
    names = "DryPenalty RepetitionPenaltyLogitsProcessor OccurrencePenalty TemperatureLogitsWarper "
    names += "MinPLogitsWarper TopKLogitsWarper TopPLogitsWarper TopNSigma TypicalLogitsWarper ExcludeTopChoices"
    assert kinds(**EVERYTHING, sampler_order="vllm") == names.split()


def test_an_order_of_ones_own() -> None:
    chosen = kinds(temperature=0.5, top_p=0.9, min_p=0.1, sampler_order=["min_p", "temperature"])
    assert chosen == ["MinPLogitsWarper", "TemperatureLogitsWarper", "TopPLogitsWarper"]
    greedy = kinds(
        do_sample=False, repetition_penalty=1.3, temperature=0.5, sampler_order="llama.cpp"
    )
    assert greedy == ["RepetitionPenaltyLogitsProcessor"]


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("lama.cpp", r"did you mean `llama.cpp`"),
        (["top_p", "temprature"], r"`temprature` \(did you mean `temperature`"),
        (["zzz"], r"There are penalties, dry"),
        (["top_p", "top_k", "top_p"], "top_p more than once"),
        ([1], "a name or a list of names"),
    ],
)
def test_an_unknown_order_is_refused(order: Any, words: str) -> None:
    model = hfgen.mix_into(tiny.llama())
    with pytest.raises(ValueError, match=f"(?s)sampler_order.*{words}"):
        model.generate(tiny.prompt(), max_new_tokens=1, sampler_order=order)


def test_all_names_of_samplers_have_a_row() -> None:
    table = [*hfgen.logits.processors.PROCESSORS, *hfgen.logits.processors.WARPERS]
    fields = {getattr(row, "field", None) for row in table}
    assert {field for named in SAMPLERS.values() for field in named} <= fields
    assert {row.field for row in hfgen.logits.processors.WARPERS} <= {
        f for n in SAMPLERS.values() for f in n
    }
    assert all(set(names) <= set(SAMPLERS) for names in PRESETS.values())


# generate


#: Fields, and what they do to scores: each changes the tokens of the calls below.
SAMPLED: dict[str, dict[str, Any]] = {
    "top_n_sigma": {"top_n_sigma": 0.5},
    "top_a": {"top_a": 0.5},
    "p_less": {"p_less": True},
    "xtc": {"xtc_probability": 0.7, "xtc_threshold": 0.05},
    "dynatemp": {"dynatemp_range": 0.8, "temperature": 0.9},
    "smoothing": {"smoothing_factor": 2.0},
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 1.0},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 1.0},
    "adaptive_p": {"adaptive_target": 0.2},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return hfgen.mix_into(tiny.llama().eval())


def padded(model: Any, **options: Any) -> list[list[int]]:
    ids = tiny.prompt(3, 7)
    ids[1, :3] = 0
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    options = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0, **options}
    return model.generate(ids, attention_mask=mask, **options)[:, 7:].tolist()


@pytest.mark.parametrize("name", SAMPLED)
def test_sampling_with_each(model: Any, name: str) -> None:
    call: dict[str, Any] = {"do_sample": True, "top_k": 0, "seed": [3, 4, 5]}
    plain, ours = padded(model, **call), padded(model, **call, **SAMPLED[name])
    assert plain != ours
    assert ours == padded(model, **call, **SAMPLED[name], prompt_lookup_num_tokens=3)
    single = padded(model, **call, **SAMPLED[name], num_return_sequences=2)
    assert len(single) == 6
    assert len({tuple(row) for row in single}) > 2
    if "mirostat" in name or "adaptive" in name:
        with pytest.raises(ValueError, match="num_beams"):
            padded(model, do_sample=True, num_beams=2, **SAMPLED[name])
    else:
        torch.manual_seed(0)
        assert len(padded(model, do_sample=True, num_beams=2, **SAMPLED[name])) == 3


@pytest.mark.parametrize("name", SAMPLED)
def test_greedy_calls_do_without(model: Any, name: str) -> None:
    assert padded(model, do_sample=False, **SAMPLED[name]) == padded(model, do_sample=False)


NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0,
    "dry_multiplier": 0.0,
    "top_n_sigma": 0,
    "top_a": 0.0,
    "p_less": False,
    "xtc_probability": 0.0,
    "dynatemp_range": 0.0,
    "smoothing_factor": 0.0,
    "mirostat": 0,
    "penalty_window": 9,
    "penalty_exclude_ids": [3],
}


def test_nothing_is_built_for_neutral_values() -> None:
    assert kinds(**NEUTRAL) == kinds(do_sample=False, **NEUTRAL) == kinds() == []


def test_a_mixed_batch_builds_what_one_prompt_asks_for(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    build: Callable[..., Any] = type(model)._get_logits_processor

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.extend(build(self, *args, **kwargs))
        return build(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "_get_logits_processor", noted)
    padded(model, do_sample=True, top_k=0, temperature=[1.0, 0.5, 1.0], min_p=[None, None, None])
    assert [type(processor).__name__ for processor in found] == ["TemperaturePerRow"]
