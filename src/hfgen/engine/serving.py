"""``engine.serving()``: an asyncio front for an engine, which its own thread steps."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import EngineClosedError, as_exception

if TYPE_CHECKING:
    from .engine import Engine
    from .request import EngineEvent, EngineRequest, RequestOutput

#: Requests that are prepared between two steps, at most: those that decode wait for it.
MAX_ADDED = 8


class Service(AbstractAsyncContextManager["Service"]):
    """An engine for coroutines: ``async with engine.serving() as service``.

    One thread adds, cancels and steps; it sleeps while there is nothing to do. Until the service is
    closed, ``add``, ``step`` and ``close`` of the engine raise ``EngineError`` in other threads. ``observe``
    is called in the event loop with the output of each request that has ended.
    """

    #: Why the thread has ended, if it was not by ``close``.
    error: BaseException | None = None
    #: The thread: requests are added in turn, and between them it makes a step, if there is work.
    _thread: Any = None
    _is_over = False

    def __init__(
        self, engine: Engine, observe: Callable[[RequestOutput], None] | None = None
    ) -> None:
        self.engine = engine
        self.observe = observe
        #: Who waits for which request, as long as it is referred to; read and written by the thread alone.
        self._open: dict[EngineRequest, weakref.ref[ServiceRequest]] = {}
        self._may_add = asyncio.Semaphore(MAX_ADDED)
        #: Set when the thread has ended: by ``close``, or with ``error``.
        self.ended = asyncio.Event()

    @property
    def is_running(self) -> bool:
        return self._thread is not None and not self._is_over

    async def __aenter__(self) -> Service:
        if self._thread is not None:
            raise EngineClosedError("a service is entered once: ask engine.serving() for another")
        self._loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, "hfgen-serving")
        self.engine.serve_in(thread.submit(threading.current_thread).result())
        self._thread = thread
        if self.engine.has_work:
            thread.submit(self._step)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is left and end the thread; the engine stays as it is, and may be stepped."""
        if self._thread is not None:
            with suppress(RuntimeError):  # it has ended
                await asyncio.shield(asyncio.wrap_future(self._thread.submit(self._end)))
            await asyncio.to_thread(self._thread.shutdown)

    async def add(self, prompt: Any, *, has_events: bool = True, **kwargs: Any) -> ServiceRequest:
        """The request, once the engine has taken it; the arguments are those of ``Engine.add``.

        Without ``has_events`` it yields nothing, and only has a ``result``. Raises what ``Engine.add``
        raises, and ``EngineClosedError`` if the service does not run.
        """
        if self._thread is None:
            raise EngineClosedError("the service does not run: enter it by `async with`")
        request = ServiceRequest(has_events)
        async with self._may_add:
            try:
                added = self._thread.submit(self._add, weakref.ref(request), prompt, kwargs)
            except RuntimeError:  # it has ended
                raise self._closed_error() from self.error
            taken = await asyncio.wrap_future(added)
        if isinstance(taken, Exception):
            raise taken
        request.request = taken
        return request

    async def stream(self, prompt: Any, **kwargs: Any) -> AsyncIterator[EngineEvent]:
        """The events of a request as they come; the arguments are those of ``Engine.add``.

        Closing the iterator, or cancelling the task, cancels the request: its rows leave with the
        next step. Raises what ``add`` raises, and the exception that ended the request.
        """
        async with await self.add(prompt, **kwargs) as request:
            async for event in request:
                yield event

    async def generate(self, prompt: Any, **kwargs: Any) -> RequestOutput:
        """The output of a request; cancelling the task cancels it. Raises as ``stream`` does."""
        async with await self.add(prompt, has_events=False, **kwargs) as request:
            return await request.result()

    def _closed_error(self) -> EngineClosedError:
        error = EngineClosedError("the service is closed")
        error.__cause__ = self.error
        return error

    # In the thread.

    def _add(
        self, owner: weakref.ref[ServiceRequest], prompt: Any, kwargs: dict[str, Any]
    ) -> EngineRequest | Exception:
        if self._is_over:
            return self._closed_error()
        slept = not self.engine.has_work
        try:
            request = self.engine.add(prompt, **kwargs)
        except BaseException as error:  # a panic of a library is none of Exception
            return as_exception(error)
        self._open[request] = owner
        if slept:
            self._thread.submit(self._step)
        return request

    def _step(self) -> None:
        """Make a step and hand over what has come of it; another one follows if there is work."""
        if self._is_over:
            return
        try:
            for request, owner in self._open.items():
                if (waiting := owner()) is None or waiting.is_cancelled:
                    self.engine.cancel(request)
            self._hand_over(self.engine.step())
            if self.engine.has_work:
                self._thread.submit(self._step)
        except BaseException as error:
            self._end(error)

    def _end(self, error: BaseException | None = None) -> None:
        """Cancel what is left, in a last step unless there was an ``error``, and end the thread."""
        self.error = error
        with suppress(Exception):  # requests that this step cannot end get an error below
            for request in self._open:
                self.engine.cancel(request)
            if error is None and self._open:
                self._hand_over(self.engine.step())
        reason = as_exception(error or self._closed_error())
        requests, self._open, self._is_over = self._open, {}, True
        # Before others know that the thread has ended: they may step the engine.
        self.engine.serve_in(None)
        with suppress(RuntimeError):  # the event loop is closed
            self._send([(owner(), _End(error=reason)) for owner in requests.values()])
            self._loop.call_soon_threadsafe(self.ended.set)
        self._thread.shutdown(wait=False)

    def _hand_over(self, events: Iterable[EngineEvent]) -> None:
        """Send the events of a step to their requests, and the outputs of requests that have ended."""
        items: list[tuple[ServiceRequest | None, Any]] = []
        for event in events:
            waiting = self._open[event.request]() if event.request in self._open else None
            if waiting is not None and waiting.has_events:
                items.append((waiting, event))
        for request in [request for request in self._open if request.done]:
            waiting, output = self._open.pop(request)(), self.engine.result(request)
            items.append((waiting, _End(output, output.error)))
        self._send(items)

    def _send(self, items: list[tuple[ServiceRequest | None, Any]]) -> None:
        """Raises ``RuntimeError`` if the event loop is closed, which ends the thread."""
        if items:
            self._loop.call_soon_threadsafe(self._put, items)

    # In the event loop.

    def _put(self, items: list[tuple[ServiceRequest | None, Any]]) -> None:
        for request, item in items:
            if request is not None and (isinstance(item, _End) or not request.is_cancelled):
                request.items.put_nowait(item)
            if isinstance(item, _End) and item.output is not None and self.observe is not None:
                self.observe(item.output)


