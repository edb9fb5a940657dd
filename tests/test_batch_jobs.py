"""`hfgen batch`: answers of solo calls, a line each; a killed job goes on without loss or repeats."""

from __future__ import annotations

import fcntl
import json
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hfgen
from hfgen.tools.cli import app, loading
from hfgen.tools.cli.batch import PREFIX, Line, Output, Requests
from hfgen.tools.cli.report import CliError
from tests.test_openai_api import TEMPLATE
from tests.tiny import byte_tokenizer, llama

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def loaded() -> loading.Loaded:
    model = hfgen.mix_into(llama(vocab_size=258, eos_token_id=0, pad_token_id=1))
    return loading.Loaded("tiny", model, byte_tokenizer(TEMPLATE))


@pytest.fixture
def tiny_model(monkeypatch: pytest.MonkeyPatch, loaded: loading.Loaded) -> loading.Loaded:
    monkeypatch.setattr(loading, "load", lambda *_: loaded)
    return loaded


def request(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, *lines: Any) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["batch", *map(str, arguments)])


def contents(path: Path) -> dict[str, Any]:
    """What each request was answered, but for names and times that are new in each run."""
    return {
        line["custom_id"]: (line["response"]["body"].get("choices"), line["error"])
        for line in read(path)
    }


def test_answers_are_those_of_solo_calls(tmp_path: Path, tiny_model: loading.Loaded):
    source = write(
        tmp_path / "in.jsonl",
        request("greedy", prompt="abc", **GREEDY),
        request("chat", CHAT, messages=[{"role": "user", "content": "hi"}], **GREEDY),
        request("sampled", prompt="xyz", seed=3, n=2, max_tokens=5, top_p=0.9, logprobs=2),
        request("both", prompt=["abc", "xyz"], **GREEDY),
    )
    result = run(source, "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 0, result.stderr
    assert "4 answered · 0 failed" in result.stderr
    lines = {line["custom_id"]: line for line in read(tmp_path / "out.jsonl")}
    model, tokenizer = tiny_model.model, tiny_model.tokenizer

    def solo(text: str, **kwargs: Any) -> list[str]:
        inputs = tokenizer(text, return_tensors="pt")
        kwargs |= {"tokenizer": tokenizer, "return_dict_in_generate": True}
        return model.generate(**inputs, **kwargs).texts

    def texts(name: str) -> list[str]:
        return [choice["text"] for choice in lines[name]["response"]["body"]["choices"]]

    alone = {n: solo(n, do_sample=False, max_new_tokens=6)[0] for n in ("abc", "xyz")}
    assert texts("greedy") == [alone["abc"]]
    assert texts("both") == [alone["abc"], alone["xyz"]]
    sampling = {"do_sample": True, "seed": 3, "top_p": 0.9, "top_k": 0, "num_return_sequences": 2}
    assert texts("sampled") == solo("xyz", max_new_tokens=5, **sampling)
    body = lines["chat"]["response"]["body"]
    alone_chat = solo("user:hi;assistant:", do_sample=False, max_new_tokens=6)
    assert [choice["message"]["content"] for choice in body["choices"]] == alone_chat
    n_new, n_prompt = (body["usage"][f"{name}_tokens"] for name in ("completion", "prompt"))
    assert (n_prompt, 0 < n_new <= 6) == (len("user:hi;assistant:"), True)
    for line in lines.values():
        assert line["error"] is None
        assert line["response"]["status_code"] == 200
        assert line["id"].startswith("batch_req_")
        assert line["response"]["body"]["model"] == "tiny"


def test_json_by_a_schema_and_a_shared_start(tmp_path: Path):
    """On the built-in model; stored prefixes change no answer."""
    schema = {"type": "array", "items": {"enum": [1, 22]}, "minItems": 2, "maxItems": 2}
    asked = {"type": "json_schema", "json_schema": {"name": "pair", "schema": schema}}
    start = "# Numbers of things\nimport os\nimport sys\n" * 4
    source = write(
        tmp_path / "in.jsonl",
        *(
            request(name, prompt=f"{start}{name} = ", response_format=asked, max_tokens=20, seed=4)
            for name in ("apples", "pears", "plums")
        ),
    )
    outputs = tmp_path / "plain.jsonl", tmp_path / "shared.jsonl"
    assert run(source, "-o", outputs[0]).exit_code == 0
    assert run(source, "-o", outputs[1], "--prefix-cache", "--max-rows", 1).exit_code == 0
    assert contents(outputs[0]) == contents(outputs[1])
    for choices, _ in contents(outputs[0]).values():
        assert len(json.loads(choices[0]["text"])) == 2
        assert choices[0]["finish_reason"] == "stop"


#: Lines that cannot be answered, and what their errors have to name.
WRONG: list[tuple[Any, str]] = [
    ("not json", "not JSON"),
    ('{"custom_id": "torn", "bo', "not JSON"),
    ("[1]", "not a JSON object"),
    ('{"custom_id": "deep", "body": ' + 100_000 * "[" + 100_000 * "]" + "}", "nested"),
    (r'{"custom_id": "a\udc80", "url": "/v1/completions", "body": {}}', "surrogate"),
    (request("w0", prompt="a\udc80"), ""),
    ({"url": COMPLETIONS, "body": {}}, "custom_id"),
    ({"custom_id": 7, "url": COMPLETIONS, "body": {}}, "custom_id"),
    (request("w1", "/v1/embeddings", input="x"), "`url`"),
    ({**request("w2", prompt="x"), "method": "GET"}, "`method`"),
    ({"custom_id": "w3", "url": COMPLETIONS}, "`body`"),
    (request("w4", prompt="x", temprature=1), "temperature"),
    (request("w5", prompt=""), "`prompt`"),
    (request("w6", CHAT, messages=[]), "`messages`"),
    (request("w7", prompt="x", stream=True), "`stream`"),
    (
        request(
            "w11",
            CHAT,
            messages=[{"role": "user", "content": "x"}],
            chat_template_kwargs={"chat_template": "{{ 1 }}"},
        ),
        "`chat_template`",
    ),
    (request("w8", prompt="x", n=40), "rows"),
    (request("w9", prompt="x", n=2, temperature=0), "`temperature` above 0"),
    (request("w10", prompt="x", bad_words=[" "], logit_bias={"999": 1}), "999"),
]


def test_wrong_lines_are_errors_of_their_own(tmp_path: Path, tiny_model: loading.Loaded):
    source = write(
        tmp_path / "in.jsonl",
        request("first", prompt="abc", **GREEDY),
        *(line for line, _ in WRONG),
        "",
        request("last", prompt="abc", **GREEDY),
    )
    output = tmp_path / "out.jsonl"
    result = run(source, "-o", output)
    assert result.exit_code == 1
    assert f"2 answered · {len(WRONG)} failed" in result.stderr
    by_line = {line["error"]["line"]: line for line in read(output) if line["error"] is not None}
    assert len(by_line) == len(WRONG)
    for number, (asked, words) in enumerate(WRONG, start=2):
        line = by_line[number]
        assert words in line["error"]["message"], line
        assert line["response"]["status_code"] == 400
        assert line["response"]["body"]["error"]["message"] == line["error"]["message"]
        custom_id = asked.get("custom_id") if isinstance(asked, dict) else None
        assert line["custom_id"] == (custom_id if isinstance(custom_id, str) else None)
    before = output.read_bytes()
    again = run(source, "-o", output)
    assert again.exit_code == 1
    assert f"done before, {len(WRONG)} of them with an error" in again.stderr
    assert output.read_bytes() == before


def test_a_request_that_fails_is_an_error_of_the_server(
    tmp_path: Path, tiny_model: loading.Loaded, monkeypatch: pytest.MonkeyPatch
):
    source = write(tmp_path / "in.jsonl", *(request(c, prompt=c, **GREEDY) for c in "ab"))
    forward, n_calls = type(tiny_model.model).forward, []

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        n_calls.append(1)
        if len(n_calls) == 4:
            raise RuntimeError("device lost")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(tiny_model.model), "forward", failing)
    assert run(source, "-o", tmp_path / "out.jsonl", "--max-rows", 1).exit_code == 1
    lines = {line["custom_id"]: line for line in read(tmp_path / "out.jsonl")}
    assert lines["a"]["response"]["status_code"] == 500
    assert lines["a"]["error"]["message"] == "device lost"
    assert lines["b"]["error"] is None


