"""The web application: its routes, and errors in the shape of OpenAI's.

Of the server of ``transformers serve``, these parts are used: the reading of messages and of media, the
parsing of thoughts and tool calls, and the format of ``/v1/responses``.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from ..openai_api import error_body
from .handlers import ChatHandler, EngineHandler, TextHandler
from .metrics import Metrics
from .responses import ResponsesHandler
from .served import Served

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
        """It is loaded: `transformers chat` asks for that before it begins."""
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