class ServiceRequest(AsyncIterator["EngineEvent"], AbstractAsyncContextManager["ServiceRequest"]):
    """A request of a service: an iterator of its events, and then its ``output``.

    It ends when ``async with request`` is left, by ``cancel()``, when the task that waits for it is
    cancelled, and when nothing refers to it.
    """

    #: The engine's own.
    request: EngineRequest
    #: Its output once it has ended, and the exception that ended it.
    output: RequestOutput | None = None
    error: BaseException | None = None
    is_cancelled = _is_over = False

    def __init__(self, has_events: bool) -> None:
        self.has_events = has_events
        self.items: asyncio.Queue[Any] = asyncio.Queue()

    async def __anext__(self) -> EngineEvent:
        if not self._is_over:
            item = await self._take()
            if not isinstance(item, _End):
                return item
        raise StopAsyncIteration

    async def result(self) -> RequestOutput:
        """Wait for the end of the request and return its output, which may be incomplete after ``cancel()``.

        Drops events that were not taken. Raises the exception that ended the request.
        """
        while not self._is_over:
            await self._take()
        if self.error is not None:
            raise self.error
        assert self.output is not None
        return self.output

    def cancel(self) -> None:
        """End it, if it has not ended: its rows leave with the next step, and no more events come."""
        self.is_cancelled = True

    async def aclose(self) -> None:
        """``cancel``, as of any asynchronous iterator."""
        self.cancel()

    async def __aexit__(self, *exception: object) -> None:
        self.cancel()

    async def _take(self) -> Any:
        """The next item; raises the exception that ended the request."""
        try:
            item = await self.items.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if isinstance(item, _End):
            self._is_over, self.output, self.error = True, item.output, item.error
            if self.error is not None:
                raise self.error
        return item


@dataclass(slots=True)
class _End:
    output: RequestOutput | None = None
    error: BaseException | None = None
