"""``transformers serve``: its web application, called without a network."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from starlette.testclient import TestClient
from transformers.cli.serve import Serve

import hfgen


@pytest.fixture
def server(folder: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setattr(uvicorn.Server, "run", lambda self: None)
    serving = Serve(force_model=folder, device="cpu")
    with TestClient(serving.server.config.app) as client:
        yield client
    serving._thread = None
    serving.kill_server()


def body(folder: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hello"}]
    return {"model": folder, "messages": messages, "max_tokens": 8, "temperature": 0.0} | more


def test_chat_completion(server: TestClient, folder: str, both: Callable) -> None:
    def run() -> Any:
        answer = server.post("/v1/chat/completions", json=body(folder))
        assert answer.status_code == 200, answer.text
        report = answer.json()
        return report["choices"], report["usage"]

    theirs, ours = both(run)
    assert ours == theirs
    assert theirs[1]["completion_tokens"] == 8


def test_streamed_chat_completion(server: TestClient, folder: str, both: Callable) -> None:
    def run() -> list[Any]:
        answer = server.post("/v1/chat/completions", json=body(folder, stream=True))
        assert answer.status_code == 200, answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        return [json.loads(line)["choices"] for line in lines if line.startswith("{")]

    theirs, ours = both(run)
    assert ours == theirs
    assert len(theirs) > 2


def test_an_error_of_a_stream_is_sent(server: TestClient, folder: str) -> None:
    config = json.dumps({"max_new_tokens": 4, "repetition_penalty": -1.0})
    with hfgen.patched():
        answer = server.post(
            "/v1/chat/completions", json=body(folder, stream=True, generation_config=config)
        )
    assert "error" in json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))
    assert "finish_reason" not in answer.text
