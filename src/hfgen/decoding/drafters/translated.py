"""Drafts by an assistant with another tokenizer.

Greedy: tokens are translated through their text, both ways ("universal assisted generation").
Sampling: the assistant is restricted to the tokens that both vocabularies have, so that the
probability of each drafted token is known (Timor et al. 2025, "Accelerating LLM Inference with
Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies", algorithm 4).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, RepetitionPenaltyLogitsProcessor

from ...logits.processors import LogitsProcessorList, for_drafts, is_row_wise
from ...memory.caches.layers import keeps_all_tokens
from ...state.call import ModelKwargs
from ...state.run import Run
from ...state.vocabularies import Spelling, n_scores, shared_tokens
from .assistant import Assistant
from .base import Draft, DraftContext, Setup
from .restriction import Restriction
from .text_bridge import Row, common_prefix


class UniversalDrafter(Assistant):
    """Drafts in the assistant's tokens, for rows that are as far in them as they happen to be.

    The assistant's ids are laid out in columns, padded on the left so that all rows end together. As
    the vocabularies differ, rows drift apart; they are then laid out anew, and read anew.
    """

    #: By how many columns rows may have drifted apart.
    DRIFT = 8

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.target = Spelling(setup.tokenizer, n_scores(setup.run.model))
        self.own = Spelling(setup.assistant_tokenizer, n_scores(self.model))
        self.encoder_mask: torch.Tensor | None = None
        self.translate_encoder_input()
        config = self.model.generation_config
        windows = (config.target_lookbehind or 10, config.assistant_lookbehind or 10)
        self.rows: list[Row] = []
        for tokens in _prompts(setup.run):
            opening = self.opening(self.target.text(tokens))
            self.rows.append(Row(self.target, self.own, *windows, opening))
            self.rows[-1].read(tokens)
        self.n_read = [setup.run.ids.shape[1]] * len(self.rows)
        text_config = self.model.config.get_text_config()
        self.positions: float = getattr(text_config, "max_position_embeddings", None) or math.inf
        self.pads = [0] * len(self.rows)
        #: The columns of each row as the cache has them; -1 where that is unknown.
        self.fed: list[list[int]] = [[] for _ in self.rows]
        #: Columns of the cache that still hold; those that held in the round before.
        self.n_valid = self.n_kept = 0

    def opening(self, text: str) -> list[int]:
        """What the assistant's ids begin with, before ``text``."""
        if not self.model.config.is_encoder_decoder:
            return self.own.opening(text)
        start = self.model.generation_config.decoder_start_token_id
        start = self.model.config.decoder_start_token_id if start is None else start
        return [] if start is None else [start]

    # --- a round --------------------------------------------------------------------------------

    def draft(self, context: DraftContext) -> Draft | None:
        if all(context.is_done):
            return None
        self.read(context)
        pairs = zip(self.rows, context.is_done, strict=True)
        columns = [[] if is_done else row.context() for row, is_done in pairs]
        room = [max(context.end - known, 0) for known in context.known]
        rooms = [n if ids else 0 for n, ids in zip(room, columns, strict=True)]
        own = self.laid_out(columns, rooms) if any(rooms) else None
        if own is None or (drafted := super().draft(own)) is None:
            return None
        tokens = drafted.tokens.tolist()
        known = own.ids[:, : own.start].tolist()
        self.fed = [
            old[: self.n_kept] + (before + new)[self.n_kept :]
            for old, before, new in zip(self.fed, known, tokens, strict=True)
        ]
        return self.translated(tokens, drafted, own, context)

    def read(self, context: DraftContext) -> None:
        """Let the rows read what has become known of the target's tokens."""
        first = min(n for n, done in zip(self.n_read, context.is_done, strict=True) if not done)
        new = context.ids[:, first : max(context.known)].tolist()
        for index, row in enumerate(self.rows):
            if not context.is_done[index]:
                row.read(new[index][self.n_read[index] - first : context.known[index] - first])
                self.n_read[index] = context.known[index]

    def laid_out(self, contexts: list[list[int]], rooms: list[int]) -> DraftContext | None:
        """A context of the assistant's ids: ``contexts``, empty for ended rows; ``rooms`` to draft."""
        is_open = [room > 0 for room in rooms]
        self.n_valid = min(
            common_prefix(fed, [0] * pad + ids)
            for fed, pad, ids, open_ in zip(self.fed, self.pads, contexts, is_open, strict=True)
            if open_
        )
        lengths = [pad + len(ids) for pad, ids in zip(self.pads, contexts, strict=True)]
        first, end = _span(lengths, rooms)
        n_kept = min(self.n_valid, first - 1, self.cached)
        # Some caches can be taken back by the last draft alone.
        is_lost = n_kept < self.n_kept and not (
            self.run is not None and keeps_all_tokens(self.run.model_kwargs["past_key_values"])
        )
        if self.run is None or is_lost or end - first > max(rooms) + self.DRIFT:
            self.run, self.cached, self.length = None, 0, 0
            n_kept, longest = 0, max(map(len, contexts))
            self.pads = [longest - len(ids) if ids else 0 for ids in contexts]
            lengths = [longest] * len(lengths)
            first, end = _span(lengths, rooms)
        end = int(min(end, self.positions))
        if first >= end:
            return None
        self.n_kept = n_kept
        width = max(end, *lengths)
        padded = [[0] * pad + ids for pad, ids in zip(self.pads, contexts, strict=True)]
        ids = torch.tensor([row + [0] * (width - len(row)) for row in padded])
        known = (n if open_ else end for n, open_ in zip(lengths, is_open, strict=True))
        is_done = tuple(not open_ for open_ in is_open)
        return DraftContext(ids, tuple(known), is_done, start=first, n_tokens=end - first)

    def translated(
        self, tokens: list[list[int]], drafted: Draft, own: DraftContext, context: DraftContext
    ) -> Draft:
        """The draft for ``context``, of the assistant's ``tokens`` from ``own.start`` on."""
        result = torch.full((len(self.rows), context.n_tokens), -1)
        for index, row in enumerate(self.rows):
            if own.is_done[index]:
                continue
            lead, begin = context.known[index] - context.start, own.known[index] - own.start
            room = context.n_tokens - lead
            mine = tokens[index][begin : begin + room]  # others may have had more columns to fill
            mine = mine[: mine.index(-1)] if -1 in mine else mine
            theirs = self.followed(row, mine)[:room]
            result[index, lead : lead + len(theirs)] = torch.tensor(theirs, dtype=torch.long)
        return Draft(result)

    def followed(self, row: Row, drafted: list[int]) -> list[int]:
        return row.follow(drafted) if drafted else []

    def forget(self, n_valid: int) -> None:
        super().forget(min(n_valid, self.n_valid))

    # --- the assistant's own run ----------------------------------------------------------------

    def use_parameters_of_rows(self, run: Run, target: Run) -> None:
        """EOS ids are the assistant's own; a penalty of the target's holds for any tokens."""
        self.eos = run.config._eos_token_tensor

    def shared_processors(self, target: Run) -> list[Any]:
        """Repetition penalties: other processors speak of the target's tokens."""
        return [p for p in target.processors if isinstance(p, RepetitionPenaltyLogitsProcessor)]

    def config(self, target: GenerationConfig) -> GenerationConfig:
        """A config in the assistant's terms; what the call does not say it has of its own."""
        config = GenerationConfig(
            do_sample=bool(target.do_sample),
            num_beams=1,
            num_return_sequences=1,
            temperature=1.0,
            cache_implementation="dynamic",
            eos_token_id=self.model.generation_config.eos_token_id,
        )
        config.is_assistant, config.use_mtp = True, False
        if config.eos_token_id is None:
            config.eos_token_id = getattr(self.own.tokenizer, "eos_token_id", None)
        return config

    def model_kwargs(self, target: Run, ids: torch.Tensor) -> ModelKwargs:
        kwargs: ModelKwargs = {}
        if any(self.pads):
            prefix = "decoder_" if self.model.config.is_encoder_decoder else ""
            columns = torch.arange(ids.shape[1], device=ids.device)
            pads = torch.tensor(self.pads, device=ids.device)
            kwargs[prefix + "attention_mask"] = (columns >= pads[:, None]).long()
        if self.encoder_mask is not None:
            repeats = len(ids) // len(self.encoder_mask)
            mask = self.encoder_mask.repeat_interleave(repeats, dim=0)
            kwargs["attention_mask"] = mask.to(ids.device)
        return kwargs

    def translate_encoder_input(self) -> None:
        """Encode text for the assistant's encoder anew; features of other media stay as they are."""
        given = self.setup.encoder_input
        if not self.model.config.is_encoder_decoder or given is None or given.is_floating_point():
            return
        rows = [list(self.own.tokenizer.encode(self.target.text(row))) for row in given.tolist()]
        width = max(1, *map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        self.setup, self.encoder_mask = replace(self.setup, encoder_input=ids), mask


class ByText(UniversalDrafter):
    """Greedy: everything is translated as text, so the two vocabularies may be disjoint."""

    def followed(self, row: Row, drafted: list[int]) -> list[int]:
        """The text's tokens; if the assistant has ended it, the target's EOS."""
        assert self.run is not None
        tokens = super().followed(row, drafted)
        own_eos = self.run.config._eos_token_tensor
        eos = self.setup.run.config._eos_token_tensor
        if eos is None or own_eos is None or not drafted or drafted[-1] not in own_eos.tolist():
            return tokens
        is_whole = len(drafted) == 1 or bool(tokens)  # else there is text that was not translated
        return [*tokens, int(eos[0])] if is_whole else []


class BySharedTokens(UniversalDrafter):
    """Sampling: the assistant draws from shared tokens, by scores that the target's processors saw."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.to_target = shared_tokens(self.target, self.own)
        processors = for_drafts(p for p in setup.run.processors if is_row_wise(p))
        self.restriction = Restriction(
            self.to_target, self.target.size, LogitsProcessorList(processors), setup.run.ids.device
        )

    def followed(self, row: Row, drafted: list[int]) -> list[int]:
        return [self.to_target[token] for token in drafted]

    def prepare(self, ids: torch.Tensor) -> Run:
        run = super().prepare(ids)
        run.processors = LogitsProcessorList([self.restriction])
        return run

    def laid_out(self, contexts: list[list[int]], rooms: list[int]) -> DraftContext | None:
        if (own := super().laid_out(contexts, rooms)) is not None:
            self.restriction.own_known = own.known
        return own

    def draft(self, context: DraftContext) -> Draft | None:
        self.restriction.begin(context)
        return super().draft(context)

    def translated(
        self, tokens: list[list[int]], drafted: Draft, own: DraftContext, context: DraftContext
    ) -> Draft:
        """Also the logits: those of each row's tokens, in the target's vocabulary."""
        result = super().translated(tokens, drafted, own, context)
        logits: Any = drafted.logits
        shift = torch.tensor(own.known) - own.start - torch.tensor(context.known) + context.start
        columns = (torch.arange(context.n_tokens) + shift[:, None]).clamp(0, logits.shape[1] - 1)
        rows = torch.arange(len(self.rows), device=logits.device)[:, None]
        logits = logits[rows, columns.to(logits.device)]  # (rows, n, vocab)
        return Draft(result.tokens, self.restriction.to_target(logits))


def _span(lengths: list[int], rooms: list[int]) -> tuple[int, int]:
    """The first column to draft for any row, and the first that is not."""
    spans = [(n, n + room) for n, room in zip(lengths, rooms, strict=True) if room]
    return min(first for first, _ in spans), max(end for _, end in spans)


def _prompts(run: Run) -> list[list[int]]:
    """The target's prompt without its padding, row by row."""
    name = "decoder_attention_mask" if run.is_encoder_decoder else "attention_mask"
    mask = run.model_kwargs.get(name)
    if mask is None or mask.shape != run.ids.shape:
        mask = torch.ones_like(run.ids)
    return [ids[is_token].tolist() for ids, is_token in zip(run.ids, mask.bool(), strict=True)]
