"""Prompts with references from JSON lines, and their completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...engine.many import generate_many


def read(path: Path) -> list[dict[str, Any]]:
    """A row for each line of a file; one that cannot be used has ``line`` and ``error``. Raises ``OSError``."""
    rows: list[dict[str, Any]] = []
    for number, content in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            rows.append({"line": number, **parse(content.removeprefix(b"\xef\xbb\xbf"))})
        except ValueError as error:
            rows.append({"line": number, "error": str(error)})
    return rows


def parse(content: bytes) -> dict[str, Any]:
    """A line as ``{"prompt": …, "reference": …}``. Raises ``ValueError`` that says what is wrong."""
    if not content.strip():
        raise ValueError("the line is empty")
    try:
        value = json.loads(content)
        json.dumps(value, ensure_ascii=False).encode()  # fails for halves of surrogate pairs
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
    options = value.get("options", {})
    if not isinstance(options, dict):
        raise ValueError(f"`options` has to be a JSON object, but is {options!r}")
    if (n := options.get("num_return_sequences", 1)) != 1:
        why = "one completion is scored"
        raise ValueError(f"{why}: `num_return_sequences` has to be 1, but is {n!r}")
    return {"prompt": prompt, "references": references, "options": options}


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def complete(model: Any, tokenizer: Any, rows: list[dict[str, Any]], **kwargs: Any) -> None:
    """Give ``rows`` their ``prediction``, ``finish_reason`` and ``n_tokens``, or else an ``error``."""
    prompts = [(row["prompt"], row["options"]) for row in rows]
    outputs = generate_many(model, prompts, tokenizer, **kwargs)
    for row, output in zip(rows, outputs, strict=True):
        if output.error is not None:
            row["error"] = str(output.error) or type(output.error).__name__
            continue
        row |= {"prediction": output.text or "", "finish_reason": str(output.finish_reason)}
        row["n_tokens"] = len(output.token_ids)
