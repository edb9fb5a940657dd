"""Grammars as a logits processor, and as a stopping criterion if there is no EOS token; their builders."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from ...families import n_scores
from ...settings.fields import require_tokenizer
from ...settings.grammar import Grammar
from ..thinking import Thinking, marker_ids
from .follower import Followed, Follower
from .llguidance import LLGuidance, library_of

LOWEST = -1e30  # the score of every token of a beam that has ended: it stays below all that go on


@dataclass(eq=False)
class GrammarProcessor(LogitsProcessor):
    """Leaves the tokens that the grammar of a row allows, and an EOS where its text is complete.

    Its state is a function of the ids, so that beams, drafts and rollbacks need no extra care.
    Rows that have ended keep their scores; among beams, they get the lowest.
    """

    llguidance: LLGuidance
    follower: Follower
    is_search: bool = False  # rows are beams, of which those that have ended must not win

    def __deepcopy__(self, memo: dict[int, Any]) -> GrammarProcessor:
        return replace(self, follower=deepcopy(self.follower, memo))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = self.follower.follow(input_ids)
        is_open = [self.follower.is_open(row) for row in rows]
        bits = self.llguidance.bits(len(rows))
        of_text = [i for i, row in enumerate(rows) if is_open[i] and row.is_text]
        self.llguidance.fill(bits, [(rows[i].matcher, i) for i in of_text])
        n_bytes = (scores.shape[1] + 7) // 8
        if (n_missing := n_bytes - bits.shape[1]) > 0:  # ids that are no tokens
            tails = bits.new_tensor([[0 if has_grammar else 255] for has_grammar in is_open])
            bits = torch.cat([bits, tails.expand(-1, n_missing)], dim=1)
        for row, row_bits, has_grammar in zip(rows, bits.numpy(), is_open, strict=True):  # a view
            if row is not None and (has_grammar or row.is_thinking):
                self.complete(row, row_bits)
        limits = as_limits(bits[:, :n_bytes], scores)
        over = [i for i, row in enumerate(rows) if row is not None and row.is_over]
        if self.is_search and over:
            limits[over] = LOWEST
        if limits.shape[1] > scores.shape[1]:
            return torch.minimum(scores, limits[:, : scores.shape[1]])
        return torch.minimum(scores, limits, out=limits)

    def complete(self, row: Followed, bits: Any) -> None:
        """Add to a row's ``bits (n_bytes,)``, a numpy array, what its matcher does not know.

        An EOS may follow what is complete, and nothing else; a section of thoughts may be opened.
        """
        if not row.is_text and not row.is_thinking:
            bits[:] = 0
        is_complete = row.is_text and row.matcher.is_accepting()
        for token in self.follower.eos[row.prompt]:
            set_bit(bits, token, is_complete)
        if row.opening is not None:
            set_bit(bits, row.opening, True)


def set_bit(bits: Any, token: int, is_on: bool) -> None:
    """Set the bit of an id in ``bits (n_bytes,)``, unless the id is outside of them."""
    byte, bit = divmod(token, 8)
    if 0 <= byte < len(bits):
        bits[byte] = bits[byte] & (255 - (1 << bit)) | (is_on << bit)


def as_limits(bits: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Upper bounds of scores, ``(rows, 8 * n_bytes)``: infinity where an id is allowed, else -infinity.

    A minimum of scores and bounds is many times faster than a masked copy of the scores.
    """
    index = bits.to(scores.device).flatten().int()
    limits = _limits_of_bytes(scores.device, scores.dtype).index_select(0, index)
    return limits.view(len(bits), -1)


