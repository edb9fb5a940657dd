"""``engine.serving()``: coroutines take what one thread steps, and whoever leaves takes its rows along."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from typer.testing import CliRunner

import hfgen
from hfgen.engine.errors import EngineClosedError, EngineError, QueueFullError
from hfgen.engine.serving import Service
from hfgen.tools import cli, serve
from tests import tiny
from tests.test_astream import Holding


@dataclass(eq=False)
class Request:
    id: str
    n: int
    error: BaseException | None = None
    n_done: int = 0
    done: bool = False
    is_cancelled: bool = False


@dataclass
class Event:
    request: Request
    token_ids: tuple[int, ...]
    finish_reason: str | None = None


@dataclass
class Output:
    id: str
    token_ids: list[int]
    finish_reason: str
    error: BaseException | None = None


@dataclass
class Counting:
    """Counts to ``n`` for each request, one token a step; with the engine's interface."""

    max_queue: int = 100
    seconds: float = 0.0
    n_steps: int = 0
    requests: dict[str, Request] = field(default_factory=dict)
    threads: set[int] = field(default_factory=set)
    breaks_at: int | None = None
    cancelled_at: int | None = None  # steps before the cancelling, and before the result is taken
    left_at: int | None = None

    def serve_in(self, thread: threading.Thread | None) -> None:
        pass

    @property
    def has_work(self) -> bool:
        return any(not request.done for request in self.requests.values())

    def add(self, prompt: int, error: BaseException | None = None) -> Request:
        self.threads.add(threading.get_ident())
        if prompt < 0:
            raise ValueError("`prompt` has to be positive")
        if len(self.requests) >= self.max_queue:
            raise QueueFullError("full")
        request = Request(f"r{id(object())}-{len(self.requests)}-{self.n_steps}", prompt, error)
        self.requests[request.id] = request
        return request

    def step(self) -> list[Event]:
        self.threads.add(threading.get_ident())
        self.n_steps += 1
        time.sleep(self.seconds)
        if self.n_steps == self.breaks_at:
            raise RuntimeError("the engine broke")
        events = []
        for request in self.requests.values():
            if request.done:
                continue
            if request.is_cancelled:
                request.done = True
                events.append(Event(request, (), "cancelled"))
                continue
            request.n_done += 1
            failed = request.error is not None and request.n_done == 3
            request.done = request.n_done == request.n or failed
            reason = ("error" if failed else "length") if request.done else None
            events.append(Event(request, (request.n_done,), reason))
        return events

    def cancel(self, request: Request) -> None:
        self.threads.add(threading.get_ident())
        request.is_cancelled = True
        self.cancelled_at = self.n_steps

    def result(self, request: Request) -> Output:
        assert request.done
        del self.requests[request.id]
        if request.is_cancelled:
            self.left_at = self.n_steps
        reason = "cancelled" if request.is_cancelled else "length"
        failed = request.error is not None and request.n_done >= 3
        tokens = list(range(1, request.n_done + 1))
        return Output(request.id, tokens, reason, request.error if failed else None)


@pytest.fixture(autouse=True)
def n_threads() -> Iterator[int]:
    """The threads of before; the service's is gone after the test."""
    n = threading.active_count()
    yield n
    end = time.monotonic() + 10
    while any(t.name.startswith("hfgen-serving") for t in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.005)


async def tokens_of(service: Service, n: int, **kwargs: Any) -> list[int]:
    return [token async for event in service.stream(n, **kwargs) for token in event.token_ids]


def test_each_consumer_gets_its_own_events() -> None:
    engine = Counting()

    async def main() -> None:
        async with Service(engine) as service:
            found = await asyncio.gather(*(tokens_of(service, n) for n in range(1, 40)))
            assert found == [list(range(1, n + 1)) for n in range(1, 40)]
            output = await service.generate(5)
            assert (output.token_ids, output.finish_reason) == ([1, 2, 3, 4, 5], "length")

    asyncio.run(main())
    assert engine.requests == {}
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


def test_the_thread_sleeps_without_work() -> None:
    engine = Counting()

    async def main() -> None:
        async with Service(engine) as service:
            await service.generate(3)
            n = engine.n_steps
            await asyncio.sleep(0.1)
            assert engine.n_steps == n == 3
            await service.generate(2)

    asyncio.run(main())


