"""``hfgen serve`` and the official client of OpenAI: parameters, streams, refusals, and hanging up."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import huggingface_hub
import openai
import psutil
import pytest
import torch
import transformers
from safetensors.torch import save_file

import hfgen
from hfgen.tools.serve.steering import read_sets
from tests.clients.server import FAILING, LINES, Running, running, wait_for

PROMPT = "def remove_file(path):\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    model, tokenizer = hfgen.builtin_model()
    tokenizer.chat_template = LINES
    with running(hfgen.mix_into(model), tokenizer) as found:
        yield found
        found.wait_until_idle()


def solo(server: Running, prompt: str = PROMPT, **fields: Any) -> Any:
    """What ``generate`` returns for a prompt alone."""
    inputs = server.tokenizer(prompt, return_tensors="pt")
    usual = {"max_new_tokens": 16, "return_dict_in_generate": True, "top_k": 0}
    if not fields.get("do_sample"):
        usual |= {"do_sample": False}
        del usual["top_k"]
    return server.model.generate(**inputs, tokenizer=server.tokenizer, **usual | fields)


def asked(server: Running, is_stream: bool, is_chat: bool, **body: Any) -> list[dict[str, Any]]:
    """The choices that a client gets: text, finish reason, and the tokens' log-probabilities."""
    client = server.client()
    body = {"model": "tiny", "max_tokens": 16, "stream": is_stream} | body
    if is_chat:
        content = PROMPT.removesuffix("\n")  # the template adds it
        answer: Any = client.chat.completions.create(
            messages=[{"role": "user", "content": content}], **body
        )
    else:
        answer = client.completions.create(prompt=PROMPT, **body)
    found: dict[int, dict[str, Any]] = {}
    for chunk in answer if is_stream else [answer]:
        for choice in chunk.choices:
            entry = found.setdefault(choice.index, {"text": "", "logprobs": []})
            part = choice if not is_chat else choice.delta if is_stream else choice.message
            entry["text"] += (part.content if is_chat else part.text) or ""
            if choice.logprobs is not None:
                own = choice.logprobs
                values = [t.logprob for t in own.content] if is_chat else own.token_logprobs
                entry["logprobs"] += values
            if choice.finish_reason is not None:
                entry["finish_reason"] = choice.finish_reason
    client.close()
    return [found[index] for index in sorted(found)]


def test_a_tokenizer_that_has_another_is_the_tokenizer() -> None:
    """As that of mistral-common."""
    model, tokenizer = hfgen.builtin_model()
    tokenizer.chat_template, tokenizer.tokenizer = LINES, object()
    with running(hfgen.mix_into(model), tokenizer) as server:
        for is_chat in (False, True):
            (choice,) = asked(server, False, is_chat, temperature=0)
            assert choice["text"] == solo(server).texts[0]


ROW = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 99}}}
ROW |= {"required": ["x"], "additionalProperties": False}
SAMPLED = {"do_sample": True, "seed": 5}
PENALISED = {"do_sample": False, "max_new_tokens": 40}

#: A body, and the arguments of ``generate`` that it stands for.
PARAMETERS = {
    "temperature 0": ({"temperature": 0}, {"do_sample": False}),
    "temperature": ({"temperature": 0.5, "seed": 5}, {"temperature": 0.5, **SAMPLED}),
    "no temperature": ({"seed": 5}, {"temperature": 1.0, **SAMPLED}),
    "seed": ({"temperature": 1, "seed": 6}, {"temperature": 1.0, "do_sample": True, "seed": 6}),
    "top_p": ({"top_p": 0.3, "seed": 5}, {"top_p": 0.3, **SAMPLED}),
    "n": ({"n": 3, "seed": 5}, {"num_return_sequences": 3, **SAMPLED}),
    "stop": ({"temperature": 0, "stop": ["from"]}, {"stop_strings": ["from"]}),
    "max_tokens": ({"temperature": 0, "max_tokens": 5}, {"max_new_tokens": 5}),
    "frequency_penalty": (
        {"temperature": 0, "frequency_penalty": 1.5, "max_tokens": 40},
        {"frequency_penalty": 1.5, **PENALISED},
    ),
    "presence_penalty": (
        {"temperature": 0, "presence_penalty": 1.5, "max_tokens": 40},
        {"presence_penalty": 1.5, **PENALISED},
    ),
    "logit_bias": (
        {"temperature": 0, "logit_bias": {"300": 50.0}},
        {"sequence_bias": {(300,): 50.0}},
    ),
}


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_has_its_effect(
    server: Running, name: str, is_chat: bool, is_stream: bool
) -> None:
    body, fields = PARAMETERS[name]
    expected = solo(server, **fields)
    reasons = [{"eos": "stop"}.get(reason, str(reason)) for reason in expected.finish_reasons]
    choices = asked(server, is_stream, is_chat, **body)
    assert [choice["text"] for choice in choices] == expected.texts
    assert [choice["finish_reason"] for choice in choices] == reasons


