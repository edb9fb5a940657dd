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

from ..memory.batch import Batch, OfBatch, take_rows
from ..running import next_token
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
        #: The request that each row belongs to.
        self.owners: list[Decoding] = []
        self.moves: dict[Decoding, Moves] = {}
        #: No other request may join.
        self.is_closed = False
        #: The same object for all batches whose rows could be in one.
        self.kind = object()
        self.choices = Choices()
        for decoding in decodings:
            self._own(decoding)

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self.owners)

    @property
    def members(self) -> list[Decoding]:
        """The requests, in the order in which they joined."""
        return list(self.moves)

    @property
    def length(self) -> int:
        """Columns, padding included."""
        return self.ids.shape[1]

    def join(self, decoding: Decoding, batch: Batch) -> None:
        """Add the rows of a request, which are those of ``batch``.

        Raises ``ValueError``, before anything is changed, if its cache or arguments are of another form.
        """
        self._append(batch)
        self._own(decoding)

    def absorb(self, other: JoinedRows) -> None:
        """Add all rows of another batch. Raises ``ValueError``, before anything is changed, as ``join``."""
        self._append(other.batch)
        for decoding, moves in other.moves.items():
            decoding.places = [len(self.owners) + place for place in decoding.places]
            self.moves[decoding] = moves
        self.owners += other.owners
        other.owners, other.moves = [], {}

    def _append(self, batch: Batch) -> None:
        """Append the rows of ``batch``. Raises ``ValueError`` if it cannot join."""
        length, other = (_encoder_length(each) for each in (self.batch, batch))
        # The mask over frames of speech has another unit than the states of its encoder.
        is_speech = self.model.main_input_name != "input_ids"
        if length != other and is_speech:
            raise ValueError(f"Encoder's states of {other} cannot be padded to {length}.")
        self.batch.append(batch)

    def _own(self, decoding: Decoding) -> None:
        """Assign the newest rows of the batch to ``decoding``."""
        self.moves[decoding] = moves = Moves()
        decoding.leave_cache(moves)
        decoding.places = [len(self.owners) + i for i in range(decoding.n_rows)]
        self.owners += [decoding] * decoding.n_rows

    def leave(self, decoding: Decoding) -> None:
        """Remove the rows of a request; the last rows move into their places."""
        del self.moves[decoding]
        for place in sorted(decoding.places, reverse=True):
            self._remove(place)
        decoding.places = []
        if not self.moves:
            self.owners = []
            del self.batch  # free its memory now: the step refers to these rows until its end

    def extract(self, decoding: Decoding) -> Batch:
        """Remove the rows of a request; returns them, without padding, as a batch to ``join`` with."""
        batch = self.batch.extract(torch.tensor(decoding.places))
        if (n_padding := batch.ids.shape[1] - decoding.length) > 0:
            batch.trim(n_padding)
        self.leave(decoding)
        return batch

    def close_gaps(self) -> None:
        """Make the tokens of each row consecutive; here they always are."""

    def _remove(self, place: int) -> None:
        """Remove the row at ``place``; the last row takes its place."""
        last = len(self.owners) - 1
        if last:
            self.batch.leave(place)
        owner = self.owners.pop()
        if place != last:
            self.owners[place] = owner
            owner.places[owner.places.index(last)] = place

    def rows_of(self, decoding: Decoding) -> list[int]:
        """The row of the cache that each row of a request continues: beams may have changed places."""
        index = self.moves[decoding].index
        return decoding.places if index is None else [decoding.places[i] for i in index.tolist()]

    # ------------------------------------------------------------ batches that become two, or one

    def split(self, leaving: list[Decoding]) -> JoinedRows:
        """Move some of the requests, not all, to another batch, which is returned."""
        places = torch.tensor([place for decoding in leaving for place in decoding.places])
        other = type(self)(self.model, leaving, self.batch.extract(places))
        other.kind = self.kind
        staying = [decoding for decoding in self.moves if decoding not in other.moves]
        self.batch.take(torch.tensor([place for each in staying for place in each.places]))
        self.owners, self.moves = [], {}
        for decoding in staying:
            self._own(decoding)
        self._trim()
        other._trim()
        return other

    # ------------------------------------------------------------ a step

    def _trim(self) -> None:
        """Cut off the columns that are padding in all rows."""
        longest = max(decoding.length + decoding.n_gaps for decoding in self.moves)
        if (n := self.length - longest) > 0:
            self.batch.trim(n)

    def forward(self) -> ModelOutput:
        """Forward the newest token of each row; the outputs have a row for each."""
        outputs = next_token(self, self.model.__call__)  # type: ignore[arg-type]
        self.batch.model_kwargs = self.model._update_model_kwargs_for_generation(
            outputs,
            self.batch.model_kwargs,
            is_encoder_decoder=self.is_encoder_decoder,
        )
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
        index = self._index(decoding.places)
        fields = {}
        for name, value in outputs.items():
            is_cache = isinstance(value, Cache)
            fields[name] = cache if is_cache else take_rows(value, index, len(self.owners), name)
        return type(outputs)(**fields)

    def append_newest(self, newest: Mapping[Decoding, Tensor]) -> None:
        """Append the tokens that the requests have chosen, after reordering beams.

        ``newest``: those of some requests ``(n_rows,)``. The ids of the others end with theirs.
        """
        self._apply_moves()
        parts: list[Tensor] = []
        index, n = [0] * len(self.owners), 0
        for decoding in self.moves:
            tokens = newest.get(decoding)
            parts.append(decoding.run.ids[:, -1] if tokens is None else tokens)
            for place in decoding.places:
                index[place], n = n, n + 1
        column = torch.cat(parts)
        if index != list(range(n)):
            column = column[self._index(index)]
        self.batch.ids = torch.cat([self.batch.ids, column[:, None]], dim=1)
        self._trim()

    def _apply_moves(self) -> None:
        """Reorder the shared cache by the beams' parents."""
        index: Tensor | None = None
        for decoding, moves in self.moves.items():
            if moves.index is None:
                continue
            if index is None:
                index = torch.arange(len(self.owners), device=self.ids.device)
            places = self._index(decoding.places)
            index[places] = places[moves.index]
            moves.index = None
        if index is not None:
            self.batch.move(index)


def _encoder_length(batch: Batch) -> int | None:
    """How many states of an encoder the rows attend to; ``None`` without an encoder."""
    states = batch.model_kwargs.get("encoder_outputs")
    return None if states is None else int(states[0].shape[1])