def test_fields_of_the_command_line_hold_where_a_request_says_nothing(
    tmp_path: Path, tiny_model: loading.Loaded
):
    source = write(
        tmp_path / "in.jsonl",
        request("short", prompt="abc", max_tokens=2),
        request("long", prompt="abc"),
        request("greedy", prompt="abc", temperature=0),
        request("chat", CHAT, messages=[{"role": "user", "content": "x"}], ignore_eos=True),
    )
    options = ("--max-new-tokens", 5, "--temperature", 0.7, "--seed", 1)
    assert run(source, "-o", tmp_path / "out.jsonl", *options).exit_code == 0
    lines = {line["custom_id"]: line["response"]["body"] for line in read(tmp_path / "out.jsonl")}
    n_tokens = {name: body["usage"]["completion_tokens"] for name, body in lines.items()}
    assert n_tokens == {"short": 2, "long": 5, "greedy": 5, "chat": 5}
    text = lines["long"]["choices"][0]["text"]
    assert text.startswith(lines["short"]["choices"][0]["text"])


def test_a_chat_without_a_limit_stays_within_the_positions(
    tmp_path: Path, tiny_model: loading.Loaded
):
    messages = [{"role": "user", "content": "x"}]
    source = write(
        tmp_path / "in.jsonl", request("a", CHAT, messages=messages, ignore_eos=True, temperature=0)
    )
    assert run(source, "-o", tmp_path / "out.jsonl").exit_code == 0
    usage = read(tmp_path / "out.jsonl")[0]["response"]["body"]["usage"]
    assert usage["total_tokens"] == 256


