"""From a request body to the arguments of ``generate``, and to the token ids of its prompts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from ...families import max_positions
from ...settings import grammar
from ...settings.fields import FIELDS, PER_ROW, with_suggestions
from ...settings.vllm import PARAMS, Param

COMPLETION_TOKENS = 16  # where the body gives no limit, as OpenAI has it; a chat goes on to its end
CHAT_TOKENS = 1024  # new tokens where neither the request nor the model has a limit: upstream's

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
#: The grammar fields of vLLM's earlier versions.
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
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
        others = [n for n, field in CHECKED_AS.items() if field == name != "logprobs"]
        names = FROM.get(name, others)
        return "`" + next((n for n in [name, *names] if n in body), [*names, name][0])

    return re.sub(r"`(\w+)", field, message)


SPACE = " ?"  # white space between the tokens of JSON: small models may write it without end


def _response_format(value: Any) -> dict[str, Any]:
    match value:
        case {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"grammar": grammar.json_object(whitespace=SPACE)}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"grammar": grammar.json(schema, whitespace=SPACE)}
    types = "json_object, json_schema (with `json_schema`: {name, schema}) or text"
    raise ValueError(f"`response_format` has to have a `type` of {types}, but is {value!r:.80}.")


def _logit_bias(value: Any) -> dict[str, Any]:
    try:
        return PARAMS["logit_bias"].becomes(value)
    except (AttributeError, TypeError, ValueError):
        has_to = "has to map token ids to numbers"
        raise ValueError(f"`logit_bias` {has_to}, but is {value!r:.80}.") from None


def _stream_options(value: Any) -> dict[str, Any]:
    if value and not isinstance(value, Mapping):
        raise ValueError(f"`stream_options` has to be an object, but is {value!r:.80}.")
    return {}


def _guided(kind: str) -> Param:
    return Param(None, lambda value: PARAMS["structured_outputs"].becomes({kind: value}))


def _own(name: str) -> Param:
    return Param(None, lambda value: {name: value})


#: Fields of the prompt, which its reader checks, and of transport and accounting, which change no token.
WITHOUT_ARGUMENTS = (
    "messages prompt tools tool_choice parallel_tool_calls documents chat_template_kwargs "
    "add_generation_prompt continue_final_message add_special_tokens echo top_logprobs "
    "model stream user metadata store service_tier safety_identifier prompt_cache_key request_id"
).split()
#: The fields of a body. Of a field with a ``reason``, only the default is accepted.
BODY: dict[str, Param] = {
    **{name: Param(None) for name in WITHOUT_ARGUMENTS},
    **{name: _own(name) for name in OWN},
    **PARAMS,
    **{name: _guided(name.removeprefix("guided_")) for name in GUIDED},
    "logit_bias": Param(None, _logit_bias),
    "max_completion_tokens": Param(None, PARAMS["max_tokens"].becomes),
    "response_format": Param(None, _response_format),
    "stream_options": Param(None, _stream_options),
    # Of OpenAI, and not supported:
    "audio": Param(None, reason="answers are text only"),
    "best_of": Param(1, reason="use `n`, and choose by `logprobs`"),
    "function_call": Param(None, reason="use `tools`"),
    "functions": Param(None, reason="use `tools`"),
    "modalities": Param(["text"], reason="answers are text only"),
    "prediction": Param(None, reason="the drafter is chosen when the model is loaded"),
    "reasoning_effort": Param(None, reason="use `chat_template_kwargs` or `thinking_token_budget`"),
    "suffix": Param(None, reason="write the suffix into the prompt, in the format of the model"),
    "verbosity": Param(None, reason="ask for it in the prompt"),
    "web_search_options": Param(None, reason="web search is not available"),
}


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


def _arguments(name: str, value: Any, fields: Mapping[str, Any], is_chat: bool) -> dict[str, Any]:
    """The arguments that one of the ``fields`` of a body becomes."""
    if name not in BODY:
        unknown = with_suggestions([name], BODY)
        raise ValueError(f"The body of the request has an unknown field: {unknown}.")
    if name == "echo" or (name == "logprobs" and is_chat):
        if not isinstance(value, bool):
            raise ValueError(f"`{name}` has to be true or false, but is {value!r:.80}.")
        if name == "logprobs":
            return {"logprobs": 0} if value and "top_logprobs" not in fields else {}
        if value and is_chat:
            raise ValueError("`echo` is for completions: a chat has no answer with its prompt.")
        n = fields.get("logprobs") if value else None
        return {} if n is None else {"prompt_logprobs": _checked("logprobs", n)}
    if name == "top_logprobs":
        if is_chat and fields.get("logprobs"):
            return {"logprobs": _checked(name, value)}
        if value != 0:
            raise ValueError("`top_logprobs` needs `logprobs`: true, of a chat.")
        return {}
    param = BODY[name]
    if param.reason is not None and value != param.default:
        reason = "" if param is PARAMS.get(name) else f": {param.reason}"
        raise ValueError(f"`{name}` (={value!r:.80}) is not supported{reason}.")
    if value in ([], "") or (name == "max_tokens" and "max_completion_tokens" in fields):
        return {}
    return param.becomes(_checked(name, value))


def defaults_of(model: Any) -> dict[str, Any]:
    """The model's own generation config, as far as it says something."""
    config = vars(model.generation_config)
    return {name: value for name, value in config.items() if value is not None}


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
    defaults = defaults or {}
    set_fields = {name: value for name, value in body.items() if value is not None}
    fields: dict[str, Any] = {}
    for name, value in set_fields.items():
        try:
            update = _arguments(name, value, set_fields, is_chat)
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
            needs = f"`n` (={set_fields['n']}) needs a `temperature` above 0"
            raise ValueError(f"{needs}: greedy answers are equal.")
        fields = {n: value for n, value in fields.items() if FIELDS[n].needs != "do_sample"}
    elif "top_k" not in fields and defaults.get("top_k") is None:
        fields["top_k"] = 0  # transformers' default is 50
    lengths = ("max_new_tokens", "max_length")
    if not is_chat and all(n not in fields and defaults.get(n) is None for n in lengths):
        fields["max_new_tokens"] = COMPLETION_TOKENS
    return fields


