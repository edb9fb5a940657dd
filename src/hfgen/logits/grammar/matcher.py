"""The interface of a grammar library: follow tokens, and compute which tokens may come next."""

from __future__ import annotations

from typing import Protocol

import torch

from ...settings.grammar import Grammar


class Matcher(Protocol):
    """Where one text stands in its grammar."""

    @property
    def is_accepting(self) -> bool:
        """Whether the text is complete as it is."""

    @property
    def is_stopped(self) -> bool:
        """Whether nothing can follow."""

    def consume(self, tokens: list[int]) -> int:
        """Follow ``tokens`` as far as the grammar takes them; returns how many these are."""

    def rollback(self, n_tokens: int) -> None:
        """Forget the last ``n_tokens`` of those that were consumed."""

    def copy(self) -> Matcher:
        """Another one in the same place; the two share nothing that changes."""

    def forced(self) -> list[int]:
        """Tokens of the text that has to follow, if there is one; others may spell it, too."""


class Library(Protocol):
    """A library of grammars, for one tokenizer."""

    #: The number of ids that tokens may have.
    n_tokens: int

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning; compiled once. ``ValueError`` for what the library refuses."""

    def bits(self, n_rows: int) -> torch.Tensor:
        """Room for masks: uint8 ``(n_rows, n_bytes)``, of 8 ids a byte, lowest bit first, all set."""

    def fill(self, bits: torch.Tensor, matchers: list[tuple[int, Matcher]]) -> None:
        """Write to each given row of ``bits`` which ids its matcher allows; no EOS is among them."""
