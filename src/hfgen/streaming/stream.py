"""A call as an iterator, decoded in the consumer's thread, or an asynchronous one with a thread of its own."""

from __future__ import annotations

import asyncio
import contextvars
from _thread import start_new_thread
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, closing
from typing import Any

import torch

from ..decoding import loop
from ..decoding.outputs import GenerateOutput
from ..memory.checks import explaining_misfit
from ..prepare.stages import prepare
from ..state.call import Request
from .events import Rows, StreamEvent

#: Events that an ``AsyncStream`` decodes ahead of the consumer.
AHEAD = 4


class Stream(Iterator[StreamEvent], AbstractContextManager["Stream"]):
    """The events of a call, decoded in the consumer's thread as it asks for them.

    A row has an event for each step in which it gains something. Closing the stream ends decoding
    and frees its memory: by ``close()``, by leaving ``with stream:``, or when nothing refers to it.
    An exception of the call is raised by ``next()``, and closes the stream as well.
    """

    #: What ``generate`` returns, from the last event on; also ``StopIteration.value``.
    result: GenerateOutput | torch.Tensor | None = None

    def __init__(self, model: Any, request: Request) -> None:
        self._ready: deque[StreamEvent] = deque()
        self._steps = _decode(model, request)
        self._advance()

    def __next__(self) -> StreamEvent:
        while not self._ready:
            self._advance()
        return self._ready.popleft()

    @torch.no_grad()  # while decoding, not in the code of the consumer
    def _advance(self) -> None:
        try:
            events = next(self._steps)
        except StopIteration as end:
            if end.value is None:  # it has come to its end before, or was closed
                raise StopIteration(self.result) from None
            events, self.result = end.value
        self._ready.extend(events)

    @torch.no_grad()
    def close(self) -> None:
        """End decoding, if it has not come to its end; no more events come."""
        self._steps.close()
        self._ready.clear()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_steps"):
            self.close()


def _decode(
    model: Any, request: Request
) -> Generator[list[StreamEvent], None, tuple[list[StreamEvent], GenerateOutput | torch.Tensor]]:
    """Prepare the call and yield an empty list, then yield the events of each step but the last.

    Returns the events of the last step, and what ``generate`` returns.
    """
    call = prepare(model, request)
    try:
        run, strategy = call.start(model)
        yield []
        recording = loop.begin(run)
        rows, events = Rows(run, strategy), list[StreamEvent]()
        with explaining_misfit(model, call.cache):
            with closing(loop.drive(run, strategy)) as steps:
                for step in steps:
                    events = rows.advance(step)
                    if not run.finished:
                        yield events
            result, output = loop.conclude(run, strategy, recording)
        return [*events, *rows.finish(result)], output
    finally:
        call.release()


class AsyncStream(AsyncIterator[StreamEvent], AbstractAsyncContextManager["AsyncStream"]):
    """The events of a call, decoded in a thread of its own, a few events ahead of the consumer.

    The thread starts with the first event that is asked for. Decoding ends at the next step when the
    task is cancelled or runs out of time as it waits for an event, after ``aclose()``, or when nothing
    refers to the stream. An exception of the call is raised where the consumer waits.
    """

    #: What ``generate`` returns, once the stream has come to its end.
    result: GenerateOutput | torch.Tensor | None = None

    def __init__(self, model: Any, request: Request) -> None:
        self._call: tuple[Any, Request] | None = (model, request)
        #: The thread while decoding goes on, and the items that it has decoded or will decode.
        self._thread: ThreadPoolExecutor | None = None
        self._items: deque[Future[Any]] = deque()

    async def __anext__(self) -> StreamEvent:
        if self._call is not None:
            self._thread = ThreadPoolExecutor(1, "hfgen-astream")
            self._run: Any = contextvars.copy_context().run
            (model, request), self._call = self._call, None
            device = model.device.type  # threads do not inherit its autocast
            cast = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
            self._steps = _items(model, request, torch.autocast(device, *cast))
        if self._thread is None:
            raise StopAsyncIteration
        try:
            self._decode_ahead(self._thread)
            item = await asyncio.wrap_future(self._items.popleft())
        except BaseException:
            self._stop()
            raise
        if isinstance(item, StreamEvent):
            self._decode_ahead(self._thread)
            return item
        self.result = item
        await self.aclose()
        raise StopAsyncIteration

    def _decode_ahead(self, thread: ThreadPoolExecutor) -> None:
        while len(self._items) < AHEAD:
            self._items.append(thread.submit(self._run, next, self._steps, None))

    def _stop(self) -> Future[None] | None:
        """End decoding after the step that runs; return what is done then, if the thread had started."""
        self._call, thread, self._thread = None, self._thread, None
        if thread is None:
            return None
        while self._items:
            self._items.pop().cancel()
        ended = thread.submit(self._run, self._steps.close)
        thread.shutdown(wait=False)
        return ended

    async def aclose(self) -> None:
        """End decoding, if it has not come to its end; returns when its memory is free."""
        thread = self._thread
        if (ended := self._stop()) is not None and thread is not None:
            await asyncio.shield(asyncio.wrap_future(ended))  # cancelled, it would not close
            thread.shutdown()  # it has nothing left to do

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # In another thread: garbage is also collected where this one holds a lock that `submit` takes.
        if getattr(self, "_thread", None) is not None:
            start_new_thread(self._stop, ())


def _items(model: Any, request: Request, autocast: Any) -> Generator[Any, None, None]:
    """The events, and then what ``generate`` returns."""
    with autocast, Stream(model, request) as stream:
        yield from stream
        yield stream.result
