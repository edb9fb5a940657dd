"""Log-likelihoods of continuations: those of whole forwards, with common prefixes forwarded once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import hfgen
from hfgen.families import selects_keys
from hfgen.running import prompt_logits, shared_prefix
from hfgen.tools.evaluate import continuations
from hfgen.tools.evaluate.continuations import Likelihoods, Pair
from tests import tiny
from tests.parity.decoder_families import DECODER_FAMILIES

Found = dict[int, tuple[float, bool]]


@pytest.fixture(scope="module")
def llama() -> Any:
    return hfgen.mix_into(tiny.llama())


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and columns of each forward."""
    found: list[tuple[int, int]] = []
    original = shared_prefix.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        forwarded = original(*args, **kwargs)
        found.append(tuple(forwarded.ids.shape))
        return forwarded

    monkeypatch.setattr(shared_prefix, "forward", forward)
    return found


def tokens(draw: random.Random, n: int) -> list[int]:
    return [draw.randrange(5, 90) for _ in range(n)]


def questions(examples: int, lengths: Sequence[int], answers: Sequence[int]) -> list[Pair]:
    """Questions of ``lengths`` behind the same examples, each with answers of as many tokens."""
    draw = random.Random(0)
    begin = tokens(draw, examples)
    contexts = [begin + tokens(draw, n) for n in lengths]
    return [(context, tokens(draw, n)) for context in contexts for n in answers]


def alone(model: Any, pairs: Sequence[Pair], max_length: int = 64) -> Found:
    """What a forward of each pair by itself says."""
    found: Found = {}
    for number, (context, continuation) in enumerate(pairs):
        ids = torch.tensor([(context + continuation)[-(max_length + 1) :]])
        n, expected = len(continuation), torch.tensor(continuation)
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits[0, -n:]
        logprobs = logits.float().log_softmax(dim=-1)[range(n), expected]
        found[number] = float(logprobs.sum()), bool((logits.argmax(dim=-1) == expected).all())
    return found


def likelihoods(model: Any, pairs: Sequence[Pair], max_length: int = 64, **options: Any) -> Found:
    parts = list(Likelihoods(model, max_length, **options).of(pairs))
    assert sum(map(len, parts)) == len(pairs)
    return {number: answer for part in parts for number, answer in part.items()}


def check(found: Found, expected: Found, rel: float = 1e-4, least: float = 1e-6) -> None:
    assert sorted(found) == sorted(expected)
    for number, (value, is_greedy) in found.items():
        assert value == pytest.approx(expected[number][0], rel=rel, abs=least)
        assert is_greedy == expected[number][1]


def mixed_lengths(model: Any) -> list[Pair]:
    """Pairs of all kinds: shared contexts, the same text in two ways, too long, and greedy ones."""
    draw = random.Random(1)
    pairs = questions(20, [5, 9, 14], (1, 3, 1, 2)) + questions(0, [3, 7], (4, 1))
    context, long = tokens(draw, 6), tokens(draw, 80)
    with torch.no_grad():
        greedy = model.generate(torch.tensor([context]), max_new_tokens=4, do_sample=False)
    greedy = greedy[0, len(context) :].tolist()
    pairs += [(context, greedy[:n]) for n in (1, 2, 3)] + [(context + greedy[:1], greedy[1:3])]
    pairs += [([5], tokens(draw, 64)), (long, [7]), (long, [8]), (long[:60], tokens(draw, 9))]
    return [*pairs, ([5], tokens(draw, 12)), pairs[0]]


@pytest.mark.parametrize("batch_size", [None, 1, 3])
@pytest.mark.parametrize("n_tokens", [8192, 100])
def test_they_are_those_of_whole_forwards(
    llama: Any, monkeypatch: pytest.MonkeyPatch, n_tokens: int, batch_size: int | None
) -> None:
    monkeypatch.setattr(continuations, "TOKENS", n_tokens)
    monkeypatch.setattr(continuations, "HELD", 1)
    monkeypatch.setattr(continuations, "WORTH", 0 if n_tokens == 100 else 4)
    monkeypatch.setattr(prompt_logits, "POSITIONS", 3)  # the head gets several pieces
    for model in (llama, hfgen.mix_into(tiny.gpt2())):
        pairs = mixed_lengths(model)
        expected = alone(model, pairs)
        assert {True, False} == {is_greedy for _, is_greedy in expected.values()}
        check(likelihoods(model, pairs, batch_size=batch_size), expected)
    assert list(Likelihoods(llama, 64, batch_size).of([])) == []


