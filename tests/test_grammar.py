"""Grammars: what they allow, beside what they may be used with, and what is refused."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from typing import Any

import jsonschema
import pydantic
import pytest
import torch
from transformers import AddedToken, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

import hfgen
from hfgen import grammar as G
from hfgen.logits.grammar import llguidance as backend
from hfgen.logits.grammar.follower import Follower
from hfgen.logits.grammar.llguidance import library_of
from hfgen.logits.grammar.processor import GrammarProcessor, as_limits
from tests import tiny
from tests.parity import grammars as sweep
from tests.parity.decoder_families import seeded

PROMPTS = ("def is_even(number):\n", "import os\n\nprint(", "x = {", "class Parser:\n    ")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
KEYS = {
    "type": "object",
    "properties": {f"the_key_with_the_number_{i}": {"type": "boolean"} for i in range(4)},
    "required": [f"the_key_with_the_number_{i}" for i in range(4)],
    "additionalProperties": False,
}
PERSONS = G.json(PERSON, whitespace=False)


class Pair(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    left: int = pydantic.Field(ge=0, le=99)
    right: bool


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return hfgen.builtin_model()


def generate(loaded: tuple[Any, Any], prompts: Any = PROMPTS, **options: Any) -> Any:
    """What a call with the built-in model returns."""
    model, tokenizer = loaded
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True)
    return model.generate(**inputs, **{"tokenizer": tokenizer, "max_new_tokens": 80} | options)


def texts(loaded: tuple[Any, Any], output: Any, prompts: Any = PROMPTS) -> list[str]:
    """The generated text of each row; an assertion error if one was cut off."""
    tokenizer = loaded[1]
    length = tokenizer(list(prompts), return_tensors="pt", padding=True).input_ids.shape[1]
    rows = getattr(output, "sequences", output)[:, length:].tolist()
    eos = tokenizer.eos_token_id
    assert all(eos in row for row in rows)
    return [tokenizer.decode(row[: row.index(eos)]) for row in rows]


def assert_persons(found: list[str]) -> None:
    for text in found:
        jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize(
    ("grammar", "is_right"),
    [
        (G.choice(["yes", "no"]), lambda text: text in ("yes", "no")),
        (G.choice(['say "ü"\n', "\\d", "😀"]), lambda text: text in ('say "ü"\n', "\\d", "😀")),
        (G.regex(r"[a-z]{2,5}-\d{3}"), re.compile(r"[a-z]{2,5}-\d{3}").fullmatch),
        (G.lark('start: "<" word ">"\nword: /[a-z]{1,9}/'), re.compile("<[a-z]{1,9}>").fullmatch),
        (G.json(json.dumps({"enum": [1, "é"]})), lambda text: json.loads(text) in (1, "é")),
        (G.json(Pair, whitespace=False), Pair.model_validate_json),
        (G.json(Pair, whitespace=" ?"), lambda text: "\n" not in text and json.loads(text)),
        (G.json(Pair, whitespace=False), lambda text: " " not in text and json.loads(text)),
    ],
    ids=["choice", "odd choice", "regex", "lark", "text", "pydantic", "one space", "compact"],
)
@pytest.mark.parametrize("do_sample", [False, True])
def test_each_kind(loaded, grammar, is_right, do_sample):
    output = generate(loaded, grammar=grammar, do_sample=do_sample, temperature=3.0, top_k=0)
    assert all(map(is_right, texts(loaded, output)))


def test_any_object(loaded):
    grammar = G.json_object(whitespace=False)
    found = generate(loaded, grammar=grammar, do_sample=True, max_new_tokens=100, top_k=5)
    tokens = found.tolist()
    ended = [row for row in tokens if loaded[1].eos_token_id in row[-100:]]
    assert ended
    for row in ended:
        text = loaded[1].decode(row, skip_special_tokens=True)
        prompt = next(prompt for prompt in PROMPTS if text.startswith(prompt))
        assert isinstance(json.loads(text.removeprefix(prompt)), dict)


def test_random_schemas_are_kept():
    outcomes = sweep.run(seed=7, count=sweep.ROWS, max_new_tokens=120)
    assert [outcome for outcome in outcomes if outcome.is_wrong] == []
    n_valid = sum(outcome.what == "valid" for outcome in outcomes)
    assert n_valid >= 6
    assert any('"' in outcome.text for outcome in outcomes)


def test_the_judge_of_schemas_tells_right_from_wrong():
    assert sweep.judge(PERSON, '{"name": "x", "age": 3, "tags": []}', True).what == "valid"
    assert sweep.judge(PERSON, '{"name": "x", "age": 300, "tags": []}', True).is_wrong
    assert sweep.judge(PERSON, '{"name": "x",', True).is_wrong
    assert sweep.judge(PERSON, '{"name": "x",', False).what == "cut off"


# Rows


def test_a_row_is_its_own_call(loaded):
    grammars = [PERSONS, None, G.choice(["yes", "no"]), G.regex(r"\d+\.\d\d")]
    output = generate(loaded, grammar=grammars, max_new_tokens=24)
    for row, (prompt, grammar) in enumerate(zip(PROMPTS, grammars, strict=True)):
        alone = generate(loaded, [prompt], grammar=grammar, max_new_tokens=24)[0]
        own = output[row, output.shape[1] - 24 :][: len(alone)]
        n_prompt = len(loaded[1](prompt).input_ids)
        alone = alone[n_prompt:].tolist()
        assert own[: len(alone)].tolist() == alone


def test_rows_without_a_grammar_are_as_in_a_call_without(loaded):
    given = [None, PERSONS, None, PERSONS]
    mixed = generate(loaded, grammar=given, max_new_tokens=20)
    free = generate(loaded, max_new_tokens=20)
    assert torch.equal(mixed[::2], free[::2])
    assert not torch.equal(mixed[1::2], free[1::2])


def test_samples_of_a_prompt(loaded):
    output = generate(
        loaded, grammar=PERSONS, do_sample=True, temperature=4.0, num_return_sequences=3
    )
    found = texts(loaded, output)
    assert_persons(found)
    assert len(set(found)) > 8


def test_seeded_rows_do_not_depend_on_their_neighbours(loaded):
    options = {"do_sample": True, "temperature": 2.0, "seed": [5, 6, 7, 8]}
    together = texts(loaded, generate(loaded, grammar=PERSONS, **options))
    assert_persons(together)
    alone = generate(loaded, PROMPTS[2:3], grammar=PERSONS, do_sample=True, temperature=2.0, seed=7)
    assert texts(loaded, alone, PROMPTS[2:3]) == together[2:3]


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 4},
        {"num_beams": 3, "do_sample": True, "temperature": 2.0, "top_k": 0},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
        {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0},
        {"num_beams": 4, "drop_finished": True},
    ],
    ids=["beams", "sampled", "groups", "early", "dropped"],
)
def test_beams(loaded, options):
    """Each returned beam is in the grammar, and no state was taken from another beam."""
    n = options["num_beams"]
    output = generate(loaded, PROMPTS[:2], grammar=PERSONS, num_return_sequences=n, **options)
    assert_persons(texts(loaded, output, PROMPTS[:2]))


def test_beams_of_few_texts(loaded):
    """Fewer texts than beams: those that there are come first."""
    output = generate(
        loaded,
        grammar=G.choice(["yes", "no"]),
        num_beams=4,
        num_return_sequences=2,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = texts(loaded, output)
    assert all({*pair} <= {"yes", "no"} for pair in zip(found[::2], found[1::2], strict=True))
    assert (output.sequences_scores > -100).any()


def test_sequences_that_a_search_has_not_found_are_unfinished(loaded):
    options = {"num_beams": 4, "num_return_sequences": 4, "do_sample": True, "top_k": 1}
    options |= {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 4}
    output = generate(loaded, PROMPTS[:1], grammar=G.choice(["a", "b"]), **options)
    is_found = [score > -1e6 for score in output.sequences_scores.tolist()]
    assert 0 < sum(is_found) < 4
    assert output.finish_reasons == ["eos" if found else "unfinished" for found in is_found]


@pytest.mark.parametrize("seed", range(3))
def test_beams_of_few_texts_do_not_see_what_ends_their_neighbours(loaded, seed):
    """With fewer texts than beams, hypotheses are left over whose scores are equal."""
    model, tokenizer = loaded
    asked = {
        "num_beams": 3,
        "num_return_sequences": 3,
        "do_sample": True,
        "top_p": 0.5,
        "early_stopping": True,
        "length_penalty": 2.0,
        "max_new_tokens": 12,
        "return_dict_in_generate": True,
        "output_scores": True,
        "tokenizer": tokenizer,
    }
    choice = G.choice(["int", "float", "complex"])
    prompts = ["def add(a, b):\n    return", "import os\nclass A:\n    def f("]
    alone = tokenizer(prompts[:1], return_tensors="pt")
    both = tokenizer(prompts, return_tensors="pt", padding=True)
    expected = model.generate(**alone, **asked, seed=seed, grammar=choice)
    rows = {"seed": [seed, 7], "grammar": [choice, None], "stop_token_ids": [None, [1413, 268]]}
    output = model.generate(**both, **asked, **rows)
    assert output.texts[:3] == expected.texts
    torch.testing.assert_close(output.sequences_scores[:3], expected.sequences_scores)


def test_beams_of_one_prompt_find_the_likeliest_text(loaded):
    """By hand: the scores of both texts, as the masked and normalised model gives them."""
    grammar, prompt = G.regex("[ab]{3}"), PROMPTS[:1]
    options = {"renormalize_logits": True, "return_dict_in_generate": True, "output_scores": True}
    best = generate(loaded, prompt, grammar=grammar, num_beams=16, length_penalty=0.0, **options)
    (text,) = texts(loaded, best, prompt)
    drawn = generate(
        loaded, prompt, grammar=grammar, do_sample=True, num_return_sequences=64, **options
    )
    found = texts(loaded, drawn, prompt)
    eos = loaded[1].eos_token_id
    tokens = drawn.sequences[:, -len(drawn.scores) :]
    log_probs = torch.stack(drawn.scores, dim=1).log_softmax(-1).gather(2, tokens[:, :, None])
    ended = (tokens == eos).cumsum(dim=1) - (tokens == eos).int() > 0
    totals = log_probs.squeeze(2).masked_fill(ended, 0).sum(dim=1)
    likeliest = int(totals.argmax())
    assert float(best.sequences_scores[0]) >= float(totals[likeliest]) - 1e-3
    assert re.fullmatch("[ab]{3}", text)
    assert set(map(len, found)) == {3}


# Drafts


class Babble:
    """Drafts of random tokens, of which hardly one is in a grammar."""

    def __init__(self, vocab: int = 2048) -> None:
        self.vocab, self.generator = vocab, torch.Generator().manual_seed(0)

    def draft(self, context: hfgen.DraftContext) -> hfgen.Draft:
        shape = (len(context.known), min(context.n_tokens, 5))
        return hfgen.Draft(torch.randint(0, self.vocab, shape, generator=self.generator))

    def observe(self, verdict: hfgen.Acceptance) -> None:
        pass


DRAFTING: dict[str, Any] = {
    "forced": lambda: {"assistant_model": hfgen.ForcedTokens()},
    "lookup": lambda: {"prompt_lookup_num_tokens": 6},
    "assistant": lambda: {"assistant_model": hfgen.builtin_model(draft=True)[0]},
    "early exit": lambda: {"assistant_early_exit": 1},
    "babble": lambda: {"assistant_model": Babble()},
}


@cache
def plainly(grammars: tuple[Any, ...], prompts: tuple[str, ...], **options: Any) -> torch.Tensor:
    """What a plain call returns, which other ways to decode are compared with."""
    return generate(hfgen.builtin_model(), prompts, grammar=[*grammars], **options)


@pytest.mark.parametrize("name", DRAFTING)
def test_drafts_change_no_token(loaded, name):
    grammars = (PERSONS, G.json(KEYS), None, G.regex("(ab){6,20}c"))
    for rows in (slice(4), slice(1)):
        given, prompts = grammars[rows], PROMPTS[rows]
        drafted = generate(loaded, prompts, grammar=[*given], max_new_tokens=32, **DRAFTING[name]())
        assert torch.equal(drafted, plainly(given, prompts, max_new_tokens=32))


@pytest.mark.parametrize("name", DRAFTING)
def test_drafted_samples_are_in_the_grammar(loaded, name):
    options = {"do_sample": True, "temperature": 2.0, "grammar": PERSONS, **DRAFTING[name]()}
    assert_persons(texts(loaded, generate(loaded, PROMPTS[:1], **options), PROMPTS[:1]))
    drafted = generate(loaded, PROMPTS[:2], **options, seed=3)
    assert_persons(texts(loaded, drafted, PROMPTS[:2]))
    plain = plainly((PERSONS,) * 2, PROMPTS[:2], do_sample=True, temperature=2.0, seed=3)
    assert torch.equal(drafted, plain)


def test_forced_tokens_save_forwards(loaded):
    output = generate(
        loaded,
        grammar=G.json(KEYS, whitespace=False),
        assistant_model=hfgen.ForcedTokens(),
        output_speculation=True,
        return_dict_in_generate=True,
        num_assistant_tokens=40,
    )
    statistics = output.speculation
    assert statistics.acceptance_rate > 0.9
    assert statistics.forwards < 0.3 * statistics.generated / len(PROMPTS)


def test_forced_tokens_and_drafts_are_offered_together(loaded):
    """Where nothing is forced, the other drafter is asked; what is not allowed is cut off."""
    options = {"grammar": G.json(KEYS), "output_speculation": True, "return_dict_in_generate": True}
    babble = Babble()
    drafted = generate(loaded, assistant_model=babble, **options).speculation
    assert drafted.acceptance_rate > 0.7  # of random tokens alone it would be next to nothing
    asked = babble.generator.get_state()
    assert not torch.equal(asked, torch.Generator().manual_seed(0).get_state())


# Following


def followed(loaded: tuple[Any, Any], starts: list[Any], n_prompts: int = 1) -> Follower:
    tokenizer = loaded[1]
    library = library_of(tokenizer)
    matchers = [grammar and library.matcher(grammar) for grammar in starts]
    eos = [frozenset([tokenizer.eos_token_id])] * len(starts)
    return Follower(matchers, eos, [2] * len(starts), library.n_tokens)


def masks(loaded: tuple[Any, Any], follower: Follower, ids: torch.Tensor) -> torch.Tensor:
    library = library_of(loaded[1])
    processor = GrammarProcessor(library, follower)
    return processor(ids, torch.zeros(len(ids), 2048))


def test_a_row_is_followed_wherever_it_goes(loaded):
    """Longer, shorter, into what is no text, back, and as another row's continuation: as afresh."""
    follower = followed(loaded, [PERSONS, G.regex("[a-c]+x?")])
    tokenizer, generator = loaded[1], torch.Generator().manual_seed(1)
    good = ['{"name":"abc","age":12,"tags":["a"]}', "abcabcx"]
    rows = [[7, 7, *tokenizer(text).input_ids, tokenizer.eos_token_id, 1, 1] for text in good]
    n_checked = 0
    for _ in range(60):
        length = int(torch.randint(2, min(map(len, rows)) + 1, (), generator=generator))
        ids = torch.tensor([row[:length] for row in rows]).repeat_interleave(2, dim=0)
        if length > 3 and torch.rand((), generator=generator) < 0.5:  # a draft that is wrong
            ids[0, -1] = 900
        if torch.rand((), generator=generator) < 0.3:
            ids = ids[[1, 0, 3, 2]]
        found = masks(loaded, follower, ids)
        afresh = followed(loaded, [PERSONS, G.regex("[a-c]+x?")])
        assert torch.equal(found, masks(loaded, afresh, ids))
        n_checked += int((found == -torch.inf).any())
    assert n_checked > 30


