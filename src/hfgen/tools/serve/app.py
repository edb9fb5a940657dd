"""The web application: its routes and its errors.

Of the server of ``transformers serve``, these parts are used: the reading of messages and of media, the
parsing of thoughts and tool calls, and the format of ``/v1/responses``.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..openai_api import error_body
from .answers import sse
from .guard import refusal
from .handlers import Chat, Completion, Handler, refusals
from .metrics import Metrics
from .responses import Responses
from .served import Served


class LoadModel(Handler):
    """``/load_model``: what `transformers chat` asks for before it begins."""

    async def response(self) -> Response:
        with refusals(self.body):
            self.served.check_name(self.body)
        status = {"status": "ready", "model": self.served.name, "cached": True}
        return Response(sse(status), media_type="text/event-stream")


HANDLERS: dict[str, type[Handler]] = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completion,
    "/v1/responses": Responses,
    "/load_model": LoadModel,
}
NOT_OFFERED = ("/v1/audio/transcriptions", "/v1/systemone")  # what only `transformers serve` has
REQUEST_ID = "x-request-id"  # names a request, and its response


def application(served: Served, metrics: Metrics) -> Starlette:
    """The application for one model."""
    model = {"id": served.name, "object": "model", "owned_by": "hfgen", "created": 0}

    def show_metrics(_: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    def show_health(_: Request) -> Response:
        status, code = ("ok", 200) if served.service.is_running else ("unhealthy", 503)
        return JSONResponse({"status": status}, code)

    def show_models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    def show_model(request: Request) -> Response:
        if (name := request.path_params["name"]) != served.name:
            raise HTTPException(404, f"The only model here is {served.name!r}, not {name!r}.")
        return JSONResponse(model)

    def not_offered(_: Request) -> Response:
        raise HTTPException(501, "`hfgen serve` does not offer this: use `transformers serve`.")

    async def refused(_: Request, error: Any) -> Response:
        return refusal(error)

    async def failed(_: Request, error: Exception) -> Response:
        return JSONResponse(error_body(error, 500), 500)

    posts = {path: endpoint(kind, served) for path, kind in HANDLERS.items()}
    posts |= dict.fromkeys(NOT_OFFERED, not_offered)
    return Starlette(
        routes=[
            *(Route(path, function, methods=["POST"]) for path, function in posts.items()),
            Route("/metrics", show_metrics),
            Route("/health", show_health),
            Route("/v1/models", show_models),
            Route("/v1/models/{name:path}", show_model),
        ],
        exception_handlers={HTTPException: refused, Exception: failed},
    )


def endpoint(kind: type[Handler], served: Served) -> Callable[[Request], Any]:
    """The function of a route. When the client hangs up, its task is cancelled (Starlette: only streams)."""

    async def handle(request: Request, request_id: str) -> Response:
        try:
            body = await asyncio.to_thread(served.limits.read, request.scope["body"])
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        # Pages of other sites can send text and forms without asking, but no JSON.
        kind_of_body = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not kind_of_body.startswith("application/") or not kind_of_body.endswith("json"):
            raise HTTPException(400, "`Content-Type` has to be application/json.")
        return await kind(served, body, request_id).response()

    async def until_gone(request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    async def answer(request: Request) -> Response:
        request_id = request.headers.get(REQUEST_ID) or str(uuid.uuid4())
        handling = asyncio.ensure_future(handle(request, request_id))
        leaving = asyncio.ensure_future(until_gone(request))
        try:
            await asyncio.wait({handling, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not handling.done():
                return Response(status_code=499)  # which nobody reads
            response = handling.result()
        finally:
            handling.cancel()
            leaving.cancel()
        response.headers[REQUEST_ID] = request_id
        return response

    return answer
