"""Where rows end: at strings, patterns, tokens, repetitions, and when they are cancelled."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor

import hfgen
from hfgen.logits.stopping import StopRegexCriteria, StopStringCriteria
from hfgen.logits.stopping.reasons import RepetitionCriteria
from hfgen.logits.stopping.strings import WINDOW
from hfgen.settings.kinds import RepetitionDetection
from tests import tiny
from tests.scripted import PROMPT, generated, ids_of, model, tokenizer, write
from tests.tokenizers_of_all_kinds import ALL, TEXTS, byte_level

#: Every mode whose tokens a script can tell.
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "assisted": {"drafts": True},
    "assisted sampling": {"drafts": True, "do_sample": True},
    "contrastive": {"penalty_alpha": 0.001, "top_k": 4},
    "dola": {"dola_layers": [0]},
    "dropping": {"drop_finished": True},
}
IN_EVERY_MODE = pytest.mark.parametrize("mode", MODES)


# ---------------------------------------------------------------- which rows upstream would end


@pytest.mark.parametrize("name", ["builtin", "byte_level", "byte_fallback", "metaspace"])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_strings_end_the_rows_that_they_end_upstream(name: str, data: st.DataObject) -> None:
    tokenizer = ALL[name]()
    text = data.draw(st.sampled_from([text[:24] for text in TEXTS]))
    begin = data.draw(st.integers(0, len(text) - 1))
    strings = [text[begin : begin + data.draw(st.integers(1, 5))], "x", "</s>"]
    try:
        theirs = transformers.StopStringCriteria(tokenizer, strings)
    except ValueError:  # no token has the characters of a string
        return
    ours = StopStringCriteria(tokenizer, strings)
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids += data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=6)) + ids
    expected = [theirs(torch.tensor([ids[:n]]), None).item() for n in range(1, len(ids) + 1)]
    assert [ours(torch.tensor([ids[:n]]), None).item() for n in range(1, len(ids) + 1)] == expected


def test_a_string_in_several_tokens_of_a_character() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("aሰb", add_special_tokens=False)
    criteria = StopStringCriteria(tokenizer, "ሰ")
    assert len(ids) >= 4
    ends = [criteria(torch.tensor([ids[:n]]), None).item() for n in range(1, len(ids) + 1)]
    assert ends == [n == len(ids) - 1 for n in range(1, len(ids) + 1)]


@pytest.mark.parametrize(("name", "string"), [("metaspace", "☃"), ("word_piece", "return")])
def test_strings_that_upstream_cannot_tabulate(name: str, string: str) -> None:
    """A character that no token has is never found; a tokenizer need not be able to write "abcdef"."""
    tokenizer = ALL[name]()
    with pytest.raises(ValueError, match=r"Stop string preprocessing|substring not found"):
        transformers.StopStringCriteria(tokenizer, string)
    ids = tokenizer.encode("x return", add_special_tokens=False)
    ended = StopStringCriteria(tokenizer, string)(torch.tensor([ids]), None).item()
    assert ended == (name == "word_piece")


# ---------------------------------------------------------------- in every mode


@IN_EVERY_MODE
@pytest.mark.parametrize(
    ("stop", "expected", "other"),
    [
        ({"stop_strings": "é"}, "abcé", "uvw<eos>"),  # two bytes
        ({"stop_strings": ["zz", "d, e"]}, "abcé d, e", "uvw<eos>"),
        ({"stop_strings": ["a"]}, "a", "uvw<eos>"),  # the first token
        ({"stop_regex": r"[^\w] \w"}, "abcé d, e", "uvw<eos>"),
        ({"stop_regex": [r"\A.b", "never"]}, "ab", "uvw<eos>"),
        ({"stop_regex": "[^a-d]"}, "abcé", "u"),  # not in the midst of a character
        ({"stop_token_ids": ids_of("f,")}, "abcé d,", "uvw<eos>"),
        (
            {"repetition_detection": {"max_pattern_size": 3, "min_count": 3}},
            "abcé d, efgfgfg",
            "uvw<eos>",
        ),
        ({"max_new_tokens": 6, "ignore_eos": True}, "abcé ", "uvw<eos><eos><eos>"),
    ],
)
def test_a_stop_ends_its_row(mode: str, stop: dict[str, Any], expected: str, other: str) -> None:
    output = write("abcé d, efgfgfgfg<eos>", "uvw<eos>", **MODES[mode] | stop)
    assert generated(output) == [expected, other]


@IN_EVERY_MODE
@pytest.mark.parametrize(
    ("stop", "least", "free", "held"),
    [
        ({"stop_strings": ["b", "e"]}, 4, "aab", "aabbcé d, e"),
        ({"stop_strings": "b"}, 3, "aab", "aabb"),
        ({"stop_strings": ["bc", "c"]}, 4, "aabbc", "aabbc"),  # its end lies behind the minimum
        ({"stop_regex": "[bd]"}, 5, "aab", "aabbcé d"),
        ({"repetition_detection": {"max_pattern_size": 1, "min_count": 2}}, 3, "aa", "aabb"),
    ],
)
def test_min_tokens_holds_back_every_stop(
    mode: str, stop: dict[str, Any], least: int, free: str, held: str
) -> None:
    text, stop = "aabbcé d, e<eos>", MODES[mode] | stop
    for options, expected in (({"min_new_tokens": least}, free), ({"min_tokens": least}, held)):
        assert generated(write(text, "uvw<eos>" + "z" * 9, **stop, **options))[0] == expected


def test_min_tokens_holds_back_tokens_that_end_a_row() -> None:
    for ending in ({}, {"stop_token_ids": ids_of("c")}):
        output = write("c<eos>", min_tokens=3, max_new_tokens=5, **ending)
        same = write("c<eos>", min_new_tokens=3, max_new_tokens=5, **ending)
        assert torch.equal(output.sequences, same.sequences)


def test_rows_have_minimums_of_their_own() -> None:
    output = write(*["abcdbcd<eos>"] * 3, stop_strings="c", min_tokens=[None, 3, 4])
    assert generated(output) == ["abc", "abcdbc", "abcdbc"]


@pytest.mark.parametrize("stop", ["c", ["c", "v"], [["c"], "w"], [None, "v"]])
def test_stop_is_another_name_of_stop_strings(stop: Any) -> None:
    expected = generated(write("abcde<eos>", "uvw<eos>", stop_strings=stop))
    assert generated(write("abcde<eos>", "uvw<eos>", stop=stop)) == expected
    with pytest.raises(ValueError, match="`stop` is another name of `stop_strings`"):
        write("abcde<eos>", "uvw<eos>", stop=stop, stop_strings="b")


def test_a_callers_own_method_keeps_its_argument_stop() -> None:
    def method(model: Any, input_ids: Any, stop: Any = None, **kwargs: Any) -> Any:
        return stop

    model: Any = hfgen.mix_into(tiny.llama())
    assert model.generate(tiny.prompt(1), custom_generate=method, max_new_tokens=2, stop="c") == "c"


@IN_EVERY_MODE
def test_rows_end_at_stops_of_their_own(mode: str) -> None:
    if mode in ("contrastive", "dola"):  # whose prompts have no parameters of their own
        return
    configs = [
        hfgen.GenerationConfig(stop_strings=["c"], max_new_tokens=9),
        hfgen.GenerationConfig(stop_token_ids=[ids_of("b")[0]], max_new_tokens=9),
        hfgen.GenerationConfig(stop_regex="d.", max_new_tokens=9),
        hfgen.GenerationConfig(max_new_tokens=9, ignore_eos=True),
    ]
    options = dict(MODES[mode])
    for config in configs:
        config.do_sample = options.get("do_sample", False)
        config.drop_finished = options.get("drop_finished", False)
        config.return_dict_in_generate = True
    kwargs: dict[str, Any] = {} if "drafts" not in options else {"drafts": True}
    output = write(
        *["abcde<eos>ghi"] * 4,
        generation_config=configs,
        max_new_tokens=None,
        return_dict_in_generate=None,
        **kwargs,
    )
    assert generated(output) == ["abc", "ab", "abcde", "abcde<eos>ghi"]
    assert output.finish_reasons == ["stop", "stop", "stop", "length"]


def test_what_begins_in_the_prompt_does_not_count() -> None:
    stops = {"stop_strings": ["y: ab"], "stop_regex": "y: a"}
    output = write("abcay: abc<eos>", **stops)
    assert generated(output) == ["abcay: a"]
    output = write(
        "aaab<eos>", prompts=["aaa"], repetition_detection={"max_pattern_size": 1, "min_count": 3}
    )
    assert generated(output, 3) == ["aaa"]


def test_a_stop_in_one_hypothesis_of_a_beam() -> None:
    """The likelier branch has the stop string at its second token, the other one never."""

    class Branches(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            (a,), (b,), (x,), (y,) = map(ids_of, "abxy")
            cost = torch.full_like(scores, 1e4)
            for row, ids in enumerate(input_ids[:, len(PROMPT) :].tolist()):
                if not ids:
                    cost[row, a], cost[row, b] = 0.0, 30.0
                else:
                    cost[row, x if ids[0] == a else y] = 0.0
            return scores - cost

    ids = torch.tensor([ids_of(PROMPT)])
    for options in ({}, {"num_beam_groups": 2, "diversity_penalty": 90.0}):
        output = model().generate(
            ids,
            num_beams=2,
            num_return_sequences=2,
            max_new_tokens=6,
            stop_strings=["ax"],
            tokenizer=tokenizer(),
            logits_processor=[Branches()],
            return_dict_in_generate=True,
            length_penalty=0.0,
            eos_token_id=None,
            **options,
        )
        assert output.texts == ["", "byyyyy"]
        assert output.finish_reasons == ["stop", "length"]


@pytest.mark.parametrize("stops", [list(range(3, 90)), list(range(30, 97))])
def test_a_search_has_enough_candidates_beside_those_that_stop(stops: list[int]) -> None:
    """Stop tokens leave beams as much to go on with as EOS tokens do."""
    ids, one = tiny.prompt(1), hfgen.mix_into(tiny.llama())
    options = {"num_beams": 3, "early_stopping": "never", "length_penalty": 4.0}
    options |= {"max_new_tokens": 8, "pad_token_id": 0, "num_return_sequences": 2}
    by_eos = one.generate(ids, eos_token_id=[2, *stops], **options)
    assert torch.equal(one.generate(ids, stop_token_ids=stops, **options), by_eos)


# ---------------------------------------------------------------- patterns


def regex(pattern: str, text: str, prompt_length: int = 0) -> int | None:
    """After how many tokens, one per byte, a row ends."""
    criteria = StopRegexCriteria(tokenizer(), pattern, prompt_length)
    ids = ids_of(text)
    ends = (n for n in range(1, len(ids) + 1) if criteria(torch.tensor([ids[:n]]), None).item())
    return next(ends, None)


def test_patterns_see_the_start_of_the_text_and_what_is_behind() -> None:
    assert regex("^b", "abb") is None
    assert regex("^b", "abb", prompt_length=1) == 2
    assert regex("(?<=a)b", "bab") == 3
    assert regex("a$", "ba") == 2
    assert regex("(?s)a.b", "xaéb") == 5


def test_a_pattern_is_looked_for_in_a_window() -> None:
    text = "<" + "x" * (WINDOW + 10) + ">" + "<" + "y" * (WINDOW - 2) + ">"
    assert regex("(?s)<.*>", text) == len(text)
    assert regex("^y", "a" + "y" * (WINDOW + 5)) is None


# ---------------------------------------------------------------- cancel


@IN_EVERY_MODE
def test_cancel_from_another_thread(mode: str) -> None:
    cancellation = hfgen.Cancellation()

    class Slow(LogitsProcessor):
        is_row_wise = True

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] == len(PROMPT) + 3:
                thread = threading.Thread(target=cancellation.cancel)
                thread.start()
                thread.join()
            return scores

    processors = [Slow()]
    ids = torch.tensor([ids_of(PROMPT)] * 2)
    options = {name: v for name, v in MODES[mode].items() if name != "drafts"}
    if "drafts" in MODES[mode]:
        options["prompt_lookup_num_tokens"] = 4
    output = model().generate(
        ids,
        max_new_tokens=40,
        logits_processor=processors,
        cancel=cancellation,
        return_dict_in_generate=True,
        ignore_eos=True,
        **options,
    )
    assert output.sequences.shape[1] == len(PROMPT) + 4
    assert output.finish_reasons == ["cancelled"] * 2
    assert cancellation.is_cancelled


def test_cancelled_beams_are_returned_as_far_as_they_have_got() -> None:
    cancellation = hfgen.Cancellation()
    cancellation.cancel()
    output = model().generate(
        torch.tensor([ids_of(PROMPT)]),
        num_beams=3,
        max_new_tokens=9,
        stopping_criteria=[cancellation],
        return_dict_in_generate=True,
    )
    assert output.sequences.shape[1] == len(PROMPT) + 1
    assert output.finish_reasons == ["cancelled"]


# ---------------------------------------------------------------- padding


def test_rows_that_a_stop_has_ended_are_padded_and_leave_the_batch() -> None:
    options = {"stop_token_ids": [ids_of("b")[0]], "eos_token_id": None, "pad_token_id": 1}
    output = write("abcdefgh", "uvwxyzabb", max_new_tokens=8, **options)
    assert output.sequences[0, len(PROMPT) :].tolist() == [*ids_of("ab"), *[1] * 6]
    assert output.past_key_values is not None
    dropped = write("abcdefgh", "uvwxyzabb", max_new_tokens=8, drop_finished=True, **options)
    assert torch.equal(dropped.sequences, output.sequences)
    assert dropped.past_key_values is None  # it has fewer rows


def test_a_stop_string_pads_as_upstream_does_unless_rows_leave() -> None:
    """Without an EOS, upstream's rows run on behind a stop string until all have ended."""
    options = {"stop_strings": ["b", "z"], "eos_token_id": None, "pad_token_id": 1}
    model().generation_config.eos_token_id, eos = None, model().generation_config.eos_token_id
    try:
        output = write("abcdef", "uvwxyz", **options)
        dropped = write("abcdef", "uvwxyz", drop_finished=True, **options)
    finally:
        model().generation_config.eos_token_id = eos
    assert generated(output) == ["abcdef", "uvwxyz"]
    assert generated(dropped) == ["ab", "uvwxyz"]
    assert output.finish_reasons == dropped.finish_reasons == ["stop", "stop"]
    assert output.texts == dropped.texts == ["a", "uvwxy"]


