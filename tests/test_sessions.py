"""Sessions: whatever is done to its rows, each is a call of ``generate`` with the same ids and seed."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor

import hfgen
from hfgen.session import Session, SessionBusyError, SessionClosedError
from tests import tiny
from tests.parity.harness import FAMILIES, ours, quiet
from tests.test_assisted import phi3
from tests.test_interventions import layer_of, width_of

#: Of full attention, windows, both, states of linear attention, an encoder, and images.
NAMED = (
    *("llama", "gpt2", "qwen3", "mixtral", "deepseek_v3", "bloom", "falcon_alibi"),
    *("mistral", "gemma3_text", "gpt_oss", "llama4_text", "gemma3n_text"),
    *("jamba", "falcon_h1", "qwen3_next", "lfm2", "zamba2", "nemotron_h", "mamba", "mamba2"),
    *("t5", "bart_seq2seq", "marian_seq2seq", "m2m_100"),
    *("llava", "qwen2_vl", "paligemma", "mllama"),
)
N_EXAMPLES = int(os.environ.get("HFGEN_FUZZ", 3 * len(NAMED))) // len(NAMED)

#: Ids of the smallest vocabulary that are not special.
TOKENS = st.integers(5, 60)
NUMBERS = st.lists(st.integers(0, 9), min_size=6, max_size=6)
OPTIONS = st.fixed_dictionaries(
    {"max_new_tokens": st.sampled_from([6, 15, 40])},
    optional={
        "seed": st.integers(0, 99),
        "temperature": st.sampled_from([0.7, 1.5]),
        "repetition_penalty": st.just(1.3),
        "min_new_tokens": st.just(4),
        "mirostat": st.just(2),
        "interventions": st.sampled_from(["all", "prompt", "generated"]),
    },
)
#: Operations; numbers and tokens are for as many rows as there are at most.
OPERATIONS = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("fork"), st.integers(1, 2)),
    st.tuples(st.just("rewind"), NUMBERS),
    st.tuples(st.just("feed"), st.lists(st.lists(TOKENS, max_size=3), min_size=6, max_size=6)),
    st.tuples(st.just("keep"), st.permutations(range(6)), st.integers(1, 6)),
    st.tuples(st.just("join"), OPTIONS, st.integers(0, 4)),
    st.tuples(st.just("set"), st.sampled_from([0.5, 1.2]), st.integers(0, 5)),
    st.tuples(st.just("steer"), st.sampled_from(["all", "generated"]), st.integers(0, 5)),
    st.tuples(st.just("logits")),
)


def steered(model: Any, tokens: str) -> list[hfgen.Steer]:
    part = (
        ".mlp" if "gemma3n" in model.config.model_type else ""
    )  # its layers have four states a token
    vector = torch.linspace(-1, 1, width_of(model))
    return [hfgen.Steer(layer_of(model) + part, vector, tokens=tokens)]


def begun(name: str, options: dict[str, Any], seed: int = 0) -> Session:
    """A session of one row; prompts of text have a length that depends on ``seed``."""
    family, model = FAMILIES[name], ours(name)
    inputs = dict(family.inputs(model, 1, False, seed))
    if list(inputs) == ["input_ids"] and family.kind == "decoder":
        inputs["input_ids"] = inputs["input_ids"][:, : 1 + seed % 7]
    options = {"pad_token_id": 0, "do_sample": "seed" in options} | options
    if tokens := options.get("interventions"):
        options["interventions"] = steered(model, tokens)
    if not options["do_sample"]:
        for name_of_sampling in ("temperature", "mirostat"):
            options.pop(name_of_sampling, None)
    return model.session(**inputs, **options, snapshot_every=1 + seed % 4)


def done(session: Session, operation: tuple[Any, ...], name: str, seed: int) -> Session:
    """The session that an operation makes; of a refused one, the same."""
    kind, *values = operation
    n = len(session)
    if kind == "step":
        for _ in session.step(*values):
            pass
    elif kind == "fork" and n <= 3:
        return session.fork(*values)
    elif kind == "rewind":
        numbers = zip(values[0], session.tokens, strict=False)
        session.rewind([min(number, len(tokens)) for number, tokens in numbers])
    elif kind == "feed":
        limits = [row.run.config.max_length - row.n_tokens for row in session._rows]
        fed = zip(values[0], limits, strict=False)
        session.feed([tokens[:limit] for tokens, limit in fed])
    elif kind == "keep":
        return session.keep([row for row in values[0] if row < n][: values[1]])
    elif kind == "join" and n <= 3:
        other = begun(name, values[0], seed + 1)
        for _ in other.step(values[1]):
            pass
        return session.join(other)
    elif kind == "set":
        session.set(temperature=values[0], do_sample=True, seed=7, row=values[1] % n)
    elif kind == "steer":
        session.set(interventions=steered(session.model, values[0]), row=values[1] % n)
    elif kind == "logits":
        assert session.logits.shape[0] == n
    return session


def near(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.allclose(one, two, rtol=1e-3, atol=1e-3)


def check(session: Session, same: Callable[[Any, Any], bool] = near) -> None:
    """Compare each row with its fresh call: tokens, the end, and the logits of the next token."""
    logits = session.logits
    for index, ids in enumerate(session.ids):
        call = session.call(index) | {"return_dict_in_generate": True, "output_logits": True}
        fresh = session.model.generate(**call)
        sequence = fresh.sequences[0].tolist()
        assert sequence[: len(ids)] == ids
        if session.finish_reasons[index] is not None:
            assert len(sequence) == len(ids)
            continue
        place = len(fresh.logits) - (len(sequence) - len(ids))
        assert same(fresh.logits[place][0], logits[index])


class Interrupt:
    """Raises ``KeyboardInterrupt`` as the function ``number`` of the session's modules is entered within."""

    def __init__(self, number: int) -> None:
        self.remaining = number

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        self.remaining -= "/hfgen/session/" in frame.f_code.co_filename
        if self.remaining == 0:
            sys.settrace(None)
            raise KeyboardInterrupt

    def __enter__(self) -> None:
        self.before = sys.gettrace()
        sys.settrace(self)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_interrupted_changes_leave_rows_that_go_on(name: str) -> None:
    changes: list[Callable[[Session], Any]] = [
        lambda session: session.rewind([1, 3]),
        lambda session: session.feed([[5, 6], [7]]),
        lambda session: list(session.step(2)),
    ]
    n_interrupts = 0
    for number in range(2, 60, 4):
        with quiet():
            session = begun(name, {"max_new_tokens": 40, "seed": 3, "eos_token_id": None})
            list(session.step(5))
            session = session.fork(2)
            try:
                with Interrupt(number):
                    changes[number // 4 % 3](session)
            except KeyboardInterrupt:
                n_interrupts += 1
            list(session.step(2))
            session.rewind(1)
            list(session.step(1))
            check(session)
    assert n_interrupts > 8


@pytest.mark.parametrize("name", NAMED)
def test_any_operations_leave_rows_as_their_fresh_calls(name: str) -> None:
    @settings(
        max_examples=max(N_EXAMPLES, 1),
        deadline=None,
        derandomize="HFGEN_FUZZ" not in os.environ,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(OPTIONS, st.lists(OPERATIONS, min_size=3, max_size=8), st.integers(0, 50))
    def run(options: dict[str, Any], operations: list[tuple[Any, ...]], seed: int) -> None:
        with quiet():
            session = begun(name, options, seed)
            for operation in operations:
                session = done(session, operation, name, seed)
            check(session)

    run()


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3_next", "t5"])
def test_exact_rows_have_the_bits_of_their_fresh_calls(name: str) -> None:
    with quiet(), hfgen.exact(ours(name)):
        session = begun(name, {"max_new_tokens": 24, "seed": 3, "min_new_tokens": 18}, seed=5)
        for _ in session.step(12):
            pass
        session = session.fork(3)
        session.rewind([0, 5, 9])
        session.feed([[], [7, 8], [9]])
        other = begun(name, {"max_new_tokens": 24}, seed=2)
        session = session.join(other).keep([3, 1, 2, 0])
        for _ in session.step(4):
            pass
        session.rewind(2)
        check(session, torch.equal)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text"])
def test_prefixes_of_the_model_begin_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prefixes = ours(name), hfgen.PrefixCache()
    monkeypatch.setattr(model, "prefix_cache", prefixes, raising=False)
    with quiet():
        ids = torch.arange(5, 33).view(2, 14)
        model.generate(ids, max_new_tokens=2, pad_token_id=0)
        session = model.session(ids, max_new_tokens=12, pad_token_id=0)
        for _ in session.step(6):
            pass
        session.rewind([5, 2])
        check(session.fork(2))
    assert prefixes.stats.hits >= 2


def test_a_rewind_to_where_keys_were_rotated_otherwise() -> None:
    model = hfgen.mix_into(phi3())  # above 16 tokens, it computes all keys anew
    session = model.session(tiny.prompt(2, 13), max_new_tokens=9, eos_token_id=None)
    for _ in session.step(6):
        pass
    session.rewind(4)
    for _ in session.step(7):
        pass
    for row, tokens in enumerate(session.tokens):
        assert model.generate(**session.call(row))[0, 13:].tolist() == list(tokens)


# ---------------------------------------------------------------- what operations do


@pytest.fixture(scope="module")
def model() -> Any:
    return hfgen.mix_into(tiny.llama())


def events_of(session: Session, n: int) -> list[Any]:
    return list(session.step(n))


def test_rows_of_a_padded_batch_are_those_of_the_batch(model: Any) -> None:
    ids = tiny.prompt(3)
    ids[1, :3], ids[2, :5] = 0, 0
    mask = (ids != 0).long()
    arguments = {"do_sample": True, "seed": [1, 2, 3], "temperature": [0.7, 1.0, 1.3]}
    options = {"max_new_tokens": 9, "pad_token_id": 0, "return_dict_in_generate": True}
    output = model.generate(ids, attention_mask=mask, **arguments, **options)
    session = model.session(ids, attention_mask=mask, **arguments, **options)
    events = events_of(session, 20)
    generated = [[t for t in row if t != 0] for row in output.sequences[:, 7:].tolist()]
    assert session.tokens == generated
    assert session.finish_reasons == output.finish_reasons
    assert session.ids[1] == output.sequences[1, 3:].tolist()[: len(session.ids[1])]
    by_row = [[t for e in events if e.row == row for t in e.token_ids] for row in range(3)]
    assert by_row == generated


def test_a_batch_is_forwarded_together_and_prompts_once(model: Any) -> None:
    forwards: list[int] = []

    def count(module: Any, args: Any, outputs: Any) -> None:
        forwards.append(len(outputs.logits))

    count.is_row_wise = True  # type: ignore[attr-defined]
    handle = model.register_forward_hook(count)
    try:
        session = model.session(tiny.prompt(1), max_new_tokens=30, do_sample=True, seed=5)
        events_of(session, 3)
        assert len(forwards) == 3
        four = session.fork(4)
        events_of(four, 5)
        assert forwards[3:] == [4] * 5
        four.logits, four.logits  # noqa: B018
        events_of(four, 1)
        assert forwards[8:] == [4]
        four.rewind([1, 2, 3, 4])
        events_of(four, 1)  # also tries out whether the model hides padding
        forwards.clear()
        four.rewind([0, 1, 0, 0])
        four.feed([[5, 6, 7]] * 4)
        four.logits  # noqa: B018
        assert forwards == [4]  # four tokens of each at once, since as many are missing
    finally:
        handle.remove()


def test_a_fork_of_a_greedy_row_is_the_row_and_seeds_are_split(model: Any) -> None:
    greedy = model.session(tiny.prompt(1), max_new_tokens=12).fork(3)
    events_of(greedy, 12)
    assert greedy.tokens[0] == greedy.tokens[1] == greedy.tokens[2]
    sampled = model.session(tiny.prompt(1), max_new_tokens=12, do_sample=True)
    seed = sampled.call(0)["seed"]
    forked = sampled.fork(3)
    seeds = [forked.call(row)["seed"] for row in range(3)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 3
    assert [sampled.fork(3).call(row)["seed"] for row in range(3)] == seeds


def test_sessions_that_share_a_cache_do_not_see_each_other(model: Any) -> None:
    session = model.session(tiny.prompt(2), max_new_tokens=40, min_new_tokens=40)
    events_of(session, 4)
    before = session.tokens
    fork = session.fork()
    fork.rewind(2)
    fork.feed([[9], [10]])
    events_of(fork, 3)
    assert session.tokens == before
    check(session)
    events_of(session, 3)
    check(session)
    check(fork)
    session.close()
    check(fork)


class Forced(LogitsProcessor):
    """Makes a call of ``generate`` choose ``tokens`` first, whatever their scores are."""

    def __init__(self, prompt_length: int, tokens: list[int]) -> None:
        self.prompt_length, self.tokens = prompt_length, tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = input_ids.shape[1] - self.prompt_length
        if place >= len(self.tokens):
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.tokens[place]] = 0.0
        return forced


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "mistral"])
def test_given_tokens_are_as_if_they_had_been_chosen(name: str) -> None:
    """``call`` names a strategy of the session's; here it is a plain call with a processor."""
    with quiet():
        options = {"do_sample": True, "ignore_eos": True, "repetition_penalty": 1.2}
        options |= {"max_new_tokens": 20, "pad_token_id": 0}
        model, ids = ours(name), tiny.prompt(1, 5) % 60
        session = model.session(ids, **options, seed=4)
        events_of(session, 6)
        session = session.fork(2)
        session.rewind([1, 3])
        session.feed([[9], [11, 12]])
        given = session.tokens
        events_of(session, 20)
        for row in range(2):
            seed = session.call(row)["seed"]
            forced = [Forced(5, given[row])]
            fresh = model.generate(ids, **options, seed=seed, logits_processor=forced)
            assert session.ids[row] == fresh[0].tolist()


