"""Libraries that people use with OpenAI's interface, in their default modes, and `hfgen serve`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import instructor
import openai
import pydantic
import pydantic_ai
import pytest
from langchain_openai import ChatOpenAI
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from transformers import AddedToken

import hfgen
from tests import scripted, tiny
from tests.clients.server import Running, running
from tests.clients.test_lm_eval_model import ANSWER_TASK, CHOICE_TASK, CHOICES

#: A chat of lines, in which tools stand first.
TEMPLATE = (
    "{% for t in tools or [] %}# {{ t.function.name }}: {{ t.function.parameters }}\n{% endfor %}"
    "{% for m in messages %}{{ m.content or m.tool_calls }}\n{% endfor %}"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    model, tokenizer = hfgen.builtin_model()
    tokenizer.chat_template = TEMPLATE
    with running(hfgen.mix_into(model), tokenizer) as found:
        yield found
        found.wait_until_idle()


# ------------------------------------------------------------ lm_eval and echoed prompts


def test_lm_eval(server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``local-completions`` scores and generates as ``hf`` does."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "docs.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": p, "choices": c}) for p, c in CHOICES))
    for name, text in ("choice", CHOICE_TASK), ("answer", ANSWER_TASK):
        (tmp_path / f"{name}.yaml").write_text(text.format(file=file))
    server.tokenizer.save_pretrained(tmp_path / "tokenizer")
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    shared = {"tasks": ["local_choice", "local_answer"], "task_manager": manager}
    shared |= {"bootstrap_iters": 0}
    served = {"model": "tiny", "base_url": f"{server.url}/v1/completions"}
    served |= {"tokenizer": str(tmp_path / "tokenizer")}
    ours = simple_evaluate("local-completions", served, batch_size=2, **shared)
    alone = HFLM(pretrained=server.model, tokenizer=server.tokenizer, device="cpu")
    theirs = simple_evaluate(alone, **shared)
    assert ours["results"] == theirs["results"]
    for our, their in zip(*(r["samples"]["local_choice"] for r in (ours, theirs)), strict=True):
        for (ours_of, is_greedy), (theirs_of, was_greedy) in zip(
            our["filtered_resps"], their["filtered_resps"], strict=True
        ):
            assert ours_of == pytest.approx(theirs_of, abs=1e-3)
            assert is_greedy == was_greedy


def test_echo(server: Running) -> None:
    client, prompt = server.client(), "import os\n"
    ids = server.tokenizer(prompt).input_ids
    usual: Any = {"model": "tiny", "temperature": 0, "max_tokens": 4}
    plain = client.completions.create(prompt=prompt, logprobs=2, **usual).choices[0]
    for given in prompt, ids:
        both = client.completions.create(prompt=given, logprobs=2, echo=True, **usual).choices[0]
        assert both.text == prompt + plain.text
        assert both.logprobs.token_logprobs[0] is None
        assert both.logprobs.top_logprobs[0] is None
        assert "".join(both.logprobs.tokens) == both.text
        assert both.logprobs.tokens[len(ids) :] == plain.logprobs.tokens
        assert both.logprobs.top_logprobs[len(ids) :] == plain.logprobs.top_logprobs
        assert all(len(top) == 2 for top in both.logprobs.top_logprobs[1:])
        places = zip(both.logprobs.text_offset, both.logprobs.tokens, strict=True)
        assert all(both.text.startswith(token, at) for at, token in places)
    usual["max_tokens"] = 0
    sampled = usual | {"temperature": 1}
    mixed = client.completions.create(prompt=["x = 1", ids], n=2, echo=True, **sampled)
    assert [choice.text for choice in mixed.choices] == ["x = 1", "x = 1", prompt, prompt]
    alone = client.completions.create(prompt=prompt, logprobs=2, echo=True, **usual).choices[0]
    assert alone.logprobs.top_logprobs == both.logprobs.top_logprobs[: len(ids)]
    chunks = client.completions.create(prompt=prompt, echo=True, stream=True, **usual)
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == prompt
    with pytest.raises(openai.BadRequestError, match="`stream` has to be false"):
        client.completions.create(prompt=prompt, echo=True, logprobs=1, stream=True, **usual)


# ------------------------------------------------------------ tools


class Point(pydantic.BaseModel):
    """A point."""

    x: Annotated[int, pydantic.Field(ge=0, le=99)]
    kind: Literal["new", "old"]


class Line(pydantic.BaseModel):
    """A line between points, which its schema refers to."""

    start: Point
    end: Point


def tool(name: str, kind: type[pydantic.BaseModel], **more: Any) -> Any:
    function = {"name": name, "parameters": kind.model_json_schema(), **more}
    return {"type": "function", "function": function}


TOOLS = [tool("plot", Point), tool("draw", Line)]
KINDS = {"plot": Point, "draw": Line}
MESSAGES: Any = [{"role": "user", "content": "x = 1"}]
USUAL: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "temperature": 0}
USUAL |= {"max_completion_tokens": 150}
NAMED: Any = {"type": "function", "function": {"name": "draw"}}
ALLOWED: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "draw"}}]}


def calls_of(answer: Any, is_stream: bool) -> tuple[str, list[Any], str]:
    """Text, calls and finish reason of an answer."""
    text, calls, reason = "", [], ""
    for chunk in answer if is_stream else [answer]:
        (choice,) = chunk.choices
        part = choice.delta if is_stream else choice.message
        text += part.content or ""
        calls += part.tool_calls or []
        reason = choice.finish_reason or reason
    return text, calls, reason


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ("plot", "draw")),
        (NAMED, ("draw",)),
        ({"type": "allowed_tools", "allowed_tools": ALLOWED}, ("draw",)),
    ],
    ids=["required", "named", "allowed"],
)
def test_a_call_is_required(server: Running, choice: Any, names: Any, is_stream: bool) -> None:
    """Sampled at a high temperature, calls still are those of the tools, by their schemas."""
    body = USUAL | {"temperature": 1.5, "tool_choice": choice, "stream": is_stream}
    answer = server.client().chat.completions.create(seed=3, parallel_tool_calls=False, **body)
    text, (call,), reason = calls_of(answer, is_stream)
    assert (text, reason) == ("", "tool_calls")
    assert call.function.name in names
    KINDS[call.function.name].model_validate_json(call.function.arguments)


class Pushing(scripted.Script):
    """A model that prefers what it is told to, where a grammar allows that."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores + (super().__call__(input_ids, scores) == 1000.0) * 1000.0


