"""From outputs of the engine to a response body."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from ...logits.logprobs.openai import content, legacy
from ...state.text import Pieces, decode

#: Reasons of a text that was cut off; every other one is an end.
CUTS = frozenset(("length", "time", "timeout", "cancelled", "repetition", "error"))


def finish_reason(reason: Any) -> str:
    """OpenAI's word for why a row ended: ``"stop"``, or ``"length"`` for what was cut off.

    A criterion of the caller's own ends a text as a stop does. ``stop_reason`` keeps hfgen's word.
    """
    return "length" if reason in CUTS else "stop"


def stop_reason(reason: Any) -> str | int | None:
    """vLLM's ``stop_reason``: the stop string or token; ``None`` for an EOS and for the length.

    For other reasons it is their name, as ``"repetition"``.
    """
    if reason == "stop":
        return getattr(reason, "stop", None)
    return None if reason in ("eos", "grammar", "length") else str(reason)


def usage(outputs: Sequence[Any]) -> dict[str, int]:
    """Tokens of the prompts and of the answers of some ``RequestOutput``."""
    n_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    n_new = sum(len(row.token_ids) for output in outputs for row in output.sequences)
    counts = {"prompt_tokens": n_prompt, "completion_tokens": n_new}
    return counts | {"total_tokens": n_prompt + n_new}


def chat_response(output: Any, **common: Any) -> dict[str, Any]:
    """The body of a chat's response, of one ``RequestOutput``; ``common`` as of ``_response``."""

    def choice(output: Any, row: Any, pieces: Any) -> dict[str, Any]:
        has_any = row.logprobs is not None
        logprobs = {"content": content(row.logprobs, pieces), "refusal": None} if has_any else None
        message = {"role": "assistant", "content": row.text, "refusal": None}
        return {"message": message, "logprobs": logprobs}

    return _response([output], choice, "chatcmpl", "chat.completion", **common)


def completion_response(
    outputs: Any, *, echo: bool = False, tokenizer: Any = None, **common: Any
) -> dict[str, Any]:
    """The body of a completion's response, of one ``RequestOutput`` or one for each of its prompts.

    ``echo``: texts and log-probabilities begin with those of the prompt, which ``tokenizer`` spells.
    """

    def choice(output: Any, row: Any, pieces: Any) -> dict[str, Any]:
        text, ids, tokens = row.text, row.token_ids, row.logprobs
        if echo:
            text = echoed(output.prompt_token_ids, tokenizer) + (text or "")
            ids = [*output.prompt_token_ids, *ids]
        if echo and output.prompt_logprobs is not None:
            tokens = [*output.prompt_logprobs[0], *(tokens or ())]
        return {"text": text, "logprobs": None if tokens is None else legacy(ids, tokens, pieces)}

    outputs = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
    return _response(outputs, choice, "cmpl", "text_completion", tokenizer=tokenizer, **common)


def echoed(prompt: list[int], tokenizer: Any) -> str:
    """The text of a prompt, behind which that of its answers stands."""
    return decode(tokenizer, prompt, skip_special_tokens=True)


def _response(
    outputs: list[Any],
    choice: Callable[[Any, Any, Any], dict[str, Any]],
    prefix: str,
    kind: str,
    *,
    model: str,
    tokenizer: Any = None,
    id: str | None = None,
    created: int | None = None,
) -> dict[str, Any]:
    """``tokenizer``: spells the tokens of log-probabilities. ``created``: seconds since 1970."""
    pieces = None if tokenizer is None else Pieces(tokenizer)
    rows = [(output, row) for output in outputs for row in output.sequences]
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}" if id is None else id,
        "object": kind,
        "created": int(time.time()) if created is None else created,
        "model": model,
        "choices": [
            {
                "index": index,
                **choice(output, row, pieces),
                "finish_reason": finish_reason(row.finish_reason),
                "stop_reason": stop_reason(row.finish_reason),
            }
            for index, (output, row) in enumerate(rows)
        ],
        "usage": usage(outputs),
        "system_fingerprint": None,
    }


def error_body(error: BaseException | str, status: int = 400) -> dict[str, Any]:
    """The body of a response with ``status``: what was wrong, and with which of the two sides."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = str(error) or type(error).__name__
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