def test_shards_are_all_lines_once(tmp_path: Path, tiny_model: loading.Loaded):
    names = [str(n) for n in range(7)]
    source = write(tmp_path / "in.jsonl", *(request(n, prompt=n, **GREEDY) for n in names))
    found: list[str] = []
    for i in 1, 2, 3:
        output = tmp_path / f"out-{i}.jsonl"
        assert run(source, "-o", output, "--shard", f"{i}/3").exit_code == 0
        found += (line["custom_id"] for line in read(output))
        assert len(read(output)) in (2, 3)
    assert sorted(found) == names


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return {
        "in": write(tmp_path / "in.jsonl", request("a", prompt="x"), request("b", prompt="y")),
        "out": tmp_path / "out.jsonl",
        "twice": write(
            tmp_path / "twice.jsonl", request("a", prompt="x"), "", request("a", prompt="y")
        ),
        "notes": write(tmp_path / "notes.txt", "something else"),
        "torn": tmp_path / "nowhere" / "out.jsonl",
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/no/such", "-o", "out"], ["/no/such"]),
        (["in"], ["--output"]),
        (["in", "-o", "in"], ["-o", "another"]),
        (["in", "-o", "notes"], ["line 1", "notes.txt"]),
        (["in", "-o", "torn"], ["no such folder"]),
        (["twice", "-o", "out"], ["lines 1 and 3", "custom_id", "'a'"]),
        (["in", "-o", "out", "--shard", "5/4"], ["--shard", "5/4"]),
        (["in", "-o", "out", "--shard", "0/4"], ["--shard", "0/4"]),
        (["in", "-o", "out", "--shard", "2"], ["--shard"]),
        (["in", "-o", "out", "--policy", "random"], ["--policy", "srpt"]),
        (["in", "-o", "out", "--dtype", "int3"], ["--dtype", "int3"]),
        (["in", "-o", "out", "--max-rows", "0"], ["--max-rows"]),
        (["in", "-o", "out", "--chat-template", "/no/such"], ["/no/such"]),
        (["in", "-o", "out", "--temprature", "1"], ["--temprature", "--temperature"]),
    ],
)
def test_wrong_options_end_before_the_model_is_loaded(
    arguments: list[str], words: list[str], files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("the model was loaded"))
    notes = files["notes"].read_bytes()
    result = run(*(str(files.get(argument, argument)) for argument in arguments))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert all(word in line for word in words), line
    assert files["notes"].read_bytes() == notes