def test_parameters_make_a_difference(server: Running) -> None:
    """Otherwise the test above would pass without any of them."""
    texts = {}
    for name, (_, fields) in PARAMETERS.items():
        texts[name] = solo(server, **fields).texts[0]
    greedy = solo(server, max_new_tokens=40).texts[0]
    texts |= {"more": greedy}
    same = {"no temperature", "n"}  # the first of n rows is what one row is
    assert len({text for name, text in texts.items() if name not in same}) == len(texts) - 2


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_log_probabilities(server: Running, is_chat: bool, is_stream: bool) -> None:
    expected = solo(server, logprobs=2).logprobs
    body = {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    (choice,) = asked(server, is_stream, is_chat, temperature=0, **body)
    found = torch.tensor(choice["logprobs"])
    torch.testing.assert_close(found, expected.token_logprobs[0], atol=1e-4, rtol=0)


def test_log_probabilities_have_tokens_and_others(server: Running) -> None:
    client, messages = server.client(), [{"role": "user", "content": "import os"}]
    usual = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    chat: Any = client.chat.completions.create(
        messages=messages, logprobs=True, top_logprobs=3, **usual
    )
    tokens = chat.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == chat.choices[0].message.content
    assert all(len(token.top_logprobs) == 3 for token in tokens)
    assert all(token.top_logprobs[0].token == token.token for token in tokens)  # greedy
    stream: Any = client.completions.create(prompt="import os", logprobs=1, stream=True, **usual)
    own = [chunk.choices[0].logprobs for chunk in stream if chunk.choices[0].logprobs]
    lengths = [len(token) for each in own for token in each.tokens]
    offsets = [offset for each in own for offset in each.text_offset]
    assert offsets == [sum(lengths[:n]) for n in range(len(lengths))]


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
def test_json(server: Running, is_stream: bool) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "row", "schema": ROW}}
    usual = {"temperature": 0, "max_tokens": 100}
    (choice,) = asked(server, is_stream, True, response_format=schema, **usual)
    assert list(json.loads(choice["text"])) == ["x"]
    assert choice["finish_reason"] == "stop"
    (choice,) = asked(server, is_stream, True, response_format={"type": "json_object"}, **usual)
    assert choice["text"].startswith("{")


def test_usage_and_names(server: Running) -> None:
    client, messages = server.client(), [{"role": "user", "content": "x = 1"}]
    usual: Any = {"model": "tiny", "messages": messages, "n": 2, "max_completion_tokens": 7}
    answer = client.chat.completions.create(seed=1, **usual)
    counts = answer.usage.prompt_tokens, answer.usage.completion_tokens
    assert counts == (len(server.tokenizer("x = 1\n").input_ids), 14)
    assert answer.model == "tiny"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(seed=1, **usual, **options)
    assert (last.choices, last.usage) == ([], answer.usage)
    assert all(chunk.usage is None for chunk in chunks)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'tiny'"):
        client.models.retrieve("some/other")


def test_several_prompts(server: Running) -> None:
    prompts = ["import os", "def f", server.tokenizer("class A").input_ids]
    usual: Any = {"model": "tiny", "temperature": 0, "max_tokens": 6}
    texts = [solo(server, prompt, max_new_tokens=6).texts[0] for prompt in prompts[:2]]
    client = server.client()
    answer = client.completions.create(prompt=prompts[:2], **usual)
    assert [choice.text for choice in answer.choices] == texts
    answer = client.completions.create(prompt=prompts[2], **usual)
    assert answer.choices[0].text == solo(server, "class A", max_new_tokens=6).texts[0]


def test_an_assistant_drafts(server: Running) -> None:
    """The answers are those without it, and it forwards; beams do without."""
    draft, calls = hfgen.builtin_model(draft=True)[0], []
    draft.register_forward_hook(lambda *_: calls.append(1))
    with running(server.model, server.tokenizer, drafts={"assistant_model": draft}) as drafted:
        for body in {"temperature": 0}, {"seed": 3}, {"num_beams": 2}, {"temperature": 0, "n": 1}:
            n_calls = len(calls)
            for is_chat in False, True:
                both = [
                    asked(each, is_chat, is_chat, extra_body=body) for each in (server, drafted)
                ]
                assert both[0] == both[1]
            assert (len(calls) > n_calls) == ("num_beams" not in body)


