"""Hostile requests to a real ``hfgen serve``, with a client beside them whose answers keep coming."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from hfgen.tools.cli import app
from tests.clients.server import LINES, wait_for

#: Seconds that another request may hold up the victim.
HELD_UP = 1.0

#: Bodies of the fuzzer; ``HFGEN_FUZZ=5000`` sends so many.
N_BODIES = int(os.environ.get("HFGEN_FUZZ", "600"))

VICTIM = {"model": "builtin", "prompt": "import os\n", "max_tokens": 4, "temperature": 0}


class Served:
    """A process that serves the built-in model."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url
        self.memory = psutil.Process(process.pid).memory_info
        self.client = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, body: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.post(
            f"/v1/{path}", content=content, headers={"content-type": "application/json"}
        )


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Served]:
    (folder / "chat.jinja").write_text(LINES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hfgen", "serve", "--port", str(port)]
    command += ["--chat-template", str(folder / "chat.jinja"), *options]
    log = folder / "log"  # a pipe would be full
    with log.open("w") as stderr, subprocess.Popen(command, stderr=stderr) as process:
        try:
            wait_for(lambda: "http://127.0.0.1" in log.read_text())
            served = Served(process, f"http://127.0.0.1:{port}")
            assert is_up(served)  # as the line says
            served.post("completions", VICTIM)
            yield served
            served.client.close()
        finally:
            process.kill()


def is_up(served: Served) -> bool:
    try:
        return served.client.get("/health").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    save_file({"model.layers.2": torch.ones(256)}, folder / "odd.safetensors")
    with serving(folder, "--steering", str(folder)) as found:
        yield found
        assert is_up(found)


@contextmanager
def victim(served: Served) -> Iterator[list[float]]:
    """Seconds of requests that are sent one after the other while the block runs."""
    expected = served.post("completions", VICTIM).json()["choices"][0]["text"]
    seconds: list[float] = []
    is_over = threading.Event()
    wrong: list[str] = []

    def ask() -> None:
        with httpx.Client(base_url=served.url, timeout=60) as client:
            while not is_over.is_set():
                start = time.monotonic()
                answer = client.post("/v1/completions", json=VICTIM)
                seconds.append(time.monotonic() - start)
                if answer.status_code != 200 or answer.json()["choices"][0]["text"] != expected:
                    wrong.append(answer.text)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield seconds
    finally:
        is_over.set()
        thread.join()
    assert not wrong


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "completions", {"model": "builtin", "prompt": "x", "max_tokens": 2, **fields}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": "x"}]
    return "chat/completions", {"model": "builtin", "messages": messages, "max_tokens": 2, **fields}


def raw(text: str) -> tuple[str, bytes]:
    return "completions", text.encode()


def image(url: Any) -> tuple[str, dict[str, Any]]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return chat(messages=[{"role": "user", "content": [part]}])


NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"

#: Name → request, and what its error has to name; an empty text allows an answer.
ATTACKS: dict[str, tuple[tuple[str, Any], str]] = {
    "a word that panics": (
        completion(dry_multiplier=1.0, dry_sequence_breakers=[" " * 10_500_000]),
        "dry_sequence_breakers",
    ),
    "a template": (chat(chat_template_kwargs={"chat_template": NESTED}), "chat_template_kwargs"),
    "padding": (
        chat(chat_template_kwargs={"padding": "max_length", "max_length": 10**9}),
        "chat_template_kwargs",
    ),
    "a fetched image": (image("http://127.0.0.1:9/x.png"), "messages"),
    "a file": (image("/etc/passwd"), "messages"),
    "rows": (completion(n=2**21, temperature=1), "n"),
    "beams": (completion(num_beams=2**21), "num_beams"),
    "a large regex": (completion(guided_regex="(a{1000}){1000}", max_tokens=8), ""),
    "a deep regex": (completion(guided_regex="(" * 5000 + "a" + ")" * 5000), "guided_regex"),
    "a slow regex": (completion(stop_regex="(a+)+$"), "stop_regex"),
    "a long prompt": (completion(prompt="x " * 20_000), "prompt"),
    "a long word": (completion(prompt="x" * 15_000_000), "prompt"),
    "a word at the limit": (completion(prompt="a" * 999_000), "prompt"),
    "words at the limit": (completion(prompt="a " * 499_000), "prompt"),
    "a long stop": (completion(stop="x" * 10_000_000), "stop"),
    "a stop at the limit": (completion(stop="\n" * 60_000, max_tokens=30), ""),
    "many stops": (completion(stop=["x"] * 100_000), "stop"),
    "many choices": (completion(guided_choice=[f"{i}" for i in range(100_000)]), "guided_choice"),
    "choices at the limit": (completion(guided_choice=[f"{i:060}" for i in range(1000)]), ""),
    "bad words": (completion(bad_words=["x" * 1000] * 15_000), "bad_words"),
    "bad words at the limit": (completion(bad_words=[f"{i}abc" for i in range(1000)]), ""),
    "a long logit_bias": (completion(logit_bias={str(i): 1 for i in range(2000)}), "logit_bias"),
    "a wrong logit_bias": (completion(logit_bias={"x": "x" * 60_000}), "logit_bias"),
    "many ids": (completion(prompt=[5] * 400_000), "prompt"),
    "a wrong scale": (completion(interventions={"odd": 10**18}), "interventions"),
    "a wrong vector": (completion(interventions={"../odd": 1}), "interventions"),
    "many vectors": (completion(interventions={f"{i}": 1 for i in range(1000)}), "interventions"),
    "a wrong id": (completion(prompt=[10**12]), "prompt"),
    "digits": (
        raw('{"model":"builtin","prompt":"x","max_tokens":' + "9" * 400 + "}"),
        "max_tokens",
    ),
    "too many digits": (
        raw('{"model":"builtin","prompt":"x","max_tokens":' + "9" * 5000 + "}"),
        "JSON",
    ),
    "infinity": (raw('{"model":"builtin","prompt":"x","temperature":1e400}'), "temperature"),
    "nan": (raw('{"model":"builtin","prompt":"x","temperature":NaN}'), "temperature"),
    "a name twice": (raw('{"model":"builtin","prompt":"x","prompt":"y"}'), "prompt"),
    "a surrogate": (raw('{"model":"builtin","prompt":"\\ud800"}'), "prompt"),
    "a surrogate's name": (raw('{"model":"builtin","prompt":"x","\\ud800":1}'), "lone surrogate"),
    "depth": (raw('{"model":"builtin","prompt":' + "[" * 100_000 + "]" * 100_000 + "}"), "nested"),
    "some depth": (raw('{"model":"builtin","prompt":' + "[" * 500 + "]" * 500 + "}"), "nested"),
    "values": (
        raw('{"model":"builtin","prompt":"x","metadata":[' + "{}," * 4_000_000 + "{}]}"),
        "values",
    ),
    "no JSON": (raw("x" * 10_000_000), "JSON"),
    "a list": (raw("[]"), "JSON"),
    "nothing": (raw(""), "JSON"),
    "a deep schema": (
        chat(
            response_format={
                "type": "json_schema",
                "json_schema": {
                    "name": "x",
                    "schema": {
                        "anyOf": [
                            {
                                "type": "object",
                                "properties": {f"p{i}": {"$ref": "#"} for i in range(900)},
                            }
                        ]
                    },
                },
            }
        ),
        "",
    ),
    "multiples": (completion(guided_json={"multipleOf": 999_983}), "guided_json"),
    "multiples that are joined": (
        completion(guided_json={"allOf": [{"multipleOf": 997}, {"multipleOf": 99.1}]}),
        "guided_json",
    ),
    "multiples of a function": (
        chat(
            tools=[
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"multipleOf": 10**9 + 7}},
                }
            ],
            tool_choice="required",
        ),
        "tools",
    ),
    "multiples in a lark": (
        completion(guided_grammar='start: %json {"multiple\\u004ff": 999983}'),
        "guided_grammar",
    ),
    "a schema that refers to itself": (completion(guided_json={"$ref": "#"}), "guided_json"),
    "many biases": (completion(sequence_bias=[[[5, 7], 1.0]] * 25_000), "sequence_bias"),
    "many values of tokens": (completion(logprob_token_ids=[*range(21)]), "logprob_token_ids"),
    "a slow lark": (
        completion(guided_grammar="start: a a a a a a a a\na: (b b b b)*\nb: /x*/ /x*/ /x*/"),
        "",
    ),
    "a schema of patterns": (
        completion(guided_json={"type": "string", "pattern": "^(a|b|ab)*(a?){200}$"}),
        "",
    ),
    "tools": (
        chat(
            tools=[
                {
                    "type": "function",
                    "function": {"name": f"f{i}", "parameters": {"type": "object"}},
                }
                for i in range(2000)
            ],
            tool_choice="required",
        ),
        "tools",
    ),
    "a tool of many branches": (
        chat(
            tools=[
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "parameters": {"anyOf": [{"const": f"{i}" * 20} for i in range(9_000)]},
                    },
                }
            ],
            tool_choice="required",
        ),
        "tools",
    ),
    "messages": (chat(messages=[{"role": "user", "content": "x"}] * 50_000), "messages"),
    "a negative number": (completion(max_tokens=-1), "max_tokens"),
    "a huge answer": (completion(max_tokens=10**15), "max_tokens"),
    "a long answer": (completion(max_tokens=100_000), "max_tokens"),
    "a thought": (completion(thinking_token_budget=1, thinking_message="x" * 60_000), ""),
    "another model": (completion(model="../../etc/passwd"), "has to be 'builtin'"),
    "a long name": (completion(model="x" * 15_000_000), "has to be 'builtin', but is 'xxx"),
    "a path": (("../../etc/passwd", {}), "Not Found"),
}