def test_options_are_checked_without_torch(files: dict[str, Path]):
    code = (
        "import sys; from hfgen.tools.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "batch", str(files["twice"]), "-o", str(files["out"])]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["2", "False"]


def test_two_jobs_do_not_write_the_same_output(files: dict[str, Path]):
    with open(files["out"], "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        result = run(files["in"], "-o", files["out"])
        assert result.exit_code == 2
        assert "another job" in result.stderr
    with Output(files["out"]), pytest.raises(CliError, match="another job"):
        Output(files["out"])


@pytest.mark.parametrize("n_kept", [0, 1, 5, len(PREFIX), 60, 10_000])
def test_a_line_that_was_not_finished_is_cut_off(tmp_path: Path, n_kept: int):
    path = tmp_path / "out.jsonl"
    record = {"id": "batch_req_1", "custom_id": "a", "response": {"x": "é" * 30}, "error": None}
    with Output(path) as output:
        output.write(record)
        output.write({**record, "custom_id": None, "error": {"line": 3}})
    whole = path.read_bytes()
    assert whole.startswith(PREFIX)
    torn = whole.splitlines(keepends=True)[0][:-1][:n_kept]  # at most all but the line's end
    path.write_bytes(whole + torn)
    with Output(path) as output:
        assert output.done == {"a": None, 3: None}
        assert output.n_failed == 1
        assert output.was_cut == (n_kept > 0)
        output.write({**record, "custom_id": "b"})
    assert path.read_bytes().startswith(whole)
    assert [line["custom_id"] for line in read(path)] == ["a", None, "b"]


def test_a_file_of_other_content_is_left_alone(tmp_path: Path):
    for content in (
        b"hello",
        b'{"id": 3}\n',
        b"\x00\x00\n",
        b'{"custom_id": "a"}\n{"id": "batch_req_',
        b"[" * 100_000,
    ):
        path = tmp_path / "other"
        path.write_bytes(content)
        with pytest.raises(CliError, match="not one of an output"):
            Output(path)
        assert path.read_bytes() == content


@pytest.mark.parametrize("path", [Path("/dev/full"), Path("/")])
def test_what_is_no_file_is_refused(path: Path):
    with pytest.raises(CliError, match="it is no file"):
        Output(path)


def test_lines_are_read_as_they_are(tmp_path: Path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"custom_id": "a"}\r\n\n  \n{"custom_id": "\xff"}\n{"custom_id": "c"}'
    )
    lines = list(Requests(path))
    assert [line.number for line in lines] == [1, 4, 5]
    assert [line.key for line in lines] == ["a", 4, "c"]
    assert lines[0] == Line(1, lines[0].digest, {"custom_id": "a"}, "a")


def children(n: int) -> list[Any]:
    """Requests of several lengths, greedy and with seeds, some of them wrong."""
    return [
        "wrong"
        if number % 11 == 5
        else request(
            f"request {number}",
            prompt=f"def f{number}(x):\n",
            max_tokens=2 + 5 * (number % 5),
            **({"seed": number} if number % 2 else {"temperature": 0}),
        )
        for number in range(n)
    ]


def test_a_killed_job_goes_on_where_it_was(tmp_path: Path):
    n = 18
    source = write(tmp_path / "in.jsonl", *children(n))
    output, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    command = [sys.executable, "-m", "hfgen", "batch", str(source), "-o", str(output)]
    job = subprocess.Popen([*command, "--max-rows", "4"], stderr=subprocess.PIPE)
    while not output.exists() or output.read_bytes().count(b"\n") < 4:
        assert job.poll() is None, job.communicate()
        time.sleep(0.002)
    job.send_signal(signal.SIGKILL)
    job.communicate()
    assert job.returncode == -signal.SIGKILL
    assert output.read_bytes().count(b"\n") < n
    # What a kill in the middle of a line leaves; where it falls in truth is up to the system.
    with open(output, "ab") as file:
        file.write(b'{"id": "batch_req_0", "custom_id": "request 1')
    resumed = run(source, "-o", output, "--max-rows", 4)
    assert resumed.exit_code == run(source, "-o", whole, "--max-rows", 4).exit_code == 1
    assert "not finished, and is done again" in resumed.stderr
    counts = Counter(
        (line["custom_id"], (line["error"] or {}).get("line")) for line in read(output)
    )
    assert len(counts) == n
    assert set(counts.values()) == {1}
    assert contents(output) == contents(whole)
    n_wrong = sum(custom_id is None for custom_id, _ in counts)
    assert n_wrong == sum(line == "wrong" for line in children(n)) > 1


def test_other_requests_with_the_ids_of_old_answers_are_refused(
    tmp_path: Path, tiny_model: loading.Loaded
):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    assert run(write(source, request("a", prompt="x", **GREEDY)), "-o", output).exit_code == 0
    before = output.read_bytes()
    lines = request("b", prompt="x", **GREEDY), request("a", prompt="y", **GREEDY)
    result = run(write(source, *lines), "-o", output)
    assert result.exit_code == 2
    assert "line 2" in result.stderr
    assert "'a'" in result.stderr
    assert output.read_bytes() == before


def test_a_full_disk_keeps_the_answers_and_says_how_to_go_on(
    tmp_path: Path, tiny_model: loading.Loaded
):
    names = [str(n) for n in range(8)]
    source = write(tmp_path / "in.jsonl", *(request(n, prompt=n, **GREEDY) for n in names))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_500, limits[1]))
    try:
        result = run(source, "-o", tmp_path / "out.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.exit_code == 2
    assert "answers in it are kept" in result.stderr
    assert (tmp_path / "out.jsonl").stat().st_size == 1_500
    assert run(source, "-o", tmp_path / "out.jsonl").exit_code == 0
    assert sorted(contents(tmp_path / "out.jsonl")) == names


VALUES = [
    *(None, True, -1, 0, 7, 2**70, 10**400, 1e308, float("nan"), float("inf")),
    *("", "\udc80", "\0", "é" * 50, "(a{1000}){1000}", "{%" * 9),
    *(
        [],
        {},
        [[]],
        ["a", 1],
        [-1],
        [[999]],
        ["abc", ""],
        {"1": 1e308},
        {"": None},
        {"type": "text"},
    ),
    *([{"role": "user"}], [{"role": "x", "content": [{"type": "image_url"}]}]),
    {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}},
    {"chat_template": 3 * "{% for i in range(99999) %}" + 3 * "{% endfor %}"},
]
FIELDS = [
    *("n", "stop", "logit_bias", "temperature", "seed", "response_format", "max_tokens", "top_p"),
    *("messages", "prompt", "logprobs", "echo", "structured_outputs", "chat_template_kwargs"),
    *("tools", "tool_choice", "min_tokens", "bad_words", "stop_token_ids", "dry_sequence_breakers"),
]


