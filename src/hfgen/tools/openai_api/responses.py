"""From outputs of the engine to a response body."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from ...logits.logprobs.result import content, legacy
from ...state.text import Pieces, decode

#: Reasons of a text that was cut off; every other one is an end.
CUTS = frozenset(("length", "time", "timeout", "cancelled", "repetition", "error"))


def choice(index: int, reason: Any, **fields: Any) -> dict[str, Any]:
    """A choice of a row that has ended for ``reason``, or goes on (``None``).

    Its ``finish_reason`` is OpenAI's word: ``"length"`` for what was cut off, else ``"stop"``. Its
    ``stop_reason`` is vLLM's: the stop string or token, and for other reasons than an EOS and the
    length their name.
    """
    fields = {"index": index, **fields, "finish_reason": None}
    if reason is None:
        return fields
    stop = None if reason in ("eos", "grammar", "length") else str(reason)
    stop = getattr(reason, "stop", None) if reason == "stop" else stop
    word = "length" if reason in CUTS else "stop"
    return fields | {"finish_reason": word, "stop_reason": stop}


def chat_logprobs(tokens: Any, pieces: Pieces | None) -> dict[str, Any] | None:
    return None if tokens is None else {"content": content(tokens, pieces), "refusal": None}


def usage(outputs: Sequence[Any]) -> dict[str, int]:
    """Tokens of the prompts and of the answers of some ``RequestOutput``."""
    n_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    n_new = sum(len(row.token_ids) for output in outputs for row in output.sequences)
    counts = {"prompt_tokens": n_prompt, "completion_tokens": n_new}
    return counts | {"total_tokens": n_prompt + n_new}


def head(kind: str, model: str, id: str | None = None, created: Any = None) -> dict[str, Any]:
    """The first fields of a response; ``created``: seconds since 1970."""
    if id is None:
        id = f"{'cmpl' if kind == 'text_completion' else 'chatcmpl'}-{uuid.uuid4().hex}"
    created = int(time.time()) if created is None else created
    return {"id": id, "object": kind, "created": created, "model": model}


def chat_response(output: Any, *, tokenizer: Any = None, **names: Any) -> dict[str, Any]:
    """The body of a chat's response; ``names`` as of ``head``. ``tokenizer``: spells log-probabilities."""
    pieces = None if tokenizer is None else Pieces(tokenizer)
    choices = [
        choice(
            index,
            row.finish_reason,
            message={"role": "assistant", "content": row.text, "refusal": None},
            logprobs=chat_logprobs(row.logprobs, pieces),
        )
        for index, row in enumerate(output.sequences)
    ]
    return _response(head("chat.completion", **names), choices, [output])


def completion_response(
    outputs: Any, *, echo: bool = False, tokenizer: Any = None, **names: Any
) -> dict[str, Any]:
    """The body of a completion's response, of one ``RequestOutput`` or one for each of its prompts.

    ``echo``: texts and log-probabilities begin with those of the prompt, which ``tokenizer`` spells.
    """
    pieces = None if tokenizer is None else Pieces(tokenizer)
    outputs = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
    choices: list[dict[str, Any]] = []
    for output in outputs:
        for row in output.sequences:
            text, ids, tokens = row.text, row.token_ids, row.logprobs
            if echo:
                text = decode(tokenizer, output.prompt_token_ids, True) + (text or "")
                ids = [*output.prompt_token_ids, *ids]
                if output.prompt_logprobs is not None:
                    tokens = [*output.prompt_logprobs[0], *(tokens or ())]
            logprobs = None if tokens is None else legacy(ids, tokens, pieces)
            choices.append(choice(len(choices), row.finish_reason, text=text, logprobs=logprobs))
    return _response(head("text_completion", **names), choices, outputs)


def _response(names: dict[str, Any], choices: list[Any], outputs: list[Any]) -> dict[str, Any]:
    return {**names, "choices": choices, "usage": usage(outputs), "system_fingerprint": None}


def error_body(error: BaseException | str, status: int = 400) -> dict[str, Any]:
    """The body of a response with ``status``: what was wrong, and with which of the two sides."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = str(error) or type(error).__name__
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
