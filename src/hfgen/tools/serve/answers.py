"""The chunks of chats and completions that are streamed while a request decodes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transformers.cli.serving.utils import ReasoningText, ToolCall, response_events_to_chunks

from ...engine.errors import EngineClosedError
from ...engine.request import EngineEvent
from ...engine.serving import ServiceRequest
from ...logits.logprobs.result import legacy
from ...settings.logs import logger
from ..openai_api.responses import chat_logprobs, choice, error_body, usage

Choice = dict[str, Any]


class Message:
    """A row's text as a chat has it: upstream's parser tells thoughts and tool calls from the answer."""

    def __init__(self, parser: Any = None) -> None:
        self.parser = parser
        self.unread = ""  # text of which nothing has been returned
        self.opening = [] if parser is None else response_events_to_chunks(parser.initial_events)

    def items(self, text: str, is_end: bool) -> list[str | ToolCall]:
        """Parse more ``text``; return new text, ``ReasoningText``, and complete calls."""
        if self.parser is None:
            return [text] if text else []
        items, self.opening = self.opening, []
        self.unread += text
        try:
            items += response_events_to_chunks(self.parser.feed(text))
        except ValueError:  # no call, though it looks like one: from here on, all is text
            self.parser = None
            return [*items, self.unread]
        if is_end:
            with suppress(ValueError, RuntimeError):  # cut off amid a tool call, which is left out
                items += response_events_to_chunks(self.parser.finalize()[1])
        if items:
            self.unread = ""
        return items

    def whole(self, text: str, request_id: str, row: int) -> dict[str, Any]:
        """The fields of a message that is ``text``."""
        items = self.items(text, is_end=True)
        if self.parser is None:
            return {"content": text}
        calls = [item for item in items if isinstance(item, ToolCall)]
        thoughts = "".join(item for item in items if isinstance(item, ReasoningText)).strip()
        rest = "".join(item for item in items if type(item) is str).strip()
        message: dict[str, Any] = {"content": rest if rest or not calls else None}
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = [tool_call(request_id, row, *each) for each in enumerate(calls)]
        return message


def tool_call(request_id: str, row: int, number: int, call: ToolCall) -> dict[str, Any]:
    """A call as OpenAI's messages have it."""
    function = {"name": call.name, "arguments": call.arguments}
    id = f"{request_id}_{row}_tool_call_{number}"
    return {"id": id, "type": "function", "function": function}


@dataclass(slots=True)
class ChatChoices:
    """The choices of one row of a chat."""

    index: int
    message: Message
    pieces: Any
    request_id: str
    n_calls: int = 0

    def begin(self) -> list[Choice]:
        return [self.delta(role="assistant", content="")]

    def gain(self, event: EngineEvent) -> list[Choice]:
        """The choices of an event; its log-probabilities are with the first of them."""
        choices = []
        for item in self.message.items(event.text, event.finish_reason is not None):
            if isinstance(item, ReasoningText):
                choices.append(self.delta(reasoning_content=str(item)))
            elif isinstance(item, str):
                choices.append(self.delta(content=item))
            else:
                call = tool_call(self.request_id, self.index, self.n_calls, item)
                choices.append(self.delta(tool_calls=[{"index": self.n_calls, **call}]))
                self.n_calls += 1
        if event.logprobs:
            choices = choices or [self.delta(content="")]
            choices[0]["logprobs"] = chat_logprobs(event.logprobs, self.pieces)
        if event.finish_reason is not None:
            last = choice(self.index, event.finish_reason, delta={}, logprobs=None)
            if self.n_calls and last["finish_reason"] == "stop":
                last["finish_reason"] = "tool_calls"
            choices.append(last)
        return choices

    def delta(self, **fields: Any) -> Choice:
        return choice(self.index, None, delta=fields, logprobs=None)


@dataclass(slots=True)
class TextChoices:
    """The choices of one row of a completion."""

    index: int
    pieces: Any
    opening: str = ""  # the text of the prompt, if the answer is to begin with it
    offset: int = 0  # characters of the tokens that have come

    def begin(self) -> list[Choice]:
        opening = choice(self.index, None, text=self.opening, logprobs=None)
        return [opening] if self.opening else []

    def gain(self, event: EngineEvent) -> list[Choice]:
        """One choice, if there is something to tell."""
        logprobs = None
        if event.logprobs:
            logprobs = legacy(event.token_ids, event.logprobs, self.pieces)
            logprobs["text_offset"] = [n + self.offset for n in logprobs["text_offset"]]
            self.offset += sum(map(len, logprobs["tokens"]))
        if not event.text and logprobs is None and event.finish_reason is None:
            return []
        return [choice(self.index, event.finish_reason, text=event.text, logprobs=logprobs)]


async def chunks(
    request: ServiceRequest,
    choices_of: Callable[[int], ChatChoices | TextChoices],
    common: dict[str, Any],
    has_usage: bool,
) -> AsyncIterator[str]:
    """The server-sent events of a stream; what they have in ``common`` comes first in each.

    ``has_usage``: the last event counts the tokens. Leaving cancels the request.
    """
    rows: dict[int, ChatChoices | TextChoices] = {}
    async with request:
        try:
            async for event in request:
                if event.finish_reason == "error":
                    continue  # what was raised comes next
                check_open(event.finish_reason)
                choices: list[Choice] = []
                if event.row not in rows:
                    rows[event.row] = choices_of(event.row)
                    choices = rows[event.row].begin()
                choices += rows[event.row].gain(event)
                if choices:
                    yield "".join(sse({**common, "choices": [each]}) for each in choices)
        except Exception as error:  # the status has been sent: the client reads it here
            if not isinstance(error, EngineClosedError):
                logger.error("A request has failed.", exc_info=error)
            yield sse(error_body(error, 500))
            return
        if has_usage:
            yield sse({**common, "choices": [], "usage": usage([request.output])})
        yield "data: [DONE]\n\n"


def check_open(finish_reason: str | None) -> None:
    """Raise ``EngineClosedError`` for an answer that the server has cut off; clients that leave read none."""
    if finish_reason == "cancelled":
        raise EngineClosedError("The server was closed before the answer ended.")


def sse(chunk: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