def test_no_stop_token_before_the_least_number_of_tokens() -> None:
    one, ids = hfgen.mix_into(tiny.llama()), tiny.prompt(2)
    options = {"max_new_tokens": 12, "min_new_tokens": 5, "pad_token_id": 0}
    by_eos = one.generate(ids, eos_token_id=[2, *range(40, 97)], **options)
    by_stop = one.generate(ids, stop_token_ids=list(range(40, 97)), **options)
    assert torch.equal(by_stop, by_eos)
    lists = {"min_new_tokens": [5, 0], "stop_token_ids": [[*range(40, 97)], [91]]}
    own = one.generate(ids, **options | lists)
    solo = one.generate(ids[1:], **options | {"min_new_tokens": 0, "stop_token_ids": 91})
    assert own[0].tolist()[: by_stop.shape[1]] == by_stop[0].tolist()[: own.shape[1]]
    assert own[1, : solo.shape[1]].tolist() == solo[0].tolist()


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"stop_regex": "a(", "tokenizer": 1}, "`stop_regex` 'a\\(' does not compile: missing \\)"),
        ({"stop_regex": "a*", "tokenizer": 1}, "`stop_regex` 'a\\*' matches the empty text"),
        ({"stop_regex": "a"}, "`stop_regex` .* needs text"),
        ({"stop_regex": ""}, "`stop_regex` has to be a non-empty string"),
        ({"ignore_eos": True}, "`ignore_eos=True` leaves nothing to end a row"),
        ({"thinking_token_budget": -1}, "`thinking_token_budget` has to be from 0"),
        (
            {"thinking_token_budget": 3},
            "`thinking_token_budget` needs the tokens of `thinking_start`",
        ),
        (
            {"thinking_token_budget": 3, "thinking_start": [5], "thinking_end": [5]},
            "`thinking_start` and `thinking_end` have to differ",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 3, "min_count": 1}},
            "`repetition_detection`: `min_count` has to be at least 2, but is 1",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 4}},
            "`repetition_detection`: `min_pattern_size` \\(4\\) has to be between",
        ),
        ({"repetition_detection": 3}, "`repetition_detection` has to be a dict"),
        (
            {"output_metrics": True},
            "`output_metrics`=True returns its results on the output object",
        ),
    ],
)
def test_what_cannot_be_is_said_before_the_first_forward(
    kwargs: dict[str, Any], words: str
) -> None:
    if "tokenizer" in kwargs:
        kwargs = kwargs | {"tokenizer": tokenizer()}
    forwards: list[Any] = []
    hook = model().register_forward_pre_hook(lambda *args: forwards.append(args))
    try:
        with pytest.raises(ValueError, match=words):
            model().generate(torch.tensor([ids_of(PROMPT)]), **kwargs)
    finally:
        hook.remove()
    assert not forwards


def test_cancel_takes_a_cancellation() -> None:
    with pytest.raises(TypeError, match=r"`cancel` has to be a hfgen\.Cancellation, but is Event"):
        model().generate(torch.tensor([ids_of(PROMPT)]), cancel=threading.Event())


@pytest.mark.parametrize("count", [2, 3])
def test_repetitions_of_any_of_many_sizes(count: int) -> None:
    """As counted on the host, token by token; many sizes are not compared in one table."""
    generator = torch.Generator().manual_seed(count)
    criterion = RepetitionCriteria(RepetitionDetection(4000, 2, count))
    expected = []
    for length in 1, 3, 7, 8, 9, 120, 301, 700, 999, 1600:
        pattern = torch.randint(3, (length,), generator=generator).repeat(count)
        before = torch.randint(3, (1, 100), generator=generator)
        ids = torch.cat([before, pattern[None]], dim=1).repeat(3, 1)
        ids[1, 100] += 1  # the oldest token of the pattern
        ids[2, -1] += 1
        said = [criterion.reason(row, len(row)) is not None for row in ids.tolist()]
        assert criterion(ids, None).tolist() == said
        expected.append(said[0])
    assert expected == [False, *[True] * 9]
