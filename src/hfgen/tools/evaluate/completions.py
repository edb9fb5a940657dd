"""Reading prompts with references from JSON lines, and completing them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...engine.many import generate_many


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the file, counted from 1. ``options`` are arguments of ``generate`` for it alone."""

    number: int
    prompt: Any
    references: list[str]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failure:
    """A line that cannot be used, or whose generation failed."""

    number: int
    error: str


@dataclass(frozen=True, slots=True)
class Completion:
    """The model's answer to a line."""

    line: Line
    text: str
    n_tokens: int
    finish_reason: str


def read(path: Path) -> tuple[list[Line], list[Failure]]:
    """The lines of a file, and those that cannot be used. Raises ``OSError``."""
    lines, failures = [], []
    for number, content in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            lines.append(parse(number, content.removeprefix(b"\xef\xbb\xbf")))
        except ValueError as error:
            failures.append(Failure(number, str(error)))
    return lines, failures


def parse(number: int, content: bytes) -> Line:
    """A line as ``{"prompt": …, "reference": …}``. Raises ``ValueError`` that says what is wrong."""
    if not content.strip():
        raise ValueError("the line is empty")
    try:
        value = json.loads(content)
        json.dumps(
            value, ensure_ascii=False
        ).encode()  # halves of surrogate pairs cannot be written
    except (ValueError, RecursionError) as error:  # also what is not UTF-8
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"it has to be a JSON object, but is {value!r:.80}")
    prompt, references = value.get("prompt"), value.get("reference")
    if not (isinstance(prompt, str) or _is_list_of(prompt, dict)) or not prompt:
        raise ValueError(f"`prompt` has to be text or a list of messages, but is {prompt!r}")
    references = [references] if isinstance(references, str) else references
    if not _is_list_of(references, str) or not references:
        raise ValueError(f"`reference` has to be text or a list of texts, but is {references!r}")
    own = value.get("options", {})
    if not isinstance(own, dict):
        raise ValueError(f"`options` has to be a JSON object, but is {own!r}")
    if (n := own.get("num_return_sequences", 1)) != 1:
        raise ValueError(
            f"one completion is scored: `num_return_sequences` has to be 1, but is {n!r}"
        )
    return Line(number, prompt, references, own)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def complete(
    model: Any, tokenizer: Any, lines: Sequence[Line], **kwargs: Any
) -> Iterator[Completion | Failure]:
    """For each line in order: its completion, or why there is none. ``kwargs``: of ``generate_many``."""
    prompts = [(line.prompt, line.options) for line in lines]
    outputs = generate_many(model, prompts, tokenizer, **kwargs)
    for line, output in zip(lines, outputs, strict=True):
        if output.error is not None:
            yield Failure(line.number, str(output.error) or type(output.error).__name__)
        else:
            n_tokens, reason = len(output.token_ids), str(output.finish_reason)
            yield Completion(line, output.text or "", n_tokens, reason)
