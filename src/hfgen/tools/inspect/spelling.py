"""The text of token ids in a trace, with or without a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...state.text import Pieces, decode
from .records import Beam, Sequence, Step


class Speller:
    """Writes ids by a tokenizer; without one, texts are ``None``."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer if hasattr(tokenizer, "convert_ids_to_tokens") else None

    def text(self, ids: list[int]) -> str | None:
        """The text of ``ids``, special tokens included."""
        return None if self.tokenizer is None else decode(self.tokenizer, ids)

    def spelling(self, ids: set[int]) -> dict[int, str]:
        """Each id's text; bytes that are no characters by themselves as ``<0xE2>``."""
        if self.tokenizer is None:
            return {}
        pieces = Pieces(self.tokenizer)
        return {token: spelled(pieces[token]) for token in sorted(ids)}


def spelled(piece: bytes) -> str:
    """``piece`` as text, or its bytes."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in piece)


def all_ids(
    prompts: Iterable[list[int]],
    sequences: Iterable[Sequence],
    beams: Iterable[Iterable[Iterable[Beam]]],
    steps: Iterable[Step],
) -> set[int]:
    """The ids that occur in a trace."""
    ids = {token for prompt in prompts for token in prompt}
    for token in (token for sequence in sequences for token in sequence.tokens):
        ids |= {token.token_id, *(candidate.token_id for candidate in token.candidates)}
    ids |= {beam.token_id for each in beams for nodes in each for beam in nodes}
    return ids | {token for step in steps for draft in step.drafts for token in draft.token_ids}