WRITTEN = '<tool_call>\n{"name": "plot", "arguments": {"x": 123, "kind": 5}}\n</tool_call>'
VALID = WRITTEN.replace("123", "12").replace("5", '"new"')
FORM = {"type": "json_schema", "json_schema": {"name": "p", "schema": Point.model_json_schema()}}

#: What a model writes by itself, what a request asks for, and how the answer begins and what it calls.
BY_ITSELF: dict[str, tuple[str, dict[str, Any], str, list[Any]]] = {
    "free": (f"so{WRITTEN * 2}<eos>", {}, "so", [{"x": 123, "kind": 5}] * 2),
    "strict": (f"so{WRITTEN}<eos>", {"tools": [tool("plot", Point, strict=True)]}, "so", [None]),
    "strict, but no call": ("so<eos>", {"tools": [tool("plot", Point, strict=True)]}, "so", []),
    "one": (f"so{WRITTEN * 2}<eos>", {"parallel_tool_calls": False}, "so", [{"x": 123, "kind": 5}]),
    "a call in place of JSON": (f"{WRITTEN}<eos>", {"response_format": FORM}, "", [None]),
    "JSON in place of a call": ('{"x": 5<eos>', {"response_format": FORM}, '{"x": 5', []),
    "required": (f"{VALID}\n{VALID}<eos>", {"tool_choice": "required"}, "", [None] * 2),
    "cut off": (f"{WRITTEN}{WRITTEN[:-20]}", {}, "", [{"x": 123, "kind": 5}]),
    "no call": (f"so{WRITTEN[:30]}</tool_call>!<eos>", {}, f"so{WRITTEN[:30]}</tool_call>!", []),
    "none": (f"{WRITTEN}<eos>", {"tool_choice": "none"}, WRITTEN, []),
}


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", BY_ITSELF)
def test_what_the_model_does_by_itself(name: str, is_stream: bool) -> None:
    written, more, text, expected = BY_ITSELF[name]
    tokenizer = tiny.byte_tokenizer(TEMPLATE)
    body = USUAL | {"tools": [tool("plot", Point)], **more, "stream": is_stream}
    shown = None if more.get("tool_choice") == "none" else body["tools"]
    chat = tokenizer.apply_chat_template(MESSAGES, tools=shown)
    script = Pushing([scripted.ids_of(written)], len(chat["input_ids"]))
    body["max_completion_tokens"] = 300 if "<eos>" in written else len(script.scripts[0])
    with running(scripted.model(), tokenizer) as server:
        server.engine.also["logits_processor"] = [script]
        found, calls, reason = calls_of(server.client().chat.completions.create(**body), is_stream)
    assert found.startswith(text)
    assert len(calls) == len(expected)
    assert reason == ("length" if name == "cut off" else "tool_calls" if calls else "stop")
    for call, arguments in zip(calls, expected, strict=True):
        if arguments is None:
            Point.model_validate_json(call.function.arguments)
        else:
            assert json.loads(call.function.arguments) == arguments
    if name.startswith("JSON"):
        Point.model_validate_json(found)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "always"}, "`tool_choice` has to be 'none', 'auto'"),
    ({"tool_choice": {"type": "function"}}, "`tool_choice` has to be"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "`tool_choice` names 'f'"),
    ({"tool_choice": "required", "tools": []}, "`tool_choice` requires a call"),
    ({"tools": [{"type": "web_search"}]}, "`tools` has to have functions"),
    ({"tools": "plot"}, "`tools` has to have functions"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}]}
        | {"tool_choice": "required"},
        "`tools` has parameters of 'f' that are refused",
    ),
]


