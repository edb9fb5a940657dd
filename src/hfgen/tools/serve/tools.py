"""Tools of a chat: which calls a request allows or requires, and their grammar in the model's format."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers.cli.serving.utils import get_response_template
from transformers.utils.chat_parsing import parse_response

from ...settings import grammar
from ...settings.grammar import Grammar
from ..openai_api.requests import SPACE

#: The format of Hermes and Qwen, for calls of models whose own format is unknown.
USUAL: dict[str, Any] = {
    "start_anchor_pattern": r"\Z",  # no part of the prompt belongs to the answer
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}

CHOICES = "'none', 'auto', 'required', or an object that names functions of `tools`"


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions that a request allows, whether one has to be called, and whether only one may be."""

    functions: dict[str, Mapping[str, Any]]
    is_required: bool = False
    is_single: bool = False

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Tools:
        """Read ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a body. Raises ``ValueError``."""
        functions = _functions(body.get("tools") or [])
        mode, names = _choice(body.get("tool_choice") or "auto")
        if mode == "none":
            return cls({})
        if names is not None:
            if unknown := [name for name in names if name not in functions]:
                known = list(functions)
                raise ValueError(f"`tool_choice` names {unknown[0]!r}, but `tools` has {known}.")
            functions = {name: functions[name] for name in names}
        if mode != "auto" and not functions:
            raise ValueError("`tool_choice` requires a call, but `tools` is empty.")
        is_single = mode == "named" or body.get("parallel_tool_calls") is False
        return cls(functions, mode != "auto", is_single)

    def grammar(self, format: Format | None, answer: Grammar | None) -> Grammar | None:
        """Calls, or ``answer`` in their place if none is required; ``None`` if nothing restricts them.

        Calls that are required have arguments by their schemas. Others do if their function is
        ``strict`` or beside an ``answer`` in JSON. Raises ``ValueError`` for a schema that is refused.
        """
        if format is None or not self.functions:
            return None
        is_whole = self.is_required or (answer is not None and answer.kind == "json")
        is_strict = {name: is_whole or bool(f.get("strict")) for name, f in self.functions.items()}
        has_own = answer is not None and not is_whole  # a regular expression, or another grammar
        if has_own or not (is_whole or self.is_single or any(is_strict.values())):
            return None
        calls = "call" if self.is_single else "call (SPACE? call)*"
        if self.is_required:
            rules = [f"start: {calls}", f"call: {format.begin} rest"]
        elif answer is not None:
            rules = [f"start: {calls} | answer", f"call: {format.begin} rest"]
            rules.append(f"answer: {_json(json.loads(answer.text))}")
        elif format.is_token:
            rules = ["start: part* call?" if self.is_single else "start: (part* call)* part*"]
            rules += [f"call: {format.begin} rest", f"part: TEXT{format.others}"]
            rules.append(r"TEXT: /(.|\n)+/")
        else:
            rules = ["start: TEXT | call" if self.is_single else "start: call* TEXT"]
            rules += ["call: opening rest", f"opening[lazy]: TEXT {format.begin}"]
            rules.append(r"TEXT: /(.|\n)*/")
        names = " | ".join(f"call_{number}" for number in range(len(self.functions)))
        rules += [f"rest: SPACE? ({names}) SPACE? {format.end}", r"SPACE: /[ \n]/"]
        for number, (name, function) in enumerate(self.functions.items()):
            schema = _parameters(name, function) if is_strict[name] else {"type": "object"}
            opening = f'{{"name": {json.dumps(name)}, "arguments": '
            rules.append(f'call_{number}: {_quoted(opening)} arguments_{number} "}}"')
            rules.append(f"arguments_{number}: {_json(schema)}")
        return grammar.lark("\n".join(rules))


