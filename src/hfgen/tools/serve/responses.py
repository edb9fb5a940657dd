"""The handler of ``/v1/responses``: transformers' response format, with the engine's requests."""

from __future__ import annotations

import asyncio
from typing import Any

from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseGenerateManager, BaseHandler, _StreamError

from ...engine.serving import ServiceRequest
from .answers import Message, check_open
from .handlers import Handler, result_of

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
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None

    def generate_streaming(self, *_: Any, response_parser: Any = None, **__: Any) -> Any:
        self.task = asyncio.ensure_future(self.run(Message(response_parser)))
        return self.queue, self

    async def run(self, message: Message) -> None:
        """Fill the queue, as upstream's streamers do: the end is ``None``."""
        try:
            async for event in self.request:
                check_open(event.finish_reason)
                self.total_tokens += len(event.token_ids)
                for item in message.items(event.text, event.finish_reason is not None):
                    self.queue.put_nowait(item)
        except Exception as error:
            self.queue.put_nowait(_StreamError(str(error)))
        self.queue.put_nowait(None)

    async def generate_non_streaming(self, *_: Any, **__: Any) -> tuple[str, int, list[int]]:
        output = await result_of(self.request)
        return output.text or "", len(output.prompt_token_ids), output.token_ids

    def cancel(self) -> None:
        self.request.cancel()

    stop = cancel