#: Arguments of the methods that fill a template: no request sets them.
RESERVED = {
    name
    for owner in (PreTrainedTokenizerBase, ProcessorMixin)
    for name in inspect.signature(owner.apply_chat_template).parameters
}


def prompts_of(body: Mapping[str, Any], tokenizer: Any, *, is_chat: bool) -> list[list[int]]:
    """The ids of a chat's prompt, or of each of a completion's. ``ValueError`` for no or wrong ones."""
    if not is_chat:
        return _completion_prompts(body, tokenizer)
    messages: Any = body.get("messages")
    check_messages(messages, "messages")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("The tokenizer has no chat template: give one, or complete a prompt.")
    if body.get("tool_choice") not in (None, "auto", "none"):
        why = "only `hfgen serve` requires calls"
        raise ValueError(f"`tool_choice` has to be 'auto' or 'none': {why}.")
    options = template_options(body) | {"return_dict": True}
    options["tools"] = body.get("tools") if body.get("tool_choice") != "none" else None
    try:
        encoded = tokenizer.apply_chat_template([_of_text(each) for each in messages], **options)
    except Exception as error:  # the template's own: no system message, roles out of turn
        raise ValueError(f"The chat template raised an error: {error}") from error
    return [list(encoded["input_ids"])]


def check_messages(messages: Any, name: str) -> None:
    """Raise ``ValueError`` for messages, those of the field ``name``, of another shape."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"`{name}` has to be a list of messages, but is {messages!r:.80}.")
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else message
        is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not is_message or not isinstance(content, str | list | None):
            raise ValueError(f"`{name}` have a `role` and `content`, but one is {message!r:.80}.")


def template_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``apply_chat_template`` that ``body`` sets, those of ``chat_template_kwargs`` too.

    Raises ``ValueError`` for what is no variable of a template: a request's own could run for ever.
    """
    variables = body.get("chat_template_kwargs") or {}
    if not isinstance(variables, Mapping):
        raise ValueError(f"`chat_template_kwargs` has to be an object, but is {variables!r:.80}.")
    if reserved := sorted(variables.keys() & RESERVED):
        raise ValueError(f"`chat_template_kwargs` has `{reserved[0]}`, which is no variable.")
    continues, opens = bool(body.get("continue_final_message")), body.get("add_generation_prompt")
    return {
        **({"documents": body["documents"]} if body.get("documents") else {}),
        "add_generation_prompt": not continues if opens is None else bool(opens),
        "continue_final_message": continues,
        **variables,
    }


def _of_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is text: parts of text are joined."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return dict(message)
    try:
        if all(part["type"] == "text" for part in parts):
            return {**message, "content": "".join(part["text"] for part in parts)}
    except (KeyError, TypeError):
        pass
    raise ValueError("`content` has to be text, or parts of type 'text'.")


def _completion_prompts(body: Mapping[str, Any], tokenizer: Any) -> list[list[int]]:
    prompt, has_special = body.get("prompt"), bool(body.get("add_special_tokens", True))
    is_ids = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
    prompts = [prompt] if isinstance(prompt, str) or is_ids else prompt
    prompt_ids: list[list[int]] = []
    for ids in prompts if isinstance(prompts, list) and prompts else [None]:
        if isinstance(ids, str):
            ids = tokenizer(ids, add_special_tokens=has_special).input_ids
        if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
            has_to = "has to be text, a list of ids, or a list of these, and not empty"
            raise ValueError(f"`prompt` {has_to}, but is {prompt!r:.80}.")
        prompt_ids.append(ids)
    return prompt_ids
