"""Rows of several requests in one batch: how a row joins, is forwarded, and leaves.

At every moment this is a batch padded on the left, as ``generate`` gets them: all rows end in the same
column. A row that joins is put beside the others, the shorter side padded; when the longest row has
left, the columns that only it needed are cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

from ..memory.batch import Batch, take_rows
from ..running import next_token
from ..state.call import ModelKwargs
from .decoding import Decoding
from .plain import Choices


class Moves(Cache):
    """Stands for the cache in a request's own arguments: notes where its rows go on, for the batch.

    Beam search reorders the layers of its cache; here, the shared cache follows before the next forward.
    """

    def __init__(self) -> None:
        super().__init__(layers=[self])
        #: Row ``i`` of the request goes on as its row ``index[i]``; ``None`` if all stay.
        self.index: Tensor | None = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.index = beam_idx if self.index is None else self.index[beam_idx]


class JoinedRows:
    """The decoding rows of several requests. Reads like a ``Run`` for ``execution.next_token``.

    With ``fixed_shapes``, the model sees 1, 2, 4, 8, … rows. Spare rows, whose outputs are dropped, repeat
    another row, or are what a request has left behind.
    """

    def __init__(self, model: Any, pad_token_id: int = 0, *, fixed_shapes: bool = False) -> None:
        self.model = model
        self.pad_token_id = pad_token_id
        self.fixed_shapes = fixed_shapes
        self.batch: Batch | None = None
        #: Of each row, the request that it belongs to; ``None`` of a spare one.
        self.owners: list[Decoding | None] = []
        self.moves: dict[Decoding, Moves] = {}
        #: Whether nobody else may join.
        self.is_closed = False
        #: One object for all batches whose rows could be in one.
        self.kind = object()
        #: Whether what spare rows repeat may have left.
        self._are_spares_old = False
        self.choices = Choices()

    def __len__(self) -> int:
        """How many rows belong to requests."""
        return len(self.owners) - self.owners.count(None)

    @property
    def members(self) -> list[Decoding]:
        """The requests, in the order in which they joined."""
        return list(self.moves)

    @property
    def ids(self) -> Tensor:
        assert self.batch is not None
        return self.batch.ids

    @property
    def model_kwargs(self) -> ModelKwargs:
        assert self.batch is not None
        return self.batch.model_kwargs

    @property
    def length(self) -> int:
        """Columns, padding included."""
        return 0 if self.batch is None else self.batch.ids.shape[1]

    @property
    def n_cells(self) -> int:
        """Cells of the cache, padding included."""
        return 0 if self.batch is None else self.batch.ids.numel()

    @property
    def n_filled(self) -> int:
        """Cells of the cache that hold a token."""
        return sum(decoding.n_rows * decoding.length for decoding in self.moves)

    def join(self, decoding: Decoding, batch: Batch | None = None) -> None:
        """Let the rows of a request decode with these, from its next token on.

        ``batch``: its rows, if they were in a batch before. Raises ``ValueError``, and leaves everything as
        it was, if its cache or arguments are of another form.
        """
        if batch is None:
            batch = Batch(decoding.run.ids, decoding.run.model_kwargs)
        if self.batch is None:
            return self.begin([decoding], Batch(batch.ids.clone(), dict(batch.model_kwargs)))
        self._check_encoders(batch)
        self._replace_spares(batch)
        self.batch.append(batch, self.pad_token_id)
        return self._own([decoding])

    def begin(self, decodings: list[Decoding], batch: Batch) -> None:
        """Become the rows of ``decodings``, which are those of ``batch``."""
        self.batch = batch
        self._own(decodings)

    def _check_encoders(self, batch: Batch) -> None:
        """Raise ``ValueError`` if states of an encoder differ in length and cannot be masked."""
        assert self.batch is not None
        ours, theirs = (_encoder_length(each) for each in (self.batch, batch))
        # The mask over frames of speech has another unit than the states of its encoder.
        is_speech = self.model.main_input_name != "input_ids"
        if ours != theirs and is_speech:
            raise ValueError(f"Encoder's states of {theirs} cannot be padded to {ours}.")

    def absorb(self, other: JoinedRows) -> None:
        """Take all rows of another batch in. Raises ``ValueError``, before anything is changed, as ``join``."""
        assert self.batch is not None
        assert other.batch is not None
        self._check_encoders(other.batch)
        other._drop_spares(len(other.owners))
        self._replace_spares(other.batch)
        self.batch.append(other.batch, self.pad_token_id)
        for decoding, moves in other.moves.items():
            decoding.places = [len(self.owners) + place for place in decoding.places]
            self.moves[decoding] = moves
        self.owners += other.owners
        other.batch, other.owners, other.moves = None, [], {}

    def _own(self, decodings: list[Decoding]) -> None:
        """Let the newest rows belong to ``decodings``."""
        for decoding in decodings:
            self.moves[decoding] = moves = Moves()
            decoding.leave_cache(moves)
            decoding.places = [len(self.owners) + i for i in range(decoding.n_rows)]
            self.owners += [decoding] * decoding.n_rows

    def leave(self, decoding: Decoding) -> None:
        """Take the rows of a request out; the last rows move into their places."""
        assert self.batch is not None
        del self.moves[decoding]
        for place in sorted(decoding.places, reverse=True):
            if self.fixed_shapes:
                self.owners[place] = None
                self._are_spares_old = True
            else:
                self._remove(place)
        decoding.places = []
        if not self.moves:
            self.batch, self.owners = None, []

    def extract(self, decoding: Decoding) -> Batch:
        """Take the rows of a request out; returns them, without padding, as a batch to ``join`` with."""
        batch = self._extracted([decoding])
        if (n_padding := batch.ids.shape[1] - decoding.length) > 0:
            batch.trim(n_padding)
        self.leave(decoding)
        return batch

    def _remove(self, place: int) -> None:
        """Let the last row move to ``place``, and be one less."""
        assert self.batch is not None
        last = len(self.owners) - 1
        if last:
            self.batch.leave(place)
        owner = self.owners.pop()
        if place != last:
            self.owners[place] = owner
            if owner is not None:
                owner.places[owner.places.index(last)] = place

    def rows_of(self, decoding: Decoding) -> list[int]:
        """Which rows of the cache those of a request go on from: beams may have changed places."""
        index = self.moves[decoding].index
        return decoding.places if index is None else [decoding.places[i] for i in index.tolist()]

    # ------------------------------------------------------------ spare rows

    def _drop_spares(self, n_rows: int) -> None:
        """Drop up to ``n_rows`` spare rows, the last ones first: most move no other row."""
        spare = [place for place, owner in enumerate(self.owners) if owner is None]
        for place in spare[::-1][:n_rows]:
            self._remove(place)

    def _replace_spares(self, batch: Batch) -> None:
        """Make room for ``batch`` in the place of spare rows. Raises ``ValueError`` if it cannot join."""
        assert self.batch is not None
        if None in self.owners:
            self.batch.joined_arguments(batch)
            self._drop_spares(len(batch))

    def _fit(self) -> None:
        """Let the number of rows be a power of two, with as few spare rows as that takes."""
        assert self.batch is not None
        n_rows = 1 << (len(self) - 1).bit_length()
        self._drop_spares(max(len(self.owners) - n_rows, 0))
        model_row = next(iter(self.moves)).places[0]
        if (n_more := n_rows - len(self.owners)) > 0:
            rows = self.batch.extract(torch.tensor([model_row] * n_more))
            self.batch.append(rows, self.pad_token_id)
            self.owners += [None] * n_more
        if self._are_spares_old and None in self.owners:
            # Else positions could go beyond those of the model, where no row of a request does.
            taken = [model_row if owner is None else i for i, owner in enumerate(self.owners)]
            self.batch.take_arguments(torch.tensor(taken))
        self._are_spares_old = False

    # ------------------------------------------------------------ batches that become two, or one

    def split(self, leaving: list[Decoding]) -> JoinedRows:
        """Let some of the requests, not all, go on in another batch, which is returned."""
        other = JoinedRows(self.model, self.pad_token_id, fixed_shapes=self.fixed_shapes)
        other.kind = self.kind
        other.batch = self._extracted(leaving)
        other.moves = {decoding: self.moves.pop(decoding) for decoding in leaving}
        self._keep([place for place, owner in enumerate(self.owners) if owner in self.moves])
        other._number()
        other._trim()
        self._trim()
        return other

    def _extracted(self, members: list[Decoding]) -> Batch:
        """A batch of the rows of some requests, in that order."""
        assert self.batch is not None
        places = [place for decoding in members for place in decoding.places]
        return self.batch.extract(torch.tensor(places))

    def _number(self) -> None:
        """Let the rows be those of the requests, one after the other."""
        self.owners = []
        for decoding in self.moves:
            first, n = len(self.owners), decoding.n_rows
            decoding.places = list(range(first, first + n))
            self.owners += [decoding] * n

    def _keep(self, places: list[int]) -> None:
        """Take the rows at ``places``, which are all rows of their requests, and no others."""
        assert self.batch is not None
        self.batch.take(torch.tensor(places))
        new = {place: i for i, place in enumerate(places)}
        self.owners = [self.owners[place] for place in places]
        for decoding in self.moves:
            decoding.places = [new[place] for place in decoding.places]

    # ------------------------------------------------------------ a step

    def _trim(self) -> None:
        """Cut off the columns that are padding in all rows."""
        longest = max(decoding.length for decoding in self.moves)
        if self.batch is not None and (n := self.length - longest) > 0:
            self.batch.trim(n)

    def forward(self) -> ModelOutput:
        """Forward the newest token of each row; the outputs have a row for each."""
        assert self.batch is not None
        if self.fixed_shapes:
            self._fit()
        outputs = next_token(self, self.model.__call__)  # type: ignore[arg-type]
        self.batch.model_kwargs = self.model._update_model_kwargs_for_generation(
            outputs,
            self.batch.model_kwargs,
            is_encoder_decoder=self.model.config.is_encoder_decoder,
        )
        return outputs

    def choose(self, outputs: ModelOutput) -> tuple[Tensor, dict[Decoding, int | Exception]]:
        """The next token of each plain row, ``(rows,)`` and by request, or what that is to end with."""
        plain = sorted((d for d in self.moves if d.plain is not None), key=lambda d: d.places[0])
        logits: Tensor = outputs["logits"][:, -1]
        if len(plain) < len(logits):
            logits = logits[self._index([decoding.places[0] for decoding in plain])]
        tokens, chosen = self.choices.choose([decoding.plain for decoding in plain], logits)
        return tokens, dict(zip(plain, chosen, strict=True))

    def _index(self, places: list[int]) -> Tensor:
        return self.choices.indices.on(self.ids.device, places)

    def outputs_of(self, decoding: Decoding, outputs: ModelOutput) -> ModelOutput:
        """The part of ``outputs`` that is about the rows of one request."""
        first, n = decoding.places[0], len(decoding.places)
        cache = self.moves[decoding]
        if n == 1 and isinstance(outputs, CausalLMOutputWithPast):
            logits = outputs.logits[first : first + 1]
            return CausalLMOutputWithPast(logits=logits, past_key_values=cache)
        index = self._index(decoding.places)
        own = {name: take_rows(v, index, len(self.owners), name) for name, v in outputs.items()}
        own |= {name: cache for name, value in own.items() if isinstance(value, Cache)}
        return type(outputs)(**own)

    def append_newest(self, tokens: Tensor | None = None, chose: Sequence[Decoding] = ()) -> None:
        """Take the tokens that the requests have chosen, for beams that may have changed places.

        ``tokens (rows,)``: those of the requests ``chose``. The others have them behind their ids.
        """
        assert self.batch is not None
        self._apply_moves()
        parts, n = ([], 0) if tokens is None else ([tokens], len(tokens))
        number = {decoding: i for i, decoding in enumerate(chose)}
        index = [0] * len(self.owners)  # a spare row gets any token
        for decoding in self.moves:
            if decoding in number:
                index[decoding.places[0]] = number[decoding]
                continue
            parts.append(decoding.run.ids[:, -1])
            for place in decoding.places:
                index[place], n = n, n + 1
        column = torch.cat(parts) if len(parts) > 1 else parts[0]
        if index != list(range(n)):
            column = column[self._index(index)]
        self.batch.ids = torch.cat([self.batch.ids, column[:, None]], dim=1)
        self._trim()

    def _apply_moves(self) -> None:
        """Let the shared cache follow beams that have changed places."""
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
            assert self.batch is not None
            self.batch.move(index)


def _encoder_length(batch: Batch) -> int | None:
    """How many states of an encoder the rows attend to; ``None`` without an encoder."""
    states = batch.model_kwargs.get("encoder_outputs")
    return None if states is None else int(states[0].shape[1])
