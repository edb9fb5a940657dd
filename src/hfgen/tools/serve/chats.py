"""From the messages and tools of a request to the inputs of the model, and to the grammar of its answer."""

from __future__ import annotations

import base64
import copy
import io
import json
import re
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import BaseHandler, Modality, get_response_template
from transformers.utils.chat_parsing import parse_response

from ...families import text_tokenizer
from ...settings import grammar
from ...settings.grammar import Grammar
from ..openai_api.requests import SPACE, template_options
from .limits import HEARD, MEBIBYTE, SEEN, Limits

#: The kinds of content of a message that all models read.
TEXTS = ("text", "input_text", "output_text")


def parts_of(messages: Any) -> Iterator[Any]:
    """The parts of messages whose content is a list."""
    for message in messages:
        content = message.get("content")
        yield from content if isinstance(content, list) else ()


def has_media(messages: Any) -> bool:
    kinds = (part.get("type") if isinstance(part, dict) else None for part in parts_of(messages))
    return any(kind not in TEXTS for kind in kinds)


def inputs_of(
    model: Any, processor: Any, messages: Any, body: Mapping[str, Any], name: str, limits: Limits
) -> Any:
    """The inputs of ``model``, on its device: ``messages``, of the field ``name``, in its chat template.

    Media are checked against ``limits``; ``body`` may have what fills a template. Raises ``ValueError`` for
    what cannot be read, or not by this model.
    """
    modality = ModelManager.get_model_modality(model, processor=processor)
    kinds = [*TEXTS, *(SEEN if modality is not Modality.LLM else ())]
    kinds += HEARD if modality is Modality.MULTIMODAL else ()
    for part in parts_of(messages):
        kind = part.get("type") if isinstance(part, dict) else part
        if kind not in kinds:
            has = f"`{name}` has content of type {kind!r}"
            raise ValueError(f"{has}, but this model reads {', '.join(kinds)}.")
    options = template_options(body)
    chat = [{n: v for n, v in message.items() if v is not None} for message in messages]
    try:
        chat = BaseHandler.get_processor_inputs_from_messages(chat, modality)
        inline_media(chat, limits, name)
        has_video = any(p["type"] == "video" for p in parts_of(chat) if isinstance(p, dict))
        inputs = processor.apply_chat_template(
            chat,
            tools=body.get("tools") or None,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            load_audio_from_video=modality is Modality.MULTIMODAL and has_video,
            **({"num_frames": 32} if has_video else {}),  # as upstream: all frames are too many
            **options,
        )
    except Exception as error:  # the template's own, of a wrong call, of an image that is none
        raise ValueError(f"`{name}` cannot be read: {str(error) or repr(error):.500}") from error
    return inputs.to(model.device)


def inline_media(messages: list[dict[str, Any]], limits: Limits, name: str) -> None:
    """Replace URLs of media by their bytes in base64; ``ValueError`` for what ``limits`` do not allow."""
    parts = [part for part in parts_of(messages) if part["type"] != "text"]
    if len(parts) > limits.max_media:
        raise ValueError(f"`{name}` has more than {limits.max_media} images, sounds or videos.")
    n_pixels, most = 0, 4 * limits.max_pixels
    for part in parts:
        url = part["url"]
        if not isinstance(url, str):
            raise ValueError(f"`{name}` has a URL that is no text: {url!r:.80}.")
        try:
            data = content_of(url, limits)
            if len(data) > limits.max_media_mb * MEBIBYTE:
                raise ValueError(f"it is larger than {limits.max_media_mb:g} MiB")
            if part["type"] == "image":
                n_pixels += pixels_of(data, limits)
            if n_pixels > most:
                raise ValueError(f"all images together have more than {most:,} pixels")
        except (OSError, ValueError) as error:
            raise ValueError(f"`{name}`: {url!r:.80} is refused: {error}") from error
        kind = url[5:].partition(";")[0] if url.startswith("data:") else ""
        encoded = base64.b64encode(data).decode()
        part["url"] = f"data:{kind or part['type'] + '/unknown'};base64,{encoded}"


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """A host that is allowed may not send the server to one that is not."""

    def redirect_request(self, *_: Any) -> None:
        return None


#: Without a proxy of the environment, and without the handlers of ``file:`` and ``ftp:``.
FETCH = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirects())


def content_of(url: str, limits: Limits) -> bytes:
    """The bytes behind a ``data:`` URL, a URL of an allowed host, or a file in the allowed folder."""
    if url.startswith("data:"):
        head, _, data = url.partition(",")
        if not head.endswith(";base64"):
            raise ValueError("a data: URL has to be in base64")
        return base64.b64decode(data, validate=True)
    if ":" not in url[:16]:  # a sound without a format
        return base64.b64decode(url, validate=True)
    source, too_many = urlsplit(url), int(limits.max_media_mb * MEBIBYTE) + 1
    if source.scheme in ("http", "https"):
        if source.hostname not in limits.media_hosts.split(","):
            raise ValueError("fetching from this host is not allowed (--media-hosts)")
        with FETCH.open(url, timeout=limits.media_seconds) as answer:
            return bytes(answer.read(too_many))
    if source.scheme == "file" and limits.media_folder:
        path = Path(unquote(source.path)).resolve()
        if not path.is_relative_to(Path(limits.media_folder).resolve()) or not path.is_file():
            raise ValueError("there is no such file in the folder of --media-folder")
        with path.open("rb") as file:
            return file.read(too_many)
    raise ValueError("media have to be data: URLs in base64")


#: Of images; Pillow opens others with programs of the system (EPS), or slowly.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
MAX_RATIO = 200  # of an image's sides: processors that set the shorter one multiply the other


def pixels_of(data: bytes, limits: Limits) -> int:
    """The pixels of an image, by its header. Raises ``ValueError`` for too many, and for no image."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            shorter, longer = sorted(image.size)  # of the first frame: no other is read
    except Image.UnidentifiedImageError:
        raise ValueError(f"it is no image of {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError as error:
        raise ValueError(str(error)) from error
    if (n_pixels := shorter * longer) > limits.max_pixels:
        raise ValueError(f"it has more than {limits.max_pixels:,} pixels")
    if longer > MAX_RATIO * shorter:
        raise ValueError(f"a side is more than {MAX_RATIO} times the other")
    return n_pixels


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
    tokenizer = text_tokenizer(processor)
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
