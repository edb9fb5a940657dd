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
from jinja2 import TemplateError
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.utils import (
    BaseHandler,
    Modality,
    build_response_parser,
    get_response_template,
)

from ..engine.errors import DoesNotFitError, EngineClosedError, QueueFullError
from ..engine.serving import Service, ServiceRequest
from ..families import max_positions
from ..logs import logger
from ..openai_api import chat_response, completion_response, generate_kwargs, prompts_of, usage
from ..openai_api.responses import echoed
from ..text import Pieces
from .answers import ChatChoices, Message, TextChoices, chunks
from .tools import USUAL, Tools, reader_of

#: New tokens of an answer that neither the request nor the model limits, as upstream has it.
NEW_TOKENS = 1024

#: Fields of a generation config that a client sends along, and the model decides.
OF_THE_MODEL = ("bos_token_id", "pad_token_id", "transformers_version", "use_cache")

#: Arguments of chat templates that other servers take, and the values that change nothing.
OF_TEMPLATES = {"documents": [], "continue_final_message": False, "add_generation_prompt": True}

#: The kinds of content of a message, and those of it that only some models read.
TEXTS = ("text", "input_text", "output_text")
SEEN = ("image_url", "input_image", "video_url")
HEARD = ("input_audio", "audio_url")

#: Of the likeliest tokens that an answer tells of in each place, as OpenAI has it.
MAX_LOGPROBS = 20

#: Seconds after which a client that was refused may come again.
RETRY_AFTER = 1


@contextmanager
def refusals() -> Iterator[None]:
    """Turns what is raised before a request is in the engine into a status."""
    try:
        yield
    except HTTPException:
        raise
    except QueueFullError as error:
        raise HTTPException(429, str(error), {"Retry-After": str(RETRY_AFTER)}) from error
    except EngineClosedError as error:
        raise HTTPException(503, str(error)) from error
    except DoesNotFitError as error:
        advice = "lower `n` or `max_tokens`, or shorten the prompt"
        raise HTTPException(400, f"{error}: {advice}") from error
    except KeyError as error:
        raise HTTPException(400, f"The request lacks {error}.") from error
    except (AttributeError, IndexError, TemplateError, TypeError, ValueError) as error:
        raise HTTPException(400, str(error)) from error


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
        with refusals():
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
        """Upstream's ``handle_request``, which calls ``_streaming`` or ``_non_streaming``."""
        return await super().handle_request(body, request_id)

    def parameters(self, body: dict[str, Any]) -> dict[str, Any]:
        """The fields of generation that a body asks for. Raises ``ValueError``."""
        raise NotImplementedError

    def defaults(self) -> dict[str, Any]:
        """The model's own generation config, as far as it says something."""
        config = self.model_manager.only[0].generation_config
        return {name: value for name, value in vars(config).items() if value is not None}

    def _validate_request(self, body: dict[str, Any]) -> None:
        """Nothing: ``parameters`` has refused what is not known."""

    def _build_generation_config(self, *_: Any, **__: Any) -> None:
        """Nothing: the engine gets ``fields``."""

    def get_processor_inputs_from_messages(self, messages: list[Any], modality: Any) -> list[Any]:
        """Upstream's, which drops the parts that the model does not read; here they are refused."""
        kinds = [*TEXTS, *(SEEN if modality is not Modality.LLM else ())]
        kinds += HEARD if modality is Modality.MULTIMODAL else ()
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ValueError(
                    f"`{self.messages}` has to have objects with `role` and `content`, but one is "
                    f"{message!r:.80}."
                )
            content = message.get("content")
            for part in content if isinstance(content, list) else ():
                kind = part.get("type") if isinstance(part, dict) else part
                if kind not in kinds:
                    raise ValueError(
                        f"`{self.messages}` has content of type {kind!r}, but this model reads "
                        f"{', '.join(kinds)}."
                    )
        given = [{n: v for n, v in each.items() if v is not None} for each in messages]
        return BaseHandler.get_processor_inputs_from_messages(given, modality)

    async def add(self, service: Service, inputs: Any, **kwargs: Any) -> ServiceRequest:
        """Put a prompt, its ids or the model's inputs, into the engine."""
        model = self.model_manager.only[0]
        length = inputs["input_ids"].shape[-1] if hasattr(inputs, "keys") else len(inputs)
        if all(n not in self.fields | self.defaults() for n in ("max_new_tokens", "max_length")):
            kwargs["max_new_tokens"] = default_length(model, length)
        if hasattr(model, "has_talker"):  # it would speak, too
            kwargs["generation_mode"] = "text"
        inputs = dict(inputs) if hasattr(inputs, "keys") else inputs
        priority = self.body.get("priority", 0)
        return await service.add(inputs, priority=priority, **self.fields | kwargs)

    async def begin(self, service: Service, inputs: Any) -> ServiceRequest:
        """The request of a chat; if its answer is read by the model's own template, it has special tokens."""
        template = get_response_template(self.reader, self.model_manager.only[0])
        own = {} if template in (None, USUAL) else {"skip_special_tokens": False}
        return await self.add(service, inputs, **own)

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


