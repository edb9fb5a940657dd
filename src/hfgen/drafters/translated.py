"""Drafts by an assistant that has another tokenizer.

Greedy: what is known is decoded to text and encoded anew for the assistant, and what it drafts goes
the same way back ("universal assisted generation"). Sampling: the assistant is restricted to the
tokens that both vocabularies have, so that the probability of each drafted token is known (Timor et
al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies", algorithm 4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from transformers import EncoderDecoderCache, GenerationConfig
from transformers.cache_utils import DynamicLayer

from ..processors import LogitsProcessorList, is_row_wise
from ..types import ModelKwargs, Run
from ..vocabularies import INCOMPLETE, Spelling, n_scores, shared_tokens
from .assistant import Assistant
from .base import Context, Draft, Setup


class Row(Protocol):
    """One sequence of the target, as the assistant reads it."""

    def read(self, tokens: list[int]) -> None:
        """Take the target's next known ``tokens``."""

    def context(self) -> list[int]:
        """All that is known, in the assistant's ids."""

    def follow(self, drafted: list[int]) -> list[int]:
        """What the assistant has drafted behind ``context``, in the target's ids."""


class Reencoded:
    """A row that is translated as text.

    What is encoded anew each round is a window of the newest target tokens. Where it begins moves
    on with them: see ``move``. A wrong alignment makes a bad draft, no more.
    """

    def __init__(
        self, target: Spelling, own: Spelling, lookbehind: int, own_lookbehind: int
    ) -> None:
        self.target, self.own = target, own
        self.lookbehind, self.own_lookbehind = lookbehind, own_lookbehind
        self.tokens: list[int] = []
        self.begin = 0  # of the window, in `tokens`
        self.limit = 2 * lookbehind  # tokens in a window that is about to move
        #: The assistant's ids up to the window; how many that begin the window's encoding are theirs.
        self.before: list[int] = []
        self.n_overlap = 0
        self.newest: list[int] = []  # the end of the last context

    def open(self, opening: list[int]) -> None:
        """Let the assistant's context begin with these."""
        self.before = list(opening)

    def read(self, tokens: list[int]) -> None:
        self.tokens += tokens

    def context(self) -> list[int]:
        window = self.encoded(self.begin)
        context = self.before + window[self.n_overlap :]
        self.move(window)
        self.newest = context[-self.own_lookbehind :]
        return context

    def encoded(self, begin: int) -> list[int]:
        """The assistant's ids of the text from the target's token ``begin`` on.

        A character that is not complete is left to the assistant.
        """
        return self.own.ids(self.target.text(self.tokens[begin:]).rstrip(INCOMPLETE))

    def move(self, window: list[int]) -> None:
        """Begin the window later, once it has grown to its limit.

        The encodings of both windows end alike. Where they part is where what is kept as it is
        ends; the later window's first ids, of a text cut somewhere, are not used.
        """
        if len(self.tokens) - self.begin <= self.limit:
            return
        begin = len(self.tokens) - self.lookbehind
        later = self.encoded(begin)
        n_common = common_suffix(window[self.n_overlap :], later)
        if 2 * n_common <= len(later):  # hardly: try again further on
            self.limit *= 2
            return
        self.before += window[self.n_overlap : len(window) - n_common]
        self.begin, self.n_overlap = begin, len(later) - n_common
        self.limit = 2 * self.lookbehind

    def follow(self, drafted: list[int]) -> list[int]:
        old = self.own.text(self.newest)
        text = self.own.text(self.newest + drafted).rstrip(INCOMPLETE)
        if not text.startswith(old):
            return []
        return self.appended(text[len(old) :])

    def appended(self, text: str) -> list[int]:
        """The target's ids of ``text`` behind what is known."""
        if not text:
            return []
        known_ids = self.tokens[-self.lookbehind :]
        known = self.target.text(known_ids)
        complete = known.rstrip(INCOMPLETE)
        ids = self.target.ids(complete + text)
        if ids[: len(known_ids)] == known_ids:
            return ids[len(known_ids) :]
        if complete != known:
            return []  # amid a character
        as_encoded = self.target.ids(known)  # which the target may have chosen to write otherwise
        if ids[: len(as_encoded)] == as_encoded:
            return ids[len(as_encoded) :]
        ids = self.target.ids(text)  # what is known ends amid a token
        return ids if self.target.text(known_ids + ids) == known + text else []


