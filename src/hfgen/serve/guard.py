"""Checks before the application: API key, request size, and disconnected clients."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: Paths that need no key: what a load balancer asks.
OPEN_PATHS = ("/health",)


class Guard:
    """An ASGI application (asgi.readthedocs.io) around another one.

    * A request without the key is answered with 401, one of more than ``max_bytes`` with 413.
    * When the client hangs up, the task that answers it is cancelled: in Starlette, only streams are.
    """

    def __init__(self, app: Any, api_key: str | None, max_bytes: int) -> None:
        self.app, self.api_key, self.max_bytes = app, api_key, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not self.may_enter(scope["path"], headers.get(b"authorization", b"")):
            challenge = [(b"www-authenticate", b"Bearer")]
            await refuse(send, 401, "the API key is missing or wrong", challenge)
            return
        length = headers.get(b"content-length", b"")
        too_long = length.isdigit() and int(length) > self.max_bytes
        body = None if too_long else await self.read(receive)
        if body is None:
            await refuse(send, 413, f"the request is larger than {self.max_bytes:,} bytes")
            return
        await answer(self.app, scope, body, receive, send)

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
            if len(body) > self.max_bytes:
                return None
            if not message.get("more_body", False):
                return bytes(body)


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


async def refuse(
    send: Send, status: int, message: str, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """Answer with an error, in the shape of OpenAI's."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    body = json.dumps({"error": error}).encode()
    start = [(b"content-type", b"application/json"), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})
