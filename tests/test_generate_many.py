"""`generate_many`: outputs of solo calls, in order or as they finish, from prompts of any number."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hfgen
from hfgen import generate_many
from hfgen.engine import Engine, many
from hfgen.engine.many import JobProgress
from tests import tiny

MODEL = hfgen.mix_into(tiny.llama())


def ids(length: int, seed: int = 0) -> list[int]:
    return tiny.prompt(1, length, seed)[0].tolist()


def solo(prompt: list[int], **kwargs: Any) -> list[int]:
    output = MODEL.generate(torch.tensor([prompt]), **kwargs)
    return output[0, len(prompt) :].tolist()


PROMPTS = [ids(3 + 5 * (n % 4), n) for n in range(9)]
LENGTHS = [11, 2, 7, 1, 9, 3, 12, 5, 4]


def test_outputs_are_those_of_solo_calls_in_order():
    asked = [(prompt, {"max_new_tokens": n}) for prompt, n in zip(PROMPTS, LENGTHS, strict=True)]
    outputs = list(generate_many(MODEL, asked, max_rows=3, eos_token_id=None))
    assert [output.id for output in outputs] == [str(n) for n in range(9)]
    for output, (prompt, own) in zip(outputs, asked, strict=True):
        assert output.prompt_token_ids == prompt
        assert output.token_ids == solo(prompt, **own, eos_token_id=None)
        assert output.finish_reason == "length"
        assert output.error is None


def test_as_they_finish_the_short_ones_come_first():
    asked = [
        (prompt, {"max_new_tokens": n}) for prompt, n in zip(PROMPTS[:2], (20, 2), strict=True)
    ]
    outputs = list(generate_many(MODEL, asked, in_order=False, eos_token_id=None))
    assert [(output.id, len(output.token_ids)) for output in outputs] == [("1", 2), ("0", 20)]


def test_own_arguments_come_before_those_of_all():
    asked = [(PROMPTS[0], {"max_new_tokens": 2, "seed": 1}), PROMPTS[1]]
    outputs = list(generate_many(MODEL, asked, max_new_tokens=5, do_sample=True, seed=3))
    assert [len(output.token_ids) for output in outputs] == [2, 5]
    first = solo(PROMPTS[0], max_new_tokens=2, do_sample=True, seed=1)
    second = solo(PROMPTS[1], max_new_tokens=5, do_sample=True, seed=3)
    assert [output.token_ids for output in outputs] == [first, second]


class Counted(Iterator[Any]):
    """Prompts without end, which knows how many were read."""

    def __init__(self, prompts: Any) -> None:
        self.prompts, self.n_read = prompts, 0

    def __next__(self) -> Any:
        self.n_read += 1
        return next(self.prompts)


@pytest.mark.parametrize("in_order", [True, False])
def test_endless_prompts_are_read_as_they_are_needed(in_order: bool):
    prompts = Counted(itertools.cycle(PROMPTS))
    outputs = generate_many(MODEL, prompts, max_rows=2, max_new_tokens=3, in_order=in_order)
    assert prompts.n_read == 0
    for n_taken, output in enumerate(itertools.islice(outputs, 12), start=1):
        assert output.error is None
        assert prompts.n_read <= n_taken + 2 * 2 + 1  # decoding, waiting
    outputs.close()
    with pytest.raises(StopIteration):
        next(outputs)


def test_outputs_that_wait_for_a_slow_one_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(many, "HELD_PER_ROW", 4)
    slow = (PROMPTS[0], {"max_new_tokens": 60})
    prompts = Counted(itertools.chain([slow], itertools.cycle(PROMPTS)))
    outputs = generate_many(MODEL, prompts, max_rows=2, max_new_tokens=1, eos_token_id=None)
    assert len(next(outputs).token_ids) == 60
    assert prompts.n_read == 4 * 2
    assert [next(outputs).id for _ in range(9)] == [str(n) for n in range(1, 10)]
    outputs.close()


def test_closing_cancels_what_is_left(monkeypatch: pytest.MonkeyPatch):
    engines: list[Engine] = []

    class Noted(Engine):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            engines.append(self)

    monkeypatch.setattr(many, "Engine", Noted)
    outputs = generate_many(MODEL, PROMPTS, max_rows=4, max_new_tokens=30, eos_token_id=None)
    (engine,) = engines
    next(outputs)
    assert engine.has_work
    outputs.close()
    assert not engine.has_work
    assert engine.n_rows == 0


class Panic(BaseException):
    """As one of Rust's libraries: no Exception."""


