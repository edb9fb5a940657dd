"""The handlers of ``/v1/chat/completions`` and ``/v1/completions``, and code that all handlers share."""

from __future__ import annotations

import copy
import inspect
import json
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse, StreamingResponse
from transformers.cli.serving.utils import (
    BaseHandler,
    build_response_parser,
    get_response_template,
)

from ..engine.errors import DoesNotFitError, EngineClosedError, QueueFullError
from ..engine.serving import Service, ServiceRequest
from ..families import max_positions
from ..logs import logger
from ..openai_api import (
    chat_response,
    completion_response,
    generate_kwargs,
    in_words_of,
    prompts_of,
    usage,
)
from ..openai_api.responses import echoed
from ..text import Pieces
from .answers import ChatChoices, Message, TextChoices, chunks
from .chats import inputs_of
from .tools import USUAL, Tools, reader_of

#: New tokens of an answer that neither the request nor the model limits, as upstream has it.
NEW_TOKENS = 1024

#: Fields of a generation config that a client sends along, and the model decides.
OF_THE_MODEL = ("bos_token_id", "pad_token_id", "transformers_version", "use_cache")

#: Of the likeliest tokens that an answer tells of in each place, as OpenAI has it.
MAX_LOGPROBS = 20

#: Seconds after which a client that was refused may come again.
RETRY_AFTER = 1


@contextmanager
def refusals(body: dict[str, Any]) -> Iterator[None]:
    """Turns what is raised before the request of ``body`` is in the engine into a status."""
    try:
        yield
    except HTTPException:
        raise
    except QueueFullError as error:
        raise HTTPException(429, str(error), {"Retry-After": str(RETRY_AFTER)}) from error
    except EngineClosedError as error:
        raise HTTPException(503, str(error)) from error
    except DoesNotFitError as error:
        advice = "Lower `n` or `max_tokens`, or shorten the prompt."
        raise HTTPException(400, f"{error} {advice}") from error
    except (IndexError, ValueError) as error:
        raise HTTPException(400, in_words_of(body, str(error))) from error
    except (AttributeError, KeyError, TypeError) as error:
        message = f"The request cannot be read: {in_words_of(body, str(error))}"
        raise HTTPException(400, message) from error


async def result_of(request: ServiceRequest) -> Any:
    """The output of a request; raises ``HTTPException`` with 500 if it has failed."""
    try:
        async with request:
            return await request.result()
    except Exception as error:
        logger.error("A request has failed.", exc_info=error)
        message = f"The request has failed: {type(error).__name__}: {error}"
        raise HTTPException(500, message) from error


class EngineHandler(BaseHandler):
    """What the handlers share: parameters of a request, and its way into the engine.

    A copy of the handler serves each request, and knows its ``body`` and the ``fields`` of generation.
    """

    body: dict[str, Any]
    fields: dict[str, Any]
    #: Reads thoughts and calls of answers, as upstream's parsers take it.
    reader: Any
    #: The field of a body that has its messages.
    messages = "messages"

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Answer, or raise ``HTTPException``: 400, 429, 500 or 503."""
        own = copy.copy(self)
        with refusals(body):
            own.body = body = unfolded(body)
            own.fields = self.parameters({n: v for n, v in body.items() if n != "priority"})
            check(own.fields, body)
            tools = Tools.of(body)
            model, processor = self.model_manager.only
            own.reader, format = reader_of(model, processor, tools)
            calls = tools.grammar(format, own.fields.get("grammar"))
            if calls is not None:
                own.fields["grammar"] = calls
            if not tools.functions:
                body = {name: value for name, value in body.items() if name != "tools"}
            answer = await own.answer(body, request_id)
            return await answer if inspect.isawaitable(answer) else answer

    async def answer(self, body: dict[str, Any], request_id: str) -> Any:
        """The response, or a coroutine that returns it."""
        raise NotImplementedError

    def parameters(self, body: dict[str, Any]) -> dict[str, Any]:
        """The fields of generation that a body asks for. Raises ``ValueError``."""
        raise NotImplementedError

    def defaults(self) -> dict[str, Any]:
        """The model's own generation config, as far as it says something."""
        config = self.model_manager.only[0].generation_config
        return {name: value for name, value in vars(config).items() if value is not None}

    def inputs(self, messages: Any, body: dict[str, Any]) -> Any:
        """The inputs of the model for a chat; raises ``ValueError``."""
        model, processor = self.model_manager.only
        modality = self.model_manager.get_model_modality(model, processor=processor)
        return inputs_of(model, processor, modality, messages, body, self.messages)

    async def add(self, inputs: Any, **kwargs: Any) -> ServiceRequest:
        """Put a prompt, its ids or the model's inputs, into the engine."""
        model = self.model_manager.only[0]
        length = inputs["input_ids"].shape[-1] if hasattr(inputs, "keys") else len(inputs)
        if all(n not in self.fields | self.defaults() for n in ("max_new_tokens", "max_length")):
            kwargs["max_new_tokens"] = default_length(model, length)
        if hasattr(model, "has_talker"):  # it would speak, too
            kwargs["generation_mode"] = "text"
        inputs = dict(inputs) if hasattr(inputs, "keys") else inputs
        is_text = not isinstance(inputs, dict) or inputs.keys() <= {"input_ids", "attention_mask"}
        if is_text and ((self.fields | self.defaults()).get("num_beams") or 1) == 1:
            kwargs |= self.model_manager.drafts
        priority = self.body.get("priority", 0)
        service: Service = self.generation_state.service
        return await service.add(inputs, priority=priority, **self.fields | kwargs)

    async def begin(self, inputs: Any) -> ServiceRequest:
        """The request of a chat; if its answer is read by the model's own template, it has special tokens."""
        template = get_response_template(self.reader, self.model_manager.only[0])
        own = {} if template in (None, USUAL) else {"skip_special_tokens": False}
        return await self.add(inputs, **own)

    def common(self, request_id: str, kind: str) -> dict[str, Any]:
        """What the chunks of a stream have in common."""
        created, name = int(time.time()), self.model_manager.force_model
        return {"id": request_id, "object": kind, "created": created, "model": name}

    @property
    def tokenizer(self) -> Any:
        processor = self.model_manager.only[1]
        return getattr(processor, "tokenizer", processor)

    @property
    def pieces(self) -> Any:
        """The texts of single tokens, if log-probabilities are asked for."""
        return Pieces(self.tokenizer) if "logprobs" in self.fields else None

    @property
    def count(self) -> Any:
        """What counts the tokens of an output, if a stream is to end with that."""
        has_usage = (self.body.get("stream_options") or {}).get("include_usage")
        return (lambda output: usage([output])) if has_usage else None