@pytest.mark.alone
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_name_their_field_and_hold_nobody_up(served: Served, name: str) -> None:
    (path, body), names = ATTACKS[name]
    before = served.memory().rss
    for is_last in False, True:  # a busy machine holds up once, an attack each time
        with victim(served) as seconds:
            wait_for(lambda: len(seconds) >= 2)
            alone, n = statistics.median(seconds), len(seconds)
            answer = served.post(path, body)
            wait_for(lambda seconds=seconds, n=n: len(seconds) >= n + 2)
        if names:
            assert 400 <= answer.status_code < 500, answer.text
            assert names in answer.text
            assert len(answer.text) < 10_000
        else:
            assert answer.status_code in (200, 400), answer.text
        if max(seconds[n:]) < alone + HELD_UP:
            break
        assert not is_last, seconds
    assert served.memory().rss < before + 250 * 2**20


@pytest.mark.alone
def test_attacks_at_once(served: Served) -> None:
    before = served.memory().rss
    with victim(served) as seconds:
        wait_for(lambda: len(seconds) >= 2)
        alone = statistics.median(seconds)
        random.seed(1)
        for _ in range(2):
            chosen = random.sample([a for a, _ in ATTACKS.values()], 8)
            threads = [threading.Thread(target=served.post, args=each) for each in chosen]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert sorted(seconds)[int(0.9 * len(seconds))] < alone + HELD_UP
    assert served.memory().rss < before + 500 * 2**20


