"""The web application with its routes and errors, and running it: an engine, guards, and uvicorn.

Of the server of ``transformers serve``, these parts are used: the reading of messages and of media, the
parsing of thoughts and tool calls, and the format of ``/v1/responses``.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...engine.engine import Engine
from ...engine.errors import EngineError
from ...engine.serving import Service
from ..openai_api import error_body
from .guard import Guard
from .handlers import ChatHandler, EngineHandler, TextHandler
from .limits import Limits
from .metrics import Metrics
from .responses import ResponsesHandler
from .served import Served

LOCAL = ("localhost", "127.0.0.1", "::1")

#: Seconds for clients to read their last event after the grace period.
PARTING = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """Where the server listens, and what it lets in."""

    host: str = "127.0.0.1"
    #: 0: any that is free.
    port: int = 8000
    api_key: str | None = None
    limits: Limits = field(default_factory=Limits)
    log_level: str = "warning"

    @property
    def hosts(self) -> list[str]:
        """The names by which clients may call the server; any if it is empty.

        A page of any website may call a server on loopback by a name of its own (DNS rebinding).
        """
        named = [name for name in self.limits.allowed_hosts.split(",") if name]
        return [*LOCAL, *named] if self.host in LOCAL or named else []


def bound(host: str, port: int) -> socket.socket:
    """A socket that is bound, and does not listen yet. Raises ``OSError`` for an address that is taken."""
    (family, kind, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    found = socket.socket(family, kind)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(address)
    except OSError:
        found.close()
        raise
    return found


#: Handlers by their paths; ``None`` for what only ``transformers serve`` offers.
PATHS: dict[str, type[EngineHandler] | None] = {
    "/v1/chat/completions": ChatHandler,
    "/v1/completions": TextHandler,
    "/v1/responses": ResponsesHandler,
    "/v1/audio/transcriptions": None,
    "/v1/systemone": None,
}

#: Names a request, and its response.
REQUEST_ID = "x-request-id"


def application(served: Served, metrics: Metrics) -> FastAPI:
    """The application for one model."""
    app = FastAPI()
    only = {"id": served.name, "object": "model", "owned_by": "hfgen", "created": 0}
    for path, kind in PATHS.items():
        app.post(path)(not_offered if kind is None else endpoint(kind(served)))

    @app.get("/metrics")
    def show_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/health")
    def show_health() -> JSONResponse:
        is_running = served.service.is_running
        status = {"status": "ok" if is_running else "unhealthy"}
        return JSONResponse(status, 200 if is_running else 503)

    @app.get("/v1/models")
    def show_models() -> dict[str, Any]:
        return {"object": "list", "data": [only]}

    @app.get("/v1/models/{model:path}")
    def show_model(model: str) -> dict[str, Any]:
        if model != served.name:
            raise HTTPException(404, f"The only model here is {served.name!r}, not {model!r}.")
        return only

    @app.post("/load_model")
    def load_model(body: dict[str, Any]) -> Response:
        """Answer `transformers chat`, which asks to load the model before it begins."""
        served.check_name(body)
        status = {"status": "ready", "model": served.name, "cached": True}
        return Response(f"data: {json.dumps(status)}\n\n", media_type="text/event-stream")

    @app.exception_handler(StarletteHTTPException)
    async def refused(_: Any, error: StarletteHTTPException) -> JSONResponse:
        status = 400 if error.status_code == 422 else error.status_code
        return JSONResponse(error_body(str(error.detail), status), status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def unreadable(_: Any, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(error_body("The body has to be a JSON object, but is not."), 400)

    @app.exception_handler(Exception)
    async def failed(_: Any, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(error, 500), 500)

    return app


def endpoint(handler: EngineHandler) -> Any:
    """The function of a route; each request gets an id, or has its own."""

    async def answer(request: Request, body: dict[str, Any]) -> Any:
        request_id = request.headers.get(REQUEST_ID) or str(uuid.uuid4())
        response = await handler.handle_request(body, request_id)
        response.headers[REQUEST_ID] = request_id
        return response

    return answer


def not_offered() -> None:
    raise HTTPException(501, "`hfgen serve` does not offer this: use `transformers serve`.")


class Protocol(H11Protocol):
    """Closes connections whose client takes too long to send the headers of a request."""

    #: Of the server; a subclass has it.
    seconds: float

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(self.seconds, self.close_if_silent, None)

    def close_if_silent(self, before: Any) -> None:
        """Close the connection if no request has come since ``before`` and none is being answered."""
        newest = self.cycle
        is_answering = newest is not None and not newest.response_complete
        if newest is before and not is_answering:
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(self.seconds, self.close_if_silent, newest)


class Server(uvicorn.Server):
    """Ends open answers with an error when their grace has passed, and the process if that fails."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        grace: float,
        on_start: Callable[[Any], None],
    ) -> None:
        super().__init__(config)
        self.service, self.grace, self.on_start = service, grace, on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_start(self)

    def handle_exit(self, *args: Any) -> None:
        super().handle_exit(*args)
        faulthandler.dump_traceback_later(self.grace + 2 * PARTING, exit=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.ensure_future(self.end_answers())
        await super().shutdown(sockets)
        closing.cancel()
        faulthandler.cancel_dump_traceback_later()

    async def end_answers(self) -> None:
        await asyncio.sleep(self.grace)
        await self.service.close()

    async def watch(self) -> None:
        """Stop when the engine's thread has ended."""
        await self.service.ended.wait()
        self.should_exit = True


async def serve(
    name: str,
    model: Any,
    processor: Any,
    engine: Engine,
    settings: Settings,
    on_start: Callable[[uvicorn.Server], None] = lambda server: None,
    drafts: Mapping[str, Any] = MappingProxyType({}),
    listener: socket.socket | None = None,
) -> None:
    """Serve ``model`` under ``name`` until the process gets a signal, or the server's ``should_exit`` is set.

    ``processor``: a tokenizer, or a processor of other inputs as well. ``on_start`` gets the server
    when it listens. ``drafts``: arguments of each ``generate`` that can draft, as
    ``assistant_model``. ``listener``: a bound socket. Raises ``EngineError`` if the engine has failed,
    ``OSError`` if the port is taken.
    """
    logging.getLogger("transformers.cli.serving").setLevel(
        logging.ERROR
    )  # it warns of every request
    listener = listener or bound(settings.host, settings.port)
    metrics, limits = Metrics(engine), settings.limits
    async with Service(engine, metrics.observe) as service:
        app = application(Served(name, model, processor, service, drafts, limits), metrics)
        config = uvicorn.Config(
            Guard(app, settings.api_key, limits, settings.hosts),
            host=settings.host,
            port=settings.port,
            http=type("Protocol", (Protocol,), {"seconds": limits.receive_seconds}),
            log_level=settings.log_level,
            limit_concurrency=limits.max_connections,
            timeout_graceful_shutdown=round(limits.grace_seconds + PARTING),
        )
        server = Server(config, service, limits.grace_seconds, on_start)
        watching = asyncio.ensure_future(server.watch())
        await server.serve([listener])
        watching.cancel()
    if service.error is not None:
        message = f"the engine has failed: {type(service.error).__name__}: {service.error}"
        raise EngineError(message) from service.error
