"""The work of ``hfgen batch``: lines of a file to an engine, and answers of it to another file."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from ...engine import Engine, RequestOutput
from ...engine.many import JobProgress
from ...engine.many import outputs as outputs_of
from ...settings.fields import FIELDS
from ..openai_api.requests import default_length, defaults_of, generate_kwargs, prompts_of
from ..openai_api.responses import chat_response, completion_response, error_body
from .batch import Line, Output, Requests
from .loading import Loaded
from .report import duration

#: URL → whether it asks for a chat; else it asks for a completion.
URLS = {"/v1/chat/completions": True, "/v1/completions": False}


@dataclass(slots=True)
class Job:
    """Feeds the lines that are not done to an engine, and writes what becomes of them."""

    loaded: Loaded
    lines: Requests
    output: Output
    fields: dict[str, Any]  # of the command line
    progress: JobProgress
    n_failed: int = 0
    #: Number of a prompt → its line, the outputs of the line's prompts (None: not ended), its place in them.
    running: dict[int, tuple[Line, list[Any], int]] = field(default_factory=dict)

    def run(self, engine: Engine) -> None:
        on_events = self.progress.add_events
        outputs = outputs_of(engine, self.prompts(), {}, in_order=False, on_events=on_events)
        for number, output in outputs:
            line, of_line, place = self.running.pop(number)
            of_line[place] = output
            if None not in of_line:
                self.finish(line, of_line)

    def prompts(self) -> Iterator[tuple[list[int], dict[str, Any]]]:
        """The prompts of the lines that are not done, and their arguments; wrong lines are written."""
        numbers = count()
        for line in self.lines:
            if line.key in self.output.done:
                continue
            try:
                prompts, kwargs = self.read(line)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a panic of Rust is no Exception; other lines go on
                self.fail(line, error)
                continue
            outputs = [None] * len(prompts)
            has_length = {"max_new_tokens", "max_length"} & (self.defaults | kwargs).keys()
            for place, prompt in enumerate(prompts):
                self.running[next(numbers)] = line, outputs, place
                if not has_length:
                    kwargs["max_new_tokens"] = default_length(self.loaded.model, len(prompt))
                yield prompt, dict(kwargs)

    @property
    def defaults(self) -> dict[str, Any]:
        """Fields of the command line, and of the model's own config."""
        return defaults_of(self.loaded.model) | self.fields

    def read(self, line: Line) -> tuple[list[list[int]], dict[str, Any]]:
        """The prompts of a line, and the arguments of ``generate``. Raises ``ValueError``."""
        body, url = line.request.get("body"), line.request.get("url")
        if line.error is not None:
            raise ValueError(line.error)
        if not isinstance(body, dict):
            raise ValueError(f"`body` has to be a JSON object, but is {body!r}.")
        if line.request.get("method", "POST") != "POST":
            raise ValueError(f"`method` has to be POST, but is {line.request['method']!r}.")
        if body.get("stream"):
            raise ValueError("`stream` has to be false: answers of a batch are written as a whole.")
        if url not in URLS:
            raise ValueError(f"`url` has to be one of {list(URLS)}, but is {url!r}.")
        is_chat = URLS[url]
        kwargs = self.fields | generate_kwargs(body, is_chat=is_chat, defaults=self.defaults)
        if not kwargs["do_sample"]:
            kwargs = {n: v for n, v in kwargs.items() if FIELDS[n].needs != "do_sample"}
        return prompts_of(body, self.loaded.tokenizer, is_chat=is_chat), kwargs

    def finish(self, line: Line, outputs: list[RequestOutput]) -> None:
        """Write the response of a request, or the error of one of its prompts."""
        if errors := [output.error for output in outputs if output.error is not None]:
            return self.fail(line, errors[0])
        asked, loaded = line.request["body"], self.loaded
        names = {"model": asked.get("model") or loaded.name, "tokenizer": loaded.tokenizer}
        if URLS[line.request["url"]]:
            body = chat_response(outputs[0], **names)
        else:
            body = completion_response(outputs, echo=bool(asked.get("echo")), **names)
        return self.write(line, 200, body, None)

    def fail(self, line: Line, error: BaseException) -> None:
        """Write that a line is wrong, or that answering it failed."""
        status = 400 if isinstance(error, IndexError | TypeError | ValueError) else 500
        body = error_body(error, status)
        kind, message = body["error"]["type"], body["error"]["message"]
        self.n_failed += 1
        self.output.n_failed += 1
        self.write(line, status, body, {"code": kind, "message": message, "line": line.number})

    def write(self, line: Line, status: int, body: Any, error: dict[str, Any] | None) -> None:
        name = uuid.uuid4().hex
        response = {"status_code": status, "request_id": name, "body": body}
        ids = {"custom_id": line.custom_id, "request_digest": line.digest}
        self.output.write({"id": f"batch_req_{name}", **ids, "response": response, "error": error})
        self.progress.add_done()

    def summary(self, n_before: int) -> str:
        """One line: how many were answered, failed, or done before; tokens and time."""
        progress, before = self.progress, f" · {n_before:,} done before" if n_before else ""
        return (
            f"{progress.n_done - self.n_failed:,} answered · {self.n_failed:,} failed{before} · "
            f"{progress.n_tokens:,} tokens · {duration(progress.seconds)} · "
            f"{progress.tokens_per_second:,.0f} tokens/s"
        )