@pytest.mark.alone
def test_slow_and_silent_clients(tmp_path: Path) -> None:
    """Headers or bodies that never end are closed; streams that nobody reads hold up nobody."""
    with serving(tmp_path, "--receive-seconds", "1", "--max-connections", "40") as served:
        address = "127.0.0.1", int(served.url.rpartition(":")[2])
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        openings = (
            b"",
            head,
            head + b"content-length: 100\r\n\r\n{",
            b"GET / HTTP/1.1\r\nx: " + b"y" * 60_000,
        )
        clients = [socket.create_connection(address) for _ in range(32)]
        for number, client in enumerate(clients):
            client.sendall(openings[number % len(openings)])
        body = json.dumps(
            {**VICTIM, "max_tokens": 300, "stream": True, "ignore_eos": True}
        ).encode()
        unread = socket.create_connection(address)
        unread.sendall(
            head
            + f"content-length: {len(body)}\r\ncontent-type: application/json\r\n\r\n".encode()
            + body
        )
        with victim(served) as seconds:
            wait_for(lambda: len(seconds) >= 5)
        assert max(seconds) < statistics.median(seconds) + HELD_UP
        for client in clients:
            client.settimeout(10)
            while client.recv(4096):
                pass
            client.close()
        unread.close()


@pytest.mark.alone
def test_a_body_of_single_bytes(served: Served) -> None:
    """Chunks of HTTP of one byte each take seconds of the event loop, and rest in between."""
    address = "127.0.0.1", int(served.url.rpartition(":")[2])
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    with victim(served) as seconds, socket.create_connection(address) as client:
        wait_for(lambda: len(seconds) >= 2)
        alone, n = statistics.median(seconds), len(seconds)
        client.sendall(head + b"1\r\n \r\n" * 120_000 + b"0\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 400"
    assert max(seconds[n:]) < alone + HELD_UP


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.alone
@pytest.mark.parametrize(
    "data",
    [
        pytest.param(
            b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"a:b\r\n" * 13_000, id="head"
        ),
        pytest.param(CHUNKED + b"1\r\n \r\n" * 10_000, id="chunks"),
    ],
)
def test_the_first_bytes_of_many_connections(served: Served, data: bytes) -> None:
    """They come in one turn of the event loop, in which the lines and chunks would take a minute."""
    address = "127.0.0.1", int(served.url.rpartition(":")[2])
    with victim(served) as seconds, ExitStack() as stack:
        wait_for(lambda: len(seconds) >= 2)
        alone, n = statistics.median(seconds), len(seconds)
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(200)]
        for client in clients:
            with suppress(ConnectionError):  # it has been refused
                client.sendall(data)
        wait_for(lambda: len(seconds) >= n + 4)
    assert max(seconds[n:]) < alone + HELD_UP


