"""``engine.serving()``: an asyncio front for an engine, which its own thread steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from .errors import EngineClosedError, as_exception

if TYPE_CHECKING:
    from .engine import Engine
    from .request import EngineEvent, EngineRequest, RequestOutput


#: Requests that are prepared between two steps, at most: those that decode wait for it.
MAX_ADDED = 8


class Service:
    """An engine for coroutines: ``async with engine.serving() as service``.

    One thread adds, cancels and steps; it sleeps while there is nothing to do. Until the service is
    closed, ``add``, ``step`` and ``close`` of the engine raise ``EngineError`` in other threads. ``observe``
    is called in the event loop with the output of each request that has ended.
    """

    def __init__(
        self, engine: Engine, observe: Callable[[RequestOutput], None] | None = None
    ) -> None:
        self.engine = engine
        self.observe = observe
        #: Why the thread has ended, if it was not by ``close``.
        self.error: BaseException | None = None
        #: Methods of the thread and their argument; ``None``: close.
        self._commands: SimpleQueue[tuple[Callable[[_Box], None], _Box] | None] = SimpleQueue()
        self._open: dict[str, _Box] = {}  # read and written by the thread alone
        self._is_over = False
        self._loop: Any = None
        self._thread: threading.Thread | None = None
        #: Set when the thread has ended: by ``close``, or with ``error``.
        self.ended = asyncio.Event()

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""
        return self._thread is not None and not self._is_over

    async def __aenter__(self) -> Service:
        if self._thread is not None:
            raise EngineClosedError("a service is entered once: ask engine.serving() for another")
        self._loop = asyncio.get_running_loop()
        thread = threading.Thread(target=self._work, name="hfgen-serving", daemon=True)
        self.engine.serve_in(thread)
        self._thread = thread
        thread.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is left and end the thread; the engine stays as it is, and may be stepped."""
        if self._thread is not None:
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join)

    async def add(self, prompt: Any, *, has_events: bool = True, **kwargs: Any) -> ServiceRequest:
        """The request, once the engine has taken it; the arguments are those of ``Engine.add``.

        Without ``has_events`` it yields nothing, and only has a ``result``. Raises what ``Engine.add``
        raises, and ``EngineClosedError`` if the service does not run.
        """
        request = ServiceRequest(self, _Box(prompt, kwargs, has_events))
        self._post(self._add, request._box)
        await request._take()
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

    def _post(self, method: Callable[[_Box], None], box: _Box) -> None:
        """Have the thread call ``method(box)`` between two steps."""
        if self._thread is None:
            raise EngineClosedError("the service does not run: enter it by `async with`")
        self._commands.put((method, box))
        if self._is_over:  # the thread may have looked before
            self._refuse_commands()

    def _refuse_commands(self) -> None:
        with suppress(Empty, RuntimeError):
            while True:
                command = self._commands.get_nowait()
                if command is not None and command[0] == self._add:
                    self._send([(command[1], _End(error=self._closed_error()))])

    def _closed_error(self) -> EngineClosedError:
        error = EngineClosedError("the service is closed")
        error.__cause__ = self.error
        return error

    # In the thread.

    def _work(self) -> None:
        try:
            while self._obey():
                self._hand_over(self.engine.step() if self.engine.has_work else [])
        except BaseException as error:
            self.error = error
        for box in self._open.values():
            with suppress(Exception):
                self.engine.cancel(box.request)
        with suppress(Exception):  # requests that this step cannot end get an error below
            if self.error is None and self._open:
                self._hand_over(self.engine.step())
        unfinished, self._open = self._open, {}
        reason = self.error or self._closed_error()
        with suppress(RuntimeError):  # the event loop is closed
            self._send([(box, _End(error=as_exception(reason))) for box in unfinished.values()])
            self._loop.call_soon_threadsafe(self.ended.set)
        self._is_over = True
        self.engine.serve_in(None)
        self._refuse_commands()

    def _obey(self) -> bool:
        """Run the commands, waiting for one if the engine has no work; ``False``: close."""
        with suppress(Empty):
            command = self._commands.get(block=not self.engine.has_work)
            n_added = 0
            while command is not None:
                method, box = command
                method(box)
                n_added += method == self._add
                if n_added == MAX_ADDED:
                    return True
                command = self._commands.get_nowait()
            return False
        return True

    def _add(self, box: _Box) -> None:
        try:
            box.request = self.engine.add(box.prompt, **box.kwargs)
        except BaseException as error:  # a panic of a library is none of Exception
            self._send([(box, _End(error=as_exception(error)))])
        else:
            self._open[box.request.id] = box
            self._send([(box, _ADDED)])

    def _cancel(self, box: _Box) -> None:
        if box.request is not None and box.request.id in self._open:
            self.engine.cancel(box.request)

    def _hand_over(self, events: Iterable[EngineEvent]) -> None:
        """Send the events of a step to their requests, and the outputs of requests that have ended."""
        items: list[tuple[_Box, Any]] = []
        for event in events:
            box = self._open.get(event.request.id)
            if box is not None and box.has_events:
                items.append((box, event))
        for key in [key for key, box in self._open.items() if box.request.done]:
            box = self._open.pop(key)
            output = self.engine.result(box.request)
            items.append((box, _End(output, output.error)))
        self._send(items)

    def _send(self, items: list[tuple[_Box, Any]]) -> None:
        """Raises ``RuntimeError`` if the event loop is closed, which ends the thread."""
        if items:
            self._loop.call_soon_threadsafe(self._put, items)

    # In the event loop.

    def _put(self, items: list[tuple[_Box, Any]]) -> None:
        for box, item in items:
            if isinstance(item, _End) or not box.is_cancelled:
                box.items.put_nowait(item)
            if isinstance(item, _End) and item.output is not None and self.observe is not None:
                self.observe(item.output)


class ServiceRequest(AsyncIterator["EngineEvent"], AbstractAsyncContextManager["ServiceRequest"]):
    """A request of a service: an iterator of its events, and then its ``output``.

    It ends when ``async with request`` is left, by ``cancel()``, when the task that waits for it is
    cancelled, and when nothing refers to it.
    """

    #: Its output once it has ended, and the exception that ended it.
    output: RequestOutput | None = None
    error: BaseException | None = None

    def __init__(self, service: Service, box: _Box) -> None:
        self._service, self._box = service, box
        self._is_over = False

    @property
    def request(self) -> EngineRequest:
        """The engine's own."""
        return self._box.request

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
        if not self._is_over and not self._box.is_cancelled:
            self._box.is_cancelled = True
            self._service._post(self._service._cancel, self._box)

    async def aclose(self) -> None:
        """``cancel``, as of any asynchronous iterator."""
        self.cancel()

    async def __aexit__(self, *exception: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        with suppress(EngineClosedError):  # of a service that was never entered
            self.cancel()

    async def _take(self) -> Any:
        """The next item; raises the exception that ended the request."""
        try:
            item = await self._box.items.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if isinstance(item, _End):
            self._is_over, self.output, self.error = True, item.output, item.error
            if self.error is not None:
                raise self.error
        return item


@dataclass(slots=True, eq=False)
class _Box:
    """A request's arguments for the thread, and its events. Holds no ``ServiceRequest``, which may be dropped."""

    prompt: Any
    kwargs: dict[str, Any]
    has_events: bool
    items: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    is_cancelled: bool = False
    #: Written by the thread, before ``Service.add`` returns.
    request: Any = None


@dataclass(slots=True)
class _End:
    """How a request has ended."""

    output: RequestOutput | None = None
    error: BaseException | None = None


_ADDED = object()
