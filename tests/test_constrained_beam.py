"""Constrained beam search: against sums done by hand, by its rules, and on inputs it cannot take.

Against transformers 4.49: `tests/test_golden.py`.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteriaList

import hfgen
from hfgen import Constraint, DisjunctiveConstraint, PhrasalConstraint
from hfgen.decoding.strategies.constrained_beam import allocate
from tests import tiny
from tests.markov import Markov
from tests.test_bad_input import Untouched

FULL = {"return_dict_in_generate": True, "output_scores": True}
#: A phrase, a word or another, a phrase.
WORDS: list[Any] = [[60, 61], [[71, 72, 73], [70]], [80, 81, 82]]
#: What follows 1: nearly always 2. After 3 it is 4 as often as 2.
TABLE = [
    [0.2, 0.2, 0.2, 0.2, 0.2],
    [0.0, 0.0, 0.85, 0.1, 0.05],
    [0.0, 0.0, 0.9, 0.07, 0.03],
    [0.0, 0.0, 0.5, 0.1, 0.4],
    [0.0, 0.0, 0.7, 0.2, 0.1],
]


@pytest.fixture(params=["llama", "gpt2", "t5", "bart"])
def model(request: pytest.FixtureRequest) -> Any:
    return hfgen.mix_into(getattr(tiny, request.param)())


def holds(text: list[int], words: list[Any]) -> bool:
    """Whether ``text`` has each of the phrases, or one of the alternatives, without a gap."""

    def has(word: list[int]) -> bool:
        return any(text[start : start + len(word)] == word for start in range(len(text)))

    return all(any(map(has, word)) if isinstance(word[0], list) else has(word) for word in words)


def generated(model: Any, sequences: torch.Tensor, prompt: torch.Tensor) -> list[list[int]]:
    start = 1 if model.config.is_encoder_decoder else prompt.shape[1]
    return sequences[:, start:].tolist()


# --- by hand ------------------------------------------------------------------------------------


def test_a_forced_word_by_hand():
    output = Markov(TABLE).generate(
        torch.tensor([[1]]),
        num_beams=2,
        num_return_sequences=2,
        max_new_tokens=2,
        length_penalty=0.0,
        force_words_ids=[[4]],
        **FULL,
    )
    # 4 has a bank, and so a beam, for itself: 0.05 * 0.7. The other beam, 2, is forced: 0.85 * 0.03.
    assert output.sequences.tolist() == [[1, 4, 2], [1, 2, 4]]
    chances = output.sequences_scores.exp().tolist()
    assert [round(chance, 5) for chance in chances] == [0.035, 0.0255]


def test_a_longer_phrase_by_hand():
    output = Markov(TABLE).generate(
        torch.tensor([[1]]),
        num_beams=2,
        max_new_tokens=3,
        length_penalty=0.0,
        force_words_ids=[[4, 3]],
        **FULL,
    )
    # First 4 and 2, each forced on: 4, 3 and 2, 4. The best that they come to:
    # 0.05 * 0.2 * 0.5 with 4, 3, 2, and 0.85 * 0.03 * 0.2 with 2, 4, 3.
    assert output.sequences.tolist() == [[1, 2, 4, 3]]
    assert round(float(output.sequences_scores.exp()), 6) == 0.0051


def test_a_text_that_is_both_likely_and_forced_finishes_once():
    table = [[0.25] * 4, [0.0, 0.0, 0.6, 0.4], [0.0, 0.0, 0.3, 0.7], [0.25] * 4]
    output = Markov(table).generate(
        torch.tensor([[1]]),
        num_beams=2,
        num_return_sequences=2,
        max_new_tokens=3,
        length_penalty=0.0,
        early_stopping=True,
        force_words_ids=[[3]],
        stopping_criteria=StoppingCriteriaList([lambda ids, scores: ids[:, -1] == 3]),
    )
    assert output.tolist() == [[1, 2, 3], [1, 3, -1]]


def test_places_are_divided_among_banks():
    banks, scores = [0, 0, 1, 2, 1], [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert allocate(banks, scores, 3) == [3, 2, 0]
    assert allocate(banks, scores, 5) == [3, 2, 0, 4, 1]
    assert allocate(banks, [-1.0, -2.0, -torch.inf, -4.0, -5.0], 5) == [3, 4, 0, 1, 2]
    # Hundreds apart in score, which is not to outweigh a bank.
    assert allocate([2, 1, 1], [-500.0, -1.0, -2.0], 2) == [0, 1]


# --- constraints as objects ---------------------------------------------------------------------


def test_a_phrase_step_by_step():
    phrase = PhrasalConstraint([5, 6])
    assert phrase.does_advance(5)
    assert not phrase.does_advance(6)
    assert phrase.update(5) == (True, False, False)
    begun = phrase.copy(stateful=True)
    assert phrase.update(9) == (False, False, True)
    assert (phrase.advance(), phrase.remaining()) == (5, 2)
    assert (begun.advance(), begun.remaining()) == (6, 1)
    assert begun.copy().remaining() == 2
    assert begun.update(6) == (True, True, False)
    assert (begun.advance(), begun.remaining(), begun.completed) == (None, 0, True)
    begun.reset()
    assert begun.remaining() == 2
    with pytest.raises(TypeError, match="`token_id` has to be an int"):
        phrase.does_advance("5")  # type: ignore[arg-type]


def test_alternatives_step_by_step():
    either = DisjunctiveConstraint([[5, 6, 7], [5, 8], [9]])
    assert (either.advance(), either.remaining(), either.shortest) == ([5, 9], 3, 1)
    assert either.update(5) == (True, False, False)
    assert (either.advance(), either.remaining(), either.shortest) == ([6, 8], 2, 1)
    assert either.update(8) == (True, True, False)
    assert (either.advance(), either.remaining()) == (None, 0)


class AnyOf(Constraint):
    """``n`` tokens out of a set, in any order: one that a user would write."""

    def __init__(self, tokens: list[int], n: int) -> None:
        self.tokens, self.n, self.seen = tokens, n, 0
        super().__init__()

    def advance(self) -> list[int] | None:
        return list(self.tokens) if self.seen < self.n else None

    def does_advance(self, token_id: int) -> bool:
        return self.seen < self.n and token_id in self.tokens

    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        stepped = self.does_advance(token_id)
        self.seen += stepped
        return stepped, self.seen == self.n, False

    def reset(self) -> None:
        self.seen = 0

    def remaining(self) -> int:
        return self.n - self.seen

    def copy(self, stateful: bool = False) -> AnyOf:
        new = AnyOf(self.tokens, self.n)
        new.seen = self.seen if stateful else 0
        return new


class Duck:
    """A phrase without a base class; its copies share the list that ``update`` changes."""

    def __init__(self, token_ids: list[int], seen: list[int] | None = None) -> None:
        self.token_ids, self.seen = token_ids, [] if seen is None else seen
        self.seqlen = len(token_ids)

    def advance(self) -> int | None:
        return None if self.remaining() == 0 else self.token_ids[len(self.seen)]

    def does_advance(self, token_id: int) -> bool:
        return token_id == self.advance()

    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        if not self.does_advance(token_id):
            self.seen = []
            return False, False, True
        self.seen.append(token_id)
        return True, self.remaining() == 0, False

    def remaining(self) -> int:
        return len(self.token_ids) - len(self.seen)

    def copy(self, stateful: bool = False) -> Duck:
        return type(self)(self.token_ids, self.seen if stateful else None)


def test_constraints_of_ones_own(model):
    ids = tiny.prompt()
    constraints = [AnyOf([50, 51, 52], 3), PhrasalConstraint([60, 61])]
    output = model.generate(ids, constraints=constraints, num_beams=4, max_new_tokens=10)
    for text in generated(model, output, ids):
        assert sum(token in (50, 51, 52) for token in text) >= 3
        assert holds(text, [[60, 61]])
    assert [constraint.remaining() for constraint in constraints] == [3, 2]


def test_a_duck_is_as_good_as_a_phrase(model):
    ids = tiny.prompt()
    options: dict[str, Any] = {"num_beams": 4, "max_new_tokens": 10, "num_return_sequences": 2}
    ducks = model.generate(ids, constraints=[Duck([60, 61]), Duck([80, 81, 82])], **options)
    phrases = model.generate(ids, force_words_ids=[[60, 61], [80, 81, 82]], **options)
    assert ducks.tolist() == phrases.tolist()


def test_constraints_of_both_arguments_and_of_a_config():
    model, ids = hfgen.mix_into(tiny.llama()), tiny.prompt()
    config = GenerationConfig(
        constraints=[PhrasalConstraint([60, 61])],
        force_words_ids=[[80]],
        num_beams=3,
        max_new_tokens=8,
        eos_token_id=2,
        pad_token_id=0,
    )
    for _ in range(2):
        output = model.generate(ids, generation_config=config)
        assert all(holds(text, [[60, 61], [80]]) for text in generated(model, output, ids))
    assert len(config.constraints) == 1


# --- searches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("max_new_tokens", [6, 16])
def test_every_sequence_that_is_returned_meets_the_constraints(
    model, early_stopping, max_new_tokens
):
    ids = tiny.prompt(3)
    output = model.generate(
        ids,
        force_words_ids=WORDS,
        num_beams=4,
        num_return_sequences=4 if max_new_tokens == 16 else 1,
        max_new_tokens=max_new_tokens,
        early_stopping=early_stopping,
        eos_token_id=list(range(2, 60, 3)),
        **FULL,
    )
    texts = generated(model, output.sequences, ids)
    assert all(holds(text, WORDS) for text in texts)
    lengths = (output.beam_indices >= 0).sum(dim=1)
    scores = model.compute_transition_scores(output.sequences, output.scores, output.beam_indices)
    torch.testing.assert_close(output.sequences_scores, scores.sum(dim=1) / lengths)
    n = len(texts) // 3
    for start in range(0, len(texts), n):
        assert len({tuple(text) for text in texts[start : start + n]}) == n


def test_two_beams_and_three_alternatives_suffice():
    # By the rules of allocation alone, what meets the constraints is lost before the end.
    model, ids = hfgen.mix_into(tiny.gpt2()), tiny.prompt(6)
    words = [[[60, 61, 60], [62, 63, 64], [65, 66, 67]]]
    for length in range(3, 12):
        output = model.generate(ids, force_words_ids=words, num_beams=2, max_new_tokens=length)
        assert all(holds(text, words) for text in generated(model, output, ids))


def test_a_word_of_the_prompt_does_not_count(model):
    ids = tiny.prompt()
    ids[:, 2:4] = torch.tensor([60, 61])
    output = model.generate(ids, force_words_ids=[[60, 61]], num_beams=3, max_new_tokens=8)
    assert all(holds(text, [[60, 61]]) for text in generated(model, output, ids))


def test_a_forced_eos_leaves_room():
    model, ids = hfgen.mix_into(tiny.bart()), tiny.prompt()
    options: dict[str, Any] = {"num_beams": 3, "forced_eos_token_id": 2, "eos_token_id": 2}
    output = model.generate(ids, force_words_ids=[[60, 61, 62]], max_new_tokens=4, **options)
    assert output[:, 1:].tolist() == [[60, 61, 62, 2]] * 2


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2, tiny.bart])
def test_a_row_of_a_padded_batch_is_as_alone(build):
    model = hfgen.mix_into(build())
    ids = tiny.prompt(3, 8)
    mask = torch.ones_like(ids)
    is_right = model.config.is_encoder_decoder
    for row, pads in ((1, 3), (2, 5)):
        padding = slice(8 - pads, None) if is_right else slice(pads)
        ids[row, padding], mask[row, padding] = 0, 0
    options: dict[str, Any] = {
        "force_words_ids": WORDS,
        "num_beams": 4,
        "num_return_sequences": 2,
        "max_new_tokens": 14,
        "eos_token_id": list(range(2, 60, 3)),
    }
    prompt = 0 if is_right else 8
    together = model.generate(ids, attention_mask=mask, **options)[:, prompt:]
    for row in range(3):
        alone = model.generate(ids[row][mask[row].bool()][None], **options)
        alone = alone[:, 0 if is_right else int(mask[row].sum()) :]
        assert together[2 * row : 2 * row + 2, : alone.shape[1]].tolist() == alone.tolist()
        assert (together[2 * row : 2 * row + 2, alone.shape[1] :] == 0).all()


@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"use_cache": False}])
def test_the_kind_of_cache_makes_no_difference(model, options):
    ids = tiny.prompt(2)
    shared = {"force_words_ids": WORDS, "num_beams": 4, "max_new_tokens": 9}
    assert (
        model.generate(ids, **shared, **options).tolist() == model.generate(ids, **shared).tolist()
    )


def test_a_criterion_ends_only_what_meets_the_constraints(model):
    def at_small(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        return ids[:, -1] < 30

    ids = tiny.prompt(2)
    output = model.generate(
        ids,
        force_words_ids=[[60, 61], [70, 12]],  # the second ends a hypothesis itself
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=10,
        eos_token_id=None,
        stopping_criteria=StoppingCriteriaList([at_small]),
        **FULL,
    )
    lengths = (output.beam_indices >= 0).sum(dim=1).tolist()
    texts = generated(model, output.sequences, ids)
    assert len(set(map(tuple, texts[:4]))) == 4
    for text, length in zip(texts, lengths, strict=True):
        assert holds(text, [[60, 61], [70, 12]])
        assert all(token >= 30 for token in text[: length - 1])
        assert text[length - 1] == 12


def test_a_token_that_is_ruled_out_is_not_forced(caplog):
    model, ids = hfgen.mix_into(tiny.llama()), tiny.prompt(1)
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 6, "num_return_sequences": 3}
    with caplog.at_level(logging.WARNING, logger="transformers"):
        logging.getLogger("transformers").propagate = True
        output = model.generate(
            ids, force_words_ids=[[60]], suppress_tokens=[60], **options, **FULL
        )
    assert 60 not in output.sequences
    assert output.sequences_scores.isfinite().all()


# --- what cannot be searched for ----------------------------------------------------------------

MALFORMED: list[Any] = [[], [[]], [5], [[5, -1]], [[5, "a"]], [[[5], []]], [[[5], 6]], (5,), "hat"]


@pytest.mark.parametrize("words", MALFORMED, ids=str)
def test_malformed_words(words):
    untouched = Untouched()
    with pytest.raises(ValueError, match="`force_words_ids` has to be a non-empty list of phrases"):
        untouched.model.generate(tiny.prompt(), force_words_ids=words, num_beams=2)
    untouched.check()


BAD: list[Any] = [
    ({"num_beams": 1}, "`force_words_ids` needs beams to search with: `num_beams` has to be at"),
    ({"do_sample": True}, "`force_words_ids` asks for constrained beam search, which does not"),
    ({"num_beam_groups": 2}, "`force_words_ids` and `num_beam_groups` (=2) do not go together"),
    ({"force_words_ids": [[5, 97]]}, "asks for the token 97, but the model's vocabulary has the"),
    ({"force_words_ids": [[[5, 6], [5]]]}, "begins another, or is there twice: [[5, 6], [5]]"),
    ({"force_words_ids": [[[5], [5]]]}, "begins another, or is there twice: [[5], [5]]"),
    ({"force_words_ids": None, "constraints": []}, "`constraints` is an empty list"),
    (
        {"force_words_ids": [[5, 6, 7], [[8], [9, 10]], [11]]},
        "take at least 5 tokens, but at most 4",
    ),
    (
        {"forced_eos_token_id": 2, "force_words_ids": [[5, 6, 7, 8]]},
        "take at least 4 tokens, but at most 4 are to be generated, one of which is `forced_eos_token_id`",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD)
@pytest.mark.parametrize("build", [tiny.llama, tiny.t5])
def test_bad_input(build, options, message):
    untouched = Untouched(build)
    defaults = {"num_beams": 3, "max_new_tokens": 4, "force_words_ids": [[5, 6]]}
    with pytest.raises(ValueError, match=re.escape(message)):
        untouched.model.generate(tiny.prompt(), **defaults | options)
    untouched.check()


def test_a_length_of_the_whole_that_leaves_too_little():
    untouched = Untouched()
    with pytest.raises(ValueError, match="take at least 4 tokens, but at most 3 are to be"):
        untouched.model.generate(
            tiny.prompt(2, 7), force_words_ids=[[5, 6, 7, 8]], num_beams=2, max_length=10
        )
    untouched.check()


class Stuck(Duck):
    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        return True, False, False


class Contrary(Duck):
    def does_advance(self, token_id: int) -> bool:
        return False


@pytest.mark.parametrize(
    ("error", "constraints", "message"),
    [
        (TypeError, PhrasalConstraint([5]), "`constraints` has to be a list of constraints"),
        (TypeError, [[5, 6]], "has no advance(), does_advance(), update(), remaining()"),
        (ValueError, [Stuck([5])], "Stuck is not met after 10000 tokens of its advance()"),
        (ValueError, [Contrary([5])], "names the token 5, but does_advance() denies it"),
        (ValueError, [Duck([5, 200])], "asks for the token 200"),
    ],
)
def test_objects_that_are_no_constraints(error, constraints, message):
    untouched = Untouched()
    with pytest.raises(error, match=re.escape(message)):
        untouched.model.generate(
            tiny.prompt(), constraints=constraints, num_beams=2, max_new_tokens=4
        )
    untouched.check()


def test_a_class_that_cannot_be_met_is_refused_when_it_is_made():
    with pytest.raises(ValueError, match="AnyOf is not met, but its advance"):
        AnyOf([], 2)
    for wrong in ([], [-1], "ab", [[5]]):
        with pytest.raises(ValueError, match="`token_ids` has to be a non-empty list"):
            PhrasalConstraint(wrong)  # type: ignore[arg-type]
    for wrong in ([], [5], [[]], "ab"):
        with pytest.raises(ValueError, match="`nested_token_ids` has to be a non-empty list"):
            DisjunctiveConstraint(wrong)  # type: ignore[arg-type]
