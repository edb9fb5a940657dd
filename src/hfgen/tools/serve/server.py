"""Running the application: an engine, guards, and uvicorn."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import re
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import h11
import uvicorn
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...engine.engine import Engine
from ...engine.errors import EngineError
from ...engine.serving import Service
from .app import Guard, Metrics, application, refusal
from .handlers import Served
from .limits import Limits

LOCAL = ("localhost", "127.0.0.1", "::1")

#: Bytes that a connection reads at once, of a head that is not complete, and lines of a head: each of them, as each
#: chunk of a body, takes 8 to 45 us in which no request decodes.
MAX_READ, MAX_HEAD, MAX_LINES = 2**16, 2**14, 100
#: Seconds of a turn, in which one connection reads its body in chunks, and how many times as long all rest after it.
TURN, REST = 0.02, 4
PARTING = 2  # seconds for clients to read their last event after the grace period
HURRY = 0.8  # seconds in which the process ends after a second Ctrl-C


@dataclass(frozen=True, slots=True)
class Settings:
    """Where the server listens, and what it lets in."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    api_key: str | None = None
    limits: Limits = field(default_factory=Limits)
    log_level: str = "warning"

    @property
    def hosts(self) -> list[str]:
        """The names of the server, any if empty. On loopback, any site could give it others (DNS rebinding)."""
        named = [name for name in self.limits.allowed_hosts.split(",") if name]
        return [*LOCAL, *named] if self.host in LOCAL or named else []


def bound(host: str, port: int) -> socket.socket:
    """A socket that is bound, and does not listen yet. Raises ``OSError`` for an address that is taken."""
    (family, kind, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    with ExitStack() as failing:
        listener = failing.enter_context(socket.socket(family, kind))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        failing.pop_all()
    return listener


class Connection(h11.Connection):
    """Refuses heads of too many lines, and reads a body in chunks only until its turn ends."""

    is_chunked = False
    turn_ends = 0.0
    has_more = False  # when the turn has ended

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            data, _ = self.trailing_data
            blank = re.search(rb"\n\r?\n", data)
            if data.count(b"\n", 0, blank.start() if blank else None) > MAX_LINES:
                raise h11.RemoteProtocolError("too many headers")
        elif self.is_chunked and self.their_state is h11.SEND_BODY:
            self.has_more = time.monotonic() >= self.turn_ends
            if self.has_more:
                return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.is_chunked = any(name == b"transfer-encoding" for name, _ in event.headers)
        return event


class Protocol(H11Protocol):
    """Closes connections whose client takes too long to send the headers of a request."""

    seconds: float  # of the server; a subclass has it
    #: Connections with chunks to read, which have turns one after the other.
    waiting: deque[Protocol]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.conn = Connection(h11.SERVER, MAX_HEAD)
        transport.max_size = MAX_READ
        self.silence = self.loop.call_later(self.seconds, self.close_if_silent, None)

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.has_more and self not in self.waiting:
            self.transport.pause_reading()
            self.waiting.append(self)
            if len(self.waiting) == 1:
                self.loop.call_soon(self.take_turns)

    def take_turns(self) -> None:
        """Give the first connection that waits a turn, and the next one after a rest."""
        start, first = self.loop.time(), self.waiting[0]
        first.conn.turn_ends, first.conn.has_more = start + TURN, False
        try:
            if not first.transport.is_closing():
                H11Protocol.handle_events(first)
        finally:
            self.waiting.popleft()
            if first.conn.has_more and not first.transport.is_closing():
                self.waiting.append(first)
            elif not first.flow.read_paused:
                first.transport.resume_reading()
            if self.waiting:
                self.loop.call_later(REST * (self.loop.time() - start), self.take_turns)

    def connection_lost(self, exc: Exception | None) -> None:
        self.silence.cancel()  # it holds the last request
        super().connection_lost(exc)

    def close_if_silent(self, before: Any) -> None:
        """Close the connection if no request has come since ``before`` and none is being answered."""
        newest = self.cycle
        is_answering = newest is not None and not newest.response_complete
        if newest is before and not is_answering:
            self.transport.close()
        elif not self.transport.is_closing():
            self.silence = self.loop.call_later(self.seconds, self.close_if_silent, newest)


class Server(uvicorn.Server):
    """Ends open answers with an error after their grace or a second signal, and the process if that fails."""

    def __init__(self, config: Any, service: Service, grace: float, on_start: Any) -> None:
        super().__init__(config)
        self.service, self.grace, self.on_start = service, grace, on_start
        self.hurry = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_start(self)

    def handle_exit(self, sig: int, frame: Any) -> None:
        if not self.should_exit:
            super().handle_exit(sig, frame)
            faulthandler.dump_traceback_later(self.grace + 2 * PARTING, exit=True)
        elif sig == signal.SIGINT:
            self.hurry.set()  # read at uvicorn's next look at its connections, 0.1 seconds later at most
            nowhere = os.open(os.devnull, os.O_WRONLY)
            faulthandler.dump_traceback_later(HURRY, exit=True, file=nowhere)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        async def end_answers() -> None:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.hurry.wait(), self.grace)
            await self.service.close()
            await asyncio.sleep(HURRY / 8)  # in which answers of the engine end by themselves
            closed = refusal(HTTPException(503, "The server was closed before it answered."))
            for cycle in [connection.cycle for connection in self.server_state.connections]:
                if cycle is not None and not cycle.response_started:
                    await closed(cycle.scope, cycle.receive, cycle.send)
                    cycle.disconnected = True  # what the application answers is dropped
            await asyncio.sleep(HURRY / 4 if self.hurry.is_set() else PARTING)
            for connection in list(self.server_state.connections):
                connection.transport.abort()

        closing = asyncio.ensure_future(end_answers())
        await super().shutdown(sockets)
        closing.cancel()
        if not self.hurry.is_set():
            faulthandler.cancel_dump_traceback_later()

    async def on_tick(self, counter: int) -> bool:
        return self.service.ended.is_set() or await super().on_tick(counter)


