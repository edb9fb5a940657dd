"""A call as an asynchronous iterator, decoded in its own thread."""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..decoding.outputs import GenerateOutput
from ..state.call import Request
from .events import StreamEvent
from .stream import Stream

#: Events that are decoded ahead of the consumer.
AHEAD = 4


class AsyncStream(AsyncIterator[StreamEvent]):
    """The events of a call, decoded in a thread of its own, a few events ahead of the consumer.

    The thread starts with the first event that is asked for. Decoding ends at the next step when the
    task is cancelled or runs out of time as it waits for an event, after ``aclose()``, or when nothing
    refers to the stream. An exception of the call is raised where the consumer waits.
    """

    #: What ``generate`` returns, once the stream has come to its end.
    result: GenerateOutput | torch.Tensor | None = None

    def __init__(self, model: Any, request: Request) -> None:
        self._start: Callable[[], Stream] | None = partial(Stream, model, request)
        self._device_type = model.device.type
        self._worker: _Worker | None = None

    async def __anext__(self) -> StreamEvent:
        if self._start is not None:
            self._worker = _Worker(self._start, self._device_type)
            self._start = None
        if self._worker is None:
            raise StopAsyncIteration
        try:
            item = await self._worker.take()
        except asyncio.CancelledError:
            self._worker.stop()
            raise
        if isinstance(item, StreamEvent):
            return item
        self.result, error, item.error = item.result, item.error, None
        try:
            raise StopAsyncIteration if error is None else error
        finally:
            del error  # its traceback holds this frame

    async def aclose(self) -> None:
        """End decoding, if it has not come to its end; returns when its memory is free."""
        self._start = None
        if self._worker is not None:
            self._worker.stop()
            while not isinstance(await self._worker.take(), _End):
                pass

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if (worker := getattr(self, "_worker", None)) is not None:
            worker.stop()


#: Workers whose threads may run.
_running: weakref.WeakSet[_Worker] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """End the threads before the interpreter does: torch aborts the process in a thread that outlives it."""
    for worker in [*_running]:
        worker.stop()
        worker.thread.join()


@dataclass(slots=True)
class _End:
    """How a worker has ended."""

    result: GenerateOutput | torch.Tensor | None = None
    error: BaseException | None = None


class _Worker:
    """A stream in a thread, and the queue to the event loop. It does not know the ``AsyncStream``."""

    def __init__(self, start: Callable[[], Stream], device_type: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[StreamEvent | _End] = asyncio.Queue()
        self.room = threading.Semaphore(AHEAD)
        self.is_stopped = False
        is_cast = torch.is_autocast_enabled(device_type)  # which threads do not inherit
        dtype = torch.get_autocast_dtype(device_type) if is_cast else None
        self.autocast = torch.autocast(device_type, dtype, enabled=is_cast)
        work = partial(contextvars.copy_context().run, self.work, start)
        self.thread = threading.Thread(target=work, name="hfgen-astream", daemon=True)
        self.thread.start()
        _running.add(self)

    def work(self, start: Callable[[], Stream]) -> None:
        """Decode in the thread, ``AHEAD`` events ahead at most."""
        end = _End()
        try:
            with self.autocast, start() as stream:
                while self.room.acquire() and not self.is_stopped:
                    if (event := next(stream, None)) is None:
                        end.result = stream.result
                        break
                    self.send(event)
        except BaseException as error:
            end.error = error
        self.send(end)

    def send(self, item: StreamEvent | _End) -> None:
        try:
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)
        except RuntimeError:  # the loop is closed
            self.is_stopped = True

    async def take(self) -> StreamEvent | _End:
        """The next event; at the end, and from then on, an ``_End``."""
        item = await self.queue.get()
        if isinstance(item, _End):
            self.queue.put_nowait(item)
            self.thread.join()  # it has nothing left to do
        else:
            self.room.release()
        return item

    def stop(self) -> None:
        self.is_stopped = True
        self.room.release()
