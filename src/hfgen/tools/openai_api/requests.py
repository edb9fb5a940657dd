"""From a request body to the arguments of ``generate``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...families import max_positions
from ...settings import grammar
from ...settings.fields import FIELDS, PER_ROW, with_suggestions
from ...settings.vllm import PARAMS

#: Tokens of a completion whose body gives no limit; a chat goes on to its end (OpenAI's defaults).
COMPLETION_TOKENS = 16

#: New tokens of a chat that neither the request nor the model limits, as upstream has it.
CHAT_TOKENS = 1024

#: Fields of a body that say what the prompt is: whoever makes the prompt reads them.
OF_THE_PROMPT = frozenset(
    "messages prompt tools tool_choice parallel_tool_calls documents chat_template_kwargs "
    "add_generation_prompt continue_final_message add_special_tokens".split()
)
#: Fields about the model, the transport and the accounting, which change no token.
OF_THE_SERVER = frozenset(
    "model stream stream_options user metadata store service_tier safety_identifier "
    "prompt_cache_key request_id".split()
)
#: Unsupported fields of OpenAI, with their neutral value, which is accepted, and the reason.
REFUSED: dict[str, tuple[Any, str]] = {
    "audio": (None, "answers are text only"),
    "best_of": (1, "use `n`, and choose by `logprobs`"),
    "function_call": (None, "use `tools`"),
    "functions": (None, "use `tools`"),
    "modalities": (["text"], "answers are text only"),
    "prediction": (None, "the drafter is chosen when the model is loaded"),
    "reasoning_effort": (None, "use `chat_template_kwargs` or `thinking_token_budget`"),
    "suffix": (None, "write the suffix into the prompt, in the format of the model"),
    "verbosity": (None, "ask for it in the prompt"),
    "web_search_options": (None, "web search is not available"),
}
#: Fields of vLLM's earlier versions: the kind of grammar that each holds.
GUIDED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
#: hfgen's own names that a body may use. Fields that name files, or what is kept in memory, are not among them.
OWN = frozenset(PER_ROW) | frozenset(
    "num_beams early_stopping length_penalty token_healing sampler_order logprobs_mode".split()
)
#: The fields of hfgen by which values are checked whose names in a body are others.
CHECKED_AS = {
    "n": "num_return_sequences",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "stop": "stop_strings",
    "top_logprobs": "logprobs",
}
#: Further arguments of ``generate`` that come from fields with other names.
FROM: dict[str, tuple[str, ...]] = {
    "sequence_bias": ("logit_bias",),
    "grammar": ("response_format", "structured_outputs", *GUIDED, "tools", "text"),
    "input_ids": ("prompt", "messages", "input"),
    "max_completion_tokens": ("max_output_tokens", "max_completion_tokens"),
}


def in_words_of(body: Mapping[str, Any], message: str) -> str:
    """``message`` about arguments of ``generate`` with the names of the fields that ``body`` has."""

    def field(match: re.Match[str]) -> str:
        name = match[1]
        names = FROM.get(name, [n for n, own in CHECKED_AS.items() if own == name != "logprobs"])
        return "`" + next((n for n in [name, *names] if n in body), [*names, name][0])

    return re.sub(r"`(\w+)", field, message)


#: White space between the tokens of JSON: as much as it likes, a small model writes without end.
SPACE = " ?"


def _response_format(value: Any) -> dict[str, Any]:
    match value:
        case {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"grammar": grammar.json_object(whitespace=SPACE)}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"grammar": grammar.json(schema, whitespace=SPACE)}
        case {"type": "json_schema"}:
            raise ValueError(
                "`response_format` has to have `json_schema`: {name, schema}, but has not."
            )
    kinds = ["json_object", "json_schema", "text"]
    raise ValueError(f"`response_format` has to have a `type` of {kinds}, but is {value!r}.")


def _checked(name: str, value: Any) -> Any:
    """``value`` as the field behind ``name`` has it. Raises ``ValueError`` with the name in the body."""
    row = FIELDS.get(CHECKED_AS.get(name, name))
    if row is None:
        return value
    if isinstance(value, bool) and row.kind.option in ("a number", "an integer"):
        raise ValueError(f"`{name}` has to be {row.kind.words}, but is {value}.")
    if row.kind.option == "a number" and isinstance(value, int):
        value = float(value)  # JSON does not tell 2 from 2.0
    row.check(name, value)
    return value


def _logit_bias(value: Any) -> dict[str, Any]:
    try:
        return PARAMS["logit_bias"].becomes(value)
    except (AttributeError, TypeError, ValueError):
        raise ValueError(
            f"`logit_bias` has to map token ids to numbers, but is {value!r}."
        ) from None


def default_length(model: Any, prompt_length: int) -> int:
    """New tokens where nobody limits them: as many as the model has positions for, up to a limit."""
    positions = max_positions(model)
    room = CHAT_TOKENS if positions is None else positions - prompt_length
    return max(1, min(CHAT_TOKENS, room))


def generate_kwargs(
    body: Mapping[str, Any], *, is_chat: bool, defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The arguments of ``generate`` that a request's ``body`` asks for; not the prompt.

    ``null`` is not given. A temperature of 0 decodes greedily. ``defaults``: fields of a generation
    config that hold where the body says nothing, as those of the model; where they say nothing either,
    it is as OpenAI has it: sampling at temperature 1 of all tokens, and 16 tokens of a completion. A
    chat that gives no limit has no ``max_new_tokens`` here. Other fields: those of vLLM's
    ``SamplingParams``, and hfgen's that hold per row.

    Raises ``ValueError`` for an unknown field, an unsupported field, and a wrong value.
    """
    defaults = {} if defaults is None else defaults
    set_fields = {name: value for name, value in body.items() if value is not None}
    fields: dict[str, Any] = {}
    for name, value in set_fields.items():
        try:
            update = _fields_of(name, value, set_fields, is_chat)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, ValueError) and f"`{name}`" in str(error):
                raise
            raise ValueError(f"`{name}` cannot be {value!r:.80}: {error}") from error
        if "grammar" in fields and "grammar" in update:
            raise ValueError(f"`{name}` is a second grammar, but an answer can have only one.")
        fields |= update
    n_beams = fields.get("num_beams") or defaults.get("num_beams") or 1
    if "do_sample" not in fields:
        is_sampled = defaults.get("do_sample", n_beams == 1)
        fields["do_sample"] = bool(is_sampled and defaults.get("temperature") != 0)
    if not fields["do_sample"]:
        if fields.get("num_return_sequences", 1) > n_beams == 1:
            raise ValueError(
                f"`n` (={set_fields['n']}) needs a `temperature` above 0: greedy answers are equal."
            )
        fields = {n: value for n, value in fields.items() if FIELDS[n].needs != "do_sample"}
    elif "top_k" not in fields and defaults.get("top_k") is None:
        fields["top_k"] = 0  # transformers' default is 50
    lengths = ("max_new_tokens", "max_length")
    if not is_chat and all(n not in fields and defaults.get(n) is None for n in lengths):
        fields["max_new_tokens"] = COMPLETION_TOKENS
    return fields


