"""Checks before the application: host, API key, size and JSON of a body, and disconnected clients."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ..openai_api import error_body
from .limits import Limits

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: Paths that need no key: what a load balancer asks.
OPEN_PATHS = ("/health",)


class Guard:
    """An ASGI application (asgi.readthedocs.io) around another one.

    * A request to a host that is not the server's is answered with 421, one without the key with 401, one
      that is too large with 413, too slow with 408, and no JSON object within the limits with 400.
    * When the client hangs up, the task that answers it is cancelled: in Starlette, only streams are.
    """

    def __init__(self, app: Any, api_key: str | None, limits: Limits, hosts: Sequence[str]) -> None:
        """``hosts``: the names by which clients may call the server; any if it is empty."""
        self.app, self.api_key, self.limits, self.hosts = app, api_key, limits, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            body = await self.admitted(scope, receive)
        except HTTPException as error:
            content, status = error_body(error.detail, error.status_code), error.status_code
            await JSONResponse(content, status, error.headers)(scope, receive, send)
        else:
            await answer(self.app, scope, body, receive, send)

    async def admitted(self, scope: Scope, receive: Receive) -> bytes:
        """The body of a request that may enter. Raises ``HTTPException``."""
        limits, headers = self.limits, dict(scope["headers"])
        if self.hosts and hostname(headers.get(b"host", b"")) not in self.hosts:
            names = ", ".join(self.hosts)
            raise HTTPException(421, f"`Host` has to be one of {names} (--allowed-hosts)")
        if not self.may_enter(scope["path"], headers.get(b"authorization", b"")):
            challenge = {"WWW-Authenticate": "Bearer"}
            raise HTTPException(401, "the API key is missing or wrong", challenge)
        length = headers.get(b"content-length", b"")
        body = None
        try:
            if not (length.isdigit() and int(length) > limits.max_bytes):
                body = await asyncio.wait_for(self.read(receive), limits.receive_seconds)
        except asyncio.TimeoutError:
            seconds = f"{limits.receive_seconds:g} seconds (--receive-seconds)"
            raise HTTPException(408, f"the request took more than {seconds}") from None
        if body is None:
            size = f"{limits.max_bytes:,} bytes (--max-request-mb)"
            raise HTTPException(413, f"the request is larger than {size}")
        is_form = headers.get(b"content-type", b"").startswith(b"multipart/")
        if scope["method"] == "POST" and scope["path"].startswith("/v1/") and not is_form:
            try:
                await asyncio.to_thread(limits.read, body)
            except ValueError as error:
                raise HTTPException(400, str(error)) from None
        return body

    def may_enter(self, path: str, authorization: bytes) -> bool:
        """Whether a request has the key, or needs none."""
        if self.api_key is None or path in OPEN_PATHS:
            return True
        scheme, _, key = authorization.partition(b" ")
        is_key = hmac.compare_digest(key.strip(), self.api_key.encode())
        return is_key and scheme.lower() == b"bearer"

    async def read(self, receive: Receive) -> bytes | None:
        """The body; ``None`` if it is too long. Of a client that has hung up, what it sent."""
        body = bytearray()
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > self.limits.max_bytes:
                return None
            if not message.get("more_body", False):
                return bytes(body)


def hostname(host: bytes) -> str:
    """The name in a ``Host`` header, without its port; empty if it is none."""
    try:
        return urlsplit(f"//{host.decode('latin-1')}").hostname or ""
    except ValueError:
        return ""


async def answer(app: Any, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Run ``app`` on a request that was read, and cancel it when the client hangs up."""
    is_read = is_answered = False
    has_hung_up = asyncio.Event()

    async def replay() -> MutableMapping[str, Any]:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}
        await has_hung_up.wait()
        return {"type": "http.disconnect"}

    async def note(message: MutableMapping[str, Any]) -> None:
        nonlocal is_answered
        await send(message)
        is_body = message["type"] == "http.response.body"
        is_answered = is_answered or (is_body and not message.get("more_body", False))

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    answering = asyncio.ensure_future(app(scope, replay, note))
    watching = asyncio.ensure_future(watch())
    try:
        await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
        has_hung_up.set()
        if not answering.done() and not is_answered:
            answering.cancel()
        await asyncio.wait({answering})
        if not answering.cancelled():
            answering.result()  # raises what it raised
    finally:
        answering.cancel()  # when the server itself is stopped
        watching.cancel()
