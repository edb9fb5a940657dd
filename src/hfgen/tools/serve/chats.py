"""From the messages of a request to the inputs of the model; media only as the operator allows."""

from __future__ import annotations

import base64
import io
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import BaseHandler, Modality

from ..openai_api.prompts import template_options
from .limits import MEBIBYTE, Limits

#: The kinds of content of a message, and those of it that only some models read.
TEXTS = ("text", "input_text", "output_text")
SEEN = ("image_url", "input_image", "video_url")
HEARD = ("input_audio", "audio_url")


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
        raise ValueError(f"`{name}` cannot be read: {error}") from error
    return inputs.to(model.device)


def inline_media(messages: list[dict[str, Any]], limits: Limits, name: str) -> None:
    """Replace URLs of media by their bytes in base64; ``ValueError`` for what ``limits`` do not allow."""
    parts = [part for part in parts_of(messages) if part["type"] != "text"]
    if len(parts) > limits.max_media:
        raise ValueError(f"`{name}` has more than {limits.max_media} images, sounds or videos.")
    for part in parts:
        url = part["url"]
        if not isinstance(url, str):
            raise ValueError(f"`{name}` has a URL that is no text: {url!r:.80}.")
        try:
            data = content_of(url, limits)
            if len(data) > limits.max_media_mb * MEBIBYTE:
                raise ValueError(f"it is larger than {limits.max_media_mb:g} MiB")
            if part["type"] == "image":
                check_image(data, limits)
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


def check_image(data: bytes, limits: Limits) -> None:
    """Raise ``ValueError`` for an image of too many pixels, by its header; ``OSError`` for none."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            n_pixels = image.width * image.height * getattr(image, "n_frames", 1)
    except Image.DecompressionBombError as error:
        raise ValueError(str(error)) from error
    if n_pixels > limits.max_pixels:
        raise ValueError(f"it has more than {limits.max_pixels:,} pixels")
