"""OpenAI's bodies: what each field becomes, what is refused by name, and what a response has."""

from __future__ import annotations

import json
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies

import hfgen
from hfgen import grammar
from hfgen.settings.fields import FIELDS
from hfgen.settings.vllm import PARAMS
from hfgen.tools.openai_api import responses
from hfgen.tools.openai_api.requests import BODY, CHECKED_AS, OWN, generate_kwargs, prompts_of
from hfgen.tools.openai_api.responses import chat_response, completion_response, error_body
from tests.tiny import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if tools %}tools={{ tools | length }};{% endif %}{% if loud %}!{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}

#: Bodies of a chat without its messages, and what they become beside sampling.
TAKEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"top_k": 0}),
    ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "top_p": 0.9, "top_k": 0}),
    ({"temperature": 2}, {"temperature": 2.0, "top_k": 0}),
    ({"temperature": None, "seed": 4}, {"seed": 4, "top_k": 0}),
    ({"max_tokens": 9}, {"max_new_tokens": 9, "top_k": 0}),
    ({"max_tokens": 9, "max_completion_tokens": 7}, {"max_new_tokens": 7, "top_k": 0}),
    ({"n": 3, "stop": "\n"}, {"num_return_sequences": 3, "stop_strings": ["\n"], "top_k": 0}),
    ({"stop": []}, {"top_k": 0}),
    ({"logprobs": True}, {"logprobs": 0, "top_k": 0}),
    ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3, "top_k": 0}),
    ({"logprobs": False, "top_logprobs": 0}, {"top_k": 0}),
    ({"logit_bias": {"7": -100}}, {"sequence_bias": {(7,): -100.0}, "top_k": 0}),
    ({"frequency_penalty": 1}, {"frequency_penalty": 1.0, "top_k": 0}),
    ({"presence_penalty": -0.5, "user": "me"}, {"presence_penalty": -0.5, "top_k": 0}),
    ({"response_format": {"type": "text"}}, {"top_k": 0}),
    (
        {"response_format": {"type": "json_object"}},
        {"grammar": grammar.json_object(whitespace=" ?"), "top_k": 0},
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"grammar": grammar.json(SCHEMA, whitespace=" ?"), "top_k": 0},
    ),
    ({"guided_choice": ["a", "b"]}, {"grammar": grammar.choice(["a", "b"]), "top_k": 0}),
    ({"structured_outputs": {"regex": "a+"}}, {"grammar": grammar.regex("a+"), "top_k": 0}),
    ({"top_k": 5, "min_p": 0.1}, {"top_k": 5, "min_p": 0.1}),
    (
        {"dry_multiplier": 1, "top_n_sigma": 2},
        {"dry_multiplier": 1.0, "top_n_sigma": 2.0, "top_k": 0},
    ),
    ({"modalities": ["text"]}, {"top_k": 0}),
]


@pytest.mark.parametrize(("body", "fields"), TAKEN)
def test_a_field_becomes_an_argument(body: dict[str, Any], fields: dict[str, Any]):
    assert generate_kwargs(body, is_chat=True) == {"do_sample": True, **fields}


def test_greedy_ones_have_no_fields_of_sampling():
    body = {"temperature": 0, "top_p": 0.9, "top_k": 7, "seed": 1}
    assert generate_kwargs(body, is_chat=True) == {"do_sample": False, "seed": 1}
    assert generate_kwargs({"num_beams": 4}, is_chat=True) == {"do_sample": False, "num_beams": 4}


def test_a_completion_has_16_tokens_and_counts_its_logprobs():
    kwargs = generate_kwargs({"prompt": "x", "logprobs": 5, "temperature": 0}, is_chat=False)
    assert kwargs == {"do_sample": False, "logprobs": 5, "max_new_tokens": 16}


def test_defaults_hold_where_the_body_says_nothing():
    defaults = {"max_new_tokens": 50, "top_k": 20, "temperature": 0.6}
    assert generate_kwargs({"top_p": 0.5}, is_chat=False, defaults=defaults) == {
        "do_sample": True,
        "top_p": 0.5,
    }
    for greedy in {"temperature": 0}, {"do_sample": False}, {"num_beams": 2}:
        assert not generate_kwargs({}, is_chat=True, defaults=greedy)["do_sample"]
        assert generate_kwargs({"temperature": 1}, is_chat=True, defaults=greedy)["do_sample"]