def test_a_body_in_chunks_is_read_whole(served: Served) -> None:
    """Also in a connection that goes on, and behind another request in it."""
    address = "127.0.0.1", int(served.url.rpartition(":")[2])
    head = CHUNKED.replace(b"\r\n\r\n", b"\r\ncontent-type: application/json\r\n\r\n")
    body = json.dumps(VICTIM | {"max_tokens": 4}).encode()
    request = head + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    with socket.create_connection(address) as client:
        client.sendall(request * 3)
        answers = b""
        while answers.count(b'"usage"') < 3:
            more = client.recv(2**16)
            assert more
            answers += more
    assert answers.count(b"HTTP/1.1 200 OK") == 3


def test_no_redirect_to_the_host_of_a_request(served: Served) -> None:
    answer = served.client.get("/v1/models/", headers={"host": "localhost:1"})
    assert (answer.status_code, "location" in answer.headers) == (404, False)


@pytest.mark.parametrize(
    "host", ["attacker.example", "attacker.example:8000", "localhost.evil", "[", ""]
)
def test_only_the_names_of_loopback(served: Served, host: str) -> None:
    answer = served.client.get("/v1/models", headers={"host": host})
    assert answer.status_code in (400, 421)
    for own in "localhost:1", "127.0.0.1", "[::1]:8000":
        assert served.client.get("/v1/models", headers={"host": own}).status_code == 200


def test_a_busy_port_is_found_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        arguments = ["serve", "--port", str(port), "--model", "no/such-model"]
        found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in found.stderr
    assert "/v1 (Ctrl-C" not in found.stderr


def begun(served: Served) -> socket.socket:
    """A connection that has sent a part of a body."""
    connection = socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
    connection.sendall(head)
    connection.settimeout(20)
    return connection


LONG = {**VICTIM, "max_tokens": 480, "ignore_eos": True, "num_beams": 8, "n": 8}


