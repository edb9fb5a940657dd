"""Checks before the application: host, API key, and size of a body."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from ..openai_api import error_body
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
