"""Images and sounds of messages: none is fetched or opened that the operator has not allowed."""

from __future__ import annotations

import base64
import io
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from .limits import MEBIBYTE, Limits


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """A host that is allowed may not send the server to one that is not."""

    def redirect_request(self, *_: Any) -> None:
        return None


#: Without a proxy of the environment, and without the handlers of ``file:`` and ``ftp:``.
FETCH = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirects())


def inlined(messages: list[dict[str, Any]], limits: Limits, name: str) -> None:
    """Replace each URL of a medium in ``messages``, as upstream reads them, by its bytes in base64.

    Raises ``ValueError`` that names the field of the body for a source that is not allowed, for media that are too
    many or too large, and for images of too many pixels.
    """
    contents = (message["content"] for message in messages)
    parts = [
        part
        for content in contents
        if isinstance(content, list)
        for part in content
        if part["type"] != "text"
    ]
    if len(parts) > limits.max_media:
        raise ValueError(f"`{name}` has more than {limits.max_media} images, sounds or videos.")
    for part in parts:
        if not isinstance(part["url"], str):
            raise ValueError(f"`{name}` has a URL that is no text: {part['url']!r:.80}.")
        try:
            data = content_of(part["url"], limits)
            if len(data) > limits.max_media_mb * MEBIBYTE:
                raise ValueError(f"it is larger than {limits.max_media_mb:g} MiB")
            if part["type"] == "image":
                check_image(data, limits)
        except (OSError, ValueError) as error:
            raise ValueError(f"`{name}`: {part['url']!r:.80} is refused: {error}") from error
        kind = part["url"][5:].partition(";")[0] if part["url"].startswith("data:") else ""
        own = kind or f"{part['type']}/unknown"
        part["url"] = f"data:{own};base64,{base64.b64encode(data).decode()}"


def content_of(url: str, limits: Limits) -> bytes:
    """The bytes behind a ``data:`` URL, a URL of an allowed host, or a file in the allowed folder."""
    if url.startswith("data:"):
        head, _, data = url.partition(",")
        if not head.endswith(";base64"):
            raise ValueError("a data: URL has to be in base64")
        return base64.b64decode(data, validate=True)
    if ":" not in url[:16]:  # a sound without a format
        return base64.b64decode(url, validate=True)
    source = urlsplit(url)
    if source.scheme in ("http", "https"):
        if source.hostname not in limits.media_hosts.split(","):
            raise ValueError("fetching from this host is not allowed (--media-hosts)")
        with FETCH.open(url, timeout=limits.media_seconds) as answer:
            found: bytes = answer.read(int(limits.max_media_mb * MEBIBYTE) + 1)
            return found
    if source.scheme == "file" and limits.media_folder:
        folder = Path(limits.media_folder).resolve()
        path = Path(unquote(source.path)).resolve()
        if not path.is_relative_to(folder) or not path.is_file():
            raise ValueError("there is no such file in the folder of --media-folder")
        if path.stat().st_size > limits.max_media_mb * MEBIBYTE:
            raise ValueError(f"it is larger than {limits.max_media_mb:g} MiB")
        return path.read_bytes()
    raise ValueError("media have to be data: URLs in base64")


def check_image(data: bytes, limits: Limits) -> None:
    """Raise ``ValueError`` for an image of too many pixels, by its header; ``OSError`` for none."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            width, height = image.size
            n_frames = getattr(image, "n_frames", 1)
    except Image.DecompressionBombError as error:
        raise ValueError(str(error)) from error
    if width * height * n_frames > limits.max_pixels:
        raise ValueError(f"it has more than {limits.max_pixels:,} pixels")
