"""From a request body to the token ids of its prompts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin

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