def test_a_suffix_memory_drafts(server: Running) -> None:
    memory = hfgen.SuffixMemory()
    with running(server.model, server.tokenizer, drafts={"assistant_model": memory}) as drafted:
        for body in {"temperature": 0}, {"seed": 3}:
            answers = [asked(each, False, True, extra_body=body) for each in (server, drafted)]
            assert answers[0] == answers[1]
            n_before = memory.n_accepted
            assert asked(drafted, True, True, extra_body=body) == answers[0]
            assert memory.n_accepted > n_before


def test_requests_ask_for_steering_vectors_by_name(server: Running, tmp_path: Path) -> None:
    vectors = {f"model.layers.{n}": torch.linspace(-n, n, 256) for n in (1, 2)}
    save_file(vectors, tmp_path / "odd.safetensors")
    save_file({"model.layers.3": torch.ones(256)}, tmp_path / "even.safetensors")
    sets = read_sets(tmp_path, server.model)
    edits = [hfgen.Steer(name, vector, 0.5) for name, vector in vectors.items()]
    steered_text = solo(server, interventions=edits).texts[0]
    with running(server.model, server.tokenizer, steering=sets) as steered:
        for body, text in ({}, solo(server).texts[0]), ({"odd": 0.5}, steered_text):
            body = {"interventions": body} if body else {}
            (choice,) = asked(steered, True, False, temperature=0, extra_body=body)
            assert choice["text"] == text
        assert steered_text != solo(server).texts[0]
        wrong = (["odd"], {"add": 1}, {"odd": "1"}, {"odd": 1e9}, {"odd": True}, {"odd": 2**62}, 1)
        for value in wrong:
            with pytest.raises(openai.BadRequestError, match="`interventions`"):
                asked(steered, False, False, extra_body={"interventions": value})
    with pytest.raises(openai.BadRequestError, match="started without --steering"):
        asked(server, False, False, extra_body={"interventions": {"odd": 1}})
    for name, vector in ("model.layer.3", torch.ones(256)), ("model.layers.3", torch.ones(8)):
        save_file({name: vector}, tmp_path / "bad.safetensors")
        with pytest.raises(ValueError, match=r"bad\.safetensors holds no steering vectors"):
            read_sets(tmp_path, server.model)
    (tmp_path / "bad.safetensors").write_bytes(b"x" * 99)
    with pytest.raises(ValueError, match=r"bad\.safetensors holds no steering vectors"):
        read_sets(tmp_path, server.model)


def test_the_prompt_may_be_the_beginning_of_the_answer(server: Running) -> None:
    messages: Any = [
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": "    x ="},
    ]
    body: Any = {"model": "tiny", "temperature": 0, "max_tokens": 16}
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    for more in goes_on, {"continue_final_message": True}:
        answer = server.client().chat.completions.create(messages=messages, extra_body=more, **body)
        expected = solo(server, f"{PROMPT}\n    x =").texts[0]
        assert answer.choices[0].message.content == expected


#: Bodies of completions that `generate` refuses, and what the message has to say in the body's words.
IN_WORDS = [
    ({"n": 5, "num_beams": 4}, r"^`n` \(5\) has to be smaller or equal to `num_beams`"),
    ({"prompt": [10**9]}, r"^`prompt\[0, 0\]` is 1000000000"),
    ({"logit_bias": {"99999": 1}}, "^`logit_bias` has the token 99999"),
    ({"guided_regex": "("}, "^`guided_regex` regex"),
    ({"best_of": 2}, r"^`best_of` \(=2\) is not supported: use `n`, and choose by `logprobs`"),
    ({"echo": 1}, "^`echo` has to be true or false"),
    ({"stream": True, "stream_options": "x"}, "^`stream_options` has to be an object"),
]


@pytest.mark.parametrize(("body", "message"), IN_WORDS)
def test_errors_have_the_names_of_the_body(server: Running, body: Any, message: str) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"} | body)
    assert answer.status_code == 400
    assert re.search(message, answer.json()["error"]["message"])


def test_fields_of_generate_by_their_own_names(server: Running) -> None:
    own = {"top_k": 3, "min_p": 0.1, "priority": 2}
    (choice,) = asked(server, False, False, seed=5, extra_body=own)
    assert choice["text"] == solo(server, top_k=3, min_p=0.1, **SAMPLED).texts[0]


