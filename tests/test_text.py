"""Text that grows token by token: what all tokens decode to, in whole characters, at a flat cost."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from hfgen.state.text import CONTEXT, UNKNOWN, Detokenizer, Pieces, context_of, decode
from tests.tokenizers_of_all_kinds import ALL, TEXTS, byte_fallback, byte_level, metaspace

EVERY = pytest.mark.parametrize("name", ALL)
KEEPS = st.booleans()


def spelled(name: str) -> st.SearchStrategy[list[int]]:
    """Ids of texts in several scripts, and ids at random."""
    tokenizer = ALL[name]()
    texts = st.one_of(st.sampled_from(TEXTS), st.text(max_size=12))
    ids = texts.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    anything = st.lists(st.integers(0, len(tokenizer) - 1), max_size=30)
    return st.lists(st.one_of(ids, anything), max_size=4).map(lambda parts: list(chain(*parts)))


def whole(tokenizer: Any, ids: list[int], skip: bool) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))


@EVERY
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_equals_the_text_of_all_tokens(name: str, data: st.DataObject) -> None:
    tokenizer, ids, skip = ALL[name](), data.draw(spelled(name)), data.draw(KEEPS)
    detokenizer = Detokenizer(tokenizer, skip)
    parts, rest = [], ids
    while rest:
        n = data.draw(st.integers(1, 4))
        parts.append(detokenizer.push(rest[:n]))
        rest = rest[n:]
    assert "".join(parts) + detokenizer.finish() == whole(tokenizer, ids, skip)


@EVERY
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_prompt_and_answer_are_the_text_that_stands_there(name: str, data: st.DataObject) -> None:
    tokenizer, skip = ALL[name](), data.draw(KEEPS)
    prompt, ids = data.draw(spelled(name)), data.draw(spelled(name))
    before = context_of(tokenizer, prompt)
    text = decode(tokenizer, ids, skip, before)
    detokenizer = Detokenizer(tokenizer, skip, before)
    assert "".join(detokenizer.push([token]) for token in ids) + detokenizer.finish() == text
    places = [i for i, token in enumerate(prompt) if token in tokenizer.all_special_ids]
    segment = prompt[places[-1] + 1 if places else 0 :]  # a special token starts a text
    start, both = whole(tokenizer, segment, skip), whole(tokenizer, [*segment, *ids], skip)
    if both.startswith(start):  # else a character of the prompt is completed
        assert start + text == both
    else:
        assert both.endswith(text)


@EVERY
def test_the_first_space_of_an_answer(name: str) -> None:
    tokenizer = ALL[name]()
    ids = tokenizer.encode("Der Zug der", add_special_tokens=False)
    for n in range(1, len(ids)):
        text = decode(tokenizer, ids[n:], True, context_of(tokenizer, ids[:n]))
        assert decode(tokenizer, ids[:n], True) + text == "Der Zug der"
    if name in ("byte_fallback", "metaspace", "word_piece"):  # no space at the start of a text
        word = tokenizer.encode("der", add_special_tokens=False)
        assert decode(tokenizer, word, True, context_of(tokenizer, ids)) == " der"
    opened = [*ids, tokenizer.eos_token_id]  # as a chat template opens an answer
    assert decode(tokenizer, ids, True, context_of(tokenizer, opened)) == "Der Zug der"


@EVERY
def test_characters_are_whole_and_come_at_once(name: str) -> None:
    tokenizer = ALL[name]()
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        detokenizer, returned = Detokenizer(tokenizer), ""
        for i, token in enumerate(ids):
            part = detokenizer.push([token])
            assert "\ufffd" not in part
            returned += part
            so_far = whole(tokenizer, ids[: i + 1], True)
            assert so_far.startswith(returned)
            if "<0x" not in tokenizer.convert_ids_to_tokens(token):
                assert so_far.removesuffix("\ufffd") == returned


class Counting:
    """Counts the tokens that a tokenizer is asked to decode."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.n = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        self.n += len(ids)
        return str(self.tokenizer.decode(ids, **kwargs))


#: Without the slow one's single bytes: they leave no text by which a shorter window could be known.
COSTS = [
    (name, kind)
    for name in ALL
    for kind in ("text", "random", "special", "bytes")
    if (name, kind) != ("slow", "bytes")
]


@pytest.mark.parametrize(("name", "kind"), COSTS)
def test_the_cost_of_a_token_is_flat(name: str, kind: str) -> None:
    tokenizer = Counting(ALL[name]())
    n = 300
    if kind == "text":
        ids = (tokenizer.encode(" ".join(TEXTS * 10), add_special_tokens=False) * 10)[:n]
    elif kind == "special":
        ids = [tokenizer.pad_token_id] * n
    elif kind == "bytes":  # never a whole character
        (token,) = tokenizer.encode("\xff", add_special_tokens=False)[-1:]
        ids = [token] * n
    else:
        ids = [i * 7919 % len(ALL[name]()) for i in range(n)]
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.push([token]) for token in ids) + detokenizer.finish()
    assert tokenizer.n <= (2 * CONTEXT + 2) * n
    assert text == whole(tokenizer.tokenizer, ids, True)


def test_a_run_of_bytes_waits_for_its_end() -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.convert_tokens_to_ids(["<0xC3>", "<0xA9>", "<0xC3>", "<0xA9>"])
    x, bad = tokenizer.convert_tokens_to_ids(["x", "<0xFF>"])
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([token]) for token in (*ids, x)] == ["", "", "", "", "ééx"]
    assert [detokenizer.push([token]) for token in (*ids, bad)] == [""] * 5
    assert detokenizer.finish() == "\ufffd" * 5  # one wrong byte spoils the run


def test_special_tokens_are_skipped_or_kept() -> None:
    tokenizer = byte_level()
    ids = [*tokenizer.encode("ab"), tokenizer.eos_token_id, *tokenizer.encode("c")]
    kept, skipped = Detokenizer(tokenizer, skip_special_tokens=False), Detokenizer(tokenizer)
    assert kept.push(ids) + kept.finish() == "ab</s>c"
    assert skipped.push(ids) + skipped.finish() == "abc"


def test_a_leading_space_is_left_out_once() -> None:
    tokenizer = metaspace()
    ids = tokenizer.encode("x x x", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push([token]) for token in ids) == "x x x"


@EVERY
def test_pieces_join_to_the_text(name: str) -> None:
    tokenizer = ALL[name]()
    pieces = Pieces(tokenizer)
    if name == "slow":  # leaves the bytes of larger characters out if they come alone
        assert b"".join(pieces.of(tokenizer.encode("abc", add_special_tokens=False))) == b"abc"
        return
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(pieces.of(ids)).decode()
        assert joined.lstrip(" ") == decode(tokenizer, ids).lstrip(" ")


@pytest.mark.parametrize("name", ["builtin", "byte_level", "byte_fallback", "metaspace"])
def test_pieces_are_those_of_upstream(name: str) -> None:
    tokenizer, theirs = ALL[name](), transformers.StopStringCriteria
    mode = theirs._get_stop_string_matching_mode(tokenizer)
    cleaned = theirs.clean_tokenizer_vocab(tokenizer, stop_string_matching_mode=mode)
    pieces = Pieces(tokenizer)
    assert len(cleaned[0]) == len(tokenizer)
    for piece, token in zip(*cleaned, strict=True):
        expected = piece.encode() if isinstance(piece, str) else piece
        assert pieces[token] == expected, tokenizer.convert_ids_to_tokens(token)
    assert pieces[len(tokenizer) + 5] == UNKNOWN