def _fields_of(name: str, value: Any, set_fields: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    """Return the arguments for one field of a body; ``set_fields`` are all of its fields that are not null."""
    if name == "stream_options" and set_fields.get("stream"):
        if value and not isinstance(value, Mapping):
            raise ValueError(f"`stream_options` has to be an object, but is {value!r:.80}.")
        return {}
    if name in OF_THE_PROMPT or name in OF_THE_SERVER:
        return {}
    if name in REFUSED:
        neutral, reason = REFUSED[name]
        if value != neutral:
            raise ValueError(f"`{name}` (={value!r}) is not supported: {reason}.")
        return {}
    if name == "echo":
        return _echo(value, set_fields, is_chat)
    if name == "response_format":
        return _response_format(value)
    if name == "logit_bias":
        return _logit_bias(value)
    if name in GUIDED:
        return PARAMS["structured_outputs"].becomes({GUIDED[name]: value})
    if name in ("logprobs", "top_logprobs") and is_chat:
        return _logprobs_of_chat(name, value, set_fields)
    if name == "max_tokens" and "max_completion_tokens" in set_fields:
        return {}  # its successor holds
    if name == "max_completion_tokens":
        return {"max_new_tokens": _checked(name, value)}
    if name in PARAMS:
        param = PARAMS[name]
        if param.reason is not None and value != param.default:
            raise ValueError(f"`{name}` (={value!r}) is not supported.")
        return {} if value in ([], "") else param.becomes(_checked(name, value))
    if name in OWN:
        return {name: _checked(name, value)}
    known = [*PARAMS, *OWN, *OF_THE_PROMPT, *OF_THE_SERVER, "echo", "response_format"]
    unknown = with_suggestions([name], [*known, "max_completion_tokens", "top_logprobs"])
    raise ValueError(f"The body of the request has an unknown field: {unknown}.")


def _echo(value: Any, set_fields: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    if not isinstance(value, bool):
        raise ValueError(f"`echo` has to be true or false, but is {value!r}.")
    if value and is_chat:
        raise ValueError("`echo` is for completions: a chat's answer never includes the prompt.")
    has_scores = value and set_fields.get("logprobs") is not None
    return {"prompt_logprobs": _checked("logprobs", set_fields["logprobs"])} if has_scores else {}


def _logprobs_of_chat(name: str, value: Any, set_fields: dict[str, Any]) -> dict[str, Any]:
    if name == "top_logprobs":
        if set_fields.get("logprobs"):
            return {"logprobs": _checked(name, value)}
        if value != 0:
            raise ValueError("`top_logprobs` needs `logprobs`: true.")
        return {}
    if not isinstance(value, bool):
        raise ValueError(f"`logprobs` of a chat has to be true or false, but is {value!r}.")
    return {"logprobs": 0} if value and "top_logprobs" not in set_fields else {}