@pytest.mark.alone
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(tmp_path: Path, first: signal.Signals) -> None:
    def answer() -> httpx.Response:
        return httpx.post(f"{served.url}/v1/completions", json=LONG, timeout=60)

    with serving(tmp_path, "--grace-seconds", "60") as served, ThreadPoolExecutor() as pool:
        whole, half = pool.submit(answer), begun(served)
        with served.client.stream(
            "POST", "/v1/completions", json=LONG | {"stream": True}
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            served.process.send_signal(first)
            time.sleep(0.5)
            assert served.process.poll() is None
            start = time.monotonic()
            served.process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        served.process.wait(timeout=20)
        assert time.monotonic() - start < 2  # at most 1 where nothing else runs
        assert "closed" in json.loads(rest[-1][6:])["error"]["message"], rest[-3:]
        assert whole.result().status_code == 503
        assert "closed" in whole.result().json()["error"]["message"]
        assert b" 503 " in half.recv(4096)
        half.close()
        assert "File " not in (log := (tmp_path / "log").read_text()), log


@pytest.mark.alone
def test_sigterm_ends_what_is_open_within_the_grace(tmp_path: Path) -> None:
    """Streams, and a body of which half has come."""
    with serving(tmp_path, "--grace-seconds", "0.2") as served, begun(served) as half:
        with served.client.stream(
            "POST", "/v1/completions", json=LONG | {"stream": True}
        ) as stream:
            start = time.monotonic()
            served.process.send_signal(signal.SIGTERM)
            rest = [line for line in stream.iter_lines() if line]
        answer = b"".join(iter(lambda: half.recv(4096), b""))
        served.process.wait(timeout=20)
        assert time.monotonic() - start < 2
        assert "closed" in json.loads(rest[-1][6:])["error"]["message"], rest[-3:]
        assert b" 503 " in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert "File " not in (log := (tmp_path / "log").read_text()), log


# ------------------------------------------------------------ fuzzer

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**70,
    1e-9,
    -0.5,
    1.5,
    1e300,
    "",
    "x",
    "\x00",
    "é",
    "\u202e",
    "0",
]
VALUES += [
    [],
    {},
    [[]],
    [None],
    [1, "x"],
    ["x"] * 3,
    {"": ""},
    {"type": "x"},
    {"a": {"b": [1]}},
    "a" * 5000,
    ["\n"],
    [5, 6],
]
FIELDS = (
    "model prompt max_tokens temperature top_p top_k min_p n stream stream_options seed stop echo logprobs top_logprobs "
    "logit_bias frequency_penalty presence_penalty repetition_penalty response_format tools tool_choice messages input "
    "parallel_tool_calls chat_template_kwargs user metadata best_of suffix guided_regex guided_json guided_choice "
    "guided_grammar stop_token_ids ignore_eos min_tokens bad_words allowed_token_ids num_beams length_penalty priority "
    "dry_multiplier dry_sequence_breakers mirostat thinking_token_budget prompt_logprobs include_stop_str_in_output "
    "skip_special_tokens max_completion_tokens generation_config text instructions max_output_tokens reasoning truncate "
    "add_generation_prompt continue_final_message documents functions structured_outputs xtc_probability grammar "
    "interventions"
).split()
VALID: list[tuple[str, dict[str, Any]]] = [
    completion(),
    completion(stream=True, n=2, temperature=0.8, seed=1, logprobs=2),
    completion(guided_regex="[a-z]{2}", stop=["x"]),
    completion(interventions={"odd": 0.5}),
    chat(response_format={"type": "json_object"}, logprobs=True, top_logprobs=1),
    chat(
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        stream=True,
    ),
    ("responses", {"model": "builtin", "input": "x", "max_output_tokens": 2}),
]