class ChatHandler(EngineHandler, ChatCompletionHandler):
    """``/v1/chat/completions``."""

    def parameters(self, body: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise ValueError(
                f"`messages` has to be a list of messages, but is {body.get('messages')!r}."
            )
        for name, usual in OF_TEMPLATES.items():
            if body.get(name) not in (None, usual):
                raise ValueError(f"`{name}` is not supported: use `chat_template_kwargs`.")
        return generate_kwargs(body, is_chat=True, defaults=self.defaults())

    async def _streaming(
        self,
        request_id: str,
        model: Any,
        processor: Any,
        model_id: str,
        inputs: Any,
        gen_config: Any,
        gen_manager: Service,
        tools: Any = None,
    ) -> StreamingResponse:
        def choices_of(row: int) -> ChatChoices:
            return ChatChoices(row, self.message(inputs, tools), pieces, request_id)

        pieces = self.pieces
        request = await self.begin(gen_manager, inputs)
        lines = chunks(
            request, choices_of, self.common(request_id, "chat.completion.chunk"), self.count
        )
        return StreamingResponse(lines, media_type="text/event-stream")

    async def _non_streaming(
        self,
        request_id: str,
        model: Any,
        processor: Any,
        model_id: str,
        inputs: Any,
        gen_config: Any,
        gen_manager: Service,
        tools: Any = None,
    ) -> JSONResponse:
        output = await result_of(await self.begin(gen_manager, inputs))
        body = chat_response(output, model=model_id, tokenizer=self.tokenizer, id=request_id)
        for choice in body["choices"]:
            message = choice["message"]
            read = self.message(inputs, tools)
            message |= read.whole(message["content"], request_id, choice["index"])
            if "tool_calls" in message and choice["finish_reason"] == "stop":
                choice["finish_reason"] = "tool_calls"
        return JSONResponse(body)

    def message(self, inputs: Any, tools: Any) -> Message:
        """What reads an answer to a chat's ``inputs``."""
        model = self.model_manager.only[0]
        return Message(build_response_parser(self.reader, model, inputs["input_ids"], tools=tools))


class TextHandler(EngineHandler):
    """``/v1/completions``: of text or token ids, and of several prompts where it is no stream."""

    def parameters(self, body: dict[str, Any]) -> dict[str, Any]:
        return generate_kwargs(body, is_chat=False, defaults=self.defaults())

    async def answer(self, body: dict[str, Any], request_id: str) -> Any:
        model_id, _, _ = self._resolve_model(body)
        prompts = prompts_of(body, self.tokenizer, is_chat=False)
        service, pieces, echo = self.generation_state.service, self.pieces, bool(body.get("echo"))
        if body.get("stream"):
            if len(prompts) > 1:
                raise ValueError("With `stream`, `prompt` has to be a single prompt.")
            if echo and pieces is not None:
                raise ValueError("With `echo` and `logprobs`, `stream` has to be false.")
            opening = echoed(prompts[0], self.tokenizer) if echo else ""
            lines = chunks(
                await self.add(service, prompts[0]),
                lambda row: TextChoices(row, pieces, opening),
                self.common(request_id, "text_completion"),
                self.count,
            )
            return StreamingResponse(lines, media_type="text/event-stream")
        async with AsyncExitStack() as stack:
            requests = [
                await stack.enter_async_context(await self.add(service, prompt, has_events=False))
                for prompt in prompts
            ]
            outputs = [await result_of(request) for request in requests]
        common = {"model": model_id, "tokenizer": self.tokenizer, "id": request_id}
        return JSONResponse(completion_response(outputs, echo=echo, **common))