def test_a_panic_is_an_error_in_its_place(monkeypatch: pytest.MonkeyPatch):
    class Panicking(Engine):
        def add(self, prompt: Any, **kwargs: Any) -> Any:
            if prompt == PROMPTS[1]:
                raise Panic("on purpose")
            return super().add(prompt, **kwargs)

    monkeypatch.setattr(many, "Engine", Panicking)
    outputs = list(generate_many(MODEL, PROMPTS[:3], max_new_tokens=2))
    assert [output.finish_reason == "error" for output in outputs] == [False, True, False]
    assert str(outputs[1].error) == "Panic: on purpose"


WRONG: list[Any] = [[], "text without a tokenizer", 7, (PROMPTS[0], {"temprature": 1})]


def test_what_cannot_be_used_is_an_error_in_its_place():
    asked = [PROMPTS[0], *WRONG, PROMPTS[1]]
    outputs = list(generate_many(MODEL, asked, max_new_tokens=4))
    assert [output.finish_reason == "error" for output in outputs] == [False, *4 * [True], False]
    for output in outputs[1:5]:
        assert isinstance(output.error, ValueError | TypeError)
        assert output.token_ids == []
    assert outputs[5].token_ids == solo(PROMPTS[1], max_new_tokens=4)
    raising = generate_many(MODEL, asked, max_new_tokens=4, on_error="raise")
    assert next(raising).token_ids == outputs[0].token_ids
    with pytest.raises(ValueError, match="empty"):
        next(raising)


def test_prompts_that_are_all_wrong_without_end_have_outputs():
    outputs = generate_many(MODEL, itertools.repeat([]), in_order=False)
    assert all(next(outputs).error is not None for _ in range(5))
    outputs.close()


def test_a_request_that_fails_leaves_the_others_alone():
    def break_off(input_ids: Any, scores: Any) -> Any:
        if input_ids.shape[1] > len(PROMPTS[1]) + 1:
            raise RuntimeError("broken")
        return scores

    asked = [PROMPTS[0], (PROMPTS[1], {"logits_processor": [break_off]}), PROMPTS[2]]
    outputs = list(generate_many(MODEL, asked, max_new_tokens=4))
    assert str(outputs[1].error) == "broken"
    assert outputs[1].finish_reason == "error"
    for n in 0, 2:
        assert outputs[n].token_ids == solo(PROMPTS[n], max_new_tokens=4)


def test_scores_without_a_token_are_named_by_the_prompt():
    asked = [
        PROMPTS[0],
        [],
        (PROMPTS[1], {"logits_processor": [lambda ids, scores: scores * math.nan]}),
    ]
    *_, failed = generate_many(MODEL, asked, max_new_tokens=4)
    assert "row 0 of prompt 2 are NaN or infinite at step 0" in str(failed.error)
    assert isinstance(failed.error, hfgen.InvalidScoresError)


def test_a_prompt_that_cannot_be_read_ends_the_job():
    def prompts() -> Iterator[Any]:
        yield PROMPTS[0]
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="gone"):
        list(generate_many(MODEL, prompts(), max_new_tokens=2))


def test_nothing_comes_of_no_prompts():
    assert list(generate_many(MODEL, [])) == []


def test_a_text_is_no_list_of_prompts():
    with pytest.raises(TypeError, match=r"one str: write \[prompt\]"):
        hfgen.generate_many(tiny.llama(), "hello")


def test_wrong_options_are_named_at_once():
    with pytest.raises(ValueError, match="on_error"):
        generate_many(MODEL, PROMPTS, on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="policy"):
        generate_many(MODEL, PROMPTS, policy="random")


def test_text_needs_a_tokenizer_and_gives_text():
    model, tokenizer = hfgen.builtin_model()
    prompts = ["import os\n", "def add(a, b):"]
    outputs = list(generate_many(model, prompts, tokenizer, max_new_tokens=8, do_sample=False))
    for prompt, output in zip(prompts, outputs, strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        alone = model.generate(
            **inputs,
            tokenizer=tokenizer,
            max_new_tokens=8,
            do_sample=False,
            return_dict_in_generate=True,
        )
        assert output.text == alone.texts[0]


def test_progress_counts_and_goes_to_standard_error(capsys: pytest.CaptureFixture[str]):
    outputs = list(generate_many(MODEL, PROMPTS, max_new_tokens=3, progress=True))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{len(outputs)}/{len(PROMPTS)}" in captured.err
    assert "tokens/s" in captured.err


def test_tokens_per_second_are_those_since_the_start():
    times = iter([0.0, 0.0, 2.0, 2.0, 4.0, 4.0])
    with JobProgress(3, clock=lambda: next(times)) as progress:
        progress.add_tokens(10)
        assert progress.tokens_per_second == 5.0
        progress.n_tokens += 10
        assert progress.tokens_per_second == 5.0
