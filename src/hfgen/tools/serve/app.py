"""The web application: checks before it, its routes and errors, ``/v1/responses``, and ``/metrics`` for Prometheus.

Of the server of ``transformers serve``, these parts are used: the reading of messages and of media, the
parsing of thoughts and tool calls, and the format of ``/v1/responses``.
"""

from __future__ import annotations

import asyncio
import hmac
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseGenerateManager, BaseHandler, _StreamError

from ...engine.engine import Engine
from ...engine.request import RequestOutput
from ...engine.serving import ServiceRequest
from ..openai_api.responses import error_body
from .answers import Message, check_open, sse
from .handlers import Chat, Completion, Handler, Served, refusals, result_of
from .limits import Limits

OPEN_PATHS = ("/health",)  # paths that need no key: what a load balancer asks


def refusal(error: HTTPException) -> JSONResponse:
    """The response of an error, in OpenAI's format; 422 is how upstream calls 400."""
    status = 400 if error.status_code == 422 else error.status_code
    return JSONResponse(error_body(str(error.detail), status), status, error.headers)


class Guard:
    """An ASGI application (asgi.readthedocs.io) around another one, which finds the body in ``scope["body"]``.

    A request to a host that is not the server's is answered with 421, one without the key with 401, one
    that is too large with 413, and one that is too slow with 408.
    """

    def __init__(self, app: Any, api_key: str | None, limits: Limits, hosts: Sequence[str]) -> None:
        """``hosts``: the names by which clients may call the server; any if it is empty."""
        self.app, self.api_key, self.limits, self.hosts = app, api_key, limits, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http":
            try:
                scope["body"] = await self.admitted(scope, receive)
            except HTTPException as error:
                app = refusal(error)
        await app(scope, receive, send)

    async def admitted(self, scope: Scope, receive: Receive) -> bytes:
        """The body of a request that may enter. Raises ``HTTPException``."""
        limits, headers = self.limits, dict(scope["headers"])
        if self.hosts and hostname(headers.get(b"host", b"")) not in self.hosts:
            names = ", ".join(self.hosts)
            raise HTTPException(421, f"`Host` has to be one of {names} (--allowed-hosts)")
        if self.api_key is not None and scope["path"] not in OPEN_PATHS:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            is_key = hmac.compare_digest(key.strip(), self.api_key.encode())
            if not is_key or scheme.lower() != b"bearer":
                challenge = {"WWW-Authenticate": "Bearer"}
                raise HTTPException(401, "the API key is missing or wrong", challenge)
        length = headers.get(b"content-length", b"")
        n_bytes = int(length) if length.isdigit() else 0
        try:
            return await asyncio.wait_for(self.read(receive, n_bytes), limits.receive_seconds)
        except asyncio.TimeoutError:
            seconds = f"{limits.receive_seconds:g} seconds (--receive-seconds)"
            raise HTTPException(408, f"the request took more than {seconds}") from None

    async def read(self, receive: Receive, n_bytes: int) -> bytes:
        """The body, of ``n_bytes`` by its header; of a client that has hung up, what it sent."""
        body, is_more = bytearray(), True
        while is_more and max(len(body), n_bytes) <= self.limits.max_bytes:
            message = await receive()
            body += message.get("body", b"")
            is_more = message.get("more_body", False)
        if max(len(body), n_bytes) > self.limits.max_bytes:
            size = f"{self.limits.max_bytes:,} bytes (--max-request-mb)"
            raise HTTPException(413, f"the request is larger than {size}")
        return bytes(body)


def hostname(host: bytes) -> str:
    """The name in a ``Host`` header, without its port; empty if it is none."""
    try:
        return urlsplit(f"//{host.decode('latin-1')}").hostname or ""
    except ValueError:
        return ""


class LoadModel(Handler):
    """``/load_model``: what `transformers chat` asks for before it begins."""

    async def response(self) -> Response:
        with refusals(self.body):
            self.served.check_name(self.body)
        status = {"status": "ready", "model": self.served.name, "cached": True}
        return Response(sse(status), media_type="text/event-stream")


#: Parameters of ``/v1/responses`` and their names in a chat.
OF_RESPONSES = {"max_output_tokens": "max_completion_tokens", "temperature": "temperature"}
OF_RESPONSES |= {name: name for name in ("top_p", "seed", "stop")}