async def closing(service: Service) -> None:
    stream = service.stream(10**9)
    await anext(stream)
    await stream.aclose()


async def breaking(service: Service) -> None:
    async for _ in service.stream(10**9):
        break
    gc.collect()


async def cancelling(service: Service) -> None:
    task = asyncio.create_task(tokens_of(service, 10**9))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def running_out_of_time(service: Service) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(service.generate(10**9), 0.05)


async def failing_consumer(service: Service) -> None:
    async def consume() -> None:
        async with await service.add(10**9) as request:
            async for _ in request:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await consume()


async def letting_go(service: Service) -> None:
    request = await service.add(10**9)
    await anext(request)


@pytest.mark.parametrize(
    "leave", [letting_go, closing, breaking, cancelling, running_out_of_time, failing_consumer]
)
def test_whoever_leaves_takes_its_request_along(leave: Any) -> None:
    engine = Counting(seconds=0.002)

    async def main() -> None:
        async with Service(engine) as service:
            other = asyncio.create_task(tokens_of(service, 60))
            await leave(service)
            while engine.left_at is None:
                await asyncio.sleep(0.001)
            assert await other == list(range(1, 61))

    asyncio.run(asyncio.wait_for(main(), 60))
    assert engine.cancelled_at is not None
    assert engine.left_at == engine.cancelled_at + 1
    assert engine.requests == {}


def test_a_cancelled_request_hands_over_what_there_was() -> None:
    engine, ended = Counting(seconds=0.002), []

    async def main() -> None:
        async with Service(engine, ended.append) as service:
            request = await service.add(10**9)
            await anext(request)
            request.cancel()
            output = await request.result()
            assert output.finish_reason == "cancelled"
            assert output.token_ids[0] == 1
            assert [event async for event in request] == []
            await tokens_of(service, 2)
        assert [output.finish_reason for output in ended] == ["cancelled", "length"]

    asyncio.run(main())


def test_exceptions_reach_the_consumer_that_they_belong_to() -> None:
    engine = Counting(max_queue=3)

    async def main() -> None:
        async with Service(engine) as service:
            calls = (
                tokens_of(service, 10),
                tokens_of(service, 10, error=ZeroDivisionError("mine")),
                service.generate(10, error=ArithmeticError("ours")),
                tokens_of(service, -1),
            )
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert found[0] == list(range(1, 11))
            assert [type(error) for error in found[1:]] == [
                ZeroDivisionError,
                ArithmeticError,
                ValueError,
            ]
            request = await service.add(5, error=ZeroDivisionError())
            for _ in range(2):
                with pytest.raises(ZeroDivisionError):
                    await request.result()

    asyncio.run(main())


def test_a_full_queue_says_so() -> None:
    async def main() -> None:
        async with Service(Counting(max_queue=2, seconds=0.002)) as service:
            requests = [await service.add(10**9) for _ in range(2)]
            with pytest.raises(QueueFullError):
                await service.add(1)
            requests[0].cancel()
            await requests[0].result()
            assert await tokens_of(service, 2) == [1, 2]

    asyncio.run(main())


def test_closing_cancels_what_is_left_and_ends_the_thread() -> None:
    engine = Counting(seconds=0.002)

    async def main() -> None:
        async with Service(engine) as service:
            assert service.is_running
            request = await service.add(10**9)
            task = asyncio.create_task(service.generate(10**9))
            await asyncio.sleep(0.02)
        assert not service.is_running
        assert (await request.result()).finish_reason == "cancelled"
        assert (await task).finish_reason == "cancelled"
        with pytest.raises(EngineClosedError, match="closed"):
            await service.generate(1)
        with pytest.raises(EngineError, match="another"):
            async with service:
                pass
        await service.close()  # again: nothing happens

    asyncio.run(main())
    assert not engine.has_work
    assert engine.requests == {}


