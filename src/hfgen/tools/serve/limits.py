"""``Limits``: what a server takes. Each field is an option of ``hfgen serve`` and a row of docs/serving.md."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from itertools import chain
from typing import Any

MEBIBYTE = 2**20

LARGEST = 2**63  # the largest integers of other systems; JSON has no limit
LARGEST_MULTIPLE = 10_000  # a schema's `multipleOf` takes an automaton of about as many states

#: Fields of a body that say what the prompt is.
PROMPTS = ("messages", "prompt", "input", "instructions", "tools", "documents")
MESSAGES = ("messages", "input")
#: Kinds of content of a message that only some models read; it has limits of its own.
SEEN = ("image_url", "input_image", "video_url")
HEARD = ("input_audio", "audio_url")


def limit(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a server. Seconds are wall time; sizes are of one request unless the help says otherwise."""

    max_request_mb: float = limit(16.0, "Size of a body in MiB; larger ones get 413.")
    max_values: int = limit(500_000, "Values in a body.")
    max_depth: int = limit(64, "Nested lists and objects in a body.")
    max_prompt_chars: int = limit(1_000_000, "Characters of all prompts, messages and tools.")
    max_items: int = limit(1024, "Prompts, messages, tools, and texts of any other field.")
    max_field_chars: int = limit(65_536, "Characters and numbers of a field that is no prompt.")
    max_stops: int = limit(64, "Stop strings.")
    stop_regex: bool = limit(False, "Take `stop_regex`: a pattern can take forever.")
    max_media: int = limit(16, "Images, sounds and videos.")
    max_media_mb: float = limit(8.0, "Size of one of them in MiB.")
    max_pixels: int = limit(16_000_000, "Pixels of an image.")
    media_hosts: str = limit("", "Hosts of media to fetch, with commas; none by default.")
    media_folder: str = limit("", "A folder whose files may be used as media; none by default.")
    media_seconds: float = limit(10.0, "Time in which a host has to answer with one of them.")
    prepare_seconds: float = limit(10.0, "Time to prepare media, template, tokens and grammar.")
    receive_seconds: float = limit(30.0, "Time to send the headers, and then the body.")
    max_connections: int = limit(1024, "Open connections; further ones get 503.")
    allowed_hosts: str = limit("", "Names of the server, with commas; on loopback, its own names.")
    grace_seconds: float = limit(5.0, "Time that open answers get when the server is stopped.")

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if type(value) in (int, float) and not 0 < value < math.inf:
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{option} takes a number above 0, but is {value:g}")

    @property
    def max_bytes(self) -> int:
        """The largest size of a body."""
        return int(self.max_request_mb * MEBIBYTE)

    def read(self, body: bytes) -> dict[str, Any]:
        """The JSON object of a body.

        Raises ``ValueError`` for what is no object, nested too deeply, has too many values, numbers that
        are not finite or above 64 bits, or text that is no Unicode.
        """
        if sum(body.count(sign) for sign in (b",", b"[", b"{")) > self.max_values:
            raise ValueError(f"The body has more than {self.max_values:,} values.")
        too_deep = f"The body has more than {self.max_depth} nested lists or objects."
        try:
            fields = json.loads(body, object_pairs_hook=_object)
        except RecursionError:
            raise ValueError(too_deep) from None
        except ValueError as error:
            raise ValueError(f"The body has to be a JSON object: {error}") from None
        if not isinstance(fields, dict):
            raise ValueError("The body has to be a JSON object.")
        for name, value in fields.items():
            for leaf, depth in chain([(name, 0)], leaves(value)):
                wrong = None
                if depth >= self.max_depth:
                    wrong = f": {too_deep}"
                elif isinstance(leaf, str) and re.search("[\ud800-\udfff]", leaf):
                    wrong = " has a lone surrogate: no Unicode text."
                elif isinstance(leaf, float) and not math.isfinite(leaf):
                    wrong = " has a number that is not finite."
                elif type(leaf) is int and not -LARGEST < leaf < LARGEST:
                    wrong = " has a number of more than 64 bits."
                if wrong is not None:
                    raise ValueError(f"`{printable(name)}`{wrong}")
        return fields

    def check(self, body: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for fields that are too large."""
        n_chars = 0
        for name, value in body.items():
            parts = [leaf for leaf, _ in leaves(value)]
            texts = [part for part in parts if isinstance(part, str)]
            size = sum(map(len, texts)) + len(parts) - len(texts)
            if name in PROMPTS:
                n_chars += size - (media_chars(value) if name in MESSAGES else 0)
                # A list of numbers is the ids of one prompt.
                is_list = isinstance(value, list) and value and not isinstance(value[0], int)
                n_items = len(value) if is_list else 1
                if n_chars > (most := self.max_prompt_chars):
                    raise ValueError(f"`{name}`: the prompt has more than {most:,} characters.")
                # llguidance reads their schemas while no other thread of Python runs.
                if name == "tools" and size > (most := 4 * self.max_field_chars):
                    raise ValueError(f"`tools` has more than {most:,} characters.")
            else:
                n_items = len(texts)
                if size > self.max_field_chars:
                    raise ValueError(f"`{name}` has more than {self.max_field_chars:,} characters.")
            if n_items > self.max_items:
                raise ValueError(f"`{name}` has more than {self.max_items:,} items.")
        for name in ("stop", "stop_strings"):
            if isinstance(stops := body.get(name), list) and len(stops) > self.max_stops:
                raise ValueError(f"`{name}` has more than {self.max_stops:,} strings.")
        if body.get("stop_regex") is not None and not self.stop_regex:
            raise ValueError("`stop_regex` is not allowed: the server was started without it.")


def check_multiples(text: str) -> None:
    """Raise ``ValueError`` for a grammar whose multiples would take minutes and gigabytes to compile.

    Zeros at the end of a number cost nothing. Schemas that are joined ask for the least common multiple.
    """
    plain = re.sub(r"\\u00([0-7][\da-fA-F])", lambda escape: chr(int(escape[1], 16)), text)
    product = 1
    for number in re.findall(r'"multipleOf"\s*:\s*([\d.eE+-]+)', plain):
        with suppress(InvalidOperation):  # llguidance says what is wrong
            digits = Decimal(number).normalize().as_tuple().digits
            product = math.lcm(product, int("".join(map(str, digits))))
    if product > LARGEST_MULTIPLE:
        of_all = "the least common multiple of all `multipleOf`"
        raise ValueError(f"`grammar`: {of_all} has to be at most {LARGEST_MULTIPLE:,}.")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ``ValueError`` if a name comes twice: one of the values would be dropped."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"`{printable(name)}` comes twice.")
        fields[name] = value
    return fields


def leaves(value: Any) -> Iterator[tuple[Any, int]]:
    """Keys and values without parts in ``value``, and the number of lists and objects around each."""
    waiting = [(value, 0)]
    while waiting:
        each, depth = waiting.pop()
        if isinstance(each, dict):
            waiting += [(part, depth + 1) for pair in each.items() for part in pair]
        elif isinstance(each, list):
            waiting += [(part, depth + 1) for part in each]
        if not each or not isinstance(each, dict | list):
            yield each, depth


def media_chars(messages: Any) -> int:
    """Characters of the images, sounds and videos in the contents of messages, as models read them."""
    messages = messages if isinstance(messages, list) else []
    contents = [each.get("content") for each in messages if isinstance(each, dict)]
    parts = [part for each in contents if isinstance(each, list) for part in each]
    media = [p for p in parts if isinstance(p, dict) and p.get("type") in SEEN + HEARD]
    return sum(len(leaf) for leaf, _ in leaves(media) if isinstance(leaf, str))


def printable(name: str) -> str:
    return name[:80].encode(errors="replace").decode()