#: Bodies that are refused, and what the error has to name.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temprature": 1}, "`temprature` .did you mean `temperature`"),
    ({"temperature": "hot"}, "`temperature` has to be a number"),
    ({"temperature": True}, "`temperature` has to be a number"),
    ({"temperature": -1}, "`temperature` has to be a float above 0"),
    ({"top_p": 2}, "`top_p` has to be between 0 and 1"),
    ({"n": 0}, "`n` has to be at least 1"),
    ({"n": 2, "temperature": 0}, "`n` .=2. needs a `temperature` above 0"),
    ({"n": "two"}, "`n` has to be an integer"),
    ({"max_tokens": -1}, "`max_tokens` has to be at least 0"),
    ({"max_completion_tokens": 1.5}, "`max_completion_tokens` has to be an integer"),
    ({"stop": [1]}, "`stop` has to be"),
    ({"seed": "x"}, "`seed` has to be an integer"),
    ({"logprobs": 3}, "`logprobs` has to be true or false"),
    ({"top_logprobs": 3}, "`top_logprobs` needs"),
    ({"logprobs": True, "top_logprobs": -5}, "`top_logprobs` has to be"),
    ({"logit_bias": {"a": 1}}, "`logit_bias` has to map"),
    ({"logit_bias": [1]}, "`logit_bias` has to map"),
    ({"response_format": "json"}, "`response_format` has to have a `type`"),
    ({"response_format": {"type": "json_schema"}}, "`json_schema`"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "second grammar"),
    ({"echo": True}, "`echo` is for completions"),
    ({"echo": "yes"}, "`echo` has to be true or false"),
    ({"reasoning_effort": "low"}, "chat_template_kwargs"),
    ({"best_of": 3}, "`best_of`"),
    ({"stream_interval": 5}, "`stream_interval`"),
    ({"cache_config": {"path": "/tmp/x"}}, "unknown field: `cache_config`"),
    ({"cache_implementation": "offloaded"}, "unknown field"),
    ({"custom_generate": "someone/code"}, "unknown field"),
    ({"trust_remote_code": True}, "unknown field"),
    ({"max_new_tokens": "many"}, "`max_new_tokens` has to be an integer"),
    ({"temperature": [0.5]}, "`temperature` has to be a number"),
    ({"structured_outputs": 5}, "`structured_outputs` cannot be 5"),
    ({"repetition_detection": {"max_pattern_size": "x"}}, "`repetition_detection` cannot be"),
    ({"guided_json": "{"}, "`guided_json` cannot be '{'"),
]


@pytest.mark.parametrize(("body", "message"), WRONG)
def test_what_is_wrong_is_named(body: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        generate_kwargs(body, is_chat=True)


def test_the_tables_name_fields_that_there_are():
    assert set(FIELDS) >= OWN | set(CHECKED_AS.values())
    assert all(name in PARAMS or name.startswith(("max_c", "top_l")) for name in CHECKED_AS)


def test_prompts_of_a_completion():
    tokenizer = byte_tokenizer()
    ids = tokenizer("ab").input_ids

    def prompts(prompt: Any) -> list[list[int]]:
        return prompts_of({"prompt": prompt}, tokenizer, is_chat=False)

    assert prompts("ab") == prompts(ids) == [ids]
    assert prompts(["ab", "ab"]) == prompts([ids, ids]) == [ids, ids]
    for wrong in None, [], "", [""], [[]], 7, [ids, 5], [True]:
        with pytest.raises(ValueError, match="`prompt` has to be"):
            prompts(wrong)


def test_the_prompt_of_a_chat():
    tokenizer = byte_tokenizer(TEMPLATE)

    def prompt(**body: Any) -> str:
        return tokenizer.decode(prompts_of(body, tokenizer, is_chat=True)[0])

    hello = {"role": "user", "content": "hi"}
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}],
    }
    assert prompt(messages=[hello]) == prompt(messages=[parts]) == "user:hi;assistant:"
    assert prompt(messages=[hello], add_generation_prompt=False) == "user:hi;"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert "tools=1" in prompt(messages=[hello], tools=[tool])
    assert "tools" not in prompt(messages=[hello], tools=[tool], tool_choice="none")
    with pytest.raises(ValueError, match="`tool_choice`"):  # a batch cannot require a call
        prompt(messages=[hello], tools=[tool], tool_choice="required")
    assert "!" in prompt(messages=[hello], chat_template_kwargs={"loud": True})
    image = {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}
    mute = {"role": "user", "content": [{"type": "text"}]}
    for wrong, message in (
        ([], "`messages` has to be"),
        (["hi"], "have a `role`"),
        ([image], "parts of type 'text'"),
        ([mute], "parts of type 'text'"),
    ):
        with pytest.raises(ValueError, match=message):
            prompt(messages=wrong)
    with pytest.raises(ValueError, match="no chat template"):
        prompts_of({"messages": [hello]}, byte_tokenizer(), is_chat=True)


def generated(**body: Any) -> tuple[Any, Any]:
    """What the built-in model says to a completion, as the engine hands it over; its tokenizer."""
    model, tokenizer = hfgen.builtin_model()
    ids = prompts_of(body, tokenizer, is_chat=False)[0]
    output = model.generate(
        model.dummy_inputs["input_ids"].new_tensor([ids]),
        tokenizer=tokenizer,
        return_dict_in_generate=True,
        **generate_kwargs(body, is_chat=False),
    )
    logprobs = getattr(output, "logprobs", None)
    sequences = [
        SimpleNamespace(
            token_ids=output.sequences[row, len(ids) :].tolist(),
            text=text,
            finish_reason=output.finish_reasons[row],
            logprobs=None if logprobs is None else logprobs[row],
        )
        for row, text in enumerate(output.texts)
    ]
    return SimpleNamespace(prompt_token_ids=ids, sequences=sequences), tokenizer