def test_the_config_that_transformers_chat_sends(server: Running) -> None:
    config = transformers.GenerationConfig(do_sample=False, max_new_tokens=9, pad_token_id=1)
    body = {"generation_config": config.to_json_string()}
    (choice,) = asked(server, True, True, extra_body=body, max_tokens=None)
    assert choice["text"] == solo(server, max_new_tokens=9).texts[0]
    for wrong in "{", "1", '{"cache_implementation": "static"}':
        with pytest.raises(openai.BadRequestError, match=r"`(generation_config|cache_impl.*)`"):
            asked(server, True, True, extra_body={"generation_config": wrong})


def test_responses(server: Running) -> None:
    client, expected = server.client(), solo(server).texts[0]
    body: Any = {"model": "tiny", "input": PROMPT[:-1], "max_output_tokens": 16}
    answer = client.responses.create(temperature=0, **body)
    assert (answer.output_text, answer.usage.output_tokens) == (expected, 16)
    events = list(client.responses.create(temperature=0, stream=True, **body))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == expected
    assert events[-1].type == "response.completed"
    form = {"format": {"type": "json_schema", "name": "row", "schema": ROW}}
    answer = client.responses.create(text=form, temperature=0, **body | {"max_output_tokens": 100})
    assert list(json.loads(answer.output_text)) == ["x"]


