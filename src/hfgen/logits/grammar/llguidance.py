"""Matchers of llguidance (https://github.com/guidance-ai/llguidance), compiled once per tokenizer."""

from __future__ import annotations

import json
import re
from functools import cached_property, lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...settings.grammar import Grammar
from ...settings.logs import logger

try:
    import llguidance
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
except ImportError:  # an extra; `library_of` says so
    llguidance = None  # type: ignore[assignment]

N_KEPT = 64  # the number of compiled grammars that are kept per tokenizer
#: llguidance's units of work for the states of a lexer: a tenth of its default. With it,
#: ``(a{1000}){1000}`` takes 0.06 s and a megabyte; with the default, 1 s and 207 MB.
LEXER_FUEL = 100_000
N_ALONE = 8  # up to so many masks take less time than to wake threads for them
#: The spelling of the token that llguidance takes for the end of a text. No call generates it.
END = "<|hfgen: end of the text|>"


class LLGuidance:
    """Grammars for one tokenizer, to which one token is added that ends a text.

    ``n_tokens`` is the number of the caller's ids. ``matcher(grammar)`` compiles a grammar once and
    returns the matcher of an empty text, to be copied. It raises ``ValueError`` for a grammar that
    llguidance refuses.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        name = type(tokenizer).__name__
        if backend is None or not hasattr(backend, "to_str"):
            raise ValueError(
                f"`grammar` needs a tokenizer with a fast backend (of the library tokenizers), and "
                f"`tokenizer` ({name}) has none. Load it with `use_fast=True`, or convert it."
            )
        self.size = len(tokenizer)  # without gaps between ids
        self.n_tokens = 1 + max(tokenizer.get_vocab().values())
        described = json.loads(backend.to_str())
        described["padding"] = described["truncation"] = None
        #: Texts of tokens that llguidance takes for no text, by their ids.
        self.not_text = {
            token["id"]: token["content"]
            for token in described["added_tokens"]
            if token["special"] or re.fullmatch("<.*>", token["content"])
        }
        flags = ("single_word", "lstrip", "rstrip", "normalized")
        end = {"id": self.n_tokens, "content": END, "special": True, **dict.fromkeys(flags, False)}
        described["added_tokens"].append(end)
        try:
            self.tokenizer = LLTokenizer(json.dumps(described), eos_token=self.n_tokens)
        except ValueError as error:
            raise ValueError(
                f"`grammar` cannot be used with `tokenizer` ({name}), which llguidance does not "
                f"read: {error}"
            ) from error
        self.matcher = lru_cache(maxsize=N_KEPT)(self._compiled)

    @cached_property
    def executor(self) -> LLExecutor:
        return LLExecutor()

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        limits = LLParserLimits(initial_lexer_fuel=LEXER_FUEL)
        matcher = LLMatcher(self.tokenizer, grammar.source(), log_level=0, limits=limits)
        if matcher.is_error():
            reason = f"{matcher.get_error():.500}"
            raise ValueError(f"`grammar` {grammar} is refused by llguidance: {reason}")
        for _ in range(2):  # copies share a lexer, whose limit the second may reach
            probe = matcher.deep_copy()
            probe.compute_bitmask()
            if probe.is_error():  # a `$ref` to itself is found here
                reason = probe.get_error().partition("\n")[0]
                raise ValueError(
                    f"`grammar` {grammar} has no first token, llguidance says: {reason}"
                )
        for warning in matcher.get_grammar_warnings():
            logger.warning_once(f"`grammar` {grammar}: {warning}")
        return matcher

    def bits(self, n_rows: int) -> torch.Tensor:
        """Masks that allow everything: uint8 ``(n_rows, n_bytes)``, 8 ids a byte, lowest bit first."""
        n_words = (self.n_tokens + 1 + 31) // 32
        return torch.full((n_rows, 4 * n_words), 255, dtype=torch.uint8)

    def fill(self, bits: torch.Tensor, matchers: list[tuple[LLMatcher, int]]) -> None:
        """Write to ``bits``, for each ``(matcher, row)``, which ids may follow; no EOS is among them.

        Raises ``ValueError`` if a matcher fails.
        """
        (n_rows, n_bytes), start = bits.shape, bits.data_ptr()
        if len(matchers) > N_ALONE:
            self.executor.unsafe_compute_mask_ptr(matchers, start, n_bytes, n_rows)
        else:
            for matcher, row in matchers:
                matcher.unsafe_compute_mask_ptr(start + row * n_bytes, n_bytes)
        (byte, bit), array = divmod(self.n_tokens, 8), bits.numpy()
        for matcher, row in matchers:
            if matcher.is_error():
                raise ValueError(f"The grammar of row {row} failed: {matcher.get_error()}")
            array[row, byte] &= 255 - (1 << bit)  # END
            forced = matcher.compute_ff_tokens()[:1]
            if forced and forced[0] in self.not_text and not matcher.validate_tokens(forced):
                raise ValueError(
                    f"The grammar of row {row} has the text {self.not_text[forced[0]]!r}, which the "
                    "tokenizer makes one token. llguidance takes that for no text: write it as "
                    f"<[{forced[0]}]> in a Lark grammar."
                )


_LIBRARIES: WeakKeyDictionary[Any, LLGuidance] = WeakKeyDictionary()  # by tokenizer


def library_of(tokenizer: Any) -> LLGuidance:
    """The grammars of a tokenizer: made once, and again if tokens were added to it.

    Raises ``ImportError`` if llguidance is not installed, ``ValueError`` for a tokenizer that it
    does not read.
    """
    if llguidance is None:
        raise ImportError("`grammar` needs the package llguidance: pip install 'hfgen[grammar]'")
    library = _LIBRARIES.get(tokenizer)
    if library is None or library.size != len(tokenizer):
        library = _LIBRARIES[tokenizer] = LLGuidance(tokenizer)
    return library
