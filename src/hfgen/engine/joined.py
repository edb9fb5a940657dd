"""Rows of several requests in one batch: how a row joins, is forwarded, and leaves.

At every moment this is a batch padded on the left, as ``generate`` gets them: all rows end in the same
column. A row that joins is put beside the others, the shorter side padded; when the longest row has
left, the columns that only it needed are cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

from ..decoding.drafters.schedule import Costs
from ..decoding.loop import commit
from ..families import CACHE
from ..memory.batch import Batch, outputs_of
from ..memory.caches.layers import roll_back
from ..running import next_token, prefill, verify
from ..streaming.plain import Choices
from .decoding import Decoding

#: The id in a column that is a gap in its row.
GAP = -1

#: The share of gaps in the cells of a batch above which they are moved.
MANY_GAPS = 0.2

#: Where no drafts pay, so many tokens are verified in one of so many rounds, to see whether they do now.
TRIAL, TRIAL_EVERY = 3, 16


class Moves(Cache):
    """Replaces the cache in a request's own arguments, and records how its rows are reordered.

    Beam search reorders the layers of its cache. The shared cache follows before the next forward pass; it
    does so too where a request takes drafts back.
    """

    def __init__(self) -> None:
        super().__init__(layers=[self])
        #: Row ``i`` of the request becomes its old row ``index[i]``; ``None`` if all stay.
        self.index: Tensor | None = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.index = beam_idx if self.index is None else self.index[beam_idx]

    def crop(self, max_length: int) -> None:
        """The batch knows how many tokens the request has gained."""


class JoinedRows:
    """The decoding rows of several requests, at first of ``decodings``: the rows of ``batch``, in their order."""

    #: Whether a forward feeds drafts besides the newest tokens.
    drafts = False

    def __init__(self, decodings: Sequence[Decoding], batch: Batch) -> None:
        self.batch = batch
        self.moves = {decoding: Moves() for decoding in decodings}
        places = iter(range(len(batch)))
        for decoding, moves in self.moves.items():
            decoding.leave_cache(moves)
            decoding.places = [*islice(places, decoding.n_rows)]
        #: The same object for all batches whose rows could be in one.
        self.kind = object()
        self.choices = Choices()

    @classmethod
    def of_prompts(cls, decodings: Sequence[Decoding]) -> tuple[JoinedRows, list[ModelOutput]]:
        """Forward whole prompts at once, padded on the left; returns their rows, and the outputs of each request."""
        first, *others = (decoding.run for decoding in decodings)
        batch = Batch(first.ids, first.model_kwargs | {CACHE: None}, first.model)
        for run in others:
            batch.append(Batch(run.ids, run.model_kwargs | {CACHE: None}))
        cache = first.model_kwargs[CACHE]
        cache.expect(max(decoding.longest for decoding in decodings))
        batch.model_kwargs[CACHE] = cache
        batch.model_kwargs.setdefault("attention_mask", torch.ones_like(batch.ids))
        outputs = prefill(batch.model, batch.ids, first.config, batch.model_kwargs)
        assert cache.get_seq_length() == batch.ids.shape[1]
        rows = cls(decodings, batch)
        commit(batch, outputs)
        return rows, [rows.outputs_of(decoding, outputs) for decoding in decodings]

    def __len__(self) -> int:
        return len(self.batch) if self.moves else 0

    @property
    def members(self) -> list[Decoding]:
        return list(self.moves)

    def absorb(self, other: JoinedRows) -> None:
        """Add all rows of another batch. Raises ``ValueError`` as ``Batch.append``."""
        n_before = len(self)
        self.batch.append(other.batch)
        for decoding in other.moves:
            decoding.places = [n_before + place for place in decoding.places]
        self.moves |= other.moves
        other.moves = {}

    def leave(self, decoding: Decoding) -> None:
        """Remove the rows of a request; the last rows move into their places."""
        del self.moves[decoding]
        for place in sorted(decoding.places, reverse=True):
            last = len(self.batch) - 1
            if last:
                self.batch.leave(place)
            if place != last:
                owner = next(other for other in self.moves if last in other.places)
                owner.places[owner.places.index(last)] = place
        decoding.places = []
        if not self.moves:
            del self.batch  # free its memory now: the step refers to these rows until its end

    def split(self, leaving: Sequence[Decoding]) -> JoinedRows:
        """Move some of the requests to another batch, which is returned."""
        places = torch.tensor([place for decoding in leaving for place in decoding.places])
        batch = self.batch.extract(places)
        for decoding in leaving:
            self.leave(decoding)
        other = type(self)(leaving, batch)
        other.kind = self.kind
        for rows in (self, other):
            rows.trim()
        return other

    def extract(self, decoding: Decoding) -> Batch:
        """Remove the rows of a request; returns them, without padding."""
        self.close_gaps()
        return self.split([decoding]).batch

    def close_gaps(self) -> None:
        """Make the tokens of each row consecutive; here they always are."""

    def store(self, decoding: Decoding) -> None:
        """Copy the states of a finished request that are stored as prefixes, before its rows leave."""
        session = decoding.call.prefix_session
        if session is None or session.is_given_up or not decoding.run.finished:
            return
        if decoding.plain is not None:
            decoding.plain.write()
        self.close_gaps()
        # Row ``i`` continues another row of the cache where beams have changed places.
        index, places = self.moves[decoding].index, decoding.places
        places = places if index is None else [places[i] for i in index.tolist()]
        n_tokens = decoding.run.ids.shape[1] - 1
        session.adopt(self.batch.caches[CACHE], places, n_tokens)

    # ------------------------------------------------------------ a step

    def trim(self) -> None:
        """Cut off the columns that are padding in all rows; not between ``forward`` and ``append_newest``."""
        if self.moves:
            self.batch.trim_to(max(decoding.length + decoding.n_gaps for decoding in self.moves))

    def forward(self) -> ModelOutput:
        """Forward the newest token of each row; the outputs have a row for each."""
        outputs = next_token(self.batch, self.batch.model.__call__)
        commit(self.batch, outputs)
        return outputs

    def choose(self, outputs: ModelOutput) -> list[Decoding]:
        """Choose the next tokens of the plain requests, which are returned."""
        plain = sorted((d for d in self.moves if d.plain is not None), key=lambda d: d.places[0])
        if plain:
            places = [place for decoding in plain for place in decoding.places]
            logits: Tensor = outputs["logits"][:, -1]
            if places != list(range(len(logits))):
                logits = logits[self._index(places)]
            self.choices.choose([decoding.plain for decoding in plain], logits)
        return plain

    def _index(self, places: list[int]) -> Tensor:
        return self.choices.index(self.batch.ids.device, places)

    def outputs_of(self, decoding: Decoding, outputs: ModelOutput) -> ModelOutput:
        """The rows of ``outputs`` that belong to one request."""
        first, n = decoding.places[0], len(decoding.places)
        cache = self.moves[decoding]
        if n == 1 and isinstance(outputs, CausalLMOutputWithPast):
            logits = outputs.logits[first : first + 1]
            return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})
        return outputs_of(outputs, self._index(decoding.places), len(self.batch), cache)

    def append_newest(self) -> None:
        """Append the tokens that the requests have chosen, after reordering the cache by the beams' parents."""
        moved = [d for d, moves in self.moves.items() if moves.index is not None]
        if moved:
            index = torch.arange(len(self.batch), device=self.batch.ids.device)
            for decoding in moved:
                places, moves = self._index(decoding.places), self.moves[decoding]
                index[places], moves.index = places[moves.index], None
            self.batch.move(index)
        column = self._by_place(torch.cat([decoding.newest for decoding in self.moves]))
        self.batch.ids = torch.cat([self.batch.ids, column[:, None]], dim=1)

    def _by_place(self, rows: Tensor) -> Tensor:
        """``rows`` of the requests, one after the other, in the order of the batch."""
        order = [place for decoding in self.moves for place in decoding.places]
        if order == list(range(len(order))):
            return rows
        return rows[self._index(sorted(range(len(order)), key=order.__getitem__))]


