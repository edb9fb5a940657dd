"""Rows of several requests in one batch: how a row joins, is forwarded, and leaves.

At every moment this is a batch padded on the left, as ``generate`` gets them: all rows end in the same
column. A row that joins is put beside the others, the shorter side padded; when the longest row has
left, the columns that only it needed are cut off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

from ..decoding.loop import commit
from ..memory.batch import Batch, OfBatch, take_rows
from ..running import next_token, prefill
from ..streaming.plain import Choice, Choices
from .decoding import Decoding


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


class JoinedRows(OfBatch):
    """The decoding rows of several requests, at first of ``decodings``: the rows of ``batch``."""

    #: Whether a forward feeds drafts besides the newest tokens.
    drafts = False

    def __init__(self, model: Any, decodings: Sequence[Decoding], batch: Batch) -> None:
        self.model, self.batch = model, batch
        self.moves = {decoding: Moves() for decoding in decodings}
        for decoding, moves in self.moves.items():
            decoding.leave_cache(moves)
        self._number()
        #: No other request may join.
        self.is_closed = False
        #: The same object for all batches whose rows could be in one.
        self.kind = object()
        self.choices = Choices()

    @classmethod
    def of_prompts(
        cls, model: Any, decodings: Sequence[Decoding]
    ) -> tuple[JoinedRows, list[ModelOutput]]:
        """Forward whole prompts at once, padded on the left; returns their rows, and the outputs of each request."""
        runs = [decoding.run for decoding in decodings]
        batch, *others = (Batch(r.ids, r.model_kwargs | {"past_key_values": None}) for r in runs)
        for other in others:
            batch.append(other)
        cache = runs[0].model_kwargs["past_key_values"]
        cache.expect(max(decoding.longest for decoding in decodings))
        kwargs = batch.model_kwargs | {"past_key_values": cache}
        kwargs.setdefault("attention_mask", torch.ones_like(batch.ids))
        outputs = prefill(model, batch.ids, runs[0].config, kwargs)
        assert cache.get_seq_length() == batch.ids.shape[1]
        batch.model_kwargs = kwargs
        rows = cls(model, decodings, batch)
        commit(rows, outputs)  # type: ignore[arg-type]
        return rows, [rows.outputs_of(decoding, outputs) for decoding in decodings]

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self.batch) if self.moves else 0

    @property
    def members(self) -> list[Decoding]:
        """The requests, in the order in which they joined."""
        return list(self.moves)

    @property
    def length(self) -> int:
        """Columns, padding included."""
        return self.ids.shape[1]

    def absorb(self, other: JoinedRows) -> None:
        """Add all rows of another batch. Raises ``ValueError`` as ``append``."""
        n_before = len(self)
        self.append(other.batch)
        for decoding in other.moves:
            decoding.places = [n_before + place for place in decoding.places]
        self.moves |= other.moves
        other.moves = {}

    def _number(self) -> None:
        """Assign the rows of the batch to the requests, in their order."""
        start = 0
        for decoding in self.moves:
            decoding.places = list(range(start, start + decoding.n_rows))
            start += decoding.n_rows

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

    def extract(self, decoding: Decoding) -> Batch:
        """Remove the rows of a request; returns them, without padding."""
        batch = self.batch.extract(torch.tensor(decoding.places))
        batch.trim_to(decoding.length)
        self.leave(decoding)
        return batch

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
        session.adopt(self.batch.caches["past_key_values"], places, n_tokens)

    # ------------------------------------------------------------ batches that become two, or one

    def split(self, leaving: list[Decoding]) -> JoinedRows:
        """Move some of the requests, not all, to another batch, which is returned."""
        places = torch.tensor([place for decoding in leaving for place in decoding.places])
        other = type(self)(self.model, leaving, self.batch.extract(places))
        other.kind = self.kind
        self.moves = {one: moves for one, moves in self.moves.items() if one not in other.moves}
        self.batch.take(torch.tensor([place for each in self.moves for place in each.places]))
        self._number()
        self._trim()
        other._trim()
        return other

    # ------------------------------------------------------------ a step

    def _trim(self) -> None:
        """Cut off the columns that are padding in all rows."""
        self.batch.trim_to(max(decoding.length + decoding.n_gaps for decoding in self.moves))

    def forward(self) -> ModelOutput:
        """Forward the newest token of each row; the outputs have a row for each."""
        outputs = next_token(self, self.model.__call__)  # type: ignore[arg-type]
        commit(self, outputs)  # type: ignore[arg-type]
        return outputs

    def choose(self, outputs: ModelOutput) -> dict[Decoding, Choice]:
        """What each plain request has chosen."""
        plain = sorted((d for d in self.moves if d.plain is not None), key=lambda d: d.places[0])
        if not plain:
            return {}
        places = [place for decoding in plain for place in decoding.places]
        logits: Tensor = outputs["logits"][:, -1]
        if places != list(range(len(logits))):
            logits = logits[self._index(places)]
        choices = self.choices.choose([decoding.plain for decoding in plain], logits)
        return dict(zip(plain, choices, strict=True))

    def _index(self, places: list[int]) -> Tensor:
        return self.choices.index(self.ids.device, places)

    def outputs_of(self, decoding: Decoding, outputs: ModelOutput) -> ModelOutput:
        """The rows of ``outputs`` that belong to one request."""
        first, n = decoding.places[0], len(decoding.places)
        cache = self.moves[decoding]
        if n == 1 and isinstance(outputs, CausalLMOutputWithPast):
            logits = outputs.logits[first : first + 1]
            return CausalLMOutputWithPast(logits=logits, past_key_values=cache)
        part: ModelOutput = take_rows(outputs, self._index(decoding.places), len(self.batch))
        for name, value in part.items():
            if isinstance(value, Cache):
                part[name] = cache
        return part

    def append_newest(self, newest: Mapping[Decoding, Tensor]) -> None:
        """Append the tokens that the requests have chosen, after reordering beams.

        ``newest``: those of some requests ``(n_rows,)``. The ids of the others end with theirs.
        """
        self._apply_moves()
        parts: list[Tensor] = []
        for decoding in self.moves:
            tokens = newest.get(decoding)
            parts.append(decoding.run.ids[:, -1] if tokens is None else tokens)
        column = self._by_place(torch.cat(parts))
        self.batch.ids = torch.cat([self.batch.ids, column[:, None]], dim=1)
        self._trim()

    def _by_place(self, rows: Tensor) -> Tensor:
        """``rows`` of the requests, one after the other, in the order of the batch."""
        order = [place for decoding in self.moves for place in decoding.places]
        if order == list(range(len(order))):
            return rows
        return rows[self._index(sorted(range(len(order)), key=order.__getitem__))]

    def _apply_moves(self) -> None:
        """Reorder the shared cache by the beams' parents."""
        index: Tensor | None = None
        for decoding, moves in self.moves.items():
            if moves.index is None:
                continue
            if index is None:
                index = torch.arange(len(self.batch), device=self.ids.device)
            places = self._index(decoding.places)
            index[places] = places[moves.index]
            moves.index = None
        if index is not None:
            self.batch.move(index)