def mutated(value: Any, rng: random.Random) -> Any:
    """A part of ``value`` replaced, removed, doubled or renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice([*value])
        return {**value, name: mutated(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], mutated(value[place], rng), *value[place + 1 :]]
    if isinstance(value, str) and value and rng.random() < 0.3:
        place = rng.randrange(len(value))
        return (
            value[:place]
            + rng.choice(["", "\x00", "\ud83d\ude00", "{", "\\", "%"])
            + value[place + 1 :]
        )
    return rng.choice(VALUES)


def drawn(rng: random.Random) -> tuple[str, bytes]:
    path, body = rng.choice(VALID)
    body = dict(body)
    for _ in range(rng.choice([1, 1, 2, 4])):
        match rng.randrange(4):
            case 0:
                changed = mutated(body, rng) or {}
                body = dict(changed) if isinstance(changed, dict) else {"prompt": changed}
            case 1:
                body[rng.choice(FIELDS)] = rng.choice(VALUES)
            case 2:
                body.pop(rng.choice([*body, "x"]), None)
            case 3:
                body |= {name: rng.choice(VALUES) for name in rng.sample(FIELDS, 2)}
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    tokens = body.get(limit)
    if tokens is None or (isinstance(tokens, int) and tokens > 20):
        body[limit] = 3  # an answer of the model's whole length can outlast the client's patience
    content = json.dumps(body).encode()
    if rng.random() < 0.05:  # no JSON, or no UTF-8
        place = rng.randrange(len(content))
        content = (
            content[:place] + rng.choice([b"\xff", b"", b"[", b'"', b"}"]) + content[place + 1 :]
        )
    return path, content


def test_mutated_bodies(served: Served) -> None:
    """No 500, no hang; what is refused says why, and what is answered is an answer."""
    rng = random.Random(int(os.environ.get("HFGEN_FUZZ_SEED", "1")))
    bodies = [drawn(rng) for _ in range(N_BODIES)]
    with victim(served), ThreadPoolExecutor(8) as clients:
        answers = clients.map(lambda body: served.post(*body), bodies)
        for (_, content), answer in zip(bodies, answers, strict=True):
            assert answer.status_code in (200, 400, 404), (content, answer.text)
            if answer.status_code != 200:
                assert answer.json()["error"]["message"], content
            else:
                assert "server_error" not in answer.text, (content, answer.text)


def test_pictures_within_limits(tmp_path: Path) -> None:
    """Of sources that the operator allowed, and of a size that can be held."""
    from PIL import Image

    from hfgen.tools.serve import chats
    from hfgen.tools.serve.limits import Limits

    def png(size: tuple[int, int]) -> bytes:
        stored = io.BytesIO()
        Image.new("1", size).save(stored, "PNG")
        return stored.getvalue()

    def of(url: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "image", "url": url}]}]

    def data(content: bytes) -> str:
        return f"data:image/png;base64,{base64.b64encode(content).decode()}"

    (tmp_path / "in.png").write_bytes(png((3, 3)))
    allowed = Limits(media_folder=str(tmp_path), media_hosts="images.example", max_media_mb=0.01)
    for url in data(png((3, 3))), (tmp_path / "in.png").as_uri():
        messages = of(url)
        chats.inline_media(messages, allowed, "messages")
        found = messages[0]["content"][0]["url"]
        assert found.startswith("data:image/")
        assert base64.b64decode(found.partition(",")[2]) == png((3, 3))
    outside = [
        f"file://{tmp_path}/../x.png",
        "file:///etc/passwd",
        f"file://{tmp_path}",
        "ftp://x/y",
        "x.png",
        "/etc/passwd",
    ]
    outside += [
        "http://169.254.169.254/",
        "http://images.example@127.0.0.1/",
        "https://other.example/x.png",
        "data:,x",
        "",
    ]
    outside += [data(png((9000, 9000))), data(b"x" * 20_000), data(b"no picture"), None, 5]
    outside += [data(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")]
    for url in outside:
        with pytest.raises(ValueError, match="`messages`"):
            chats.inline_media(of(url), allowed, "messages")
    with pytest.raises(ValueError, match="more than 16"):
        chats.inline_media(of(data(png((1, 1)))) * 17, allowed, "messages")
    small = Limits(max_pixels=100)
    chats.inline_media(of(data(png((10, 10)))) * 4, small, "messages")
    with pytest.raises(ValueError, match="all images together have more than 400 pixels"):
        chats.inline_media(of(data(png((10, 10)))) * 5, small, "messages")


@pytest.mark.alone
def test_a_long_animation_is_no_work() -> None:
    """Its first frame alone is read, and so the others are not counted."""
    from hfgen.tools.serve import chats
    from hfgen.tools.serve.limits import Limits

    head = b"GIF89a\1\0\1\0\x80\0\0\0\0\0\xff\xff\xff"
    frame = b",\0\0\0\0\1\0\1\0\0\2\2\x44\1\0"
    start = time.monotonic()
    chats.pixels_of(head + frame * 400_000 + b";", Limits())
    assert time.monotonic() - start < HELD_UP


def test_every_limit_is_on_the_page() -> None:
    from dataclasses import fields

    from hfgen.tools.serve.limits import Limits

    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    for each in fields(Limits):
        option = each.name.replace("_", "-")
        default = (
            f"{each.default:,}"
            if isinstance(each.default, int | float) and each.default
            else "none"
        )
        assert f"| `--{option}` | {default.removesuffix('.0')} |" in page