class Mapped:
    """A row that is translated token by token, as far as both vocabularies have the token."""

    def __init__(self, target: Spelling, own: Spelling, to_target: dict[int, int]) -> None:
        self.target, self.own = target, own
        self.to_target = to_target
        self.to_own = {theirs: mine for mine, theirs in to_target.items()}
        self.ids: list[int] = []
        self.has_prompt = False

    def open(self, opening: list[int]) -> None:
        self.ids = opening + self.ids

    def read(self, tokens: list[int]) -> None:
        if not self.has_prompt:  # the assistant's own encoding of it is what it was trained on
            self.ids += self.own.ids(self.target.text(tokens).rstrip(INCOMPLETE))
            self.has_prompt = True
            return
        for token in tokens:
            if token in self.to_own:
                self.ids.append(self.to_own[token])
            else:
                self.ids += self.own.ids(self.target.text([token]).strip(INCOMPLETE))

    def context(self) -> list[int]:
        return list(self.ids)

    def follow(self, drafted: list[int]) -> list[int]:
        return [self.to_target[token] for token in drafted]


class Translated(Assistant):
    """Drafts in the assistant's tokens, for rows that are as far in them as they happen to be.

    The assistant's ids of all rows are laid out in columns, padded on the left so that the rows end
    together. With time they drift apart, since a text has more tokens in one vocabulary and fewer
    in the other; they are then laid out anew, and read anew by the assistant.
    """

    #: By how many columns rows may have drifted apart.
    DRIFT = 8

    rows: Sequence[Reencoded | Mapped]

    def __init__(self, setup: Setup, threshold: float | None = None) -> None:
        super().__init__(setup, threshold=threshold)
        self.target = Spelling(setup.tokenizer, n_scores(setup.run.model))
        self.own = Spelling(setup.assistant_tokenizer, n_scores(self.model))
        self.encoder_mask: torch.Tensor | None = None
        self.translate_encoder_input()
        self.rows = [self.new_row() for _ in range(len(setup.run.ids))]
        self.n_read = [setup.run.ids.shape[1]] * len(self.rows)
        for row, tokens in zip(self.rows, _prompts(setup.run), strict=True):
            row.open(self.opening(self.target.text(tokens)))
            row.read(tokens)
        config = self.model.config.get_text_config()
        self.positions: float = getattr(config, "max_position_embeddings", None) or math.inf
        self.pads = [0] * len(self.rows)
        #: The columns of each row as the cache has them; -1 where that is unknown.
        self.fed: list[list[int]] = [[] for _ in self.rows]
        #: Columns of the cache that still hold; those that held in the round before.
        self.n_valid = self.n_kept = 0

    def new_row(self) -> Reencoded | Mapped:
        raise NotImplementedError

    def opening(self, text: str) -> list[int]:
        """What the assistant's ids begin with, before ``text``."""
        if not self.model.config.is_encoder_decoder:
            return self.own.opening(text)
        start = self.model.generation_config.decoder_start_token_id
        start = self.model.config.decoder_start_token_id if start is None else start
        return [] if start is None else [start]

    # --- a round --------------------------------------------------------------------------------

    def draft(self, context: Context) -> Draft | None:
        self.read(context)
        rooms = [
            0 if done else max(context.end - known, 0)
            for known, done in zip(context.known, context.is_done, strict=True)
        ]
        columns = [
            [] if done else row.context()
            for row, done in zip(self.rows, context.is_done, strict=True)
        ]
        rooms = [room if ids else 0 for room, ids in zip(rooms, columns, strict=True)]
        own = self.laid_out(columns, rooms) if any(rooms) else None
        if own is None:
            return None
        drafted = super().draft(own)
        if drafted is None:
            return None
        tokens = drafted.tokens.tolist()
        known = own.ids[:, : own.start].tolist()
        self.fed = [
            old[: self.n_kept] + (before + new)[self.n_kept :]
            for old, before, new in zip(self.fed, known, tokens, strict=True)
        ]
        return self.translated(tokens, drafted, own, context)

    def read(self, context: Context) -> None:
        """Let the rows read what has become known of the target's tokens."""
        first = min(self.n_read)
        new = context.ids[:, first : max(context.known)].tolist()
        for index, row in enumerate(self.rows):
            if not context.is_done[index]:
                row.read(new[index][self.n_read[index] - first : context.known[index] - first])
                self.n_read[index] = context.known[index]

    def laid_out(self, contexts: list[list[int]], rooms: list[int]) -> Context | None:
        """What the assistant has to go by: a context of its own ids, with room for drafts.

        ``contexts``: ids of each row, empty if it has ended; ``rooms``: how much to draft of it.
        """
        is_open = [room > 0 for room in rooms]
        self.n_valid = min(
            common_prefix(fed, [0] * pad + ids)
            for fed, pad, ids, open_ in zip(self.fed, self.pads, contexts, is_open, strict=True)
            if open_
        )
        lengths = [pad + len(ids) for pad, ids in zip(self.pads, contexts, strict=True)]
        first, end = _span(lengths, rooms)
        n_kept = min(self.n_valid, first - 1, self.cached)
        is_lost = n_kept < self.n_kept and not _can_forget_all(self.run)
        if self.run is None or is_lost or end - first > max(rooms) + self.DRIFT:
            self.run, self.cached, self.length = None, 0, 0
            longest = max(map(len, contexts))
            self.pads = [longest - len(ids) if ids else 0 for ids in contexts]
            lengths = [longest] * len(lengths)
            first, end = _span(lengths, rooms)
            n_kept = 0
        end = int(min(end, self.positions))
        if first >= end:
            return None
        self.n_kept = n_kept
        width = max(end, *lengths)
        ids = [
            [0] * pad + ids + [0] * (width - pad - len(ids))
            for pad, ids in zip(self.pads, contexts, strict=True)
        ]
        return Context(
            ids=torch.tensor(ids),
            known=tuple(
                length if open_ else end for length, open_ in zip(lengths, is_open, strict=True)
            ),
            is_done=tuple(not open_ for open_ in is_open),
            start=first,
            n_tokens=end - first,
        )

    def translated(
        self, tokens: list[list[int]], drafted: Draft, own: Context, context: Context
    ) -> Draft:
        """The draft for ``context``, of the assistant's ``tokens`` from ``own.start`` on."""
        result = torch.full((len(self.rows), context.n_tokens), -1)
        for index, row in enumerate(self.rows):
            if own.is_done[index]:
                continue
            mine = tokens[index][own.known[index] - own.start :]
            mine = mine[: mine.index(-1)] if -1 in mine else mine
            lead = context.known[index] - context.start
            theirs = self.followed(row, mine)[: context.n_tokens - lead]
            result[index, lead : lead + len(theirs)] = torch.tensor(theirs, dtype=torch.long)
        return Draft(result)

    def followed(self, row: Reencoded | Mapped, drafted: list[int]) -> list[int]:
        return row.follow(drafted) if drafted else []

    def forget(self, n_valid: int) -> None:
        super().forget(min(n_valid, self.n_valid))

    # --- the assistant's own run ----------------------------------------------------------------

    def shared_processors(self, target: Run) -> list[Any]:
        """None: they speak of the target's tokens."""
        return []

    def config(self, target: GenerationConfig) -> GenerationConfig:
        """A config in the assistant's terms; what the call does not say it has of its own."""
        config = GenerationConfig(
            do_sample=bool(target.do_sample),
            num_beams=1,
            num_return_sequences=1,
            temperature=1.0,
            cache_implementation="dynamic",
            repetition_penalty=target.repetition_penalty,
            eos_token_id=self.model.generation_config.eos_token_id,
        )
        config.is_assistant = True
        config.use_mtp = False
        if config.eos_token_id is None:
            config.eos_token_id = getattr(self.own.tokenizer, "eos_token_id", None)
        return config

    def model_kwargs(self, target: Run, ids: torch.Tensor) -> ModelKwargs:
        kwargs: ModelKwargs = {}
        prefix = "decoder_" if self.model.config.is_encoder_decoder else ""
        if any(self.pads):
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
        texts = [self.target.text(row) for row in given.tolist()]
        rows = [list(self.own.tokenizer.encode(text)) for text in texts]
        width = max(1, *map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        self.setup, self.encoder_mask = replace(self.setup, encoder_input=ids), mask


class ByText(Translated):
    """Greedy: everything is translated as text, so the two vocabularies may be disjoint."""

    def new_row(self) -> Reencoded:
        config = self.model.generation_config
        windows = (config.target_lookbehind or 10, config.assistant_lookbehind or 10)
        return Reencoded(self.target, self.own, *windows)

    def followed(self, row: Reencoded | Mapped, drafted: list[int]) -> list[int]:
        """The text's tokens; if the assistant has ended it, the target's EOS."""
        assert self.run is not None
        tokens = super().followed(row, drafted)
        own_eos = self.run.config._eos_token_tensor
        eos = self.setup.run.config._eos_token_tensor
        if eos is None or own_eos is None or not drafted or drafted[-1] not in own_eos.tolist():
            return tokens
        is_whole = len(drafted) == 1 or bool(tokens)  # else there is text that was not translated
        return [*tokens, int(eos[0])] if is_whole else []


class BySharedTokens(Translated):
    """Sampling: the assistant draws from the tokens that both vocabularies have.

    Its scores go through the target's processors, in the target's vocabulary.
    """

    def __init__(self, setup: Setup, threshold: float | None = None) -> None:
        target = Spelling(setup.tokenizer, n_scores(setup.run.model))
        own = Spelling(setup.assistant_tokenizer, n_scores(setup.assistant_model))
        self.to_target = shared_tokens(target, own)
        super().__init__(setup, threshold)
        processors = [p for p in setup.run.processors if is_row_wise(p)]
        self.restriction = Restriction(
            self.to_target, target.size, LogitsProcessorList(processors), setup.run.ids.device
        )

    def new_row(self) -> Mapped:
        return Mapped(self.target, self.own, self.to_target)

    def prepare(self, ids: torch.Tensor) -> Run:
        run = super().prepare(ids)
        run.processors = LogitsProcessorList([self.restriction])
        return run

    def laid_out(self, contexts: list[list[int]], rooms: list[int]) -> Context | None:
        own = super().laid_out(contexts, rooms)
        if own is not None:
            self.restriction.own_known = own.known
        return own

    def draft(self, context: Context) -> Draft | None:
        self.restriction.begin(context)
        return super().draft(context)

    def translated(
        self, tokens: list[list[int]], drafted: Draft, own: Context, context: Context
    ) -> Draft:
        """Also the logits: those of each row's tokens, in the target's vocabulary."""
        result = super().translated(tokens, drafted, own, context)
        assert drafted.logits is not None
        logits = drafted.logits
        shift = torch.tensor(own.known) - own.start - torch.tensor(context.known) + context.start
        columns = torch.arange(context.n_tokens) + shift[:, None]  # (rows, n)
        columns = columns.clamp(0, logits.shape[1] - 1).to(logits.device)
        rows = torch.arange(len(self.rows), device=logits.device)[:, None]
        return Draft(result.tokens, self.restriction.to_target(logits[rows, columns]))


class Restriction:
    """A processor of the assistant's scores: those of shared tokens, as the target would process them."""

    is_row_wise = True

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
        #: How far the rows are known, in the assistant's columns.
        self.own_known: tuple[int, ...] = ()

    def begin(self, context: Context) -> None:
        """Start a draft behind ``context``."""
        self.known = torch.tensor(context.known, device=self.device)
        self.ids = context.ids.to(self.device, copy=True)

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``ids (rows, length)`` and ``scores (rows, vocab)`` of the assistant; the same back."""
        vocab, device = scores.shape[1], scores.device
        shared = self.to_target(scores.to(self.device))
        restricted = self.to_own(shared, vocab)
        if self.processors:
            processed = self.processors(self.target_ids(ids.to(self.device)), shared.clone())
            processed = self.to_own(processed, vocab)
            # Nothing shared may be left, if an EOS is forced: any other draft will do as well.
            is_left = (processed > -math.inf).any(dim=1, keepdim=True)
            restricted = torch.where(is_left, processed, restricted)
        return restricted.to(device)

    def to_target(self, scores: torch.Tensor) -> torch.Tensor:
        """``(…, assistant's vocab)`` to ``(…, target's vocab)``: -inf where it is not shared."""
        result = scores.new_full((*scores.shape[:-1], self.target_size), -math.inf)
        result[..., self.target.to(scores.device)] = scores[..., self.own.to(scores.device)]
        return result

    def to_own(self, scores: torch.Tensor, vocab: int) -> torch.Tensor:
        """``(rows, target's vocab)`` to ``(rows, vocab)``, the assistant's."""
        result = scores.new_full((scores.shape[0], vocab), -math.inf)
        result[:, self.own] = scores[:, self.target]
        return result

    def target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """The target's ids ``(rows, length)`` of what is known and drafted so far.

        Rows that are shorter repeat their first id: processors ask what occurred, and what is newest.
        """
        n_drafted = ids.shape[1] - torch.tensor(self.own_known, device=self.device)
        n_drafted = n_drafted.clamp(min=0)
        lengths = self.known + n_drafted
        longest = int(lengths.max())
        if longest > self.ids.shape[1]:
            more = self.ids.new_zeros(len(self.ids), longest - self.ids.shape[1])
            self.ids = torch.cat([self.ids, more], dim=1)
        is_new = n_drafted > 0
        mapped = self.target[torch.searchsorted(self.own, ids[:, -1]).clamp(max=len(self.own) - 1)]
        rows = torch.arange(len(ids), device=self.device)
        self.ids[rows[is_new], lengths[is_new] - 1] = mapped[is_new]
        columns = torch.arange(longest, device=self.device) - longest + lengths[:, None]
        return self.ids.gather(1, columns.clamp(min=0))


def translated_drafter(setup: Setup, threshold: float | None) -> Translated:
    """By text if the call is greedy, by shared tokens if it samples."""
    kind = BySharedTokens if setup.run.config.do_sample else ByText
    return kind(setup, threshold)


def common_prefix(first: list[int], second: list[int]) -> int:
    """How many elements two lists begin with alike. Fast if they differ near the shorter one's end."""
    n = min(len(first), len(second))
    while first[:n] != second[:n]:
        n -= 1
    return n


def common_suffix(first: list[int], second: list[int]) -> int:
    return common_prefix(first[::-1], second[::-1])


def _span(lengths: list[int], rooms: list[int]) -> tuple[int, int]:
    """The first column to draft for any row, and the first that is not."""
    spans = [(n, n + room) for n, room in zip(lengths, rooms, strict=True) if room]
    return min(first for first, _ in spans), max(end for _, end in spans)


def _prompts(run: Run) -> list[list[int]]:
    """The target's prompt without its padding, row by row."""
    name = "decoder_attention_mask" if run.is_encoder_decoder else "attention_mask"
    mask = run.model_kwargs.get(name)
    ids: list[list[int]] = run.ids.tolist()
    if mask is None or mask.shape != run.ids.shape:
        return ids
    return [run.ids[row][mask[row].bool()].tolist() for row in range(len(ids))]


def _can_forget_all(run: Run | None) -> bool:
    """Whether the run's cache can be taken back as far as one likes, and not only the last draft."""
    cache = None if run is None else run.model_kwargs["past_key_values"]
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    return all(type(layer) is DynamicLayer for layer in getattr(cache, "layers", [None]))
