"""Beams that are streamed: what has been streamed is never revised, and is the best sequence."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

import hfgen
from tests import tiny

EOS = list(range(8, 60, 4))


class Recorder(BaseStreamer):
    """Keeps the tensors that it is given."""

    def __init__(self) -> None:
        self.puts: list[Tensor] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        assert self.ends == 0
        self.puts.append(value.clone())

    def end(self) -> None:
        self.ends += 1

    def tokens(self, rows: int) -> Tensor:
        return torch.cat([put.reshape(rows, -1) for put in self.puts], dim=1)


@pytest.fixture(scope="module", params=["llama", "t5", "bart"])
def model(request: pytest.FixtureRequest) -> Any:
    return hfgen.mix_into(getattr(tiny, request.param)())


def draw_options(rng: random.Random) -> dict[str, Any]:
    beams = rng.choice([2, 3, 4])
    return {
        "num_beams": beams,
        "num_return_sequences": rng.choice([1, beams]),
        "max_new_tokens": rng.choice([1, 5, 14, 25]),
        "do_sample": rng.random() < 0.3,
        "early_stopping": rng.choice([True, False, "never"]),
        "length_penalty": rng.choice([0.0, 1.0, 2.0, -1.0]),
        "eos_token_id": rng.choice([None, 2, EOS, list(range(5, 80))]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.5]),
    }


@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_streamed_is_the_best_sequence(model, rows):
    rng = random.Random(rows)
    n_chunks = 0
    for seed in range(7):
        options, streamer = draw_options(rng), Recorder()
        ids = tiny.prompt(rows, seed=seed)
        torch.manual_seed(seed)
        expected = model.generate(ids, **options)
        torch.manual_seed(seed)
        result = model.generate(ids, streamer=streamer, **options)
        assert torch.equal(result, expected), options

        best = result[:: options["num_return_sequences"]]
        streamed = streamer.tokens(rows)
        assert streamer.puts[0].shape[0] == rows, "one row of the prompt per prompt"
        assert torch.equal(streamed, best[:, : streamed.shape[1]]), options
        padding = -1 if options["eos_token_id"] is None else 0
        assert (best[:, streamed.shape[1] :] == padding).all(), options
        assert streamer.ends == 1
        n_chunks += len(streamer.puts) - 1
    assert n_chunks > 8, "hardly anything was streamed before the end"


def test_one_prompt_ends_with_its_eos_and_no_padding():
    model, streamer = hfgen.mix_into(tiny.llama()), Recorder()
    for seed in range(20):
        result = model.generate(
            tiny.prompt(1, seed=seed),
            streamer=(streamer := Recorder()),
            num_beams=3,
            num_return_sequences=3,
            max_new_tokens=16,
            length_penalty=-1.0,
            eos_token_id=EOS,
        )
        streamed = streamer.tokens(1)[0].tolist()
        best = result[0].tolist()
        assert best[: len(streamed)] == streamed
        if len(streamed) < len(best):
            break
    assert streamed[-1] in EOS
    assert set(best[len(streamed) :]) == {0}


class Script:
    """A processor that gives each beam the scores that are written for its last token."""

    def __init__(self, likely: dict[int, dict[int, float]], others: float = -50.0) -> None:
        self.likely, self.others = likely, others

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        scores = torch.full_like(scores, self.others)
        for row, last in enumerate(ids[:, -1].tolist()):
            for token, score in self.likely.get(last, {}).items():
                scores[row, token] = score
        return scores


def chunks(script: Script, prompts: list[int], **options: Any) -> tuple[list[Any], list[Any]]:
    """What is streamed after the prompt, and what is returned."""
    streamer = Recorder()
    result = hfgen.mix_into(tiny.llama()).generate(
        torch.tensor(prompts)[:, None],
        num_beams=2,
        logits_processor=[script],
        streamer=streamer,
        **options,
    )
    rows = len(prompts)
    return [put.reshape(rows, -1).tolist() for put in streamer.puts[1:]], result[:, 1:].tolist()


def test_tokens_come_as_soon_as_the_beams_agree():
    """Beams 11 and 12: the second overtakes, and the first dies out."""
    script = Script(
        {
            10: {11: -1.0, 12: -1.1},
            11: {21: -5.0, 22: -5.0},
            12: {31: -0.5, 32: -0.6},
            31: {41: -0.1, 42: -9.0},
            32: {43: -3.0, 44: -9.0},
            41: {51: -0.1, 52: -0.2},
            43: {53: -9.0},
            51: {61: -1.0},
            52: {62: -2.0},
        }
    )
    streamed, result = chunks(script, [10], max_new_tokens=5, eos_token_id=None)
    assert result == [[12, 31, 41, 51, 61]]
    # The beams: 11 and 12; 12-31 and 12-32; …-31-41 and …-32-43; …-41-51 and …-41-52; the end.
    assert streamed == [[[12]], [[31, 41]], [[51, 61]]]


def test_the_best_that_has_ended_counts_until_it_is_beaten():
    """10-2 has ended and 12 goes on: nothing is settled before 12 has ended with a better score."""
    script = Script({10: {2: -1.0, 12: -2.0, 13: -9.0}, 12: {14: -0.1, 15: -9.0}, 14: {2: -0.1}})
    streamed, result = chunks(script, [10], max_new_tokens=6, early_stopping=True)
    assert result == [[12, 14, 2]]  # -2.2 / 3 is better than -1.0
    assert streamed == [[[12, 14, 2]]]


def test_the_worse_that_have_ended_do_not_count():
    script = Script({10: {11: -0.1, 2: -2.0, 12: -3.0}, 11: {2: -0.1, 13: -0.15, 14: -0.5}})
    streamed, result = chunks(script, [10], max_new_tokens=3)
    # After two steps 11-2 and 2 have ended, 11-13 and 11-14 run: the best has 11, whoever it is.
    assert result == [[11, 2]]
    assert streamed == [[[11]], [[2]]]


#: A hypothesis that goes on without a loss.
ON = {14: {15: 0.0}, 15: {16: 0.0}, 16: {17: 0.0}}


@pytest.mark.parametrize(
    ("decided", "options"),
    [
        # Two ended within two steps: what runs is far behind, or is too late.
        ({10: {2: -0.2, 12: -0.1}, 12: {2: -0.1}}, {}),
        (
            {10: {12: -0.1, 2: -0.15, 13: -0.2}, 12: {2: -0.1, 14: -0.11}} | ON,
            {"early_stopping": True},
        ),
    ],
    ids=["cannot improve", "is full"],
)
def test_a_prompt_that_is_decided_does_not_hold_back_the_batch(decided, options):
    chain = {
        20: {21: -0.1, 22: -9.0},
        21: {23: -0.1, 24: -3.0},
        23: {25: -0.1, 26: -3.0},
        25: {27: -0.1, 28: -3.0},
        27: {29: -0.1},
    }
    streamed, result = chunks(Script(decided | chain), [10, 20], max_new_tokens=5, **options)
    assert result == [[12, 2, 0, 0, 0], [21, 23, 25, 27, 29]]
    assert streamed == [[[12], [21]], [[2], [23]], [[0], [25]], [[0, 0], [27, 29]]]


def test_a_batch_goes_on_with_its_slowest_prompt():
    script = Script(
        {
            10: {11: -0.1, 12: -3.0},
            11: {13: -0.1, 14: -3.0},  # agrees token by token
            13: {15: -0.1, 16: -3.0},
            20: {21: -0.1, 22: -0.2},
            21: {23: -0.1},  # two beams side by side
            22: {24: -0.1},
            23: {25: -0.1},
            24: {26: -0.1},
        }
    )
    streamed, result = chunks(script, [10, 20], max_new_tokens=3)
    assert result == [[11, 13, 15], [21, 23, 25]]
    assert streamed == [result]
    assert chunks(script, [10], max_new_tokens=3)[0] == [[[11]], [[13, 15]]]


def test_of_equals_the_first_is_streamed():
    streamed, result = chunks(Script({10: {11: -1.0, 12: -1.0}}), [10], max_new_tokens=1)
    assert result in ([[11]], [[12]])
    assert streamed == [result]


def test_beams_that_have_died_do_not_count():
    """Of 11 and 12 only 11 may go on, by one token at a time: each is streamed when it is made."""
    script = Script(
        {10: {11: -1.0, 12: -1.0}, 11: {13: -1.0}, 13: {14: 0.0}, 14: {15: 0.0}}, -torch.inf
    )
    streamed, result = chunks(script, [10], max_new_tokens=4, eos_token_id=None)
    assert result == [[11, 13, 14, 15]]
    assert streamed == [[[11, 13]], [[14]], [[15]]]


def test_nothing_more_is_streamed_when_all_have_died():
    script = Script({10: {11: 0.0}}, -torch.inf)
    streamed, _ = chunks(script, [10], max_new_tokens=5, eos_token_id=None)
    assert streamed == [[[11]]]
    streamed, _ = chunks(
        Script({20: {21: 0.0}, 21: {22: 0.0}} | script.likely, -torch.inf),
        [10, 20],
        max_new_tokens=2,
    )
    assert [row[1] for row in streamed] == [[21], [22]]


def test_text_streamers():
    model, tokenizer = hfgen.builtin_model(draft=True)
    inputs = tokenizer("def add(a, b):\n", return_tensors="pt")
    pieces: list[str] = []

    class Pieces(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            pieces.append(text)

    options = {"num_beams": 4, "max_new_tokens": 24, "no_repeat_ngram_size": 3}
    result = model.generate(**inputs, streamer=Pieces(tokenizer), **options)
    text = tokenizer.decode(result[0])
    assert "".join(pieces) == text
    assert sum(piece != "" for piece in pieces[1:]) > 2

    streamer = TextIteratorStreamer(tokenizer, timeout=5)
    model.generate(**inputs, streamer=streamer, **options)
    assert "".join(streamer) == text

    with pytest.raises(ValueError, match="batch size 1"):
        model.generate(inputs.input_ids.repeat(2, 1), streamer=TextStreamer(tokenizer), **options)


def test_beams_without_new_tokens_stream_the_prompt():
    streamer, ids = Recorder(), tiny.prompt(2)
    model = hfgen.mix_into(tiny.llama())
    model.generate(ids, num_beams=2, max_new_tokens=0, streamer=streamer)
    assert [put.tolist() for put in streamer.puts] == [ids.tolist()]
    assert streamer.ends == 1