@pytest.mark.parametrize(("body", "message"), WRONG)
def test_wrong_tools_are_named(server: Running, body: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        server.client().chat.completions.create(**USUAL | body)


def test_calls_and_their_results_go_back(server: Running) -> None:
    """As an agent sends them: templates get the arguments of a call as an object."""
    client = server.client()
    asked = client.chat.completions.create(**USUAL | {"tool_choice": NAMED}).choices[0].message
    (call,) = asked.tool_calls or []
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    body = USUAL | {"messages": [*MESSAGES, asked, result], "max_completion_tokens": 4}
    answer = client.chat.completions.create(**body)
    called = asked.model_dump(exclude_none=True)["tool_calls"]
    called[0]["function"]["arguments"] = json.loads(call.function.arguments)
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": called}, result]
    chat = server.tokenizer.apply_chat_template(messages, tools=TOOLS)
    assert answer.usage.prompt_tokens == len(chat["input_ids"])


def test_responses_call_tools(server: Running) -> None:
    client = server.client()
    flat: Any = [{"type": "function", "name": "plot", "parameters": Point.model_json_schema()}]
    for choice in "required", {"type": "function", "name": "plot"}:
        body: Any = {"model": "tiny", "input": "x = 1", "tools": flat, "tool_choice": choice}
        body |= {"temperature": 0, "parallel_tool_calls": False}
        answer = client.responses.create(**body)
        (call,) = (item for item in answer.output if item.type == "function_call")
        Point.model_validate_json(call.arguments)
        events = client.responses.create(**body, stream=True)
        done = [e for e in events if e.type == "response.function_call_arguments.done"]
        assert [(e.name, e.arguments) for e in done] == [("plot", call.arguments)]


@pytest.mark.parametrize(
    ("begin", "end", "is_special"),
    [("[CALL]", "[/CALL]", None), ("<tool_call>", "</tool_call>", False), ("<|c|>", "<|d|>", True)],
    ids=["text", "tokens", "special tokens"],
)
def test_the_model_has_a_format_of_its_own(begin: str, end: str, is_special: bool | None) -> None:
    """With a template whose calls are JSON, required calls are written and read by it."""
    tokenizer = tiny.byte_tokenizer(TEMPLATE)
    names = (begin, end, "<think>")
    if is_special is not None:
        tokenizer.add_tokens([AddedToken(name, special=is_special) for name in names])
    transform = {"type": "function", "function": "{content}"}
    call = {"open": begin, "close": end, "repeats": True, "content": "json", "transform": transform}
    text = {"content": "text", "close": tokenizer.eos_token}
    tokenizer.response_template = {
        "start_anchor_pattern": r"\Z",
        "fields": {"tool_calls": call, "content": text},
    }
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = hfgen.mix_into(
        tiny.llama(vocab_size=len(tokenizer), max_position_embeddings=2048, **special)
    )
    tools = [tool("plot", Point, strict=True)]
    chat = tokenizer.apply_chat_template(MESSAGES, tools=tools)
    said = f"<think>so{begin}{WRITTEN.split(chr(10))[1]}{end}{tokenizer.eos_token}"
    script = Pushing([tokenizer.encode(said, add_special_tokens=False)], len(chat["input_ids"]))
    with running(model, tokenizer) as server:
        body = USUAL | {"tools": tools, "max_completion_tokens": 300}
        required = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1}
        for more, text_of in (required, ""), ({}, "<think>so"):
            server.engine.also = {} if more else {"logits_processor": [script]}
            answer = server.client().chat.completions.create(**body | more)
            found, (called,), reason = calls_of(answer, False)
            assert (found, reason) == (text_of, "tool_calls")
            Point.model_validate_json(called.function.arguments)


