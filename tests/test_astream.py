"""``astream()``: the same events in an event loop; whoever leaves ends the thread and frees the cache."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest
import torch
from torch import Tensor

import hfgen
from hfgen import StreamEvent
from hfgen.streaming.stream import AHEAD
from tests import tiny
from tests.test_hooks import is_same
from tests.test_stream import EOS, MODES, Boom, Caches, Failing, generated, n_tensors, rows_of


@pytest.fixture(scope="module")
def llama() -> Any:
    return hfgen.mix_into(tiny.llama())


def wait_for(condition: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def n_threads() -> Any:
    """The threads of before; none is left after the test."""
    n = threading.active_count()
    yield n
    wait_for(lambda: threading.active_count() == n)


async def collect(stream: Any) -> list[StreamEvent]:
    return [event async for event in stream]


@pytest.mark.parametrize("mode", MODES)
def test_async_events_are_the_same(llama: Any, mode: str, n_threads: int) -> None:
    options = {"max_new_tokens": 12, "eos_token_id": EOS, **MODES[mode]}
    torch.manual_seed(0)
    expected = list(stream := llama.stream(tiny.prompt(3), **options))

    async def main() -> None:
        torch.manual_seed(0)
        events = await collect(async_stream := llama.astream(tiny.prompt(3), **options))
        assert events == expected
        assert is_same(async_stream.result, stream.result)
        assert await collect(async_stream) == []

    asyncio.run(main())


def test_two_async_streams_at_once(llama: Any, n_threads: int) -> None:
    async def main() -> None:
        streams = [llama.astream(tiny.prompt(2, seed=i), max_new_tokens=9) for i in range(3)]
        for i, events in enumerate(await asyncio.gather(*map(collect, streams))):
            expected = llama.generate(tiny.prompt(2, seed=i), max_new_tokens=9)
            assert rows_of(events) == generated(expected, [2])

    asyncio.run(main())


def test_async_exceptions_reach_the_consumer(llama: Any, n_threads: int) -> None:
    async def main() -> None:
        stream = llama.astream(tiny.prompt(1), max_new_tokens=9, logits_processor=[Failing(3)])
        assert [(await anext(stream)).row, (await anext(stream)).row] == [0, 0]
        with pytest.raises(Boom):
            await collect(stream)
        assert await collect(stream) == []
        with pytest.raises(ValueError, match="max_new_tokens"):
            await collect(llama.astream(tiny.prompt(1), max_new_tokens=-1))

    asyncio.run(main())


class Counter:
    """A processor that counts its calls."""

    n = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.n += 1
        return scores


def test_a_few_events_are_decoded_ahead(llama: Any, n_threads: int) -> None:
    async def main() -> None:
        counter = Counter()
        async with llama.astream(
            tiny.prompt(1), max_new_tokens=100, logits_processor=[counter]
        ) as stream:
            await anext(stream)
            wait_for(lambda: counter.n == AHEAD + 1)
            await asyncio.sleep(0.05)
            assert counter.n == AHEAD + 1
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await stream.aclose()
        assert counter.n == AHEAD + 1

    asyncio.run(main())


class Holding:
    """A processor that waits in its second call."""

    def __init__(self) -> None:
        self.is_inside, self.may_go_on, self.n = threading.Event(), threading.Event(), 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.n += 1
        if self.n == 2:
            self.is_inside.set()
            assert self.may_go_on.wait(60)
        return scores

    async def cancel(self, closing: Coroutine[Any, Any, None]) -> None:
        """Cancel the task that awaits ``closing`` while the processor waits, and let that go on."""
        assert await asyncio.to_thread(self.is_inside.wait, 60)
        task = asyncio.create_task(closing)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        self.may_go_on.set()


def test_a_task_is_cancelled_as_it_closes_a_stream(llama: Any, n_threads: int) -> None:
    """The stream's own thread still closes it: else the consumer's loses its autocast."""
    holding = Holding()

    async def main() -> None:
        stream = llama.astream(tiny.prompt(1), max_new_tokens=50, logits_processor=[holding])
        await anext(stream)
        await holding.cancel(stream.aclose())
        wait_for(lambda: threading.active_count() == n_threads + 1)  # that of `to_thread`

    with torch.autocast("cpu", torch.bfloat16):
        asyncio.run(main())
        assert torch.is_autocast_enabled("cpu")
    assert holding.n == 2


async def break_off(stream: Any) -> None:
    async for _ in stream:
        break


async def aclose(stream: Any) -> None:
    await anext(stream)
    await stream.aclose()


async def take_one_and_fail(stream: Any) -> None:
    async for _ in stream:
        raise Boom


async def fail(stream: Any) -> None:
    with pytest.raises(Boom):
        await take_one_and_fail(stream)


async def cancel(stream: Any) -> None:
    task = asyncio.create_task(collect(stream))
    del stream
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def run_out_of_time(stream: Any) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(collect(stream), 0.02)


async def abandon(stream: Any) -> None:
    await anext(stream)


class Slow:
    """A processor that takes its time."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        time.sleep(0.005)
        return scores


