"""What an output says of its rows: why they ended, their texts, and how long it took."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, StoppingCriteria

import hfgen
from hfgen.logits.stopping import FinishReason
from hfgen.logits.stopping.strings import StopRegexCriteria, StopStringCriteria, text_until
from hfgen.running.exact.switch import InexactError
from hfgen.state.text import Detokenizer
from tests import tiny
from tests.scripted import PROMPT, ids_of, model, tokenizer, write
from tests.test_stops import MODES
from tests.tokenizers_of_all_kinds import ALL, TEXTS

IN_EVERY_MODE = pytest.mark.parametrize("mode", MODES)


class Named(StoppingCriteria):
    """Ends rows that have ``n`` new tokens, by the count of its calls: nothing that the ids tell."""

    def __init__(self, length: int, **attributes: Any) -> None:
        self.length = length
        vars(self).update(attributes)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        is_second = torch.arange(len(input_ids)) >= len(input_ids) // 2
        return (input_ids.shape[1] >= self.length) & is_second


# ---------------------------------------------------------------- reasons


@IN_EVERY_MODE
@pytest.mark.parametrize(
    ("options", "reason", "stop", "text"),
    [
        ({}, "eos", 0, "abc"),
        ({"max_new_tokens": 2}, "length", None, "ab"),
        ({"max_new_tokens": 4}, "eos", 0, "abc"),
        ({"stop_strings": ["x", "bc"]}, "stop", "bc", "a"),
        ({"stop_strings": ["ab", "b"]}, "stop", "ab", ""),
        ({"stop_regex": "[b-d]{2}"}, "stop", "[b-d]{2}", "a"),
        ({"stop_token_ids": ids_of("b")}, "stop", ids_of("b")[0], "a"),
        ({"stop_token_ids": ids_of("b"), "max_new_tokens": 2}, "stop", ids_of("b")[0], "a"),
        ({"max_time": 0.0}, "time", None, "a"),
        ({"ignore_eos": True, "max_new_tokens": 5}, "length", None, "abc"),
        (
            {"repetition_detection": {"max_pattern_size": 1, "min_count": 4}, "ignore_eos": True},
            "repetition",
            None,
            "abc",
        ),
    ],
)
def test_why_a_row_ended(
    mode: str, options: dict[str, Any], reason: str, stop: Any, text: str
) -> None:
    output = write("abc<eos>", **MODES[mode] | options)
    assert output.finish_reasons == [reason]
    assert output.finish_reasons[0].stop == stop
    assert output.texts == [text]


@IN_EVERY_MODE
def test_rows_end_for_reasons_of_their_own(mode: str) -> None:
    output = write(
        "ab<eos>", "abcdef<eos>", "xyzuvw", stop_strings="de", max_new_tokens=6, **MODES[mode]
    )
    assert output.finish_reasons == ["eos", "stop", "length"]
    assert output.texts == ["ab", "abc", "xyzuvw"]


@pytest.mark.parametrize("mode", [name for name in MODES if name != "dropping"])
def test_criteria_of_the_callers_are_named(mode: str) -> None:
    for criterion, name in (
        (Named(len(PROMPT) + 3), "Named"),
        (Named(len(PROMPT) + 3, finish_reason="grammar"), "grammar"),
    ):
        output = write("abcdef<eos>", "abcdef<eos>", stopping_criteria=[criterion], **MODES[mode])
        assert output.finish_reasons == ["eos", name]
        assert output.texts == ["abcdef", "abc"]


def test_a_processor_may_say_why_it_made_a_row_end() -> None:
    class Closes(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores

        def finish_reason_of(self, row: int, ids: list[int]) -> str | None:
            return "grammar" if row == 1 and ids == ids_of("ab<eos>") else None

    processors = [Closes()]
    ids = torch.tensor([ids_of(PROMPT)] * 2)
    script = write("ab<eos>", "ab<eos>")
    assert script.finish_reasons == ["eos", "eos"]

    class Both(Closes):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            place = input_ids.shape[1] - len(PROMPT)
            return scores.index_fill(1, torch.tensor(ids_of("ab<eos>")[place]), 1000.0)

    processors = [Both()]
    output = model().generate(
        ids, logits_processor=processors, max_new_tokens=9, return_dict_in_generate=True
    )
    assert output.finish_reasons == ["eos", "grammar"]


def test_a_call_that_its_length_alone_ends() -> None:
    one = hfgen.mix_into(tiny.llama())
    options = {"eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
    output = one.generate(tiny.prompt(), max_new_tokens=3, **options)
    assert output.finish_reasons == ["length", "length"]
    assert one.generate(tiny.prompt(), max_new_tokens=0, **options).finish_reasons == ["length"] * 2
    assert not hasattr(output, "texts")
    assert not hasattr(output, "metrics")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True},
        {"num_beam_groups": 2, "diversity_penalty": 0.5},
        {"force_words_ids": [[9, 11]]},
        {"num_return_sequences": 3},
        {"early_stopping": True},
        {"length_penalty": 3.0},
    ],
)
def test_hypotheses_say_how_they_ended(options: dict[str, Any]) -> None:
    one = hfgen.mix_into(tiny.llama())
    torch.manual_seed(0)
    output = one.generate(
        tiny.prompt(3),
        num_beams=4,
        max_new_tokens=7,
        eos_token_id=list(range(40, 60)),
        pad_token_id=0,
        return_dict_in_generate=True,
        **options,
    )
    new, n = output.sequences[:, 7:], (output.beam_indices >= 0).sum(dim=1)
    assert len(output.finish_reasons) == len(new)
    for ids, n_tokens, reason in zip(new.tolist(), n.tolist(), output.finish_reasons, strict=True):
        newest = ids[n_tokens - 1]
        assert reason == ("eos" if 40 <= newest < 60 else "length")
        assert reason.stop == (newest if reason == "eos" else None)
        assert reason == "eos" or n_tokens == 7


def test_a_reason_is_a_word_that_knows_more() -> None:
    reason = FinishReason("stop", "\n")
    assert reason == "stop"
    assert {"stop": 1}[reason] == 1
    assert repr(reason) == "'stop' ('\\n')"
    copy = pickle.loads(pickle.dumps(reason))
    assert (copy, copy.stop) == ("stop", "\n")


# ---------------------------------------------------------------- texts


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stop_strings": ["d é"]}, "abc"),
        ({"stop_strings": ["d é"], "include_stop_str_in_output": True}, "abcd é"),
        ({"stop_regex": "d ."}, "abc"),
        ({"stop_regex": "d .", "include_stop_str_in_output": True}, "abcd é"),
        ({"stop_token_ids": ids_of("d"), "include_stop_str_in_output": True}, "abcd"),
        ({}, "abcd éf"),
        ({"include_stop_str_in_output": True}, "abcd éf"),
        ({"skip_special_tokens": None, "include_stop_str_in_output": True}, "abcd éf"),
        ({"skip_special_tokens": False}, "abcd éf"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "abcd éf<eos>"),
        ({"stop_strings": ["f<eos>"]}, "abcd éf"),  # an EOS comes first
        ({"stop_strings": ["f<eos>"], "ignore_eos": True}, "abcd é"),
        ({"max_new_tokens": 6}, "abcd \ufffd"),
    ],
)
def test_the_text_of_a_row(options: dict[str, Any], text: str) -> None:
    output = write("abcd éf<eos>", "q<eos>", **options)
    assert output.texts[0] == text


def test_prompts_have_texts_of_their_own() -> None:
    configs = [
        hfgen.GenerationConfig(stop_strings="b", include_stop_str_in_output=True),
        hfgen.GenerationConfig(stop_strings="b", skip_special_tokens=None),
        hfgen.GenerationConfig(skip_special_tokens=False, include_stop_str_in_output=True),
    ]
    for config in configs:
        config.return_dict_in_generate, config.max_new_tokens = True, 9
    output = write(
        *["abc<eos>"] * 3,
        generation_config=configs,
        return_dict_in_generate=None,
        max_new_tokens=None,
    )
    assert output.texts == ["ab", "a", "abc<eos>"]


def test_texts_without_padding_and_of_encoder_decoders() -> None:
    one = hfgen.mix_into(tiny.bart())
    one.resize_token_embeddings(len(tokenizer()))
    output = one.generate(
        torch.tensor([ids_of("abc"), ids_of("xyz")]),
        max_new_tokens=5,
        min_new_tokens=5,
        tokenizer=tokenizer(),
        return_dict_in_generate=True,
    )
    assert output.texts == tokenizer().batch_decode(
        output.sequences[:, 1:], skip_special_tokens=True
    )


# ---------------------------------------------------------------- what streams hold back


@pytest.mark.parametrize("name", [name for name in ALL if name != "slow"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_what_is_shown_is_never_cut_off(name: str, data: st.DataObject) -> None:
    tokenizer = ALL[name]()
    text = data.draw(st.sampled_from(TEXTS))
    begin = data.draw(st.integers(0, len(text) - 1))
    strings = [text[begin : begin + data.draw(st.integers(1, 8))], "zz"]
    patterns = data.draw(st.sampled_from([[], [r"(?<=\w)\s\w\w\W"], ["[.?!]$", "é.*r"]]))
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids += data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=6)) + ids
    criteria: list[Any] = [StopStringCriteria(tokenizer, strings)]
    criteria += [StopRegexCriteria(tokenizer, patterns)] if patterns else []
    shown, n_certain, detokenizer = "", 0, Detokenizer(tokenizer)
    for n in range(1, len(ids) + 1):
        found = [(c, found) for c in criteria if (found := c.found(ids, n)) is not None]
        if found:
            criterion, where = found[0]
            whole = text_until(criterion.pieces, ids[:n], where.begin, True)
            assert whole.startswith(shown)
            return
        n_next = max(n - max(c.n_open(ids[:n]) for c in criteria), n_certain)
        shown += detokenizer.push(ids[n_certain:n_next])
        n_certain = n_next


# ---------------------------------------------------------------- times


def test_metrics() -> None:
    class Slow(LogitsProcessor):
        is_row_wise = True

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            return scores

    started = time.perf_counter()
    output = hfgen.mix_into(tiny.llama()).generate(
        tiny.prompt(2, 5),
        max_new_tokens=6,
        eos_token_id=None,
        pad_token_id=0,
        logits_processor=[Slow()],
        return_dict_in_generate=True,
        output_metrics=True,
    )
    elapsed, metrics = time.perf_counter() - started, output.metrics
    assert 6 * 0.02 <= metrics.total_time <= elapsed
    assert 0.02 <= metrics.time_to_first_token < metrics.total_time
    decoding = metrics.total_time - metrics.time_to_first_token
    assert metrics.time_per_output_token == pytest.approx(decoding / 5)
    assert metrics.decode_tokens_per_second == pytest.approx(10 / decoding)
    assert metrics.prefill_tokens_per_second == pytest.approx(10 / metrics.time_to_first_token)
    assert metrics.peak_bytes is None or metrics.peak_bytes > 2**20


@pytest.mark.parametrize(
    "options", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 2}, {"max_new_tokens": 1}]
)
def test_metrics_in_other_modes(options: dict[str, Any]) -> None:
    options = {"max_new_tokens": 4, "return_dict_in_generate": True} | options
    one = hfgen.mix_into(tiny.llama())
    plain = one.generate(tiny.prompt(), **options)
    output = one.generate(tiny.prompt(), output_metrics=True, **options)
    assert torch.equal(output.sequences, plain.sequences)
    assert (output.metrics.time_per_output_token is None) == (options["max_new_tokens"] == 1)
    assert output.metrics.total_time > 0


@pytest.mark.parametrize(
    "error",
    [
        hfgen.InvalidScoresError([1, 2], 3),
        hfgen.InvalidScoresError([1, 2], 3, 0),
        InexactError("message", ()),
    ],
    ids=repr,
)
def test_errors_reach_another_process(error: Exception):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