# ------------------------------------------------------------ libraries


def test_openai_parses(server: Running) -> None:
    body = USUAL | {"max_completion_tokens": 150}
    del body["tools"]
    answer = server.client().chat.completions.parse(response_format=Line, **body)
    assert isinstance(answer.choices[0].message.parsed, Line)
    tools = [openai.pydantic_function_tool(Line)]
    one: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    called = server.client().chat.completions.parse(tools=tools, **one, **body)
    (call,) = called.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Line)
    with server.client().chat.completions.stream(response_format=Point, **body) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Point)


def test_openai_async(server: Running) -> None:
    async def main() -> list[Any]:
        async with server.async_client() as client:
            body = USUAL | {"tool_choice": NAMED}
            whole, stream = await asyncio.gather(
                client.chat.completions.create(**body),
                client.chat.completions.create(**body, stream=True),
            )
            chunks = [chunk async for chunk in stream]
            return [whole.choices[0].message.tool_calls, chunks]

    (call,), chunks = asyncio.run(main())
    (streamed,) = (c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or [])
    assert streamed.function.arguments == call.function.arguments
    Line.model_validate_json(call.function.arguments)


def test_instructor(server: Running) -> None:
    """In its default mode, a function that is named."""
    client = instructor.from_openai(server.client())
    found = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_model=Line, max_retries=0
    )
    assert isinstance(found, Line)


def test_pydantic_ai(server: Running) -> None:
    """An output type is a tool, of which it requires one."""
    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    model = OpenAIChatModel("tiny", provider=provider)
    agent = pydantic_ai.Agent(model, output_type=Line, retries=0)
    eos = str(server.tokenizer.eos_token_id)  # the model would write call after call
    settings: Any = {"logit_bias": {eos: 100}, "max_tokens": 150}
    assert isinstance(agent.run_sync("x = 1", model_settings=settings).output, Line)


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain(server: Running, method: str) -> None:
    chat = ChatOpenAI(model="tiny", base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert isinstance(chat.with_structured_output(Line, method=method).invoke("x = 1"), Line)
    if method == "function_calling":
        bound = chat.bind_tools([Point], tool_choice="any", parallel_tool_calls=False)
        (call,) = bound.invoke("x = 1").tool_calls
        Point.model_validate(call["args"])
        chunks = list(bound.stream("x = 1"))
        (call,) = sum(chunks[1:], chunks[0]).tool_calls
        Point.model_validate(call["args"])