def test_beams_go_on_from_their_parents(loaded):
    """Rows that swap and fork: no text is followed from its beginning again."""
    follower = followed(loaded, [G.regex("[a-z]{2,30}")])
    tokenizer = loaded[1]
    a, b = tokenizer("a").input_ids[0], tokenizer("b").input_ids[0]
    ids = torch.tensor([[7, 7, a], [7, 7, b], [7, 7, b]])
    follower.follow(ids)
    seen: list[int] = []
    original = follower.consume

    def consume(row: Any, tokens: list[int]) -> int:
        seen.append(len(tokens))
        return original(row, tokens)

    follower.consume = consume  # type: ignore[method-assign]
    for parents in ([1, 0, 0], [2, 1, 0], [0, 0, 0]):
        ids = torch.cat([ids[parents], torch.tensor([[a], [b], [b]])], dim=1)
        rows = follower.follow(ids)
        assert [row.n_consumed for row in rows] == [ids.shape[1] - 2] * 3
    assert set(seen) == {1}


def test_a_copy_of_a_processor_goes_its_own_way(loaded):
    follower = followed(loaded, [G.regex("abc|abd")])
    ids = torch.tensor([[7, 7, *loaded[1]("a").input_ids]])
    before = masks(loaded, follower, ids)
    other = copy.deepcopy(follower)
    longer = torch.cat([ids, torch.tensor([loaded[1]("b").input_ids])], dim=1)
    masks(loaded, other, longer)
    assert torch.equal(masks(loaded, follower, ids), before)
    assert not torch.equal(masks(loaded, other, longer), before)