def test_a_finished_row_goes_on_when_it_is_rewound_or_fed(model: Any) -> None:
    session = model.session(tiny.prompt(1), max_new_tokens=6, eos_token_id=[2], pad_token_id=0)
    (first,) = events_of(session, 1)
    session = model.session(tiny.prompt(1), max_new_tokens=9, eos_token_id=first.token_ids[0])
    assert events_of(session, 5)[-1].finish_reason == "eos"
    assert events_of(session, 5) == []
    session.feed([[7, 8]])
    assert session.finish_reasons == [None]
    events_of(session, 2)
    check(session)
    session.rewind(len(session.tokens[0]))
    assert session.tokens == [[]]
    assert events_of(session, 5)[-1].finish_reason == "eos"


@pytest.mark.parametrize("n_rows", [1, 2])
def test_none_takes_the_place_of_the_models_own_value(
    model: Any, n_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    ids = tiny.prompt(n_rows)
    expected = model.generate(ids, **options)
    monkeypatch.setattr(model.generation_config, "eos_token_id", int(expected[0, ids.shape[1] + 1]))
    assert torch.equal(model.generate(ids, **options), expected)
    session = model.session(ids, **options, assistant_model=None, prefix_cache=None)
    events_of(session, 6)
    assert session.ids == expected.tolist()
    check(session)


def test_a_row_that_ended_by_its_length_goes_on_with_a_greater_one(model: Any) -> None:
    session = model.session(tiny.prompt(1), max_new_tokens=3, min_new_tokens=3)
    events_of(session, 9)
    assert session.finish_reasons == ["length"]
    session.set(max_new_tokens=5)
    assert len(events_of(session, 9)) <= 2
    check(session)


def test_text_and_stop_strings(model: Any) -> None:
    tokenizer = tiny.ascii_tokenizer()
    options = {"tokenizer": tokenizer, "max_new_tokens": 20, "do_sample": True, "seed": 3}
    options |= {"ignore_eos": True, "pad_token_id": 0}
    whole = model.session(tiny.prompt(1), **options)
    text = "".join(event.text for event in whole.step(20))
    assert text == whole.text[0]
    stopped = model.session(tiny.prompt(1), **options, stop_strings=[text[4:6]])
    assert "".join(event.text for event in stopped.step(20)) == stopped.text[0]
    assert stopped.text[0] == text[: text.index(text[4:6])]
    stopped.feed(["xy"])
    assert stopped.tokens[0][-2:] == tokenizer("xy", add_special_tokens=False)["input_ids"]


def test_logprobs_of_events_are_those_of_the_call(model: Any) -> None:
    options = {"max_new_tokens": 8, "logprobs": 2, "return_dict_in_generate": True}
    output = model.generate(tiny.prompt(1), **options)
    session = model.session(tiny.prompt(1), **options)
    events_of(session, 5)
    session.rewind(2)
    event = events_of(session, 1)[0]
    assert event.logprobs[0].token_id == output.sequences[0, 7 + 3]
    assert event.logprobs[0].logprob == pytest.approx(output.logprobs[0][3].logprob, abs=1e-4)


def set_and_step(session: Session, edit: hfgen.Edit) -> None:
    session.set(interventions=[edit])
    events_of(session, 1)


def test_interventions_are_in_their_rows_and_forks_share_forwards(model: Any) -> None:
    layer, forwards = layer_of(model), list[int]()

    def count(hidden: torch.Tensor, where: hfgen.Where) -> torch.Tensor:
        forwards.append(len(hidden))
        return -hidden

    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": True, "seed": [1, 2, 3]}
    plain = model.session(tiny.prompt(3), **options)
    edits = [hfgen.Edit(layer, count, rows=[1], tokens="generated")]
    session = model.session(tiny.prompt(3), **options, interventions=edits)
    for each in (plain, session):
        events_of(each, 8)
    assert session.tokens[::2] == plain.tokens[::2]
    assert session.tokens[1] != plain.tokens[1]
    check(session)
    forwards.clear()
    four = session.keep([1]).fork(4)
    events_of(four, 3)
    assert set(forwards) == {4}
    four.rewind([0, 2, 0, 1])
    four.feed([[], [9], [8], []])
    events_of(four, 3)
    check(four)
    four.set(interventions=None, row=2)
    assert len(set(map(tuple, four.logits.tolist()))) > 1
    check(four)
    for bad, message in (
        (hfgen.Steer("model.layer.0", torch.ones(8)), "no module 'model.layer.0'"),
        (hfgen.Edit(layer, count, rows=[4]), "rows"),
        (hfgen.Edit(layer, lambda hidden, _: hidden[:, :0]), "shape"),
    ):
        with pytest.raises(ValueError, match=message):
            set_and_step(four, bad)
        four.set(interventions=None)
        check(four)


def test_activations_are_those_of_the_call(model: Any, tmp_path: Path) -> None:
    names, inputs = [layer_of(model), "lm_head:in"], tiny.prompt(2)
    edits = [hfgen.Steer(names[0], torch.ones(width_of(model)), rows=[0])]
    session = model.session(inputs, max_new_tokens=9, record=names, interventions=edits)
    events_of(session, 4)
    session.rewind([1, 0])
    session.feed([[9, 10], []])
    found = session.activations
    for row, ids in enumerate(session.ids):
        call = session.call(row) | {"max_new_tokens": len(ids) - 7, "return_dict_in_generate": True}
        activations = model.generate(**call).activations
        for name in names:
            assert len(found[name][row]) == len(ids)
            torch.testing.assert_close(activations[name][0], found[name][row])
    session.set(record=hfgen.Record(names, folder=tmp_path))
    assert session.activations == {}
    assert {path.name for path in tmp_path.iterdir()} == {"0.safetensors", "1.safetensors"}
    session.set(record=None)
    with pytest.raises(ValueError, match="record="):
        session.activations  # noqa: B018


def test_snapshots_are_bounded_in_number_and_bytes() -> None:
    model = ours("mamba")
    ids = FAMILIES["mamba"].inputs(model, 1, False, 0)["input_ids"]
    options = {"max_new_tokens": 40, "min_new_tokens": 40, "snapshot_every": 1}
    with quiet():
        session = model.session(ids, **options)
        events_of(session, 1)
        one = session._rows[0].states.nbytes
        events_of(session, 30)
        assert 3 * one <= session.nbytes <= 10 * one
        small = model.session(ids, **options, snapshot_bytes=2 * one)
        events_of(small, 30)
        assert small.nbytes <= 4 * one
        for each in (session, small):
            each.rewind(11)
            check(each)


# ---------------------------------------------------------------- what is refused


def test_bad_operations_are_refused_by_name_and_change_nothing(model: Any) -> None:
    session = model.session(tiny.prompt(2), max_new_tokens=10, min_new_tokens=10)
    events_of(session, 3)
    before = session.ids
    other = hfgen.mix_into(tiny.llama(hidden_size=16)).session(tiny.prompt(1), max_new_tokens=3)
    refused: list[tuple[type, str, Callable[[], Any]]] = [
        (ValueError, "Row 0 has 3 tokens behind its prompt", lambda: session.rewind([4, 0])),
        (ValueError, "`n` has 3 entries", lambda: session.rewind([1, 1, 1])),
        (ValueError, "at least 0", lambda: session.rewind(-1)),
        (TypeError, "`n` has to be an integer", lambda: session.step(1.5)),
        (TypeError, "`n` has to be an integer", lambda: session.rewind([1, True])),
        (ValueError, "Token 97 is outside of the vocabulary", lambda: session.feed([[1], [97]])),
        (TypeError, "token ids or text", lambda: session.feed([[1], [0.5]])),
        (TypeError, "an entry for each row", lambda: session.feed("text")),
        (ValueError, "with a tokenizer", lambda: session.feed(["a", "b"])),
        (ValueError, "room for 7", lambda: session.feed([[], [9] * 8])),
        (ValueError, "at least 1", lambda: session.fork(0)),
        (IndexError, "There is no row 2", lambda: session.keep([0, 2])),
        (ValueError, "`rows` is empty", lambda: session.keep([])),
        (IndexError, "There is no row 5", lambda: session.call(5)),
        (ValueError, "two models", lambda: session.join(other)),
        (TypeError, "has to be a Session", lambda: session.join([])),
        (ValueError, "max_new_tokens", lambda: session.set(max_new_tokens=-3)),
        (ValueError, "an input of the prompt", lambda: session.set(input_ids=tiny.prompt(1))),
        (ValueError, "beam search", lambda: session.set(num_beams=2)),
        (ValueError, "needs the tokenizer", lambda: session.text),
    ]
    for kind, message, operation in refused:
        with pytest.raises(kind, match=message):
            operation()
        assert session.ids == before
    check(session)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 3}, "not by beam search"),
        ({"num_return_sequences": 2, "do_sample": True}, "fork"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"use_cache": False}, "use_cache"),
        ({"assistant_model": object()}, "assistant_model"),
        ({"seed": [1, 2, 3], "do_sample": True}, "`seed` has 3"),
        ({"guidance_scale": 2.0}, "guidance_scale"),
        ({"snapshot_every": 0}, "snapshot_every"),
    ],
)
def test_arguments_that_no_session_takes(model: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.session(tiny.prompt(2), max_new_tokens=3, **arguments)


@pytest.mark.parametrize("name", ["recurrent_gemma", "rwkv", "minimax", "whisper"])
def test_models_whose_states_are_elsewhere_are_refused_by_name(name: str) -> None:
    with quiet(), pytest.raises((ValueError, TypeError), match=type(ours(name)).__name__[:7]):
        begun(name, {"max_new_tokens": 4}).logits  # noqa: B018


def test_an_exception_leaves_the_rows_as_they_were(model: Any) -> None:
    calls: list[int] = []

    def allowed(row: int, ids: Any) -> list[int]:
        calls.append(len(ids))
        if len(calls) == 6:  # in the second row, after the first has chosen
            raise KeyError("mine")
        return list(range(3, 97))

    session = model.session(
        tiny.prompt(2), max_new_tokens=10, prefix_allowed_tokens_fn=allowed, do_sample=True
    )
    with pytest.raises(KeyError, match="mine"):
        events_of(session, 5)
    assert [len(tokens) for tokens in session.tokens] == [2, 2]
    events_of(session, 5)
    assert [len(tokens) for tokens in session.tokens] == [7, 7]
    check(session)


def test_a_row_without_a_token_to_choose_is_named_and_the_others_can_go_on(model: Any) -> None:
    class OneRow(LogitsProcessor):
        def __call__(self, ids: Any, scores: Any) -> Any:
            is_its = (ids[:, 0] == prompt[1, 0]) & (ids.shape[1] > prompt.shape[1] + 1)
            return scores.masked_fill(is_its[:, None], torch.nan)

    prompt = tiny.prompt(3)
    session = model.session(
        prompt, max_new_tokens=10, eos_token_id=None, logits_processor=[OneRow()], do_sample=False
    )
    with pytest.raises(hfgen.InvalidScoresError, match=r"The scores of row 1 are NaN.* at step 2"):
        events_of(session, 5)
    assert [len(tokens) for tokens in session.tokens] == [2, 2, 2]
    others = session.keep([0, 2])
    events_of(others, 5)
    check(others)


def test_two_threads_and_a_closed_session_are_refused(model: Any) -> None:
    errors: list[BaseException] = []

    def allowed(row: int, ids: Any) -> list[int]:
        def other() -> None:
            try:
                session.rewind(0)
            except SessionBusyError as error:
                errors.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return [5]

    session = model.session(tiny.prompt(1), max_new_tokens=4, prefix_allowed_tokens_fn=allowed)
    events_of(session, 1)
    assert len(errors) == 1
    with session:
        steps = session.step(2)
    for operation in (session.fork, lambda: session.rewind(0), lambda: next(steps)):
        with pytest.raises(SessionClosedError, match="closed"):
            operation()
    session.close()


def test_a_config_of_the_caller_is_used_and_stays(model: Any) -> None:
    config = hfgen.GenerationConfig(max_new_tokens=8, do_sample=True, seed=3)
    before = config.to_dict()
    session = model.session(tiny.prompt(2), generation_config=config).fork(2)
    session.set(temperature=0.5, row=1)
    events_of(session, 4)
    assert "seed" not in session.call(1)
    assert config.to_dict() == before
    for row, ids in enumerate(session.ids):
        assert model.generate(**session.call(row))[0, : len(ids)].tolist() == ids


def test_a_model_without_the_mixin_is_used_through_a_view() -> None:
    model = tiny.llama()
    session = hfgen.Session(model, tiny.prompt(1), max_new_tokens=5)
    events_of(session, 5)
    assert session.ids == model.generate(tiny.prompt(1), max_new_tokens=5).tolist()
    assert not isinstance(model, hfgen.GenerationMixin)
