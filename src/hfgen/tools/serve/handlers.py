"""Requests of ``/v1/chat/completions`` and ``/v1/completions``, and code that all requests share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse
from transformers.cli.serving.utils import build_response_parser, get_response_template

from ...engine.errors import DoesNotFitError, EngineClosedError, QueueFullError
from ...engine.serving import Service, ServiceRequest
from ...families import max_positions, text_tokenizer
from ...logits.grammar.llguidance import library_of
from ...settings.grammar import Grammar
from ...settings.logs import logger
from ...state.text import Pieces, decode
from ..openai_api.requests import (
    check_messages,
    default_length,
    defaults_of,
    generate_kwargs,
    in_words_of,
    prompts_of,
)
from ..openai_api.responses import chat_response, completion_response, head
from .answers import ChatChoices, Message, TextChoices, check_open, chunks
from .chats import USUAL, Tools, has_media, inputs_of, reader_of
from .limits import Limits, check_multiples
from .steering import steers_of

# Fields of a generation config that the model decides; below, those of a body that limit its answer.
OF_THE_MODEL = ("bos_token_id", "pad_token_id", "transformers_version", "use_cache")
MAX_LOGPROBS = 20  # of the likeliest tokens that an answer tells of in each place, as OpenAI has it
ANSWER_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens")
RETRY_AFTER = 1  # seconds after which a client that was refused may come again
N_WORKERS = 4  # requests of a kind that are prepared at once


@dataclass(frozen=True)
class Served:
    """The model of the server, the engine that decodes with it, and arguments by which all requests draft."""

    name: str
    model: Any
    processor: Any
    service: Service
    drafts: Mapping[str, Any]
    limits: Limits
    #: Steering vectors by name and module, which requests ask for.
    steering: Mapping[str, Any] = field(default_factory=dict)
    #: Threads for templates, tokenizers and grammars, and for media, which may come slowly.
    pool: Executor = field(default_factory=partial(ThreadPoolExecutor, N_WORKERS))
    media_pool: Executor = field(default_factory=partial(ThreadPoolExecutor, N_WORKERS))

    @property
    def tokenizer(self) -> Any:
        return text_tokenizer(self.processor)

    def check_name(self, body: dict[str, Any]) -> None:
        """Raise ``ValueError`` if ``body`` is for another model."""
        if (name := body.get("model")) not in (None, self.name):
            raise ValueError(f"`model` has to be {self.name!r}, but is {name!r:.80}.")

    async def prepared(self, prepare: Callable[..., Any], *args: Any, is_slow: bool = False) -> Any:
        """Run ``prepare`` in a worker thread and return its result; ``ValueError`` if it takes too long."""
        pool = self.media_pool if is_slow else self.pool
        running = asyncio.get_running_loop().run_in_executor(pool, prepare, *args)
        seconds = self.limits.prepare_seconds
        try:
            return await asyncio.wait_for(running, seconds)
        except asyncio.TimeoutError:
            limit = f"{seconds:g} seconds (--prepare-seconds)"
            raise ValueError(f"The request took more than {limit} to prepare.") from None


@contextmanager
def refusals(body: dict[str, Any]) -> Iterator[None]:
    """Turn errors before the request of ``body`` is in the engine into ``HTTPException``."""
    try:
        yield
    except QueueFullError as error:
        raise HTTPException(429, str(error), {"Retry-After": str(RETRY_AFTER)}) from error
    except EngineClosedError as error:
        raise HTTPException(503, str(error)) from error
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        message = in_words_of(body, str(error))
        if isinstance(error, DoesNotFitError):
            message += " Lower `n` or `max_tokens`, or shorten the prompt."
        elif not isinstance(error, IndexError | ValueError):
            message = f"The request cannot be read: {message}"
        raise HTTPException(400, message) from error


async def result_of(request: ServiceRequest) -> Any:
    """The output of a request; raises ``HTTPException``: 500 if it has failed, 503 if it was cut off."""
    try:
        async with request:
            output = await request.result()
        check_open(output.finish_reason)
        return output
    except EngineClosedError as error:
        raise HTTPException(503, str(error)) from error
    except Exception as error:
        logger.error("A request has failed.", exc_info=error)
        message = f"The request has failed: {type(error).__name__}: {error}"
        raise HTTPException(500, message) from error


class Handler:
    """One request: its ``body``, and its ``fields`` of generation. A class for each path."""

    messages = "messages"  # the field of a body that has them
    is_chat = True

    def __init__(self, served: Served, body: dict[str, Any], request_id: str) -> None:
        self.served, self.body, self.request_id = served, body, request_id
        self.fields: dict[str, Any] = {}

    async def response(self) -> Response:
        """Answer, or raise ``HTTPException``: 400, 429, 500 or 503."""
        with refusals(self.body):
            self.served.check_name(self.body)
            await self.served.prepared(self.read)
            return await self.answer()

    async def answer(self) -> Response:
        raise NotImplementedError

    def parameters(self, body: dict[str, Any]) -> dict[str, Any]:
        """The fields of generation that a body asks for. Raises ``ValueError``."""
        return generate_kwargs(body, is_chat=self.is_chat, defaults=defaults_of(self.served.model))

    def read(self) -> None:
        """Check the body and set ``fields``. Raises ``ValueError`` for what a server cannot give, too."""
        self.served.limits.check(self.body)
        self.body = body = unfolded(self.body)
        of_server = ("priority", "interventions")
        of_generate = {n: v for n, v in body.items() if n not in of_server}
        self.fields = fields = self.parameters(of_generate)
        if (scales := body.get("interventions")) is not None:
            fields["interventions"] = steers_of(scales, self.served.steering)
        if not 0 <= (fields.get("logprobs") or 0) <= MAX_LOGPROBS:
            name = "top_logprobs" if "top_logprobs" in body else "logprobs"
            raise ValueError(f"`{name}` has to be between 0 and {MAX_LOGPROBS}, but is not.")
        if len(fields.get("logprob_token_ids") or ()) > MAX_LOGPROBS:
            raise ValueError(f"`logprob_token_ids` has to have at most {MAX_LOGPROBS} ids.")
        if body.get("prompt_logprobs") is not None:
            advice = "a completion with `echo` and `logprobs` has the prompt's"
            raise ValueError(f"`prompt_logprobs` is not supported: {advice}.")
        most = self.served.service.engine.scheduler.max_rows
        for name, argument in ("n", "num_return_sequences"), ("num_beams", "num_beams"):
            if (n_rows := fields.get(argument) or 1) > most:
                raise ValueError(f"`{name}` is at most {most} (--max-rows), but is {n_rows}.")
        self.compile()

    def compile(self) -> None:
        """Compile the request's grammar here, so that the engine's thread finds it."""
        if isinstance(grammar := self.fields.get("grammar"), Grammar):
            check_multiples(grammar.text)
            library_of(self.served.tokenizer).matcher(grammar)

    async def begin(self, messages: Any, body: dict[str, Any]) -> tuple[Any, Any, ServiceRequest]:
        """Add a chat to the engine; return its inputs, what upstream's parsers read its answer with, and the request."""
        check_messages(messages, self.messages)
        is_slow = has_media(messages)
        inputs, reader = await self.served.prepared(self.of_chat, messages, body, is_slow=is_slow)
        return inputs, reader, await self.add(dict(inputs))

    def of_chat(self, messages: Any, body: dict[str, Any]) -> tuple[Any, Any]:
        """The inputs of the model for a chat, and what reads its answer. Raises ``ValueError``."""
        model, processor, tools = self.served.model, self.served.processor, Tools.of(body)
        reader, format = reader_of(model, processor, tools)
        if (calls := tools.grammar(format, self.fields.get("grammar"))) is not None:
            self.fields["grammar"] = calls
            self.compile()
        if get_response_template(reader, model) not in (None, USUAL):
            self.fields["skip_special_tokens"] = False  # the model's own template reads them
        body = body if tools.functions else body | {"tools": None}
        limits = self.served.limits
        return inputs_of(model, processor, messages, body, self.messages, limits), reader

    async def add(self, inputs: Any, **kwargs: Any) -> ServiceRequest:
        """Put a prompt, its ids or the model's inputs, into the engine."""
        served, fields, is_ids = self.served, self.fields, not isinstance(inputs, dict)
        settings = fields | defaults_of(served.model)
        length = len(inputs) if is_ids else inputs["input_ids"].shape[-1]
        self.check_length(length)
        if "max_new_tokens" not in settings and "max_length" not in settings:
            kwargs["max_new_tokens"] = default_length(served.model, length)
        if hasattr(served.model, "has_talker"):  # it would speak, too
            kwargs["generation_mode"] = "text"
        is_text = is_ids or inputs.keys() <= {"input_ids", "attention_mask"}
        if is_text and (fields.get("num_beams") or settings.get("num_beams") or 1) == 1:
            kwargs |= served.drafts
        priority = self.body.get("priority", 0)
        return await served.service.add(inputs, priority=priority, **fields | kwargs)

    def check_length(self, length: int) -> None:
        """Raise ``ValueError`` for a prompt, or a prompt and an answer, of more tokens than positions."""
        positions, n_new = max_positions(self.served.model), self.fields.get("max_new_tokens")
        if positions is None:
            return
        has = f"the model has {positions:,} positions."
        if length + (0 if n_new == 0 else 1) > positions:
            name = self.messages if self.messages in self.body else "prompt"
            raise ValueError(f"`{name}` has {length:,} tokens, but {has}")
        if n_new is not None and length + n_new > positions:
            room = positions - length
            if any(self.body.get(name) is not None for name in ANSWER_LENGTHS):
                raise ValueError(f"`max_tokens` is at most {room:,} behind this prompt: {has}")
            self.fields["max_new_tokens"] = room

    def streamed(
        self, request: ServiceRequest, kind: str, choices_of: Callable[[int], Any]
    ) -> StreamingResponse:
        """Stream the answer in chunks of a ``kind``, with its usage at the end for ``include_usage``."""
        has_usage = bool((self.body.get("stream_options") or {}).get("include_usage"))
        common = head(kind, self.served.name, self.request_id)
        lines = chunks(request, choices_of, common, has_usage)
        return StreamingResponse(lines, media_type="text/event-stream")

    @property
    def pieces(self) -> Any:
        """The texts of single tokens for log-probabilities; ``None`` without these."""
        return Pieces(self.served.tokenizer) if "logprobs" in self.fields else None

    @property
    def names(self) -> dict[str, Any]:
        """What a whole response names, and what spells its tokens."""
        served = self.served
        return {"model": served.name, "tokenizer": served.tokenizer, "id": self.request_id}