@lru_cache(maxsize=8)
def _limits_of_bytes(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """``(256, 8)``: the bounds of the 8 ids of each byte."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.where(bits > 0, math.inf, -math.inf).to(device, dtype)


class NoTokenLeft(LogitsProcessor):
    """Makes scores NaN, which every strategy reports, where a grammar and other processors leave no token.

    Of the ``n_rows`` beams of a prompt, one with a token left is enough.
    """

    def __init__(self, n_rows: int = 1) -> None:
        self.n_rows = n_rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_empty = scores.amax(dim=-1) == -math.inf
        if self.n_rows > 1:
            is_empty_prompt = is_empty.view(-1, self.n_rows).all(dim=1)
            is_empty = is_empty_prompt.repeat_interleave(self.n_rows)
        if is_empty.is_cpu and not is_empty.any():
            return scores
        return scores.masked_fill(is_empty[:, None], math.nan)


class GrammarCriterion(StoppingCriteria):
    """Ends a row without an EOS token where its grammar allows nothing more."""

    ends_rows = True  # rows may end before others do, and are padded then
    finish_reason = "grammar"

    def __init__(self, follower: Follower) -> None:
        self.follower = follower

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        ends = [self.follower.has_ended(row) for row in self.follower.follow(input_ids)]
        return torch.tensor(ends, device=input_ids.device)


def check(model: Any, call: Any) -> None:
    """Compile the grammars of a call.

    Raises ``ValueError`` for DoLa, for no tokenizer or one that is not read or has more tokens than the
    model, and for a grammar that llguidance refuses; ``ImportError`` without llguidance.
    """
    if call.config.dola_layers is not None:
        raise ValueError(
            "`grammar` does not go together with DoLa (`dola_layers`), which drops all but the likely "
            "tokens before a grammar can choose among them. Leave one of them out."
        )
    for config in call.configs:
        if config.grammar is not None:
            library_for(call, model, config.grammar).matcher(config.grammar)


def library_for(call: Any, model: Any, grammar: Grammar) -> LLGuidance:
    """The grammars of a call's tokenizer; raises as ``check`` does."""
    tokenizer = call.request.kwargs.get("tokenizer")  # also where the decoding mode takes none
    require_tokenizer(tokenizer, "grammar", grammar)
    library, size = library_of(tokenizer), n_scores(model)
    if library.n_tokens > size:
        raise ValueError(
            f"`tokenizer` has {library.n_tokens} tokens and the model scores {size}: `grammar` needs the "
            "tokenizer that the model was trained with."
        )
    return library


def grammar(_: Any, context: Any) -> GrammarProcessor | None:
    """One processor for all rows."""
    call = getattr(context.config, "_call", None)
    if call is None:
        return None
    configs = call.configs * (1 if call.rows else call.prompt.batch_size)
    asked = next(config.grammar for config in configs if config.grammar is not None)
    library = library_for(call, context.model, asked)
    starts = [config.grammar and library.matcher(config.grammar) for config in configs]
    eos_tensors = [getattr(config, "_eos_token_tensor", None) for config in configs]
    eos = [frozenset(() if eos is None else eos.tolist()) for eos in eos_tensors]
    # A forced BOS is no part of the text.
    n, is_first = context.prompt_length, context.prompt_length == 1
    begins = [n + (is_first and config.forced_bos_token_id is not None) for config in configs]
    thinking = [thinking_of(config, call.request.kwargs["tokenizer"]) for config in configs]
    follower = Follower(starts, eos, begins, library.n_tokens, thinking)
    return GrammarProcessor(library, follower, is_search=(context.config.num_beams or 1) > 1)


def thinking_of(config: Any, tokenizer: Any) -> Thinking | None:
    markers = (marker_ids(getattr(config, f"thinking_{n}"), tokenizer) for n in ("start", "end"))
    start, end = map(torch.tensor, markers)
    if not len(start) or not len(end):
        return None
    return Thinking(start, end, may_begin=config.thinking_token_budget is not None)


def criterion(_: Any, context: Any) -> GrammarCriterion | None:
    """The criterion, if a prompt has no EOS; it shares the rows' states with the processor."""
    processors = getattr(getattr(context.config, "_call", None), "processors", ())
    followers = (p.follower for p in processors if isinstance(p, GrammarProcessor))
    follower = next(followers, None)
    return None if follower is None or all(follower.eos) else GrammarCriterion(follower)