def test_responses_of_what_a_model_says():
    body = {"prompt": "import os\n", "n": 2, "seed": 3, "logprobs": 2, "max_tokens": 6}
    output, tokenizer = generated(**body)
    completion = completion_response(output, model="m", tokenizer=tokenizer)
    assert completion["object"] == "text_completion"
    assert [choice["index"] for choice in completion["choices"]] == [0, 1]
    for choice, row in zip(completion["choices"], output.sequences, strict=True):
        logprobs = choice["logprobs"]
        assert choice["text"] == row.text == "".join(logprobs["tokens"])
        assert len(logprobs["token_logprobs"]) == len(row.token_ids) == 6
        ends = [
            n + len(t) for n, t in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
        ]
        assert ends[:-1] == logprobs["text_offset"][1:]
        assert all(1 <= len(top) <= 2 for top in logprobs["top_logprobs"])
        assert choice["finish_reason"] == "length"
        assert choice["stop_reason"] is None
    n_prompt = len(output.prompt_token_ids)
    assert completion["usage"] == {
        "prompt_tokens": n_prompt,
        "completion_tokens": 12,
        "total_tokens": n_prompt + 12,
    }
    chat = chat_response(output, model="m", tokenizer=tokenizer, id="chatcmpl-1", created=5)
    assert (chat["id"], chat["created"], chat["model"]) == ("chatcmpl-1", 5, "m")
    choice = chat["choices"][1]
    assert choice["message"] == {
        "role": "assistant",
        "content": output.sequences[1].text,
        "refusal": None,
    }
    assert len(choice["logprobs"]["content"]) == 6
    assert json.loads(json.dumps([chat, completion])) == [chat, completion]


def test_several_prompts_of_a_completion_are_choices_of_one_response():
    output, tokenizer = generated(prompt="def f", temperature=0, stop="(", max_tokens=8)
    response = completion_response([output, output], model="m", tokenizer=tokenizer)
    assert [choice["index"] for choice in response["choices"]] == [0, 1]
    assert {choice["finish_reason"] for choice in response["choices"]} == {"stop"}
    assert {choice["stop_reason"] for choice in response["choices"]} == {"("}
    assert response["usage"]["prompt_tokens"] == 2 * len(output.prompt_token_ids)


def test_reasons_and_errors():
    for reasons, word in (
        (("eos", "stop", "grammar", "mine"), "stop"),
        (("length", "time", "cancelled"), "length"),
    ):
        assert {responses.choice(0, each)["finish_reason"] for each in reasons} == {word}
    assert error_body(ValueError("no"))["error"]["type"] == "invalid_request_error"
    assert error_body(RuntimeError(), 500)["error"] == {
        "message": "RuntimeError",
        "type": "server_error",
        "param": None,
        "code": None,
    }


JSON = strategies.recursive(
    strategies.none()
    | strategies.booleans()
    | strategies.integers(-(2**70), 2**70)
    | strategies.floats(allow_nan=False)
    | strategies.sampled_from(["", "a", "text", "json_schema", "user", "schema", "type"]),
    lambda inner: (
        strategies.lists(inner, max_size=3)
        | strategies.dictionaries(
            strategies.sampled_from(["a", "7", "type", "text", "json_schema", "schema", "regex"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
NAMES = sorted(BODY)


@settings(max_examples=400, deadline=None)
@given(body=strategies.dictionaries(strategies.sampled_from(NAMES), JSON, max_size=3))
def test_whatever_json_a_body_has_it_is_taken_or_a_value_error(body: dict[str, Any]):
    for is_chat in True, False:
        with suppress(ValueError):
            assert generate_kwargs(body, is_chat=is_chat).keys() <= FIELDS.keys()


@settings(max_examples=200, deadline=None)
@given(
    value=JSON,
    name=strategies.sampled_from(
        ["messages", "tools", "documents", "chat_template_kwargs", "tool_choice"]
    ),
)
def test_whatever_json_a_prompt_is_it_is_taken_or_a_value_error(value: Any, name: str):
    tokenizer = byte_tokenizer(TEMPLATE)
    message = {"role": "user", "content": value}
    for body in (
        {"messages": [message]},
        {"messages": [{"role": "user", "content": "x"}], name: value},
    ):
        with suppress(ValueError):
            assert prompts_of(body, tokenizer, is_chat=True)[0]
    with suppress(ValueError):
        assert all(prompts_of({"prompt": value}, tokenizer, is_chat=False))