WRONG = {
    "temperature": "hot",
    "top_p": 3,
    "n": 0,
    "seed": "x",
    "stop": [1],
    "max_tokens": -1,
    "top_logprobs": 3,
    "frequency_penalty": "much",
    "presence_penalty": "much",
    "logit_bias": [1],
    "response_format": {"type": "xml"},
    "tool_choice": "always",
    "prompt_logprobs": 1,
    "priority": "high",
    "chat_template_kwargs": {"chat_template": "x"},
    "temprature": 1,
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_parameter_is_named(server: Running, name: str, is_stream: bool) -> None:
    messages = [{"role": "user", "content": "x"}]
    body = {"model": "tiny", "messages": messages, "stream": is_stream, name: WRONG[name]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert f"`{name}`" in answer.json()["error"]["message"]


def test_other_wrong_requests(server: Running) -> None:
    client, message = server.client(), {"role": "user", "content": "x"}
    with pytest.raises(openai.BadRequestError, match="`model` has to be 'tiny'"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="`n`"):
        client.completions.create(model="tiny", prompt="x", n=100)
    for path, body in [
        ("chat/completions", {"messages": []}),
        ("chat/completions", {"messages": [{"content": "x"}]}),
        ("chat/completions", {"messages": ["x"]}),
        ("chat/completions", {}),
        ("completions", {"prompt": ""}),
        ("completions", {"prompt": {}}),
        ("completions", {"prompt": "x", "logprobs": 21}),
        ("completions", {"prompt": "x", "logprobs": -1}),
        ("chat/completions", {"messages": [message], "logprobs": True, "top_logprobs": 21}),
        ("completions", {"prompt": ["a", "b"], "stream": True}),
        ("responses", {}),
        ("responses", {"input": "x", "temperature": "hot"}),
        ("responses", {"input": "x", "generation_config": "{}", "unheard": 1}),
    ]:
        answer = httpx.post(f"{server.url}/v1/{path}", json={"model": "tiny", **body})
        assert answer.status_code == 400, (path, body, answer.text)
        assert answer.json()["error"]["type"] == "invalid_request_error"
    for content in b"", b"[]", b"{":
        answer = httpx.post(f"{server.url}/v1/completions", content=content)
        assert answer.status_code == 400
    assert httpx.get(f"{server.url}/v1/nothing").status_code == 404
    assert httpx.post(f"{server.url}/v1/systemone", json={"x": message}).status_code == 501
    server.wait_until_idle()


SOUND = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
PARTS = {
    "image_url": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    "input_audio": SOUND,
    "video_url": {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
    "file": {"type": "file", "file": {"file_id": "x"}},
}


@pytest.mark.parametrize("kind", PARTS)
def test_what_the_model_cannot_read_is_refused(server: Running, kind: str) -> None:
    content: Any = [{"type": "text", "text": "What is this?"}, PARTS[kind]]
    messages: Any = [{"role": "user", "content": content}]
    with pytest.raises(openai.BadRequestError, match=f"`messages` has content of type '{kind}'"):
        server.client().chat.completions.create(model="tiny", messages=messages)
    content = [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "data:,"}]
    with pytest.raises(openai.BadRequestError, match="`input` has content of type 'input_image'"):
        server.client().responses.create(model="tiny", input=[{"role": "user", "content": content}])


def test_the_model_stays(server: Running) -> None:
    answer = httpx.post(f"{server.url}/load_model", json={"model": "other"})
    assert "`model` has to be 'tiny'" in answer.text
    answer = httpx.post(f"{server.url}/load_model", json={"model": "tiny"})
    assert '"ready"' in answer.text
    (choice,) = asked(server, False, False, temperature=0)
    assert choice["text"] == solo(server).texts[0]


def test_the_hubs_client(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # the server is here
    client = huggingface_hub.InferenceClient(server.url)
    messages = [{"role": "user", "content": PROMPT[:-1]}]
    chunks = client.chat_completion(
        messages, model="tiny", stream=True, temperature=0, max_tokens=16
    )
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == solo(server).texts[0]


def test_a_request_that_fails_is_alone(server: Running) -> None:
    async def main() -> None:
        client = server.async_client()
        body: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 16}
        good, bad = await asyncio.gather(
            client.completions.create(temperature=0, **body),
            client.completions.create(seed=FAILING, **body),
            return_exceptions=True,
        )
        assert isinstance(bad, openai.InternalServerError)
        assert "ZeroDivisionError: on purpose" in str(bad)
        assert good.choices[0].text == solo(server).texts[0]
        chunks, stream = [], await client.completions.create(seed=FAILING, stream=True, **body)

        async def read() -> None:
            async for chunk in stream:
                chunks.append(chunk)

        with pytest.raises(openai.APIError, match="on purpose"):
            await read()
        assert len(chunks) == 2
        await client.close()

    asyncio.run(main())
    server.wait_until_idle()


def counted(server: Running) -> dict[str, float]:
    """The values of ``/metrics``, by name and label."""
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }


def test_metrics(server: Running) -> None:
    before = counted(server)
    asked(server, False, False, max_tokens=5)
    after = counted(server)

    def gained(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert gained('hfgen_requests_total{finish_reason="length"}') == 1
    assert gained("hfgen_generated_tokens_total") == 5
    assert gained("hfgen_prompt_tokens_total") == len(server.tokenizer(PROMPT).input_ids)
    assert gained("hfgen_time_to_first_token_seconds_count") == 1
    assert after["hfgen_requests_running"] == after["hfgen_requests_waiting"] == 0
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


# ------------------------------------------------------------ hanging up


@pytest.mark.alone
def test_clients_that_hang_up_leave(server: Running) -> None:
    """64 at once; half of them hang up amid a stream, and some of these before it begins."""
    log = server.engine.log
    process = psutil.Process()
    memory = []
    prompts = [f"def function_{n}(x):\n" for n in range(64)]
    seeds = [{"do_sample": True, "seed": n, "max_new_tokens": 24 + n % 9} for n in range(64)]
    expected = [
        solo(server, prompt, **seed) if n % 2 else None
        for n, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]

    async def stay(client: Any, n: int) -> None:
        body = {"seed": n, "max_tokens": 24 + n % 9, "logprobs": 0}
        stream = await client.completions.create(
            model="tiny", prompt=prompts[n], stream=True, **body
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        own = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
        n_tokens = sum(len(each.tokens) for each in own)
        n_expected = int((expected[n].sequences[0] != 1).sum()) - len(
            server.tokenizer(prompts[n]).input_ids
        )
        assert (text, n_tokens) == (expected[n].texts[0], n_expected)

    async def leave(client: Any, n: int) -> None:
        body = {"max_tokens": 800, "seed": n, "extra_body": {"ignore_eos": True}}
        if n % 8 == 0:  # no stream, and a client that loses its patience
            call = client.completions.create(model="tiny", prompt=prompts[n], **body)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(call, 0.5)
            return
        stream = await client.completions.create(
            model="tiny", prompt=prompts[n], stream=True, **body
        )
        async for _ in stream:
            if (n := n - 4) < 0:
                break
        await stream.close()

    async def main() -> None:
        async with server.async_client() as client:
            calls = [stay(client, n) if n % 2 else leave(client, n) for n in range(64)]
            await asyncio.gather(*calls)

    n_rounds = 3
    for _ in range(n_rounds):
        n_cancelled = len(log.cancelled)
        asyncio.run(main())
        wait_for(server.engine.is_idle)
        n_left = len(log.cancelled) - n_cancelled
        assert 24 <= n_left <= 32  # on a slow machine, the impatient may leave before they arrive
        gc.collect()
        memory.append(process.memory_info().rss / 2**20)
    assert not log.late  # none was there a step after it was cancelled
    assert max(len(request.output.token_ids) for request in log.cancelled) < 400
    print(f"MiB after each round: {[round(value) for value in memory]}")
    assert max(memory[1:]) - memory[0] < 24