class DraftingRows(JoinedRows):
    """The rows of requests that draft: a forward verifies the drafts of all rows, and brings each on by any number.

    Each row is fed its newest token and its draft; shorter drafts are padded on the right. All keep as many columns as
    the row that accepts most, and where a row has accepted fewer, the others are gaps, which its mask hides. Two rows::

               fed           accepted   kept        newest
        row 0  31  41 42 43  41 42      31  41 42   50
        row 1  32  51  ·  ·  none       32   ·  ·   52

    When gaps are a good part of the batch, they are moved before the rows, where padding is.
    """

    drafts = True
    #: Forwards so far, and tokens of a row that the last one fed.
    n_rounds = n_fed = 0
    #: The tokens of each request when its newest draft was made.
    lengths: dict[Decoding, int]

    def forward(self) -> ModelOutput:
        """Forward the newest token of each row and its draft; the outputs have a row for each."""
        self.lengths = {decoding: decoding.length for decoding in self.moves}
        self.n_rounds += 1
        n_new = self._width()
        parts = []
        for decoding, start in self.lengths.items():
            decoding.strategy.shorten(n_new)
            draft = decoding.strategy.rows.tokens[:, start : start + decoding.strategy.n_new]
            parts.append(pad(draft, (0, n_new - draft.shape[1])))
        self.n_fed = n_new + 1
        drafts = self._by_place(torch.cat(parts))
        ids = torch.cat([self.batch.ids, drafts], dim=1)
        batch: Any = self.batch
        return verify(batch, batch.model.__call__, ids, n_new, return_dict=True)

    def _width(self) -> int:
        """How many columns of drafts to feed: what should make most tokens by time, in all rows."""
        longest = max(decoding.strategy.n_new for decoding in self.moves)
        if len(self.moves) == 1:  # its own schedule has decided
            return longest
        costs, n_tokens = Costs(len(self)), float(len(self))
        gains = [0.0] * longest
        for decoding in self.moves:
            reached = float(decoding.n_rows)
            for index, rate in enumerate(decoding.accepted.rates(decoding.strategy.n_new)):
                reached *= rate
                gains[index] += reached
        best, speed = 0, n_tokens
        for n, gain in enumerate(gains, 1):
            n_tokens += gain
            if n_tokens / costs.forward(n) > speed:
                best, speed = n, n_tokens / costs.forward(n)
        return best or (0 if self.n_rounds % TRIAL_EVERY else min(longest, TRIAL))

    def outputs_of(self, decoding: Decoding, outputs: ModelOutput) -> ModelOutput:
        logits = outputs.logits[self._index(decoding.places), : decoding.strategy.n_new + 1]
        return CausalLMOutputWithPast(logits=logits, **{CACHE: self.moves[decoding]})

    def append_newest(self) -> None:
        """Append the tokens that the requests have gained, and take what they rejected out of the cache."""
        gains = {decoding: decoding.length - self.lengths[decoding] for decoding in self.moves}
        most = max(gains.values())
        (cache,) = self.batch.caches.values()
        roll_back(cache, self.n_fed - most)
        parts = []
        for decoding, n in gains.items():
            tokens = decoding.run.ids[:, -n:]
            gap = tokens.new_full((len(tokens), most - n), GAP)
            parts.append(torch.cat([tokens[:, :-1], gap, tokens[:, -1:]], dim=1))
            decoding.n_gaps += most - n
            if n_drafted := decoding.strategy.n_new:
                decoding.accepted.observe(n - 1, n_drafted)
        new = self._by_place(torch.cat(parts))
        kwargs, is_token = self.batch.model_kwargs, new != GAP
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if mask is None and not is_token.all():
            mask = torch.ones_like(self.batch.ids)
        if mask is not None:
            kwargs["attention_mask"] = torch.cat([mask, is_token.to(mask.dtype)], dim=1)
        if positions is not None:
            positions = positions.expand(*positions.shape[:-2], len(new), -1)
            more = positions[..., -1:] + is_token.cumsum(dim=1)
            kwargs["position_ids"] = torch.cat([positions, more], dim=-1)
        self.batch.ids = torch.cat([self.batch.ids, new], dim=1)
        n_gaps = sum(decoding.n_rows * decoding.n_gaps for decoding in self.moves)
        if n_gaps > MANY_GAPS * self.batch.ids.numel():
            self.close_gaps()

    def close_gaps(self) -> None:
        if any(decoding.n_gaps for decoding in self.moves):
            self.batch.move_gaps(self.batch.ids == GAP)
            self.batch.ids = self.batch.ids.clamp(min=0)
            for decoding in self.moves:
                decoding.n_gaps = 0
