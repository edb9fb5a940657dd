"""What ``hfgen serve`` does not let in, and what it tells of tools and thoughts."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS

import hfgen
from hfgen.engine.errors import EngineError
from hfgen.engine.serving import Service
from hfgen.tools.serve.app import Responses
from hfgen.tools.serve.handlers import Chat, Completion, Served
from hfgen.tools.serve.limits import MEBIBYTE, Limits
from hfgen.tools.serve.server import Protocol, Settings
from tests import scripted, tiny
from tests.clients.server import LINES, Running, Watched, running, wait_for

KEY = "a key"
LONG = {"max_tokens": 60, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    """One row, one place in the queue, a key, and requests of 10,000 bytes at most."""
    model = tiny.llama(vocab_size=258, eos_token_id=0, pad_token_id=1)
    settings = Settings(port=0, api_key=KEY, limits=Limits(max_request_mb=10_000 / MEBIBYTE))
    tokenizer = tiny.byte_tokenizer(LINES)
    with running(hfgen.mix_into(model), tokenizer, settings, max_rows=1, max_queue=1) as found:
        yield found
        found.wait_until_idle()


@pytest.mark.parametrize("key", ["none", "a keys", "a", "ä"])
def test_without_the_key(guarded: Running, key: str) -> None:
    headers = {"authorization": f"Bearer {key}".encode("latin-1")}
    for path in "v1/models", "metrics", "v1/nothing":
        answer = httpx.get(f"{guarded.url}/{path}", headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    with pytest.raises(openai.AuthenticationError, match="API key"):
        guarded.client().completions.create(model="tiny", prompt="x")
    assert httpx.post(f"{guarded.url}/reset").status_code == 401
    assert httpx.get(f"{guarded.url}/health").status_code == 200


def test_with_the_key(guarded: Running) -> None:
    client = guarded.client(api_key=KEY)
    answer = client.completions.create(model="tiny", prompt="x", max_tokens=3)
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 3


def test_a_request_that_is_too_large(guarded: Running) -> None:
    def parts() -> Iterator[bytes]:  # without a length: it is counted
        yield b'{"model": "tiny", "prompt": "'
        for _ in range(20):
            yield b"x" * 1000
        yield b'"}'

    headers = {"authorization": f"Bearer {KEY}"}
    for content in b"x" * 10_001, parts():
        url = f"{guarded.url}/v1/completions"
        answer = httpx.post(url, content=content, headers=headers)
        assert answer.status_code == 413
        assert "10,000 bytes" in answer.json()["error"]["message"]


def test_a_full_queue(guarded: Running) -> None:
    client = guarded.client(api_key=KEY)
    body: Any = {"model": "tiny", "prompt": "x", "stream": True, **LONG}
    guarded.engine.also["logits_processor"] = [Slow()]
    running_one = client.completions.create(**body)
    wait_for(lambda: guarded.engine.n_rows == 1)
    waiting = client.completions.create(**body)
    wait_for(lambda: (guarded.engine.n_rows, guarded.engine.n_waiting) == (1, 1))
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(**body)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    running_one.close()
    waiting.close()
    guarded.engine.also.clear()
    guarded.wait_until_idle()
    patient = guarded.client(api_key=KEY, max_retries=3)
    assert patient.completions.create(model="tiny", prompt="x", max_tokens=3).choices


class Slow:
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        time.sleep(0.02)
        return scores


def test_a_model_without_a_chat_template() -> None:
    model = tiny.llama(vocab_size=258, eos_token_id=0, pad_token_id=1)
    with running(hfgen.mix_into(model), tiny.byte_tokenizer()) as server:
        with pytest.raises(openai.BadRequestError, match="chat_template"):
            server.client().chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}]
            )
        assert server.client().completions.create(model="tiny", prompt="x", max_tokens=2).choices


def test_an_engine_that_breaks() -> None:
    """What is open fails, and the server ends with the reason instead of refusing what comes."""
    model = tiny.llama(vocab_size=258, eos_token_id=0, pad_token_id=1)
    failed = pytest.raises(
        EngineError, match="the engine has failed: RuntimeError: the engine broke"
    )
    with failed, running(hfgen.mix_into(model), tiny.byte_tokenizer()) as server:
        server.engine.breaks = True
        body = {"model": "tiny", "prompt": "x", "max_tokens": 5}
        answer = httpx.post(f"{server.url}/v1/completions", json=body)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        wait_for(lambda: not server.thread.is_alive())


@pytest.mark.parametrize("path", ["responses", "chat/completions", "completions"])
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
def test_hanging_up(guarded: Running, path: str, is_stream: bool) -> None:
    log = guarded.engine.log
    n = len(log.cancelled)
    guarded.engine.also |= {"logits_processor": [Slow()], "ignore_eos": True}
    prompt = {
        "responses": {"input": "x", "max_output_tokens": 100},
        "chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100},
        "completions": {"prompt": "x", "max_tokens": 100},
    }
    body = {"model": "tiny", "stream": is_stream, **prompt[path]}
    headers = {"authorization": f"Bearer {KEY}"}
    with socket.create_connection(("127.0.0.1", int(guarded.url.rpartition(":")[2]))) as client:
        content = json.dumps(body).encode()
        lines = [f"POST /v1/{path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"]
        lines += [f"content-length: {len(content)}", *(f"{k}: {v}" for k, v in headers.items())]
        client.sendall("\r\n".join([*lines, "", ""]).encode() + content)
        if is_stream:
            assert client.recv(12) == b"HTTP/1.1 200"
        wait_for(lambda: guarded.engine.n_rows == 1)
    wait_for(guarded.engine.is_idle)
    guarded.engine.also.clear()
    assert len(log.cancelled) == n + 1
    assert len(log.cancelled[-1].output.token_ids) < 100
    assert not log.late


@pytest.mark.parametrize("kind", [Chat, Completion, Responses])
def test_a_stream_that_is_never_read(guarded: Running, kind: Any) -> None:
    """Its client has left before the first line: the rows are free."""
    prompt = {"messages": [{"role": "user", "content": "x"}]}
    prompt = {Completion: {"prompt": "x"}, Responses: {"input": "x"}}.get(kind, prompt)
    limit = "max_output_tokens" if kind is Responses else "max_tokens"
    engine = Watched(guarded.model, guarded.tokenizer)
    engine.also |= {"logits_processor": [Slow()], "ignore_eos": True}

    async def main() -> None:
        async with Service(engine) as service:
            served = Served("tiny", guarded.model, guarded.tokenizer, service, {}, Limits())
            await kind(served, {**prompt, "stream": True, limit: 100}, "an id").response()
            gc.collect()
            while not engine.is_idle():
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert len(engine.log.cancelled) == 1


def test_a_connection_that_is_closed_leaves_nothing(guarded: Running) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    for _ in range(3):
        with httpx.Client(headers={"authorization": f"Bearer {KEY}"}) as client:
            assert client.post(f"{guarded.url}/v1/completions", json=body).status_code == 200

    def is_free() -> bool:
        gc.collect()
        return not any(isinstance(each, Protocol) for each in gc.get_objects())

    wait_for(is_free, seconds=10)


# ------------------------------------------------------------ tools and thoughts

TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools | length }} tools{% endif %}<|im_start|>assistant{{ '\\n' }}"
)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ANSWERS = {
    "text": ("hello<eos>", "hello", None, 0, "stop"),
    "thoughts": ("<think>so</think>hello<eos>", "hello", "so", 0, "stop"),
    "a call": (f"{CALL}<eos>", "", None, 1, "tool_calls"),
    "calls": (f"<think>so</think>{CALL}\n{CALL}<eos>", "", "so", 2, "tool_calls"),
    "cut off": ("<think>so</think>hel", "hel", "so", 0, "length"),
}


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", ANSWERS)
def test_tools_and_thoughts(name: str, is_stream: bool) -> None:
    """Parsed by upstream, from what the engine writes."""
    written, content, thoughts, n_calls, reason = ANSWERS[name]
    tokenizer = tiny.byte_tokenizer(TEMPLATE)
    tokenizer.response_template = next(
        template for kinds, template in _RESPONSE_TEMPLATE_FALLBACKS.items() if "qwen2" in kinds
    )
    messages: Any = [{"role": "user", "content": "x"}]
    tools: Any = [{"type": "function", "function": TOOL}]
    chat = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
    ids = scripted.ids_of(written)
    script = scripted.Script([ids], len(chat["input_ids"]))
    with running(scripted.model(), tokenizer) as server:
        server.engine.also["logits_processor"] = [script]
        answer: Any = server.client().chat.completions.create(
            model="tiny", messages=messages, tools=tools, stream=is_stream, max_tokens=len(ids)
        )
        text, thinking, calls, ending = "", "", [], None
        for chunk in answer if is_stream else [answer]:
            choice = chunk.choices[0]
            part = choice.delta if is_stream else choice.message
            text += part.content or ""
            thinking += getattr(part, "reasoning_content", None) or ""
            calls += part.tool_calls or []
            ending = choice.finish_reason or ending
    assert (text, thinking or None, len(calls), ending) == (content, thoughts, n_calls, reason)
    for call in calls:
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    assert len({call.id for call in calls}) == n_calls


def test_tools_that_are_not_to_be_used() -> None:
    tokenizer = tiny.byte_tokenizer(TEMPLATE)
    messages: Any = [{"role": "user", "content": "x"}]
    tools: Any = [{"type": "function", "function": TOOL}]
    with running(scripted.model(), tokenizer) as server:
        counts = []
        for choice in "auto", "none":
            answer: Any = server.client().chat.completions.create(
                model="tiny", messages=messages, tools=tools, tool_choice=choice, max_tokens=2
            )
            counts.append(answer.usage.prompt_tokens)
    assert counts[0] - counts[1] == len("1 tools")


# ------------------------------------------------------------ the page and the command


def test_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    model, tokenizer = hfgen.builtin_model()
    tokenizer.chat_template = LINES
    with running(hfgen.mix_into(model), tokenizer, name="builtin") as server:
        blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        for block in blocks:
            here = block.replace("http://127.0.0.1:8000", server.url)
            exec(compile(here, "serving.md", "exec"), {"__name__": "page"})
            assert capsys.readouterr().out.strip()
    assert len(blocks) == 2


def test_the_command(tmp_path: Path) -> None:
    """A folder, served by ``hfgen serve`` in a process of its own, until Ctrl-C."""
    folder = tmp_path / "model"
    tiny.llama(vocab_size=258, eos_token_id=0, pad_token_id=1).save_pretrained(folder)
    tiny.byte_tokenizer(LINES).save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["serve", "--model", str(folder), "--port", str(port), "--device", "cpu"]
    template = tmp_path / "other.jinja"
    template.write_text("{{ messages[0].content }}{{ messages[0].content }}")
    arguments += ["--log-level", "info", "--optimize", "--assistant", str(folder)]
    arguments += ["--chat-template", str(template)]
    process = subprocess.Popen(
        [sys.executable, "-m", "hfgen", *arguments],
        env=os.environ | {"HFGEN_API_KEY": KEY, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert any(re.search(f"http://127.0.0.1:{port}/v1", line) for line in lines)
        url = f"http://127.0.0.1:{port}"

        def is_up() -> bool:
            try:
                return httpx.get(f"{url}/health").status_code == 200
            except httpx.ConnectError:
                return False

        wait_for(is_up)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        usual: Any = {"model": str(folder), "max_tokens": 4, "temperature": 0}
        answer = client.completions.create(prompt="x", extra_body={"ignore_eos": True}, **usual)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        chat = client.chat.completions.create(messages=[{"role": "user", "content": "ab"}], **usual)
        assert chat.usage is not None
        assert chat.usage.prompt_tokens == len("abab")
        process.send_signal(signal.SIGINT)
        requests, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "POST /v1/completions" in requests
    finally:
        process.kill()
        process.communicate()
