"""From token ids to text: incremental decoding of a row, the bytes of single tokens, and other tokenizers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

#: The character that an incomplete one is decoded to.
INCOMPLETE = "\ufffd"

#: Tokens at the end of a row that decide how the next ones are decoded, with room to spare.
CONTEXT = 8

#: A single byte in vocabularies that spell with bytes what they have no token for.
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

#: The characters by which byte-level vocabularies write bytes.
_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}

#: A byte that no text has: the piece of an id that the tokenizer does not know.
UNKNOWN = b"\xff"


class Detokenizer:
    """The text of one row, returned as soon as it is certain.

    ``push`` returns whole characters, which are final. All returned text, with that of ``finish``, is
    ``decode(tokenizer, all_ids, skip_special_tokens, before)``: spaces are not cleaned up, since that could
    change text that was returned before.

    Only the end of a row is decoded again, so the cost per token is constant. A run of byte tokens
    (``<0xE2>``) is held back up to its end: one wrong byte changes how all of it is decoded.
    """

    def __init__(
        self, tokenizer: Any, skip_special_tokens: bool = True, before: Sequence[int] = ()
    ) -> None:
        """``before``: the end of the prompt, as ``context_of`` returns it."""
        self.tokenizer = tokenizer
        self.decode = partial(decode, tokenizer, skip_special_tokens=skip_special_tokens)
        #: Special tokens that the tokenizer leaves out.
        self.skipped = frozenset(tokenizer.all_special_ids if skip_special_tokens else ())
        #: The end of the row, and how many characters of its text have been returned.
        self.window = list(before)
        #: The prompt's part of the window's text; empty once that cannot change.
        self.text_before = self.decode(self.window) if before else ""
        self.n_returned = len(self.text_before)
        self.limit = len(self.window) + CONTEXT

    def push(self, token_ids: Sequence[int]) -> str:
        """Append the next tokens of the row; returns the text that is now certain."""
        new = [token for token in token_ids if token not in self.skipped]
        if not new:
            return ""
        self.window += new
        if _is_byte(self.tokenizer, new[-1]):
            return ""
        text = self.updated()
        certain = text.removesuffix(INCOMPLETE)
        if returned := certain[self.n_returned :]:
            self.n_returned, self.text_before = len(certain), ""
        if len(self.window) > self.limit:
            self.shorten(text)
        return returned

    def finish(self) -> str:
        """The rest of the text, with a replacement character for an incomplete one."""
        return self.updated()[self.n_returned :]

    def updated(self) -> str:
        """The text of the window; its first tokens may complete a character of the prompt."""
        text = self.decode(self.window)
        if self.text_before:
            self.n_returned = n_common(self.text_before, text)
        return text

    def shorten(self, text: str) -> None:
        """Move the start of the window, whose text is ``text``, if the shorter window's text ends in the same way."""
        window = self.window[-CONTEXT:]
        while window and _is_byte(self.tokenizer, window[0]):  # perhaps amid a character
            del window[0]
        shorter, n_open = self.decode(window), len(text) - self.n_returned
        seen = text[max(self.n_returned - 2, 0) :]
        if len(seen) > n_open and shorter.endswith(seen):
            self.window, self.n_returned = window, len(shorter) - n_open
            self.text_before = ""
        self.limit = len(self.window) + CONTEXT