def test_scores_are_not_written_to(loaded):
    follower = followed(loaded, [G.regex("abc")])
    scores = torch.randn(1, 2051)  # more than the tokenizer has, and no whole number of bytes
    given = scores.clone()
    processor = GrammarProcessor(library_of(loaded[1]), follower)
    result = processor(torch.tensor([[7, 7]]), scores)
    assert torch.equal(scores, given)
    assert result.shape == scores.shape
    assert (result[:, 2048:] == -torch.inf).all()
    allowed = (result > -torch.inf).nonzero()[:, 1].tolist()
    assert {loaded[1].decode([token]) for token in allowed} <= {"a", "ab", "abc"}
    assert torch.equal(result[0, allowed], scores[0, allowed])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_limits_are_the_bits(dtype):
    bits = torch.randint(0, 256, (3, 40), dtype=torch.uint8)
    limits = as_limits(bits, torch.zeros(1, dtype=dtype))
    expected = (bits[:, :, None] >> torch.arange(8) & 1).flatten(1).bool()
    assert limits.dtype == dtype
    assert torch.equal(limits == torch.inf, expected)
    assert torch.equal(limits == -torch.inf, ~expected)


# Ends


def test_a_row_without_eos_ends_where_nothing_can_follow(loaded):
    grammars = [G.regex("a{4}"), G.regex("ab{9}"), G.choice(["x", "y"]), G.regex("c{6}")]
    output = generate(loaded, grammar=grammars, eos_token_id=None, pad_token_id=1)
    tokenizer = loaded[1]
    inputs = tokenizer(list(PROMPTS), return_tensors="pt", padding=True).input_ids
    generated = output[:, inputs.shape[1] :]
    found = [tokenizer.decode(row, skip_special_tokens=True) for row in generated]
    assert [len(text) for text in found] == [4, 10, 1, 6]
    assert generated.shape[1] <= 10
    assert (generated[:, -1] == 1).sum() == 3  # the others were padded


