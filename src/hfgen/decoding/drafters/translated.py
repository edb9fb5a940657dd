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

from ...logits.processors.lists import LogitsProcessorList, for_drafts, is_row_wise
from ...memory.caches.layers import keeps_all_tokens
from ...state.call import ModelKwargs
from ...state.run import Run
from ...state.vocabularies import Spelling, n_scores, shared_tokens
from .assistant import Assistant
from .base import Draft, DraftContext, Setup, draft_of_rows, drafted_tokens
from .text_bridge import Row, common_prefix


class UniversalDrafter(Assistant):
    """Drafts in the assistant's tokens, padded on the left so that all rows end together.

    Rows that advance by different numbers of the assistant's tokens are read anew.
    """

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
        #: Pads of each row, and its columns in the cache: -1 where that is unknown.
        self.pads = [0] * len(self.rows)
        self.fed: list[list[int]] = [[] for _ in self.rows]
        #: Columns of the cache that still hold.
        self.n_kept = 0

    def opening(self, text: str) -> list[int]:
        """The ids that the assistant's begin with, before ``text``."""
        if not self.model.config.is_encoder_decoder:
            return self.own.opening(text)
        start = self.model.generation_config.decoder_start_token_id
        start = self.model.config.decoder_start_token_id if start is None else start
        return [] if start is None else [start]

    # --- a round --------------------------------------------------------------------------------

    def draft(self, context: DraftContext) -> Draft | None:
        if all(context.is_done):
            return None
        first = min(n for n, done in zip(self.n_read, context.is_done, strict=True) if not done)
        new = context.ids[:, first : max(context.known)].tolist()
        texts: list[list[int]] = []
        n_tokens = 0
        for index, (row, known) in enumerate(zip(self.rows, context.known, strict=True)):
            if context.is_done[index]:
                texts.append([])
                continue
            row.read(new[index][self.n_read[index] - first : known - first])
            self.n_read[index] = known
            texts.append(row.context())
            n_tokens = max(n_tokens, context.end - known if texts[-1] else 0)
        own = self.laid_out(texts, n_tokens) if n_tokens else None
        if own is None or (drafted := super().draft(own)) is None:
            return None
        self.fed = [row + new for row, new in zip(self.fed, drafted.tokens.tolist(), strict=True)]
        return self.translated(drafted, own, context)

    def laid_out(self, texts: list[list[int]], n_tokens: int) -> DraftContext | None:
        """A context of the assistant's ids: ``texts``, which are empty for rows that have ended."""
        is_done, longest = tuple(not text for text in texts), max(map(len, texts))
        pads = [longest - len(text) if text else 0 for text in texts]
        rows = [[0] * (longest - len(text)) + text for text in texts]
        triples = zip(self.fed, rows, is_done, strict=True)
        valid = [common_prefix(fed, row) for fed, row, done in triples if not done]
        n_kept = min(*valid, longest - 1, self.cached)
        # Some caches can be taken back by the last draft alone.
        is_lost = n_kept < self.n_kept and not (
            self.run is not None and keeps_all_tokens(self.run.model_kwargs["past_key_values"])
        )
        if pads != self.pads or is_lost:
            self.run, self.cached, self.length, n_kept = None, 0, 0, 0
        self.pads, self.fed, self.n_kept = pads, rows, n_kept
        self.forget(n_kept)
        end = int(min(longest + n_tokens, self.positions))
        if longest >= end:
            return None
        ids = torch.tensor([row + [0] * (end - longest) for row in rows])
        known = tuple(end if done else longest for done in is_done)
        return DraftContext(ids, known, is_done, start=longest, n_tokens=end - longest)

    def translated(self, drafted: Draft, own: DraftContext, context: DraftContext) -> Draft | None:
        """The draft for ``context``, of what the assistant has ``drafted`` for ``own``."""
        rows = []
        for row, known, new in zip(
            self.rows, context.known, drafted_tokens(drafted.tokens, own), strict=True
        ):
            room = max(context.end - known, 0)
            rows.append(self.followed(row, new[:room])[:room] if new[:room] else [])
        return draft_of_rows(rows, context)

    def followed(self, row: Row, drafted: list[int]) -> list[int]:
        """The target's tokens for the assistant's ``drafted`` ones, of which there are some."""
        raise NotImplementedError

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
        encoder_input: Any = self.setup.encoder_input
        has_encoder = self.model.config.is_encoder_decoder and encoder_input is not None
        if not has_encoder or encoder_input.is_floating_point():
            return
        rows = [
            list(self.own.tokenizer.encode(self.target.text(row))) for row in encoder_input.tolist()
        ]
        width = max(1, *map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        self.setup, self.encoder_mask = replace(self.setup, encoder_input=ids), mask


class ByText(UniversalDrafter):
    """Greedy: everything is translated as text, so the two vocabularies may be disjoint."""

    def followed(self, row: Row, drafted: list[int]) -> list[int]:
        """The text's tokens; if the assistant has ended it, the target's EOS."""
        assert self.run is not None
        tokens = row.follow(drafted)
        own_eos = self.run.config._eos_token_tensor
        eos = self.setup.run.config._eos_token_tensor
        if eos is None or own_eos is None or drafted[-1] not in own_eos.tolist():
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

    def draft(self, context: DraftContext) -> Draft | None:
        self.restriction.context = context
        return super().draft(context)

    def laid_out(self, texts: list[list[int]], n_tokens: int) -> DraftContext | None:
        self.restriction.start = max(map(len, texts))
        return super().laid_out(texts, n_tokens)

    def translated(self, drafted: Draft, own: DraftContext, context: DraftContext) -> Draft | None:
        """Also the logits: those of each row's tokens, in the target's vocabulary."""
        result = super().translated(drafted, own, context)
        if result is None:
            return None
        logits: Any = drafted.logits
        columns = torch.arange(result.tokens.shape[1]) + context.start
        columns = (columns - torch.tensor(context.known)[:, None]).clamp(0, logits.shape[1] - 1)
        rows = torch.arange(len(self.rows), device=logits.device)[:, None]
        logits = logits[rows, columns.to(logits.device)]  # (rows, n, vocab)
        return replace(result, logits=self.restriction.to_target(logits))


class Restriction:
    """A processor of the assistant's scores: those of shared tokens, as the target would process them."""

    is_row_wise = True
    #: The target's known tokens before the draft, and the assistant's column in which the draft starts.
    context: DraftContext
    start: int

    def __init__(
        self,
        to_target: dict[int, int],
        target_size: int,
        processors: LogitsProcessorList,
        device: torch.device,
    ) -> None:
        self.own = torch.tensor(list(to_target), device=device)
        self.target = torch.tensor(list(to_target.values()), device=device)
        self.target_size, self.processors, self.device = target_size, processors, device

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``ids (rows, length)`` and ``scores (rows, vocab)`` of the assistant; the same back."""
        shared = self.to_target(scores.to(self.device))
        restricted = shared
        if self.processors:
            processed = self.processors(self.target_ids(ids.to(self.device)), shared.clone())
            # Nothing shared may be left, if an EOS is forced: any other draft will do as well.
            is_left = (processed[:, self.target] > -math.inf).any(dim=1, keepdim=True)
            restricted = torch.where(is_left, processed, shared)
        result = torch.full_like(scores, -math.inf)
        result[:, self.own.to(scores.device)] = restricted[:, self.target].to(scores.device)
        return result

    def to_target(self, scores: torch.Tensor) -> torch.Tensor:
        """``(…, assistant's vocab)`` to ``(…, target's vocab)``: -inf where it is not shared."""
        result = scores.new_full((*scores.shape[:-1], self.target_size), -math.inf)
        result[..., self.target.to(scores.device)] = scores[..., self.own.to(scores.device)]
        return result

    def target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """The target's ids ``(rows, length)`` so far; rows that are shorter repeat their first id."""
        known = torch.tensor(self.context.known, device=self.device)[:, None]
        n_drafted = ids.shape[1] - self.start
        longest = int(known.max()) + n_drafted
        columns = (torch.arange(longest, device=self.device) - longest + known + n_drafted).clamp(0)
        before = self.context.ids.to(self.device)
        before = before.gather(1, columns.clamp(max=before.shape[1] - 1))
        index = torch.searchsorted(self.own, ids.contiguous()).clamp(max=len(self.own) - 1)
        drafted = (self.start + columns - known).clamp(0, ids.shape[1] - 1)
        return torch.where(columns >= known, self.target[index].gather(1, drafted), before)


def _prompts(run: Run) -> list[list[int]]:
    """The target's prompt without its padding, row by row."""
    name = "decoder_attention_mask" if run.is_encoder_decoder else "attention_mask"
    mask = run.model_kwargs.get(name)
    if mask is None or mask.shape != run.ids.shape:
        mask = torch.ones_like(run.ids)
    return [ids[is_token].tolist() for ids, is_token in zip(run.ids, mask.bool(), strict=True)]