class Responses(Handler, ResponseHandler):
    """``/v1/responses``: upstream's answers, of requests of the engine."""

    messages = "input"

    def parameters(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("input") is None:
            raise ValueError("`input` has to be text or a list, but is missing.")
        BaseHandler._validate_request(self, body)
        chat = {OF_RESPONSES[name]: body[name] for name in OF_RESPONSES if name in body}
        form = body.get("text") or {}
        form = form.get("format", {"type": "text"}) if isinstance(form, dict) else form
        if not isinstance(form, dict):
            raise ValueError(f"`text` has to have an object `format`, but is {body['text']!r:.80}.")
        chat["response_format"] = form | {"json_schema": form}  # which are one level here
        return super().parameters(chat)

    async def answer(self) -> Any:
        """Upstream's; no stream is the default, as OpenAI has it."""
        body = self.body | {"tools": self._normalize_tools(self.body.get("tools"))}
        inputs, reader, request = await self.begin(self._normalize_input(body), body)
        served, manager = self.served, OneRequest(request)
        arguments: Any = self.request_id, served.model, reader, served.name, body, inputs, None
        if body.get("stream"):
            return self._streaming(*arguments, gen_manager=manager, tools=body["tools"])
        return await self._non_streaming(*arguments, gen_manager=manager, tools=body["tools"])


class OneRequest(BaseGenerateManager):
    """A request of the engine as upstream's handlers know a manager, and a streamer that counts tokens."""

    total_tokens = 0

    def __init__(self, request: ServiceRequest) -> None:
        self.request = request

    def generate_streaming(self, *_: Any, response_parser: Any = None, **__: Any) -> Any:
        self.items = self.read(Message(response_parser))
        return self, self

    async def read(self, message: Message) -> AsyncIterator[Any]:
        """What upstream's streamers put into a queue."""
        try:
            async for event in self.request:
                check_open(event.finish_reason)
                self.total_tokens += len(event.token_ids)
                for item in message.items(event.text, event.finish_reason is not None):
                    yield item
        except Exception as error:
            yield _StreamError(str(error))

    async def get(self) -> Any:
        """As of a queue, whose last item is ``None``. Nothing runs for an answer that is never read."""
        return await anext(self.items, None)

    def get_nowait(self) -> Any:
        raise asyncio.QueueEmpty

    async def generate_non_streaming(self, *_: Any, **__: Any) -> tuple[str, int, list[int]]:
        output = await result_of(self.request)
        return output.text or "", len(output.prompt_token_ids), output.token_ids

    def cancel(self) -> None:
        self.request.cancel()

    stop = cancel


HANDLERS: dict[str, type[Handler]] = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completion,
    "/v1/responses": Responses,
    "/load_model": LoadModel,
}
NOT_OFFERED = ("/v1/audio/transcriptions", "/v1/systemone")  # what only `transformers serve` has
REQUEST_ID = "x-request-id"  # names a request, and its response

#: Buckets of histograms.
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Metrics:
    """Counts of one engine, in a registry of their own."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        within: Any = {"registry": self.registry}
        rows = Gauge("hfgen_rows_running", "Rows that are prefilled or decoded now.", **within)
        rows.set_function(lambda: engine.n_rows)
        waiting = Gauge("hfgen_requests_waiting", "Requests in the queue now.", **within)
        waiting.set_function(lambda: engine.n_waiting)
        running = Gauge("hfgen_requests_running", "Requests that have left the queue.", **within)
        plan = engine.scheduler
        running.set_function(lambda: len(plan.prefilling) + len(plan.decoding))
        ended, labels = "Requests that have ended, by why.", ["finish_reason"]
        self.requests = Counter("hfgen_requests", ended, labels, **within)
        self.prompt_tokens = Counter("hfgen_prompt_tokens", "Tokens of their prompts.", **within)
        self.tokens = Counter("hfgen_generated_tokens", "Tokens generated by them.", **within)
        about = "From a request's arrival to its first token."
        name = "hfgen_time_to_first_token_seconds"
        self.first = Histogram(name, about, buckets=SECONDS, **within)
        about = "From one token of a request to its next, on average."
        name = "hfgen_time_per_output_token_seconds"
        self.each = Histogram(name, about, buckets=SECONDS_PER_TOKEN, **within)

    def observe(self, output: RequestOutput) -> None:
        """Count a request that has ended."""
        self.requests.labels(finish_reason=str(output.finish_reason)).inc()
        self.prompt_tokens.inc(len(output.prompt_token_ids))
        self.tokens.inc(sum(len(row.token_ids) for row in output.sequences))
        if (seconds := output.metrics.time_to_first_token) is not None:
            self.first.observe(seconds)
        if (seconds := output.metrics.time_per_output_token) is not None:
            self.each.observe(seconds)


def application(served: Served, metrics: Metrics) -> Starlette:
    model = {"id": served.name, "object": "model", "owned_by": "hfgen", "created": 0}

    def show_metrics(_: Request) -> Response:
        return Response(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    def show_health(_: Request) -> Response:
        status, code = ("ok", 200) if served.service.is_running else ("unhealthy", 503)
        return JSONResponse({"status": status}, code)

    def show_models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    def show_model(request: Request) -> Response:
        if (name := request.path_params["name"]) != served.name:
            raise HTTPException(404, f"The only model here is {served.name!r}, not {name!r:.80}.")
        return JSONResponse(model)

    def not_offered(_: Request) -> Response:
        raise HTTPException(501, "`hfgen serve` does not offer this: use `transformers serve`.")

    async def refused(_: Request, error: Any) -> Response:
        return refusal(error)

    async def failed(_: Request, error: Exception) -> Response:
        return JSONResponse(error_body(error, 500), 500)

    posts = {path: endpoint(kind, served) for path, kind in HANDLERS.items()}
    posts |= dict.fromkeys(NOT_OFFERED, not_offered)
    app = Starlette(
        routes=[
            *(Route(path, function, methods=["POST"]) for path, function in posts.items()),
            Route("/metrics", show_metrics),
            Route("/health", show_health),
            Route("/v1/models", show_models),
            Route("/v1/models/{name:path}", show_model),
        ],
        exception_handlers={HTTPException: refused, Exception: failed},
    )
    app.router.redirect_slashes = False  # to a URL with the `Host` of the request
    return app


def endpoint(kind: type[Handler], served: Served) -> Callable[[Request], Any]:
    """The function of a route. When the client hangs up, its task is cancelled (Starlette: only streams)."""

    async def handle(request: Request, request_id: str) -> Response:
        try:
            body = await asyncio.to_thread(served.limits.read, request.scope.pop("body"))
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