def unfolded(body: dict[str, Any]) -> dict[str, Any]:
    """The body with the fields of its ``generation_config``, JSON text, which ``transformers chat`` sends."""
    if body.get("generation_config") is None:
        return body
    try:
        fields = dict(json.loads(body["generation_config"]))
    except (TypeError, ValueError):
        raise ValueError(
            "`generation_config` has to be the JSON text of one, but is not."
        ) from None
    rest = {name: value for name, value in body.items() if name != "generation_config"}
    return {name: value for name, value in fields.items() if name not in OF_THE_MODEL} | rest


def check(fields: dict[str, Any], body: dict[str, Any]) -> None:
    """Refuse what a server cannot give: log-probabilities of whole vocabularies, and of the prompt."""
    if not 0 <= (fields.get("logprobs") or 0) <= MAX_LOGPROBS:
        name = "top_logprobs" if "top_logprobs" in body else "logprobs"
        raise ValueError(f"`{name}` has to be between 0 and {MAX_LOGPROBS}, but is not.")
    if type(body.get("priority", 0)) is not int:
        raise ValueError(f"`priority` has to be an integer, but is {body['priority']!r}.")
    if body.get("prompt_logprobs") is not None:
        raise ValueError(
            "`prompt_logprobs` is not supported: a completion with `echo` and `logprobs` has them."
        )


def default_length(model: Any, prompt_length: int) -> int:
    """New tokens where nobody limits them: as many as the model has positions for, up to a limit."""
    positions = max_positions(model)
    room = NEW_TOKENS if positions is None else positions - prompt_length
    return max(1, min(NEW_TOKENS, room))


class ChatHandler(EngineHandler):
    """``/v1/chat/completions``."""

    def parameters(self, body: dict[str, Any]) -> dict[str, Any]:
        return generate_kwargs(body, is_chat=True, defaults=self.defaults())

    async def answer(self, body: dict[str, Any], request_id: str) -> Any:
        model_id, model, _ = self._resolve_model(body)
        inputs, pieces = self.inputs(body.get("messages"), body), self.pieces

        def message() -> Message:
            ids, tools = inputs["input_ids"], body.get("tools")
            return Message(build_response_parser(self.reader, model, ids, tools=tools))

        request = await self.begin(inputs)
        if body.get("stream"):
            lines = chunks(
                request,
                lambda row: ChatChoices(row, message(), pieces, request_id),
                self.common(request_id, "chat.completion.chunk"),
                self.count,
            )
            return StreamingResponse(lines, media_type="text/event-stream")
        output = await result_of(request)
        response = chat_response(output, model=model_id, tokenizer=self.tokenizer, id=request_id)
        for choice in response["choices"]:
            own = choice["message"]
            own |= message().whole(own["content"], request_id, choice["index"])
            if "tool_calls" in own and choice["finish_reason"] == "stop":
                choice["finish_reason"] = "tool_calls"
        return JSONResponse(response)


class TextHandler(EngineHandler):
    """``/v1/completions``: of text or token ids, and of several prompts where it is no stream."""

    def parameters(self, body: dict[str, Any]) -> dict[str, Any]:
        return generate_kwargs(body, is_chat=False, defaults=self.defaults())

    async def answer(self, body: dict[str, Any], request_id: str) -> Any:
        model_id, _, _ = self._resolve_model(body)
        prompts = prompts_of(body, self.tokenizer, is_chat=False)
        pieces, echo = self.pieces, bool(body.get("echo"))
        if body.get("stream"):
            if len(prompts) > 1:
                raise ValueError("With `stream`, `prompt` has to be a single prompt.")
            if echo and pieces is not None:
                raise ValueError("With `echo` and `logprobs`, `stream` has to be false.")
            opening = echoed(prompts[0], self.tokenizer) if echo else ""
            lines = chunks(
                await self.add(prompts[0]),
                lambda row: TextChoices(row, pieces, opening),
                self.common(request_id, "text_completion"),
                self.count,
            )
            return StreamingResponse(lines, media_type="text/event-stream")
        async with AsyncExitStack() as stack:
            requests = [
                await stack.enter_async_context(await self.add(prompt, has_events=False))
                for prompt in prompts
            ]
            outputs = [await result_of(request) for request in requests]
        common = {"model": model_id, "tokenizer": self.tokenizer, "id": request_id}
        return JSONResponse(completion_response(outputs, echo=echo, **common))
