"""Running the server: an engine, the application, its guards, and uvicorn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import uvicorn

from ..engine.engine import Engine
from ..engine.serving import Service
from .adapter import application
from .guard import Guard
from .handlers import Served
from .metrics import Metrics

#: Seconds that open answers get when the server is stopped.
GRACE = 5


@dataclass(frozen=True, slots=True)
class Settings:
    """Where the server listens, and what it lets in."""

    host: str = "127.0.0.1"
    #: 0: any that is free.
    port: int = 8000
    api_key: str | None = None
    #: Of the body of a request.
    max_bytes: int = 16 * 2**20
    log_level: str = "warning"


async def serve(
    name: str,
    model: Any,
    processor: Any,
    engine: Engine,
    settings: Settings,
    on_start: Callable[[uvicorn.Server], None] = lambda server: None,
    drafts: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Serve ``model`` under ``name`` until the process gets a signal, or the server is told to exit.

    ``processor``: a tokenizer, or a processor of other inputs as well. ``on_start`` gets the server
    before it listens. ``drafts``: arguments of each ``generate`` that can draft, as
    ``assistant_model``. Raises ``SystemExit`` if the port is taken.
    """
    logging.getLogger("transformers.cli.serving").setLevel(
        logging.ERROR
    )  # it warns of every request
    metrics = Metrics(engine)
    async with Service(engine, metrics.observe) as service:
        app = application(Served(name, model, processor, service, drafts), metrics)
        guarded = Guard(app, settings.api_key, settings.max_bytes)
        config = uvicorn.Config(
            guarded,
            host=settings.host,
            port=settings.port,
            log_level=settings.log_level,
            timeout_graceful_shutdown=GRACE,
        )
        server = uvicorn.Server(config)
        on_start(server)
        await server.serve()