def test_a_context_is_forwarded_once(llama: Any, shapes: list[tuple[int, int]]) -> None:
    pairs = questions(0, [30, 28, 20], (3, 2, 4, 2))
    check(likelihoods(llama, pairs), alone(llama, pairs))
    # The contexts in one batch; then what the answers have before their last tokens.
    assert shapes == [(3, 30), (12, 3)]


def test_answers_of_one_token_need_their_context_alone(
    llama: Any, shapes: list[tuple[int, int]]
) -> None:
    pairs = questions(0, [30, 28], (1, 1, 1, 1))
    check(likelihoods(llama, pairs), alone(llama, pairs))
    assert shapes == [(2, 30)]


def test_examples_are_forwarded_once(
    llama: Any, shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = questions(40, [9, 8, 7, 6], (3, 1)) + questions(0, [9], (2,))
    monkeypatch.setattr(continuations, "ON_CPU", 30)
    check(likelihoods(llama, pairs), alone(llama, pairs))
    assert shapes == [(1, 10), (1, 40), (4, 9), (4, 2)]
    monkeypatch.setattr(continuations, "ON_CPU", 31)  # four of them are more than is saved
    shapes.clear()
    check(likelihoods(llama, pairs), alone(llama, pairs))
    assert shapes[0] == (4, 49)


def test_padding_is_limited(
    llama: Any, shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = questions(0, [40, 38, 20, 19, 5], (1,))
    monkeypatch.setattr(continuations, "ON_CPU", 4)
    check(likelihoods(llama, pairs), alone(llama, pairs))
    assert shapes == [(2, 40), (2, 20), (1, 5)]
    shapes.clear()
    likelihoods(llama, pairs, batch_size=1)
    assert [rows for rows, _ in shapes] == [1] * 5


def test_bfloat16_and_the_dtype_of_the_softmax(llama: Any) -> None:
    model = hfgen.mix_into(tiny.llama()).to(torch.bfloat16)
    pairs = questions(0, [12, 9], (3, 1, 2))
    found = likelihoods(model, pairs)
    check({n: (value, False) for n, (value, _) in found.items()}, unflagged(model, pairs), rel=0.05)
    rounded = likelihoods(model, pairs, dtype=torch.bfloat16)
    values = {number: value for number, (value, _) in rounded.items()}
    assert values != {number: value for number, (value, _) in found.items()}
    one = torch.tensor([value for number, value in values.items() if len(pairs[number][1]) == 1])
    assert one.equal(one.bfloat16().float())


def unflagged(model: Any, pairs: Sequence[Pair]) -> Found:
    return {number: (value, False) for number, (value, _) in alone(model, pairs).items()}


# Every fourth, and all kinds of caches and of positions.
OTHERS = {"bloom", "gemma2", "gemma3n_text", "gpt_neo", "mamba", "mpt", "opt", "qwen2_sliding"}
SOME = [f for i, f in enumerate(DECODER_FAMILIES) if i % 4 == 0 or f.name in OTHERS]


#: With these, what follows a text in a padded batch counts, for `hf` as well.
NOT_PADDED = {"cpmant", "prophetnet", "xlnet"}


@pytest.mark.parametrize("family", SOME, ids=str)
def test_families(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the families' sliding windows of 6 tokens; first without a common prefix of all, then with one."""
    pairs = questions(9, [4, 11, 7], (1, 3, 1, 2))
    model = hfgen.mix_into(family.build())
    expected = alone(model, pairs, 100)
    is_padded = family.name not in NOT_PADDED and not selects_keys(model)
    for cost in (1000, 2):
        monkeypatch.setattr(continuations, "ON_CPU", cost)
        found = likelihoods(model, pairs, 100, batch_size=None if is_padded else 1)
        check(found, expected, least=1e-2)  # `hrm_text` amplifies rounding


def test_which_models_share_prefixes() -> None:
    families = {family.name: family for family in DECODER_FAMILIES}
    expected = dict.fromkeys(("llama", "gemma2", "gpt2", "deepseek_v3"), True)
    expected |= dict.fromkeys(("bloom", "deepseek_v32", "openai-gpt", "roberta", "mamba"), False)
    for name, may_share in expected.items():
        model = hfgen.mix_into(families[name].build())
        assert shared_prefix.may_share(model, 64) == may_share, name
    model.train()
    assert not shared_prefix.may_share(model, 64)


def test_a_body_that_is_not_seen(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the model makes all logits, and nothing is in the cache twice."""
    pairs = questions(0, [12, 9], (3, 1, 2))
    expected = alone(llama, pairs)
    monkeypatch.setattr(prompt_logits.Body, "covers", lambda self, ids: False)
    check(likelihoods(llama, pairs), expected)
    monkeypatch.setattr(prompt_logits.families, "has_plain_head", lambda model: False)
    check(likelihoods(llama, pairs), expected)
