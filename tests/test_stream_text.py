"""The text of a stream: whole characters, nothing taken back, stops held back; that of ``generate()``."""

from __future__ import annotations

import random
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import hfgen
from hfgen import StreamEvent
from tests import tiny, tokenizers_of_all_kinds
from tests.test_stream import MODES


class Dictated:
    """A processor that lets each row say a text, byte by byte, and then end."""

    def __init__(self, tokenizer: Any, *texts: str | list[int], n_prompt: int = 7) -> None:
        self.n_prompt, rows = (
            n_prompt,
            (t if isinstance(t, list) else tokenizer(t).input_ids for t in texts),
        )
        self.rows = [[*row, tokenizer.eos_token_id] for row in rows]

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        scores = torch.full_like(scores, -50.0)
        repeats = len(ids) // len(self.rows)
        for index, row in enumerate(ids[:, self.n_prompt :].tolist()):
            said = self.rows[index // repeats]
            scores[index, said[min(len(row), len(said) - 1)]] = 0.0
        return scores


@pytest.fixture(scope="module")
def speaker() -> Any:
    """A model with a token for each byte, whose text breaks characters."""
    return hfgen.mix_into(tiny.llama(vocab_size=258, eos_token_id=0, pad_token_id=1))


@pytest.fixture(scope="module")
def bytes_of() -> Any:
    return tiny.byte_tokenizer()


def texts_of(events: Iterable[StreamEvent]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events:
        texts[event.row] = texts.get(event.row, "") + event.text
    return texts


SAID = "naïve 🙂\N{ZERO WIDTH JOINER}日本語 ok"


def test_text_comes_in_whole_characters(speaker: Any, bytes_of: Any) -> None:
    says = Dictated(bytes_of, SAID, "")
    stream = speaker.stream(
        tiny.prompt(2), tokenizer=bytes_of, logits_processor=[says], max_new_tokens=60
    )
    events = list(stream)
    assert texts_of(events) == {0: SAID, 1: ""}
    pieces = [event.text for event in events if event.row == 0]
    assert [piece for piece in pieces if piece] == list(SAID)
    assert [event.token_ids for event in events if event.row == 1] == [(bytes_of.eos_token_id,)]


def test_a_character_that_stays_broken(speaker: Any, bytes_of: Any) -> None:
    broken = bytes_of("é").input_ids[:1]
    says = Dictated(bytes_of, [*broken, *bytes_of("a").input_ids, *broken])
    stream = speaker.stream(
        tiny.prompt(1), tokenizer=bytes_of, logits_processor=[says], max_new_tokens=60
    )
    assert [event.text for event in stream] == ["", "\ufffda", "", "\ufffd"]


def check_texts(model: Any, tokenizer: Any, rows: int = 3, seed: int = 1, **options: Any) -> Any:
    """Text and reasons of a stream are those of the output of ``generate``."""
    options = {"tokenizer": tokenizer, **options}
    torch.manual_seed(seed)
    output = model.generate(tiny.prompt(rows), return_dict_in_generate=True, **options)
    torch.manual_seed(seed)
    events = list(model.stream(tiny.prompt(rows), **options))
    assert texts_of(events) == dict(enumerate(output.texts)), options
    reasons = {event.row: event.finish_reason for event in events}
    assert reasons == dict(enumerate(output.finish_reasons)), options
    for row, reason in reasons.items():
        assert reason.stop == output.finish_reasons[row].stop
    return output


@pytest.mark.parametrize("mode", MODES)
def test_texts_and_reasons_are_those_of_generate(speaker: Any, bytes_of: Any, mode: str) -> None:
    options = {"max_new_tokens": 20, **MODES[mode]}
    options.pop("return_dict_in_generate", None)
    for eos in ([0, *range(40, 50)], [0]):
        check_texts(speaker, bytes_of, eos_token_id=eos, **options)


def pieces(model: Any, tokenizer: Any, text: str, **options: Any) -> list[str]:
    """The text of each event, where a model says ``text`` byte by byte."""
    says = Dictated(tokenizer, text)
    options = {"tokenizer": tokenizer, "max_new_tokens": 60, **options}
    stream = model.stream(tiny.prompt(1), logits_processor=[says], **options)
    return [event.text for event in stream]


def test_what_may_begin_a_stop_is_held_back(speaker: Any, bytes_of: Any) -> None:
    said = pieces(speaker, bytes_of, "a ST b.STOPx", stop_strings=["STOP", ".STEP"])
    assert said == ["a", " ", "", "", "ST ", "b", "", "", "", ".", ""]
    said = pieces(speaker, bytes_of, "aaab", stop_strings="aab")
    assert said == ["", "", "a", ""]
    said = pieces(speaker, bytes_of, "\n🙂!", stop_strings="🙂🙂")
    assert said == ["\n", "", "", "", "", "🙂!", ""]


def test_a_stop_that_is_included_is_not_held_back(speaker: Any, bytes_of: Any) -> None:
    options = {"stop_strings": "STOP", "include_stop_str_in_output": True}
    assert pieces(speaker, bytes_of, "a STOPx", **options) == list("a STOP")


def test_what_may_begin_a_match_is_held_back(speaker: Any, bytes_of: Any) -> None:
    said = pieces(speaker, bytes_of, "x12 1234", stop_regex=r"\d{4}")
    assert said == ["x", "", "", "12 ", "", "", "", ""]
    said = pieces(speaker, bytes_of, "ab-b;", stop_regex=[r"b.*;"])
    assert said == ["a", "", "", "", ""]
    # `regex` does not take this, and nothing is known of what may begin.
    said = pieces(speaker, bytes_of, "abc", stop_regex=r"c(?P<__>)\Z|\N{DIGIT ONE}")
    assert "".join(said) == "ab"


def test_stops_of_each_row(speaker: Any, bytes_of: Any) -> None:
    says = Dictated(bytes_of, "ab.cd", "ab.cd", "ab.cd")
    output = check_texts(
        speaker,
        bytes_of,
        logits_processor=[says],
        stop_strings=["b.", None, "cd"],
        include_stop_str_in_output=[False, False, True],
        max_new_tokens=[20, 4, 20],
    )
    assert output.texts == ["a", "ab.c", "ab.cd"]
    assert output.finish_reasons == ["stop", "length", "stop"]


class AtLength:
    """A criterion that ends row 1 after 2 tokens."""

    def __call__(self, input_ids: Tensor, scores: Any) -> Tensor:
        ends = torch.zeros(len(input_ids), dtype=torch.bool)
        ends[1] = input_ids.shape[1] == 9
        return ends


@pytest.mark.parametrize("mode", ["greedy", "drafted"])
def test_reasons(speaker: Any, bytes_of: Any, mode: str) -> None:
    says = Dictated(bytes_of, "abc", "abcdef", "abcdef")
    options = {"logits_processor": [says], "max_new_tokens": 5, **MODES[mode]}
    output = check_texts(speaker, bytes_of, stopping_criteria=[AtLength()], **options)
    assert output.finish_reasons == ["eos", "AtLength", "length"]
    cancellation = hfgen.Cancellation()
    stream = speaker.stream(tiny.prompt(3), cancel=cancellation, **options)
    next(stream)
    cancellation.cancel()
    assert {event.row: event.finish_reason for event in stream}[2] in ("cancelled", "length")
    assert [event.finish_reason for event in speaker.stream(tiny.prompt(1), max_new_tokens=0)] == [
        "length"
    ]


def test_a_row_without_tokens_has_its_length(speaker: Any, bytes_of: Any) -> None:
    says = Dictated(bytes_of, *["aaaaaaaa"] * 3)
    repetition = {"max_pattern_size": 2, "min_count": 4}
    options = {"max_new_tokens": [3, 0, 6], "repetition_detection": repetition}
    output = check_texts(speaker, bytes_of, logits_processor=[says], **options)
    assert output.texts == ["aaa", "", "aaaa"]
    assert output.finish_reasons == ["length", "length", "repetition"]


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}])
def test_an_answer_that_a_grammar_forces(options: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    model, tokenizer = hfgen.builtin_model()
    inputs = tokenizer(["x = ", "def f"], return_tensors="pt", padding=True)
    grammars = [hfgen.grammar.regex(r"\[1, (2|3)\]"), hfgen.grammar.choice(["yes", "no"])]
    call = {**inputs, "tokenizer": tokenizer, "grammar": grammars, "max_new_tokens": 20, **options}
    output = model.generate(**call, return_dict_in_generate=True)
    events = list(model.stream(**call))
    assert texts_of(events) == dict(enumerate(output.texts))
    assert output.texts[0] in ("[1, 2]", "[1, 3]")
    reasons = {event.row: event.finish_reason for event in events}
    assert reasons == dict(enumerate(output.finish_reasons))


STOPS = (r"a+b", r"\n\n", r"(?:é|🙂)a", r"b.*\.", r"[^a]{3}", r"a(?=b)", r"(?<=a)b", r"\Aab")


@pytest.mark.parametrize("options", [{}, {"stop_strings": "c"}, {"grammar": r"ab*"}])
def test_a_processor_stands_for_its_tokenizer(
    speaker: Any, bytes_of: Any, options: dict[str, Any]
) -> None:
    """The processor of a multimodal model decodes, but has no vocabulary and no special tokens."""
    if "grammar" in options:
        pytest.importorskip("llguidance")
        options = {"grammar": hfgen.grammar.regex(options["grammar"])}
    dictated = Dictated(bytes_of, "abcde", n_prompt=7)
    call = {
        "inputs": tiny.prompt(1),
        "logits_processor": [dictated],
        "max_new_tokens": 9,
        **options,
    }
    expected = speaker.generate(**call, tokenizer=bytes_of, return_dict_in_generate=True)
    processor = SimpleNamespace(tokenizer=bytes_of, decode=bytes_of.decode)
    call["tokenizer"] = processor
    output = speaker.generate(**call, return_dict_in_generate=True)
    assert (output.texts, output.finish_reasons) == (expected.texts, expected.finish_reasons)
    assert texts_of(speaker.stream(**call)) == dict(enumerate(expected.texts))
    session = speaker.session(**call)
    session.feed(["ab"])
    assert session.text == ["ab"]


@pytest.mark.parametrize("seed", range(8))
def test_random_stops(speaker: Any, bytes_of: Any, seed: int) -> None:
    rng, modes = random.Random(seed), [mode for mode in MODES if mode != "outputs"]

    def some(n: int) -> str:
        return "".join(rng.choices("ab\n é🙂.", k=n))

    n_stopped = 0
    for _ in range(5):
        options: dict[str, Any] = {
            "max_new_tokens": rng.choice([5, 12, 30]),
            "stop_strings": [some(rng.randint(1, 4)) for _ in range(3)],
            "stop_regex": rng.choice([None, None, *STOPS]),
            "include_stop_str_in_output": rng.random() < 0.3,
            "skip_special_tokens": rng.random() < 0.7,
            "eos_token_id": rng.choice([0, 0, None]),
            "logits_processor": [Dictated(bytes_of, *(some(rng.randint(0, 14)) for _ in "abc"))],
            **MODES[rng.choice(modes)],
        }
        output = check_texts(speaker, bytes_of, **options)
        n_stopped += output.finish_reasons.count("stop")
    assert n_stopped > 2


@pytest.mark.parametrize("kind", tokenizers_of_all_kinds.ALL)
def test_tokenizers_of_all_kinds(kind: str) -> None:
    tokenizer, rng = tokenizers_of_all_kinds.ALL[kind](), random.Random(0)
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = hfgen.mix_into(tiny.llama(vocab_size=max(len(tokenizer), tiny.VOCAB), **special))
    texts = tokenizers_of_all_kinds.TEXTS
    for _ in range(3):
        said = [tokenizer(rng.choice(texts), add_special_tokens=False).input_ids[:30]]
        said += [[rng.randrange(3, len(tokenizer)) for _ in range(12)] for _ in "ab"]
        text = tokenizer.decode(rng.choice(said)) or "a"
        starts = [rng.randrange(len(text)) for _ in "ab"]
        check_texts(
            model,
            tokenizer,
            logits_processor=[Dictated(tokenizer, *said)],
            stop_strings=[text[at : at + rng.randint(1, 6)] for at in starts],
            include_stop_str_in_output=rng.random() < 0.3,
            max_new_tokens=40,
        )


@pytest.mark.parametrize("kind", ["byte_fallback", "metaspace", "word_piece"])
def test_the_first_space_of_an_answer(kind: str) -> None:
    tokenizer = tokenizers_of_all_kinds.ALL[kind]()
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = hfgen.mix_into(tiny.llama(vocab_size=len(tokenizer), **special))
    said = tokenizer("der Zug", add_special_tokens=False).input_ids
    for opening, text in ((), " der Zug"), ([tokenizer.eos_token_id], "der Zug"):
        prompt = [*tokenizer("Der Zug", add_special_tokens=False).input_ids, *opening]
        options = {"logits_processor": [Dictated(tokenizer, said, n_prompt=len(prompt))]}
        options |= {"tokenizer": tokenizer, "max_new_tokens": 20}
        inputs = torch.tensor([prompt])
        assert model.generate(inputs, return_dict_in_generate=True, **options).texts == [text]
        assert texts_of(model.stream(inputs, **options)) == {0: text}
        assert hfgen.Engine(model).add(inputs, **options).result().text == text