async def serve(
    name: str,
    model: Any,
    processor: Any,
    engine: Engine,
    settings: Settings,
    on_start: Callable[[uvicorn.Server], None] = lambda server: None,
    drafts: Mapping[str, Any] = MappingProxyType({}),
    steering: Mapping[str, Any] = MappingProxyType({}),
    listener: socket.socket | None = None,
) -> None:
    """Serve ``model`` under ``name`` until the process gets a signal, or the server's ``should_exit`` is set.

    ``processor``: a tokenizer, or one of other inputs as well. ``on_start`` gets the server when it listens.
    ``drafts``: arguments of each ``generate`` that can draft. ``steering``: vectors by name and module.
    ``listener``: a bound socket. Raises ``EngineError`` if the engine has failed, ``OSError`` if the port is
    taken.
    """
    logging.getLogger("transformers.cli.serving").setLevel("ERROR")  # it warns of every request
    listener = listener or bound(settings.host, settings.port)
    metrics, limits = Metrics(engine), settings.limits
    async with Service(engine, metrics.observe) as service:
        app = application(
            Served(name, model, processor, service, drafts, limits, steering), metrics
        )
        config = uvicorn.Config(
            Guard(app, settings.api_key, limits, settings.hosts),
            host=settings.host,
            port=settings.port,
            http=type(
                "Protocol", (Protocol,), {"seconds": limits.receive_seconds, "waiting": deque()}
            ),
            ws="none",
            log_level=settings.log_level,
            limit_concurrency=limits.max_connections,
        )
        server = Server(config, service, limits.grace_seconds, on_start)
        await server.serve([listener])
    if service.error is not None:
        message = f"the engine has failed: {type(service.error).__name__}: {service.error}"
        raise EngineError(message) from service.error