class Pieces(dict[int, bytes]):
    """By token: the bytes in UTF-8 that it adds to a text; computed on first access.

    They are those of ``transformers.StopStringCriteria``. Special tokens are spelled out. A token with a leading space
    has it also at the start of a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.before: list[int] = list(tokenizer.encode("abcdef", add_special_tokens=False))
        self.text_before = decode(tokenizer, self.before)

    def __missing__(self, token: int) -> bytes:
        self[token] = piece = self.find(token)
        return piece

    def find(self, token: int) -> bytes:
        name = self.tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return UNKNOWN
        text = decode(self.tokenizer, [*self.before, token])
        piece = text[len(self.text_before) :]
        if INCOMPLETE in piece:  # a part of a character
            if (byte := BYTE_TOKEN.fullmatch(name)) is not None:
                return bytes.fromhex(byte[1])
            if all(character in _BYTE_OF for character in name):
                return bytes(_BYTE_OF[character] for character in name)
        return piece.encode()

    def of(self, ids: Iterable[int]) -> list[bytes]:
        return [self[token] for token in ids]


def decode(
    tokenizer: Any,
    ids: Sequence[int],
    skip_special_tokens: bool = False,
    before: Sequence[int] = (),
) -> str:
    """The text that ``ids`` add to that of the ids ``before``, without a cleanup of spaces."""
    text: str = tokenizer.decode(
        [*before, *ids], skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    if not before:
        return text
    return text[n_common(decode(tokenizer, before, skip_special_tokens), text) :]


def context_of(tokenizer: Any, prompt: Sequence[int]) -> list[int]:
    """The end of a prompt's ids, on which the text of the following tokens depends.

    SentencePiece, Metaspace and WordPiece write no space at the start of a text, nor after a special token,
    as the one that opens the answer in a chat.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token_id for token_id, token in added.items() if token.special}
    special.update(getattr(tokenizer, "all_special_ids", ()))
    start = n = len(prompt)
    while start and prompt[start - 1] not in special:
        if n - start >= CONTEXT and not _is_byte(tokenizer, prompt[start]):
            break
        start -= 1
    return list(prompt[start:])


def n_common(one: Sequence[Any], two: Sequence[Any]) -> int:
    """How many elements two texts, or two lists, begin with alike.

    It is fast if they differ near the end of the shorter one.
    """
    n = min(len(one), len(two))
    while one[:n] != two[:n]:
        n -= 1
    return n


def _is_byte(tokenizer: Any, token: int) -> bool:
    name = tokenizer.convert_ids_to_tokens(token)
    return name is not None and BYTE_TOKEN.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Spelling:
    """A tokenizer without special tokens, and without ids from ``size`` on, which the model lacks."""

    tokenizer: Any
    size: int

    def text(self, ids: list[int]) -> str:
        known = [token for token in ids if token < self.size]
        return decode(self.tokenizer, known, skip_special_tokens=True)

    def ids(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text, add_special_tokens=False) if text else []
        return [token for token in ids if token < self.size]

    def opening(self, text: str) -> list[int]:
        """The special tokens that the tokenizer puts before ``text``; BOS if the text is empty."""
        if not (plain := self.ids(text)):
            bos = getattr(self.tokenizer, "bos_token_id", None)
            return [] if bos is None else [bos]
        whole = list(self.tokenizer.encode(text))
        starts = (i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return whole[: next(starts, 0)]


def shared_tokens(target: Spelling, other: Spelling) -> dict[int, int]:
    """Map ``other``'s ids, ascending, to ``target``'s of the same text; signs of spaces may differ."""
    vocab, others = target.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    sign, other_sign = _space_sign(target.tokenizer), _space_sign(other.tokenizer)
    if sign and other_sign and sign != other_sign:
        others = {
            sign + token[len(other_sign) :] if token.startswith(other_sign) else token: index
            for token, index in sorted(others.items())
        }
    pairs = sorted((index, vocab[token]) for token, index in others.items() if token in vocab)
    return {mine: theirs for mine, theirs in pairs if mine < other.size and theirs < target.size}


def _space_sign(tokenizer: Any) -> str:
    """The sign of a leading space in tokens, ``Ġ`` or ``▁``; empty if the tokenizer has none."""
    ids = tokenizer.encode(" ", add_special_tokens=False)
    tokens = tokenizer.convert_ids_to_tokens(list(ids)[:1])
    return str(tokens[0])[:1] if tokens else ""
