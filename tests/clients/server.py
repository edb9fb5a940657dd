"""A server of ``hfgen serve`` on a port of this machine, and an engine that tells what it has done."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import openai
from transformers import LogitsProcessor

import hfgen
from hfgen.families import text_tokenizer
from hfgen.tools.serve.server import Settings, serve

#: A chat in which each message is a line.
LINES = "{% for m in messages %}{{ m.content }}\n{% endfor %}"

#: The seed of requests that fail at their third token.
FAILING = 666


class Failing(LogitsProcessor):
    def __init__(self) -> None:
        self.n = 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.n += 1
        if self.n == 3:
            raise ZeroDivisionError("on purpose")
        return scores


@dataclass
class Log:
    """What became of cancelled requests."""

    #: Requests that were cancelled before they had ended.
    cancelled: list[Any] = field(default_factory=list)
    #: Those of them that a whole step has left where they were.
    late: list[Any] = field(default_factory=list)


class Watched(hfgen.Engine):
    """An engine with a log; a request with the seed ``FAILING`` fails."""

    log: Log
    #: Further arguments of every request.
    also: dict[str, Any]
    #: Whether its next step raises.
    breaks = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.log, self.also = Log(), {}

    def add(self, prompt: Any, **kwargs: Any) -> Any:
        if kwargs.get("seed") == FAILING:
            kwargs["logits_processor"] = [Failing()]
        return super().add(prompt, **kwargs, **self.also)

    def cancel(self, request: Any) -> None:
        if not request.done:
            self.log.cancelled.append(request)
        super().cancel(request)

    def step(self) -> Any:
        if self.breaks:
            raise RuntimeError("the engine broke")
        events = super().step()
        self.log.late += [request for request in self.log.cancelled if not request.done]
        return events

    def is_idle(self) -> bool:
        return not self.has_work and self.n_rows == 0 and not self.requests


@dataclass
class Running:
    """A server, and what it serves."""

    engine: Any
    model: Any
    tokenizer: Any
    url: str
    thread: threading.Thread

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **self.options(options))

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **self.options(options))

    @staticmethod
    def options(options: dict[str, Any]) -> dict[str, Any]:
        return {"api_key": "none", "max_retries": 0, "timeout": 120.0} | options

    def wait_until_idle(self) -> None:
        """Wait for the last rows to leave; a request that has left has no result to hand over."""
        wait_for(self.engine.is_idle)


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def running(
    model: Any,
    tokenizer: Any,
    settings: Settings | None = None,
    name: str = "tiny",
    drafts: Mapping[str, Any] = MappingProxyType({}),
    steering: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Iterator[Running]:
    """A server in a thread of its own; ``tokenizer`` may be a processor, ``options`` are the engine's."""
    engine = Watched(model, text_tokenizer(tokenizer), **options)
    servers: list[Any] = []
    arguments = name, model, tokenizer, engine, settings or Settings(port=0), servers.append
    errors: list[Exception] = []

    def run() -> None:
        try:
            asyncio.run(serve(*arguments, drafts=drafts, steering=steering))
        except hfgen.engine.errors.EngineError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_for(lambda: not thread.is_alive() or (servers and servers[0].started))
        port = servers[0].servers[0].sockets[0].getsockname()[1]
        yield Running(engine, model, tokenizer, f"http://127.0.0.1:{port}", thread)
    finally:
        servers[0].should_exit = True
        thread.join()
    if errors:
        raise errors[0]
