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

from ...families import CACHE, n_scores
from ...logits.processors.lists import LogitsProcessorList, for_drafts, is_row_wise
from ...memory.caches.layers import keeps_all_tokens
from ...state.call import ModelKwargs
from ...state.run import Run
from ...state.text import INCOMPLETE, Spelling, n_common, shared_tokens
from .assistant import Assistant
from .base import Draft, DraftContext, Setup, draft_of_rows, drafted_tokens, prompts_of


class UniversalDrafter(Assistant):
    """Drafts in the assistant's tokens, padded on the left, and translates their text.

    The two vocabularies may be disjoint. Rows that advance by different numbers of tokens are read anew.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.target = Spelling(setup.tokenizer, n_scores(setup.run.model))
        self.own = Spelling(setup.assistant_tokenizer, n_scores(self.model))
        self.encoder_mask: torch.Tensor | None = None
        self.translate_encoder_input()
        config, model_config = self.model.generation_config, self.model.config
        windows = (config.target_lookbehind or 10, config.assistant_lookbehind or 10)
        starts: list[int] | None = None  # the ids that the assistant's begin with
        if model_config.is_encoder_decoder:
            configs = (config, model_config)
            ids = (getattr(each, "decoder_start_token_id", None) for each in configs)
            starts = [start for start in ids if start is not None][:1]
        self.rows: list[Row] = []
        for tokens in prompts_of(setup.run):
            opening = self.own.opening(self.target.text(tokens)) if starts is None else starts
            self.rows.append(Row(self.target, self.own, *windows, opening=opening))
            self.rows[-1].tokens += tokens
        self.n_read = [setup.run.ids.shape[1]] * len(self.rows)
        positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
        self.positions: float = positions or math.inf
        self.context: DraftContext  # of the draft, in the target's ids
        self.start = 0  # the assistant's column in which the draft starts
        #: Pads of each row, and its columns in the cache: -1 where that is unknown.
        self.pads = [0] * len(self.rows)
        self.fed: list[list[int]] = [[] for _ in self.rows]
        self.n_kept = 0  # columns of the cache that still hold

    def draft(self, context: DraftContext) -> Draft | None:
        if all(context.is_done):
            return None
        self.context = context
        first = min(n for n, done in zip(self.n_read, context.is_done, strict=True) if not done)
        new = context.ids[:, first : max(context.known)].tolist()
        texts: list[list[int]] = [[] for _ in self.rows]
        n_tokens = 0
        for index, (row, known) in enumerate(zip(self.rows, context.known, strict=True)):
            if not context.is_done[index]:
                row.tokens += new[index][self.n_read[index] - first : known - first]
                self.n_read[index], texts[index] = known, row.context()
                n_tokens = max(n_tokens, context.end - known if texts[index] else 0)
        own = self.laid_out(texts, n_tokens) if n_tokens else None
        if own is None or (drafted := super().draft(own)) is None:
            return None
        self.fed = [row + new for row, new in zip(self.fed, drafted.tokens.tolist(), strict=True)]
        return self.translated(drafted, own, context)

    def laid_out(self, texts: list[list[int]], n_tokens: int) -> DraftContext | None:
        """A context of the assistant's ids: ``texts``, which are empty for rows that have ended."""
        is_done, longest = tuple(not text for text in texts), max(map(len, texts))
        self.start = longest
        pads = [longest - len(text) if text else 0 for text in texts]
        rows = [[0] * (longest - len(text)) + text for text in texts]
        triples = zip(self.fed, rows, is_done, strict=True)
        valid = [n_common(fed, row) for fed, row, done in triples if not done]
        n_kept = min(*valid, longest - 1, self.cached)
        # Some caches can be taken back by the last draft alone.
        cache = None if self.run is None else self.run.model_kwargs[CACHE]
        is_lost = n_kept < self.n_kept and (cache is None or not keeps_all_tokens(cache))
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
        new_ids, rows = drafted_tokens(drafted.tokens, own), []
        for row, known, new in zip(self.rows, context.known, new_ids, strict=True):
            room = max(context.end - known, 0)
            rows.append(self.followed(row, new[:room])[:room] if new[:room] else [])
        return draft_of_rows(rows, context)

    def followed(self, row: Row, drafted: list[int]) -> list[int]:
        """The target's tokens for the text of ``drafted``; if the assistant has ended it, with the target's EOS."""
        assert self.run is not None
        tokens, own_eos = row.follow(drafted), self.run.config._eos_token_tensor
        eos = self.setup.run.config._eos_token_tensor
        if eos is None or own_eos is None or drafted[-1] not in own_eos.tolist():
            return tokens
        is_whole = len(drafted) == 1 or bool(tokens)  # else there is text that was not translated
        return [*tokens, int(eos[0])] if is_whole else []

    def use_parameters_of_rows(self, run: Run, target: Run) -> None:
        """EOS ids are the assistant's own; a penalty of the target's holds for any tokens."""
        self.eos = run.config._eos_token_tensor

    def shared_processors(self, target: Run) -> list[Any]:
        """Repetition penalties: other processors speak of the target's tokens."""
        return [p for p in target.processors if isinstance(p, RepetitionPenaltyLogitsProcessor)]

    def config(self, target: GenerationConfig) -> GenerationConfig:
        """A config in the assistant's terms; what the call does not say it has of its own."""
        eos = self.model.generation_config.eos_token_id
        if eos is None:
            eos = getattr(self.own.tokenizer, "eos_token_id", None)
        fields: dict[str, Any] = {"num_beams": 1, "num_return_sequences": 1, "temperature": 1.0}
        fields |= {"do_sample": bool(target.do_sample), "cache_implementation": "dynamic"}
        config = GenerationConfig(**fields, eos_token_id=eos)
        config.is_assistant, config.use_mtp = True, False
        return config

    def model_kwargs(self, target: Run, ids: torch.Tensor) -> ModelKwargs:
        kwargs: ModelKwargs = {}
        if any(self.pads):
            prefix = "decoder_" if self.model.config.is_encoder_decoder else ""
            columns = torch.arange(ids.shape[1], device=ids.device)
            pads = torch.tensor(self.pads, device=ids.device)
            kwargs[prefix + "attention_mask"] = (columns >= pads[:, None]).long()
        if (mask := self.encoder_mask) is not None:
            mask = mask.repeat_interleave(len(ids) // len(mask), dim=0)
            kwargs["attention_mask"] = mask.to(ids.device)
        return kwargs

    def translate_encoder_input(self) -> None:
        """Encode text for the assistant's encoder anew; features of other media stay as they are."""
        encoder_input: Any = self.setup.encoder_input
        has_encoder = self.model.config.is_encoder_decoder and encoder_input is not None
        if not has_encoder or encoder_input.is_floating_point():
            return
        texts = map(self.target.text, encoder_input.tolist())
        rows = [list(self.own.tokenizer.encode(text)) for text in texts]
        width = max(1, *map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        self.setup.encoder_input, self.encoder_mask = ids, mask


class BySharedTokens(UniversalDrafter):
    """Sampling: the assistant draws from shared tokens; it is a processor of the assistant's scores itself."""

    is_row_wise = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.to_target, self.device = shared_tokens(self.target, self.own), setup.run.ids.device
        #: Ids ``(n,)`` of the shared tokens: the assistant's, ascending, and the target's.
        self.own_shared = torch.tensor(list(self.to_target), device=self.device)
        self.target_shared = torch.tensor(list(self.to_target.values()), device=self.device)
        processors = for_drafts(p for p in setup.run.processors if is_row_wise(p))
        self.processors = LogitsProcessorList(processors)

    def followed(self, row: Row, drafted: list[int]) -> list[int]:
        return [self.to_target[token] for token in drafted]

    def use_parameters_of_rows(self, run: Run, target: Run) -> None:
        super().use_parameters_of_rows(run, target)
        run.processors = LogitsProcessorList([self])

    def translated(self, drafted: Draft, own: DraftContext, context: DraftContext) -> Draft | None:
        """Also the logits: those of each row's tokens, in the target's vocabulary."""
        if (result := super().translated(drafted, own, context)) is None:
            return None
        logits: Any = drafted.logits
        columns = torch.arange(result.tokens.shape[1]) + context.start
        columns = (columns - torch.tensor(context.known)[:, None]).clamp(0, logits.shape[1] - 1)
        rows = torch.arange(len(self.rows), device=logits.device)[:, None]
        logits = logits[rows, columns.to(logits.device)]  # (rows, n, vocab)
        return replace(result, logits=self.in_target(logits))

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The assistant's ``scores (rows, vocab)`` of shared tokens, as the target would process them."""
        shared = restricted = self.in_target(scores.to(self.device))
        if self.processors:
            processed = self.processors(self.target_ids(ids.to(self.device)), shared.clone())
            # Nothing shared may be left, if an EOS is forced: any other draft will do as well.
            is_left = (processed[:, self.target_shared] > -math.inf).any(dim=1, keepdim=True)
            restricted = torch.where(is_left, processed, shared)
        result = torch.full_like(scores, -math.inf)
        restricted = restricted[:, self.target_shared].to(scores.device)
        result[:, self.own_shared.to(scores.device)] = restricted
        return result

    def in_target(self, scores: torch.Tensor) -> torch.Tensor:
        """``(…, assistant's vocab)`` to ``(…, target's vocab)``: -inf where it is not shared."""
        result = scores.new_full((*scores.shape[:-1], self.target.size), -math.inf)
        shared = scores[..., self.own_shared.to(scores.device)]
        result[..., self.target_shared.to(scores.device)] = shared
        return result

    def target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """The target's ids ``(rows, length)`` so far; rows that are shorter repeat their first id."""
        known = torch.tensor(self.context.known, device=self.device)[:, None]
        n_drafted = ids.shape[1] - self.start
        longest = int(known.max()) + n_drafted
        columns = (torch.arange(longest, device=self.device) - longest + known + n_drafted).clamp(0)
        before = self.context.ids.to(self.device)
        before = before.gather(1, columns.clamp(max=before.shape[1] - 1))
        index = torch.searchsorted(self.own_shared, ids.contiguous())
        shared = self.target_shared[index.clamp(max=len(self.own_shared) - 1)]
        drafted = (self.start + columns - known).clamp(0, ids.shape[1] - 1)
        return torch.where(columns >= known, shared.gather(1, drafted), before)


class Row:
    """One sequence of the target in the assistant's ids; each round encodes a window of new tokens."""

    def __init__(self, target: Spelling, own: Spelling, *windows: int, opening: Any = ()) -> None:
        """``opening``: ids that the assistant's begin with."""
        self.target, self.own = target, own
        self.lookbehind, self.own_lookbehind = windows
        self.tokens: list[int] = []
        self.begin = 0  # of the window, in `tokens`
        self.limit = 2 * self.lookbehind  # tokens in a window that is about to move
        #: The assistant's ids up to the window; how many that begin the window's encoding are theirs.
        self.before = [*opening]
        self.n_overlap = 0
        self.newest: list[int] = []  # the end of the last context

    def context(self) -> list[int]:
        window = self.encoded(self.begin)
        context = self.before + window[self.n_overlap :]
        self.move(window)
        self.newest = context[-self.own_lookbehind :]
        return context

    def encoded(self, begin: int) -> list[int]:
        """The assistant's ids of the text from token ``begin`` on, up to an incomplete character."""
        return self.own.ids(self.target.text(self.tokens[begin:]).rstrip(INCOMPLETE))

    def move(self, window: list[int]) -> None:
        """Begin the window later, once it has grown to its limit: where the encodings of both windows end alike."""
        if len(self.tokens) - self.begin <= self.limit:
            return
        begin = len(self.tokens) - self.lookbehind
        later = self.encoded(begin)
        n_shared = n_common(window[self.n_overlap :][::-1], later[::-1])
        if 2 * n_shared <= len(later):  # hardly: try again further on
            self.limit *= 2
            return
        self.before += window[self.n_overlap : len(window) - n_shared]
        self.begin, self.n_overlap = begin, len(later) - n_shared
        self.limit = 2 * self.lookbehind

    def follow(self, drafted: list[int]) -> list[int]:
        """The target's ids for the text of ``drafted`` behind what is known; none where it is not sure."""
        old = self.own.text(self.newest)
        text = self.own.text(self.newest + drafted).rstrip(INCOMPLETE)
        if text == old or not text.startswith(old):
            return []
        text = text[len(old) :]
        known_ids = self.tokens[-self.lookbehind :]
        known = self.target.text(known_ids)
        complete = known.rstrip(INCOMPLETE)
        ids = self.target.ids(complete + text)
        if ids[: len(known_ids)] == known_ids:
            return ids[len(known_ids) :]
        if complete != known:  # amid a character
            return []
        as_encoded = self.target.ids(known)  # which the target may have chosen to write otherwise
        if ids[: len(as_encoded)] == as_encoded:
            return ids[len(as_encoded) :]
        ids = self.target.ids(text)  # what is known ends amid a token
        return ids if self.target.text(known_ids + ids) == known + text else []