def mutated(line: dict[str, Any], rng: random.Random) -> str:
    """``line`` with wrong values, keys, nesting or bytes."""
    if rng.random() < 0.5:
        content = {"messages": [{"role": "user", "content": "xyz"}], **GREEDY}
        line = {**line, "url": CHAT, "body": content}
    for _ in range(rng.randint(1, 3)):
        part = rng.choice([line, line["body"], line["body"]])
        if not isinstance(part, dict):
            break
        part[rng.choice([*part, *FIELDS])] = rng.choice(VALUES)
        line.setdefault("body", {})
    text = json.dumps(line)
    if rng.random() < 0.3:
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice(["", "[" * 5_000, '"', "}", "\x7f"]) + text[place + 1 :]
    return text


@pytest.mark.parametrize("seed", range(12))
def test_random_lines_are_answered_once_and_harm_no_other(
    tmp_path: Path, tiny_model: loading.Loaded, seed: int
):
    rng = random.Random(seed)
    good = [request(f"good {n}", prompt="abc", **GREEDY) for n in range(4)]
    bad = [mutated(request(f"bad {n}", prompt="xyz", **GREEDY), rng) for n in range(24)]
    lines = [*good, *bad]
    rng.shuffle(lines)
    source, output = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    numbered = list(Requests(source))
    keys = Counter(line.key for line in numbered)
    while duplicates := [line.number for line in numbered if keys[line.key] > 1]:
        lines = [line for number, line in enumerate(lines, 1) if number not in duplicates]
        numbered = list(Requests(write(source, *lines)))
        keys = Counter(line.key for line in numbered)

    def answered() -> Counter[str | int]:
        return Counter(
            line["error"]["line"] if line["custom_id"] is None else line["custom_id"]
            for line in read(output)
        )

    assert run(source, "-o", output).exit_code in (0, 1)
    assert answered() == keys
    first = contents(output)
    assert len({str(first[line["custom_id"]]) for line in good}) == 1
    assert first["good 0"][1] is None
    output.write_bytes(output.read_bytes()[: rng.randrange(output.stat().st_size)])
    assert run(source, "-o", output).exit_code in (0, 1)
    assert answered() == keys
    assert all(contents(output)[line["custom_id"]] == first[line["custom_id"]] for line in good)
