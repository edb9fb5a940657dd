"""Penalties on what has occurred: by hand, by llama.cpp, and in calls of every mode."""

from __future__ import annotations

import inspect
import math
import random
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import transformers

import hfgen
from hfgen.families import CACHE
from hfgen.logits.processors.dry import Breakers, DryPenalty
from hfgen.logits.processors.repetition import (
    Counted,
    OccurrencePenalty,
    RepetitionPenaltyLogitsProcessor,
)
from tests import tiny
from tests.llama_cpp import Sampler, with_llama_cpp
from tests.versions import since_5_23

VOCAB = 11


def scores_of(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def some_tokens(draw: random.Random, n: int, alphabet: int) -> list[int]:
    return [draw.randrange(alphabet) for _ in range(n)]


# By hand


def test_frequency_and_presence_count_the_output() -> None:
    ids = torch.tensor([[3, 3, 3, 1, 1, 2]])  # the first three are the prompt
    zeros = torch.zeros(1, 5)
    frequency = OccurrencePenalty(0.5, Counted(first=3))
    assert frequency(ids, zeros).tolist() == [[0.0, -1.0, -0.5, 0.0, 0.0]]
    presence = OccurrencePenalty(0.5, Counted(first=3), of_presence=True)
    assert presence(ids, zeros).tolist() == [[0.0, -0.5, -0.5, 0.0, 0.0]]
    assert not zeros.any()
    assert OccurrencePenalty(0.5, Counted(first=9))(ids, zeros).tolist() == [[0.0] * 5]


def test_tokens_outside_of_the_vocabulary_and_excluded_ones_do_not_count() -> None:
    ids, zeros = torch.tensor([[7, 1, 2, 1]]), torch.ones(1, 3)
    excluded = torch.tensor([2, 99])
    frequency = OccurrencePenalty(1.0, Counted(excluded=excluded))
    assert frequency(ids, zeros).tolist() == [[1.0, -1.0, 1.0]]
    repetition = RepetitionPenaltyLogitsProcessor(2.0, excluded=excluded)
    assert repetition(ids, zeros).tolist() == [[1.0, 0.5, 1.0]]


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"guidance_scale": 1.5},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("rows", [1, 2])
def test_gradients_flow_through_scores(options: dict[str, Any], rows: int) -> None:
    """``generate`` without its ``no_grad``, as people train through it; hfgen's own fields, too."""
    grads = []
    is_own = not hasattr(transformers.GenerationConfig(), next(iter(options)))
    for model in (tiny.llama(), hfgen.mix_into(tiny.llama()))[is_own:]:
        output = inspect.unwrap(type(model).generate)(
            model,
            tiny.prompt(rows),
            max_new_tokens=4,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        torch.stack(output.scores).logsumexp(-1).sum().backward()
        grads.append(model.lm_head.weight.grad)
    assert grads[0].any()
    assert torch.allclose(grads[0], grads[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "option", [{"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}], ids=str
)
def test_scores_are_contiguous(option: dict[str, Any]) -> None:
    """As upstream's are: code of others may view them."""
    output = hfgen.mix_into(tiny.llama()).generate(
        tiny.prompt(2),
        max_new_tokens=4,
        return_dict_in_generate=True,
        output_scores=True,
        **option,
    )
    assert all(scores.view(-1).isfinite().any() for scores in output.scores)


def test_a_window_of_repetition() -> None:
    processor = RepetitionPenaltyLogitsProcessor(2.0, window=2)
    ones = torch.ones(1, 4)
    assert processor(torch.tensor([[0, 1, 2]]), ones).tolist() == [[1.0, 0.5, 0.5, 1.0]]
    assert processor(torch.tensor([[3]]), ones).tolist() == [[1.0, 1.0, 1.0, 0.5]]


def test_a_breaker_ends_a_repeat() -> None:
    def taken_off(ids: list[int], breakers: list[Any], allowed: int = 2) -> dict[int, float]:
        processor = DryPenalty(1.0, 2.0, allowed, Breakers(breakers))
        found = processor(torch.tensor([ids]), torch.zeros(1, 9))[0]
        return {token: -value for token, value in enumerate(found.tolist()) if value}

    ids = [1, 2, 3, 4, 5, 1, 2, 3]
    assert taken_off(ids, []) == {4: 2.0}  # three tokens are repeated, two are allowed
    assert taken_off(ids, [1]) == {4: 1.0}  # two since the breaker
    assert taken_off(ids, [2]) == {}
    assert taken_off(ids, [2], allowed=1) == {4: 1.0}
    assert taken_off(ids, [4]) == {}  # a breaker itself is free
    assert taken_off(ids, [[1, 2]], allowed=1) == {4: 1.0}
    assert taken_off(ids, [[2, 9]]) == {4: 2.0}
    assert taken_off([1, 1, 1, 1], []) == {1: 2.0}


def by_definition(row: list[int], least: int, last_n: int | None) -> dict[int, int]:
    """By follower: for each earlier place, how many tokens before it are those at the end."""
    row = row if last_n is None else row[-last_n:]
    found: dict[int, int] = {}
    for place in range(len(row) - 1):
        n = 0
        while n <= place and row[place - n] == row[len(row) - 1 - n]:
            n += 1
        if n >= least:
            found[row[place + 1]] = max(found.get(row[place + 1], 0), n)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_repeats_by_definition(seed: int) -> None:
    draw = random.Random(seed)
    allowed, last_n = draw.randint(1, 4), draw.choice([None, 1, 5, 12])
    processor = DryPenalty(1.0, 1.0, allowed, Breakers([]), last_n=last_n)
    processor.longest = 100
    row = some_tokens(draw, draw.randint(1, 40), draw.choice([1, 2, 3]))
    assert processor.lengths(torch.tensor(row).numpy()) == by_definition(row, allowed, last_n)
    processor.longest = 2
    expected = {t: min(n, 2) for t, n in by_definition(row, allowed, last_n).items()}
    assert processor.lengths(torch.tensor(row).numpy()) == (expected if allowed <= 2 else {})


def test_the_penalty_of_long_repeats_stays_finite() -> None:
    processor = DryPenalty(2.0, 1.75, 1, Breakers([]))
    found = processor(torch.full((1, 400), 3), torch.zeros(1, 5))
    assert math.isfinite(found.min())
    assert float(found.min()) < -1e30


def test_breakers_by_their_text() -> None:
    tokenizer = tiny.byte_tokenizer()
    breakers = Breakers(["\n", "ab"], tokenizer)
    newline, a, b = (tokenizer.encode(c)[0] for c in ("\n", "a", "b"))
    assert breakers.is_breaker(newline)
    assert not breakers.is_breaker(a)
    assert breakers.n_since([b, b, a, b, b, a], 9) == 2
    assert breakers.n_since([b, b, a], 9) == 3
    assert breakers.n_since([a, b, b, b, b], 2) == 2


# llama.cpp


@with_llama_cpp
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("window", [1, 4, 64])
def test_penalties_are_llama_cpps(seed: int, window: int) -> None:
    draw, counted = random.Random(seed), Counted(window=window)
    repetition = RepetitionPenaltyLogitsProcessor(1.3, window=window)
    frequency = OccurrencePenalty(0.4, counted)
    presence = OccurrencePenalty(-0.3, counted, of_presence=True)
    theirs = Sampler("penalties", 10**6, window, 1.3, 0.4, -0.3)
    ids: list[int] = []
    for step in range(20):
        ids.append(draw.randrange(VOCAB))
        scores, rows = scores_of(step), torch.tensor([ids])
        ours = presence(rows, frequency(rows, repetition(rows, scores)))
        expected, _, _ = theirs.accept(ids[-1]).apply(scores[0].tolist())
        assert ours[0].tolist() == pytest.approx([expected[t] for t in range(VOCAB)], abs=1e-5)


@with_llama_cpp
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("allowed", [1, 2, 4])
@pytest.mark.parametrize("breakers", [[], [2], [0, 3]], ids=str)
@pytest.mark.parametrize("last_n", [None, 1, 5, 12, 40])
def test_dry_is_llama_cpps(
    seed: int, allowed: int, breakers: list[int], last_n: int | None
) -> None:
    draw = random.Random(seed)
    alphabet = draw.choice([2, 3, VOCAB])
    ours = DryPenalty(0.8, 1.3, allowed, Breakers(breakers), last_n=last_n)
    theirs = Sampler.dry(0.8, 1.3, allowed, last_n or 512, [[token] for token in breakers])
    ids: list[int] = []
    for step in range(60):
        new = some_tokens(draw, 1, alphabet)
        if len(ids) > 10 and draw.random() < 0.1:  # say something again
            start = draw.randrange(len(ids) - 5)
            new = ids[start : start + 5]
        ids += new
        theirs.accept(*new)
        scores = scores_of(step)
        expected, _, _ = theirs.apply(scores[0].tolist())
        found = ours(torch.tensor([ids]), scores)[0].tolist()
        assert found == pytest.approx([expected[t] for t in range(VOCAB)], rel=1e-4, abs=1e-4)


# generate

#: Penalties, each of which changes what the calls below generate.
PENALTIES: dict[str, dict[str, Any]] = {
    "repetition, window": {"repetition_penalty": 1.8, "penalty_window": 4},
    "repetition, excluded": {"repetition_penalty": 1.8, "penalty_exclude_ids": list(range(5, 50))},
    "frequency": {"frequency_penalty": 1.1},
    "presence": {"presence_penalty": 1.6},
    "frequency, window": {"frequency_penalty": 1.1, "penalty_window": 5},
    "both": {"frequency_penalty": 0.4, "presence_penalty": 0.9, "penalty_exclude_ids": 7},
    "dry": {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": []},
    "n-grams": {"no_repeat_ngram_size": 2},
    "n-grams of 1": {"no_repeat_ngram_size": 1},
    "tokens of the prompt": {"encoder_repetition_penalty": 0.4},
    "n-grams of the prompt": {"encoder_no_repeat_ngram_size": 1},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return hfgen.mix_into(tiny.llama().eval())


def generate(model: Any, **options: Any) -> torch.Tensor:
    """A batch of three, of which one row is padded."""
    options = {"max_new_tokens": 30, "eos_token_id": None, "pad_token_id": 0, **options}
    ids, mask = tiny.prompt(3, 7), torch.ones(3, 7, dtype=torch.long)
    ids[1, :3], mask[1, :3] = options["pad_token_id"], 0
    return model.generate(ids, attention_mask=mask, **options)


@pytest.mark.parametrize(
    "name",
    # Before, transformers counts padding in repetition_penalty, and so does hfgen.
    [pytest.param(n, marks=[since_5_23] if n == "repetition, excluded" else []) for n in PENALTIES],
)
@pytest.mark.parametrize("drafts", [{}, {"prompt_lookup_num_tokens": 3}], ids=["plain", "lookup"])
def test_rows_with_penalties_are_solo_calls(model: Any, name: str, drafts: dict[str, Any]) -> None:
    options = {"eos_token_id": None, **PENALTIES[name], **drafts}
    ids = tiny.prompt(3, 7)
    assert generate(model, **options).tolist() != generate(model).tolist()
    solo = [
        model.generate(ids[row : row + 1, start:], max_new_tokens=30, **options)[0, 7 - start :]
        for row, start in enumerate((0, 3, 0))
    ]
    for pad in (0, int(solo[1][0]), int(solo[1][9])):  # also tokens that the padded row generates
        ours = generate(model, **options, pad_token_id=pad)
        assert ours[:, 7:].tolist() == [row.tolist() for row in solo]


@pytest.mark.parametrize("held", ["embeddings", "cache"])
@pytest.mark.parametrize("name", ["repetition", *PENALTIES])
def test_padding_that_is_not_among_the_ids_spares_no_token(
    model: Any, name: str, held: str
) -> None:
    penalties = {"repetition": {"repetition_penalty": 1.8}, **PENALTIES}[name]
    asked = {"max_new_tokens": 30, "eos_token_id": None, "pad_token_id": 0, **penalties}
    ids, mask = tiny.prompt(2, 9), torch.ones(2, 9, dtype=torch.long)
    ids[1, 5:] = ids[1, 5]
    ids[1, :4] = mask[1, :4] = 0

    def generated(row: slice, start: int) -> list[int]:
        part, shown = ids[row, start:], mask[row, start:]
        if held == "embeddings":
            prompt = {"inputs_embeds": model.get_input_embeddings()(part)}
        else:
            n, cache = 5 - start, transformers.DynamicCache(config=model.config)
            first = {"input_ids": part[:, :n], "attention_mask": shown[:, :n]}
            positions = (shown[:, :n].cumsum(1) - 1).clamp(min=0)
            model(**first, position_ids=positions, past_key_values=cache)
            prompt = {"input_ids": part[:, n:], CACHE: cache}
        tokens = model.generate(**prompt, attention_mask=shown, **asked)[-1].tolist()
        return tokens[-30:]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # penalties count generated tokens only
        assert generated(slice(2), 0) == generated(slice(1, 2), 4)


@pytest.mark.parametrize("name", ["tokens of the prompt", "n-grams of the prompt", "n-grams of 1"])
def test_rows_of_an_encoder_decoder_with_penalties_are_solo_calls(name: str) -> None:
    model, options = hfgen.mix_into(tiny.t5()), {"max_new_tokens": 12, **PENALTIES[name]}
    ids = tiny.prompt(2, 7)
    expected = model.generate(ids[1:, :4], **options)[0].tolist()
    for pad in {0, *expected}:
        padded = torch.stack([ids[0], torch.cat([ids[1, :4], torch.full((3,), pad)])])
        mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
        found = model.generate(padded, attention_mask=mask, **options)[1].tolist()
        assert found[: len(expected)] == expected


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize(
    "drafts",
    [{"prompt_lookup_num_tokens": 4}, {"num_assistant_tokens": 3}, {"assistant_early_exit": 1}],
    ids=["lookup", "assistant", "early exit"],
)
def test_drafts_change_nothing(model: Any, name: str, drafts: dict[str, Any]) -> None:
    options = dict(drafts)
    if "num_assistant_tokens" in drafts:
        options["assistant_model"] = hfgen.mix_into(tiny.llama(num_hidden_layers=1).eval())
    expected = generate(model, **PENALTIES[name])
    assert generate(model, **options, **PENALTIES[name]).tolist() == expected.tolist()
    first = tiny.prompt(3, 7)[:1]
    alone = model.generate(
        first, max_new_tokens=30, eos_token_id=None, pad_token_id=0, **options, **PENALTIES[name]
    )
    assert alone[0].tolist() == expected[0].tolist()


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize(
    "mode",
    [{"num_beams": 3}, {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}],
    ids=["beams", "groups"],
)
def test_beams_remember_their_own_past(
    model: Any, name: str, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = generate(model, **mode, **PENALTIES[name])
    assert ours.tolist() != generate(model, **mode).tolist()
    build = type(model)._get_logits_processor

    def forgetful(self: Any, *args: Any, **kwargs: Any) -> Any:
        processors = build(self, *args, **kwargs)
        for index, processor in enumerate(processors):
            if hasattr(processor, "reorder"):
                processors[index] = _Anew(lambda i=index: build(self, *args, **kwargs)[i])
        return processors

    monkeypatch.setattr(type(model), "_get_logits_processor", forgetful)
    assert generate(model, **mode, **PENALTIES[name]).tolist() == ours.tolist()


class _Anew(hfgen.logits.processors.repetition.LogitsProcessor):
    """A processor that is made for each call, and so remembers nothing."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.make()(input_ids, scores)


@pytest.mark.parametrize("name", PENALTIES)
def test_samples_of_one_prompt(model: Any, name: str) -> None:
    call: dict[str, Any] = {"do_sample": True, "top_k": 0, "seed": 5, "max_new_tokens": 15}
    ours = generate(model, **call, **PENALTIES[name], num_return_sequences=2)
    assert len(ours) == 6
    assert generate(model, **call, **PENALTIES[name])[0].tolist() == ours[0].tolist()


def test_an_encoder_decoder_counts_what_it_generates() -> None:
    model = hfgen.mix_into(tiny.t5().eval())
    out = model.generate(
        tiny.prompt(2, 7), max_new_tokens=20, presence_penalty=50.0, eos_token_id=None
    )
    for row in out[:, 1:].tolist():
        assert max(Counter(row).values()) == 1


def test_dry_without_a_tokenizer_says_what_is_missing(model: Any) -> None:
    with pytest.raises(ValueError, match=r"dry_sequence_breakers.*tokenizer"):
        generate(model, dry_multiplier=0.8)
    with pytest.raises(ValueError, match=r"dry_sequence_breakers.*has strings"):
        generate(model, dry_multiplier=0.8, dry_sequence_breakers=[3, "\n"])


def test_dry_with_a_tokenizer() -> None:
    model = hfgen.mix_into(tiny.llama(vocab_size=258).eval())
    tokenizer = tiny.byte_tokenizer()
    given = {"dry_multiplier": 3.0, "dry_allowed_length": 1, "tokenizer": tokenizer}
    expected = [tokenizer.encode(c)[0] for c in '\n:"*']
    ids = torch.randint(100, 120, (1, 40), generator=torch.Generator().manual_seed(0))
    call: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": None, "pad_token_id": 1}
    ours = model.generate(ids, **call, **given)
    assert torch.equal(ours, model.generate(ids, **call, **given, dry_sequence_breakers=expected))
    assistant = hfgen.mix_into(tiny.llama(vocab_size=258, num_hidden_layers=1).eval())
    drafted = model.generate(ids, **call, **given, assistant_model=assistant)
    assert torch.equal(ours, drafted)