@pytest.mark.parametrize("end", [break_off, aclose, fail, cancel, run_out_of_time, abandon])
def test_async_endings_free_the_memory(llama: Any, end: Any, n_threads: int) -> None:
    slow = [Slow()]

    async def main() -> None:
        before = time.monotonic()
        await end(llama.astream(tiny.prompt(1), max_new_tokens=240, logits_processor=slow))
        wait_for(lambda: threading.active_count() == n_threads and caches.n_alive == 0)
        assert time.monotonic() - before < 0.6  # all tokens would take 1.2 s

    with Caches(llama) as caches:
        asyncio.run(main())
        assert 0 < len(caches.references) < 120


def test_the_memory_of_a_closed_async_stream_is_free_on_return(llama: Any, n_threads: int) -> None:
    async def main() -> None:
        for _ in range(5):
            async with llama.astream(tiny.prompt(1), max_new_tokens=100) as stream:
                await anext(stream)
            assert caches.n_alive == 0

    with Caches(llama) as caches:
        asyncio.run(main())


def test_abandoned_async_streams_leave_nothing(llama: Any, n_threads: int) -> None:
    async def main() -> None:
        for _ in range(50):
            await abandon(llama.astream(tiny.prompt(1, 3), max_new_tokens=50))
            llama.astream(tiny.prompt(1, 3))

    n_before = n_tensors()
    asyncio.run(main())
    wait_for(lambda: threading.active_count() == n_threads)
    assert n_tensors() == n_before


def test_the_thread_has_ended_when_the_stream_has(llama: Any) -> None:
    async def main() -> None:
        for _ in range(10):
            await collect(llama.astream(tiny.prompt(1, 3), max_new_tokens=2))
            assert "hfgen-astream_0" not in {thread.name for thread in threading.enumerate()}

    asyncio.run(main())


#: A script that ends while a stream decodes; what is registered first is called last at exit.
LEAVES = """
import asyncio, atexit, threading
names = lambda: {thread.name.removesuffix("_0") for thread in threading.enumerate()}
atexit.register(lambda: print("at exit", "hfgen-astream" in names()))
import hfgen
from tests import tiny

async def main():
    await anext(stream)
    print("decodes", "hfgen-astream" in names())

stream = hfgen.mix_into(tiny.llama()).astream(tiny.prompt(1), max_new_tokens=200)
asyncio.run(main())
"""


def test_no_thread_outlives_the_interpreter() -> None:
    command = [sys.executable, "-c", LEAVES]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.splitlines() == ["decodes True", "at exit False"]


async def begun(model: Any) -> Any:
    stream = model.astream(tiny.prompt(1), max_new_tokens=200)
    await anext(stream)
    return stream


def test_a_stream_may_outlive_its_loop(llama: Any, n_threads: int) -> None:
    stream = asyncio.run(begun(llama))
    del stream
    wait_for(lambda: threading.active_count() == n_threads)


def test_an_abandoned_stream_waits_for_no_lock(llama: Any, n_threads: int) -> None:
    # The last reference may go in a collection of garbage that starts while a pool's lock is held.
    stream = asyncio.run(begun(llama))
    finished = threading.Event()

    def abandon_inside_submit() -> None:
        nonlocal stream
        with concurrent.futures.thread._global_shutdown_lock:
            stream = None
        finished.set()

    threading.Thread(target=abandon_inside_submit, daemon=True).start()
    assert finished.wait(10)
    wait_for(lambda: threading.active_count() == n_threads)


def test_autocast_is_the_consumers(llama: Any, n_threads: int) -> None:
    seen = []

    def look(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return scores

    async def main() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            await collect(llama.astream(tiny.prompt(1), max_new_tokens=1, logits_processor=[look]))
        await collect(llama.astream(tiny.prompt(1), max_new_tokens=1, logits_processor=[look]))

    asyncio.run(main())
    assert seen[0] == (True, torch.bfloat16)
    assert not seen[1][0]