@dataclass(frozen=True, slots=True)
class Format:
    """How calls are written: JSON with a name and arguments, between two terms of Lark."""

    begin: str
    end: str
    #: Whether a call begins with a token of its own, and the other such tokens: "" or " | <[…]>".
    is_token: bool
    others: str

    @classmethod
    def of(cls, template: Any, tokenizer: Any) -> Format | None:
        """The format of a response template's calls; ``None`` if they are not JSON or there is no template."""
        field = {} if template is None else template["fields"].get("tool_calls", {})
        begin, end = (_literal(field, name) for name in ("open", "close"))
        called = {"name": "f", "arguments": {"x": 1}}
        try:
            parsed = parse_response(f"{begin}{json.dumps(called)}{end}", template, prefix="")
        except (KeyError, TypeError, ValueError):
            return None
        if parsed.get("tool_calls") != [{"type": "function", "function": called}]:
            return None
        added = tokenizer.added_tokens_decoder.items()
        if template is USUAL and any(t.special and t.content in (begin, end) for _, t in added):
            return None  # which would be left out of the text
        # To llguidance, these are no text.
        ids = {t.content: i for i, t in added if t.special or re.fullmatch("<.*>", t.content)}
        opening, closing = (f"<[{ids[t]}]>" if t in ids else _quoted(t) for t in (begin, end))
        others = ",".join(str(i) for text, i in ids.items() if text not in (begin, end))
        return cls(opening, closing, begin in ids, f" | <[{others}]>" if others else "")


def reader_of(model: Any, processor: Any, tools: Tools) -> tuple[Any, Format | None]:
    """What upstream's parsers read answers with, and the format of calls. ``ValueError`` without a needed one."""
    tokenizer = getattr(processor, "tokenizer", processor)
    template = get_response_template(processor, model)
    format = Format.of(template, tokenizer) if tools.functions else None
    if not tools.functions or format is not None or (template and not tools.is_required):
        return processor, format
    format = Format.of(USUAL, tokenizer)
    if format is None and tools.is_required:
        raise ValueError("`tool_choice` cannot require a call: this model has no format for it.")
    tokenizer = copy.copy(tokenizer)
    tokenizer.response_template = USUAL
    return tokenizer, format


def _functions(tools: Any) -> dict[str, Mapping[str, Any]]:
    functions = {}
    for tool in tools if isinstance(tools, list) else [tools]:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            has_to = "has to have functions with a `name`"
            raise ValueError(f"`tools` {has_to}, but one is {tool!r:.80}.")
        if tool.get("type", "function") != "function":
            raise ValueError(f"`tools` has to have functions only, but one is a {tool['type']!r}.")
        functions[function["name"]] = function
    return functions


def _choice(choice: Any) -> tuple[str, list[Any] | None]:
    """``tool_choice`` as none, auto, required or named, and the names of what may be called."""
    if choice in ("none", "auto", "required"):
        return choice, None
    try:
        part = choice.get(choice["type"], choice)  # `/v1/responses` has one level less
        if choice["type"] == "function":
            return "named", [part["name"]]
        if choice["type"] == "allowed_tools" and part["mode"] in ("auto", "required"):
            return part["mode"], [tool.get("function", tool)["name"] for tool in part["tools"]]
    except (AttributeError, KeyError, TypeError):
        pass
    raise ValueError(f"`tool_choice` has to be {CHOICES}, but is {choice!r:.80}.")


def _parameters(name: str, function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments; those that it does not name are left out."""
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    try:
        grammar.json(schema).check()
    except (TypeError, ValueError) as error:
        raise ValueError(f"`tools` has parameters of {name!r} that are refused: {error}") from error
    return {"additionalProperties": False, **schema} if "properties" in schema else schema


def _literal(field: Mapping[str, Any], name: str) -> str:
    """The text of an anchor of a response template, if it is one text."""
    anchor = field.get(name) or field.get(f"{name}_pattern", "").removeprefix(r"\s*")
    return anchor if isinstance(anchor, str) else anchor[0]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _json(schema: Any) -> str:
    options = {"x-guidance": {"whitespace_pattern": SPACE}}
    return f"%json {json.dumps(options | schema if isinstance(schema, dict) else schema)}"