def test_a_service_ends_where_the_task_that_closes_it_is_cancelled() -> None:
    """Nobody else could use the engine: neither another service, nor ``step``."""
    engine, holding = hfgen.Engine(hfgen.mix_into(tiny.llama())), Holding()

    async def main() -> None:
        service = await engine.serving().__aenter__()
        request = await service.add(tiny.prompt(1), max_new_tokens=9, logits_processor=[holding])
        await holding.cancel(service.close())
        await asyncio.wait_for(service.ended.wait(), 60)
        assert (await request.result()).finish_reason == "cancelled"

    asyncio.run(main())
    assert engine.step() == []
    engine.close()


def test_the_engine_is_its_own_while_it_is_served() -> None:
    engine = hfgen.Engine(hfgen.mix_into(tiny.llama()))
    prompt = tiny.prompt(1)
    expected = engine.model.generate(prompt, max_new_tokens=4)[0, prompt.shape[1] :].tolist()

    async def main() -> None:
        async with engine.serving() as service:
            for refused in (engine.step, engine.close, lambda: engine.add(prompt)):
                with pytest.raises(EngineError, match="use the service"):
                    refused()
            with pytest.raises(EngineError, match="already has a service"):
                await engine.serving().__aenter__()
            assert (await service.generate(prompt, max_new_tokens=4)).token_ids == expected

    asyncio.run(main())
    assert engine.add(prompt, max_new_tokens=4).result().token_ids == expected
    engine.close()


def test_requests_of_an_engine_are_those_of_generate() -> None:
    model = hfgen.mix_into(tiny.llama())
    prompts = [tiny.prompt(1, length, seed=length) for length in range(3, 15)]
    options = [
        {"do_sample": bool(n % 2), "seed": n, "max_new_tokens": 4 + n} for n in range(len(prompts))
    ]
    expected = [
        model.generate(prompt, **each)[0, prompt.shape[1] :].tolist()
        for prompt, each in zip(prompts, options, strict=True)
    ]

    async def main() -> None:
        async with hfgen.Engine(model, max_rows=5).serving() as service:
            calls = [
                service.generate(prompt, **each)
                for prompt, each in zip(prompts, options, strict=True)
            ]
            outputs, error = await asyncio.gather(
                asyncio.gather(*calls),
                service.generate(prompts[0], temperature="hot"),
                return_exceptions=True,
            )
            assert [output.token_ids for output in outputs] == expected
            assert isinstance(error, TypeError)
            assert service.engine.n_rows == 0

    asyncio.run(main())


def test_a_service_that_was_not_entered_takes_nothing() -> None:
    async def main() -> None:
        with pytest.raises(EngineClosedError, match="async with"):
            await Service(Counting()).generate(1)

    asyncio.run(main())


def test_an_engine_that_breaks_tells_everybody() -> None:
    engine = Counting(breaks_at=4)

    async def main() -> None:
        async with Service(engine) as service:
            calls = [tokens_of(service, 10**9), service.generate(10**9)]
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert [str(error) for error in found] == ["the engine broke"] * 2
            with pytest.raises(EngineClosedError) as caught:
                await service.generate(1)
            assert str(caught.value.__cause__) == "the engine broke"
            assert not service.is_running

    asyncio.run(main())


def test_the_thread_ends_with_an_event_loop_that_was_closed() -> None:
    async def main() -> None:
        service = await Service(Counting(seconds=0.001)).__aenter__()
        await service.add(10**9)

    asyncio.run(main())  # the fixture sees that the thread has gone


# ------------------------------------------------------------ the command


def test_the_server_says_which_transformers_it_is_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    for installed in "5.21.0", "5.25.0.dev0", "6.0":
        with pytest.raises(ImportError, match=rf"5\.23\.x, 5\.24\.x, but {installed} is"):
            serve.check_requirements(installed)
    serve.check_requirements(f"{serve.TESTED[-1]}.7")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"fastapi.*hfgen\[serve\]"):
        serve.check_requirements()


def test_the_command_refuses_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ImportError("a package is missing")

    monkeypatch.setattr("hfgen.tools.cli.serve.check_requirements", refuse)
    for arguments, message in {
        ("--log-level", "loud"): "'--log-level': 'loud' is not one of 'critical'",
        ("--port", "99999"): "--port",
        ("--model", "builtin"): "a package is missing",
    }.items():
        result = CliRunner().invoke(cli.app, ["serve", *arguments])
        assert result.exit_code == 2
        assert message in result.stderr.replace("\n", " ")