def test_each_row_has_its_own_eos(loaded):
    newline = loaded[1]("\n").input_ids[0]
    grammar = G.regex("a{3}")
    each = {"grammar": grammar, "max_new_tokens": 9}
    configs = [hfgen.GenerationConfig(**each, eos_token_id=eos) for eos in (newline, 0)]
    model, tokenizer = loaded
    inputs = tokenizer(list(PROMPTS[:2]), return_tensors="pt", padding=True)
    output = model.generate(**inputs, generation_config=configs, tokenizer=tokenizer)
    length = output.shape[1] - len(loaded[1](list(PROMPTS[:2]), padding=True).input_ids[0])
    ends = [row[row != 1][-1].item() for row in output[:, -length:]]
    assert ends == [newline, 0]


def test_an_eos_that_is_text_ends_only_what_is_complete(loaded):
    """The newline is an EOS of the call, and the grammar has one in the middle."""
    newline = loaded[1]("\n").input_ids[0]
    grammar = G.regex("a(\n|b)c")
    output = generate(loaded, PROMPTS[:1], grammar=grammar, eos_token_id=newline)
    text = loaded[1].decode(output[0]).removeprefix(PROMPTS[0])
    assert text == "abc\n"


def test_other_processors_that_leave_no_token(loaded):
    """The text is complete, an EOS alone may follow, and `min_new_tokens` forbids it."""
    options: dict[str, Any] = {"grammar": G.choice(["yes"]), "min_new_tokens": 9}
    for extra in ({}, {"do_sample": True}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises(hfgen.InvalidScoresError, match="grammar"):
            generate(loaded, PROMPTS[:2], **options, **extra)
    one = options | {"grammar": [None, G.choice(["yes"])], "return_dict_in_generate": True}
    output = generate(loaded, PROMPTS[:2], **one)
    assert output.finish_reasons[1] == "error"
    assert output.finish_reasons[0] != "error"
    banned = [lambda ids, scores: torch.full_like(scores, -torch.inf)]
    with pytest.raises(hfgen.InvalidScoresError):
        generate(loaded, PROMPTS[:2], grammar=PERSONS, logits_processor=LogitsProcessorList(banned))


def test_a_row_that_has_ended_may_be_left_without_a_token(loaded):
    grammars = [G.choice(["yes"]), None]
    options = {"min_new_tokens": [0, 12], "max_new_tokens": 12}
    output = generate(loaded, PROMPTS[:2], grammar=grammars, **options)
    assert texts(loaded, output[:1], PROMPTS[:2]) == ["yes"]


def test_a_forced_eos_ends_a_text_at_the_last_token(loaded):
    output = generate(
        loaded, PROMPTS[:1], grammar=G.regex("a{99}"), forced_eos_token_id=0, max_new_tokens=6
    )
    assert output[0, -1] == 0
    assert set(loaded[1].decode(output[0, -6:-1])) == {"a"}


def test_why_a_row_ended(loaded):
    options = {"grammar": [G.regex("a{3}"), G.regex("a{30}")], "return_dict_in_generate": True}
    own = generate(loaded, PROMPTS[:2], eos_token_id=None, max_new_tokens=8, **options)
    assert own.finish_reasons == ["grammar", "length"]
    eos = generate(loaded, PROMPTS[:2], max_new_tokens=8, **options)
    assert eos.finish_reasons == ["eos", "length"]


# Thinking


def test_a_grammar_begins_behind_thoughts(loaded):
    """A section is open at the end of the first prompt and closed in the second; the third has none."""
    prompts = ["x<think>y", "x<think>y</think>", "x"]
    options = {"grammar": G.regex("[0-9]{4}"), "thinking_token_budget": [5, 5, 5]}
    output = generate(loaded, prompts, max_new_tokens=40, **options)
    tokenizer = loaded[1]
    found = [tokenizer.decode(row, skip_special_tokens=True) for row in output]
    assert re.fullmatch(r"(?s)x<think>y.*</think>[0-9]{4}", found[0])
    assert re.fullmatch(r"(?s)x<think>y</think>([0-9]{4}|<think>.*</think>[0-9]{4})", found[1])
    assert re.fullmatch(r"(?s)x([0-9]{4}|<think>.*</think>[0-9]{4})", found[2])
    n_thoughts = len(
        tokenizer(found[0].removeprefix(prompts[0]).partition("</think>")[0]).input_ids
    )
    assert n_thoughts <= 6
    drafted = generate(loaded, prompts, max_new_tokens=40, assistant_model=Babble(), **options)
    assert torch.equal(drafted, output)


def likes(tokenizer: Any, text: str, after: int) -> Any:
    """A processor that wants ``text`` to be what is generated behind ``after`` tokens."""
    tokens = tokenizer(text).input_ids

    def push(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        n = ids.shape[1] - after
        if n >= len(tokens):
            return scores
        scores = scores.clone()
        scores[:, tokens[n]] += 1e4
        return scores

    push.is_row_wise = True  # type: ignore[attr-defined]
    return push


@pytest.mark.parametrize("beams", [1, 3])
def test_a_row_may_open_a_section_of_thoughts_itself(loaded, beams):
    tokenizer = loaded[1]
    n_prompt = len(tokenizer("x").input_ids)
    wish = "<think>abc<|endoftext|>!</think>"
    options: dict[str, Any] = {"grammar": G.regex("[0-9]{4}"), "num_beams": beams}

    def text(**more: Any) -> str:
        push = [likes(tokenizer, wish, n_prompt)]
        output = generate(
            loaded, ["x"], logits_processor=push, max_new_tokens=50, **options, **more
        )
        return tokenizer.decode(output[0, n_prompt:], skip_special_tokens=True)

    thought = text(thinking_token_budget=30)
    assert re.fullmatch(r"(?s)<think>abc.*</think>[0-9]{4}", thought)  # no EOS amid thoughts
    assert re.fullmatch("[0-9]{4}", text())  # without a budget, only a prompt opens a section


def test_a_section_that_has_begun_to_open_is_opened(loaded):
    """Behind the first token of a start marker of several, the others have to follow."""
    tokenizer = loaded[1]
    start = tokenizer("<think>").input_ids
    assert len(start) > 1
    n_prompt = len(tokenizer("x").input_ids)
    push = [likes(tokenizer, tokenizer.decode(start[:1]), n_prompt)]
    options = {"grammar": G.regex("[0-9]{4}"), "thinking_token_budget": 3}
    output = generate(loaded, ["x"], logits_processor=push, max_new_tokens=30, **options)
    assert output[0, n_prompt:].tolist()[: len(start)] == start
    text = tokenizer.decode(output[0], skip_special_tokens=True)
    assert re.fullmatch(r"(?s)x<think>.*</think>[0-9]{4}", text)


# With what else there is


@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "static"},
        {"drop_finished": True},
        {"use_cache": False},
        {"prefill_chunk_size": 4},
        {"prefix_cache": True},
        {"num_beams": 3, "cache_implementation": "static"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_other_ways_to_decode_give_the_same(loaded, options):
    grammars = (PERSONS, None, G.choice(["yes", "no"]), G.regex("[a-c]{3,9}"))
    options = {"prefix_cache": hfgen.PrefixCache()} if "prefix_cache" in options else options
    beams = {"num_beams": options["num_beams"]} if "num_beams" in options else {}
    expected = plainly(grammars, PROMPTS, max_new_tokens=24, **beams)
    found = generate(loaded, grammar=[*grammars], max_new_tokens=24, **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "quantized"},
        {"penalty_alpha": 0.6, "top_k": 4},
        {
            "repetition_penalty": 1.3,
            "no_repeat_ngram_size": 4,
            "temperature": 2.0,
            "do_sample": True,
        },
        {"guidance_scale": 1.5},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_modes_keep_to_the_grammar(loaded, options):
    grammar = G.regex("[a-z]{3,9}(, [a-z]{3,9}){1,3}")
    output = generate(loaded, PROMPTS[:2], grammar=grammar, **options)
    for text in texts(loaded, output, PROMPTS[:2]):
        assert re.fullmatch("[a-z]{3,9}(, [a-z]{3,9}){1,3}", text)


def test_streaming(loaded):
    class Collect(BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens += []

    for extra in ({}, {"assistant_model": hfgen.ForcedTokens()}, {"num_beams": 3}):
        streamer = Collect()
        output = generate(loaded, PROMPTS[:1], grammar=PERSONS, streamer=streamer, **extra)
        assert streamer.tokens == output[0].tolist()


@pytest.mark.parametrize("build", [tiny.t5, tiny.bart])
@pytest.mark.parametrize("beams", [1, 3])
def test_encoder_decoders(build, beams):
    """Only what is generated counts: neither the start token nor a forced BOS is part of the text."""
    model, tokenizer = hfgen.mix_into(build()), tiny.ascii_tokenizer()
    options: dict[str, Any] = {"eos_token_id": 2, "pad_token_id": 0, "num_beams": beams}
    if build is tiny.bart:
        options["forced_bos_token_id"] = 1
    grammar = G.json({"type": "array", "items": {"enum": [1, "b"]}, "minItems": 1, "maxItems": 3})
    grammar = G.Grammar("json", grammar.text, whitespace=False)
    output = model.generate(
        tiny.prompt(3), grammar=grammar, tokenizer=tokenizer, max_new_tokens=30, **options
    )
    for row in output.tolist():
        assert 2 in row[1:]
        start = 2 if build is tiny.bart else 1
        text = tokenizer.decode(row[start : row.index(2, 1)])
        assert set(map(str, json.loads(text))) <= {"1", "b"}
    if build is tiny.bart:
        assert (output[:, 1] == 1).all()


def test_logits_wider_than_the_vocabulary():
    """Padded embeddings are never chosen, however likely they are."""
    model = hfgen.mix_into(tiny.llama(vocab_size=131))
    with torch.no_grad():
        model.lm_head.weight[97:] = model.lm_head.weight[3] * 50
    tokenizer = tiny.ascii_tokenizer()
    output = model.generate(
        tiny.prompt(3), grammar=G.regex("[a-z]{4,8}"), tokenizer=tokenizer, max_new_tokens=12
    )
    assert all(
        re.fullmatch("[a-z]{4,8}", tokenizer.decode(row[7:], skip_special_tokens=True))
        for row in output
    )


# Arguments


def refused(loaded: tuple[Any, Any], error: type[Exception], match: str, **options: Any) -> None:
    """The call fails as it should, before the model has run."""
    model, calls = loaded[0], []
    handle = model.register_forward_pre_hook(lambda *args: calls.append(args))
    try:
        with pytest.raises(error, match=match):
            generate(loaded, PROMPTS[:2], **options)
    finally:
        handle.remove()
    assert not calls


@pytest.mark.parametrize(
    ("grammar", "match"),
    [
        (G.json({"type": "foo"}), "refused by llguidance: Invalid type: foo"),
        (G.json({"not": {"type": "string"}}), "refused.*Unimplemented keys"),
        (G.regex("a("), "refused.*unclosed group"),
        (G.lark("start: x"), "refused.*unknown name"),
        ([None, G.regex("a(")], "refused.*unclosed group"),
    ],
)
def test_a_grammar_that_the_library_refuses(loaded, grammar, match):
    refused(loaded, ValueError, f"(?s)`grammar`.*{match}", grammar=grammar)


def test_wrong_arguments(loaded):
    words = r"`grammar` has to be made by hfgen\.grammar\.json"
    for value in ("[a-z]+", True, 3, int, {"kind": "xml", "text": "<a/>"}):
        refused(loaded, (TypeError, ValueError), words, grammar=value)
    refused(loaded, ValueError, "`grammar`.*tokenizer", grammar=PERSONS, tokenizer=None)
    refused(loaded, ValueError, "`grammar` .* DoLa", grammar=PERSONS, dola_layers="low")
    wide = copy.deepcopy(loaded[1])
    wide.add_tokens([f"<{i}>" for i in range(9)])
    refused(
        loaded, ValueError, "2057 tokens and the model scores 2048", grammar=PERSONS, tokenizer=wide
    )
    slow = type("Slow", (), {"__len__": lambda self: 5})()
    refused(loaded, ValueError, "`tokenizer` .Slow. has none", grammar=PERSONS, tokenizer=slow)


@pytest.mark.parametrize("schema", [Pair, Pair.model_json_schema(), G.json(Pair).to_dict()])
def test_a_schema_is_its_grammar(loaded, schema):
    expected = plainly((G.json(Pair),) * 4, PROMPTS, max_new_tokens=12)
    for grammar in (schema, [schema] * 4):
        assert torch.equal(generate(loaded, grammar=grammar, max_new_tokens=12), expected)


def test_what_no_grammar_can_be_made_of():
    assert G.json(True) == G.json("true") == G.json({})
    with pytest.raises(TypeError, match=r"`schema` has to be a dict.*bool \(False\)"):
        G.json(False)
    with pytest.raises(ValueError, match=r"`schema` is text, but not JSON.*line 1 column"):
        G.json("{'type': 'object'}")
    with pytest.raises(TypeError, match=r"`schema` has to be a dict.*list"):
        G.json([1])
    with pytest.raises(TypeError, match=r"`options`.*str"):
        G.choice("yes")
    with pytest.raises(ValueError, match="one string at least"):
        G.choice([])
    with pytest.raises(TypeError, match=r"`text` of a grammar has to be a string.*int"):
        G.regex(3)
    with pytest.raises(ValueError, match=r"`kind`.*'xml'"):
        G.Grammar("xml", "<a/>")
    with pytest.raises(TypeError, match="`whitespace`"):
        G.json({}, whitespace=3)


def test_without_the_library(loaded, monkeypatch):
    monkeypatch.setattr(backend, "llguidance", None)
    refused(loaded, ImportError, r"pip install 'hfgen\[grammar\]'", grammar=PERSONS)


def test_a_config_keeps_its_grammar(loaded, tmp_path):
    config = hfgen.GenerationConfig(grammar=PERSONS, max_new_tokens=20)
    expected = generate(loaded, PROMPTS[:1], grammar=PERSONS, max_new_tokens=20)
    assert torch.equal(generate_with(loaded, config), expected)
    config.save_pretrained(tmp_path)
    again = hfgen.GenerationConfig.from_pretrained(tmp_path)
    assert torch.equal(generate_with(loaded, again), expected)


def generate_with(loaded: tuple[Any, Any], config: hfgen.GenerationConfig) -> torch.Tensor:
    model, tokenizer = loaded
    inputs = tokenizer(list(PROMPTS[:1]), return_tensors="pt")
    return model.generate(**inputs, generation_config=config, tokenizer=tokenizer)


def test_grammars_are_compiled_once(loaded):
    tokenizer = loaded[1]
    library = library_of(tokenizer)
    assert library_of(tokenizer) is library
    grammar = G.regex("a{2}(once)?")
    misses = library.matcher.cache_info().misses
    for _ in range(3):
        generate(loaded, PROMPTS[:2], grammar=grammar, max_new_tokens=3)
    assert library.matcher.cache_info().misses == misses + 1
    other = copy.deepcopy(tokenizer)
    assert library_of(other) is not library
    other.add_tokens(["<new>"])
    assert library_of(other).n_tokens == library.n_tokens + 1


def test_a_tokenizer_is_not_kept_alive():
    import gc
    import weakref

    tokenizer = tiny.ascii_tokenizer()
    library_of(tokenizer)
    seen = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert seen() is None


def test_a_tokenizer_without_an_eos():
    """Its first token is text like any other."""
    tokenizer = tiny.byte_tokenizer()
    tokenizer.eos_token = None
    model = hfgen.mix_into(seeded(lambda: tiny.llama(vocab_size=300)))
    output = model.generate(
        tiny.prompt(2), grammar=G.regex("[0-9]{3}"), tokenizer=tokenizer, max_new_tokens=9,
        eos_token_id=None, pad_token_id=1,
    )  # fmt: skip
    assert output.shape[1] == 10
    assert all(re.fullmatch("[0-9]{3}", tokenizer.decode(row[7:])) for row in output)


@pytest.mark.parametrize("is_special", [False, True])
def test_the_text_of_a_token_that_is_no_text(is_special: bool) -> None:
    """It is refused; llguidance would allow the token, and then give the row up."""
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>", special=is_special)])
    token = tokenizer.convert_tokens_to_ids("<think>")
    model = hfgen.mix_into(tiny.llama(vocab_size=len(tokenizer), eos_token_id=0, pad_token_id=1))
    call = {"tokenizer": tokenizer, "max_new_tokens": 8}
    inputs = torch.tensor([tokenizer("hi").input_ids])
    with pytest.raises(ValueError, match=rf"has the text '<think>', .*write it as <\[{token}\]>"):
        model.generate(inputs, grammar=G.choice(["<think>yes"]), **call)
    output = model.generate(inputs, grammar=G.lark(f'start: <[{token}]> "yes"'), **call)
    assert tokenizer.decode(output[0]) == "hi<think>yes<eos>"