def unfolded(body: dict[str, Any]) -> dict[str, Any]:
    """The body with the fields of its ``generation_config``, JSON text, which ``transformers chat`` sends."""
    body = dict(body)
    config = body.pop("generation_config", None)
    try:
        fields = {} if config is None else dict(json.loads(config))
    except (TypeError, ValueError):
        message = "`generation_config` has to be the JSON text of one, but is not."
        raise ValueError(message) from None
    return {name: value for name, value in fields.items() if name not in OF_THE_MODEL} | body


class Chat(Handler):
    """``/v1/chat/completions``."""

    async def answer(self) -> Response:
        body, served, pieces = self.body, self.served, self.pieces
        inputs, reader, request = await self.begin(body.get("messages"), body)

        def message() -> Message:
            ids, tools = inputs["input_ids"], body.get("tools")
            return Message(build_response_parser(reader, served.model, ids, tools=tools))

        if body.get("stream"):
            kind, id = "chat.completion.chunk", self.request_id
            return self.streamed(request, kind, lambda n: ChatChoices(n, message(), pieces, id))
        response = chat_response(await result_of(request), **self.names)
        for choice in response["choices"]:
            parts = choice["message"]
            parts |= message().whole(parts["content"], self.request_id, choice["index"])
            if "tool_calls" in parts and choice["finish_reason"] == "stop":
                choice["finish_reason"] = "tool_calls"
        return JSONResponse(response)


class Completion(Handler):
    """``/v1/completions``: of text or token ids, and of several prompts where it is no stream."""

    is_chat = False

    async def answer(self) -> Response:
        tokenizer, read = self.served.tokenizer, partial(prompts_of, is_chat=False)
        prompts = await self.served.prepared(read, self.body, tokenizer)
        pieces, echo = self.pieces, bool(self.body.get("echo"))
        if self.body.get("stream"):
            if len(prompts) > 1:
                raise ValueError("With `stream`, `prompt` has to be a single prompt.")
            if echo and pieces is not None:
                raise ValueError("With `echo` and `logprobs`, `stream` has to be false.")
            opening = decode(tokenizer, prompts[0], True) if echo else ""
            request = await self.add(prompts[0])
            kind = "text_completion"
            return self.streamed(request, kind, lambda n: TextChoices(n, pieces, opening))
        async with AsyncExitStack() as stack:
            requests = [
                await stack.enter_async_context(await self.add(prompt, has_events=False))
                for prompt in prompts
            ]
            outputs = [await result_of(request) for request in requests]
        return JSONResponse(completion_response(outputs, echo=echo, **self.names))
