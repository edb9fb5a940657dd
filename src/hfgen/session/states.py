"""The caches of a session: batches whose rows are forwarded together."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from .. import families
from ..decoding.loop import commit
from ..memory.batch import Batch, outputs_of
from ..memory.caches import slots
from ..memory.caches.dynamic import upstream_kind
from ..memory.caches.layers import layers_of, roll_back
from ..running import MayJoin, last_logits, next_token, prefill, resized
from ..running.prefix import eligibility
from ..running.row_states import foreign_code

if TYPE_CHECKING:
    from .row import Row

#: Layers of which any number of the newest tokens can be dropped.
FULL = (DynamicLayer, DynamicIndexedLayer, *families.EMPTY_LAYERS)


class States:
    """A batch of rows with their cache, all of which end in the same column.

    ``batch`` has one more column than the cache holds: that of the tokens that come next. ``rows``: whose
    states these are, by place; ``None`` for a row that has left. ``held``: tokens of each that are cached.
    ``is_shared``: rows of other sessions or snapshots have the same states, so that nothing writes to them.
    """

    def __init__(self, batch: Batch, rows: Sequence[Row], held: list[int]) -> None:
        self.model, self.batch, self.held = batch.model, batch, held
        self.rows: list[Row | None] = []
        self.is_shared = False
        self._add(rows)

    def _add(self, rows: Sequence[Row | None]) -> None:
        for place, row in enumerate(rows, len(self.rows)):
            if row is not None:
                row.states, row.place = self, place
        self.rows += rows

    @classmethod
    def of_prompt(cls, row: Row) -> None:
        """Forward the prompt of ``row``, which gets new states and outputs."""
        model, call = row.model, row.call
        kwargs = {
            name: copy.deepcopy(value) if isinstance(value, Cache) else value
            for name, value in call.prompt.model_kwargs.items()
        }
        with edited(row, call.prompt, row.n_prompt):
            outputs = prefill(model, call.prompt.ids, call.config, kwargs)
        ids = torch.nn.functional.pad(call.prompt.ids, (0, 1))
        states = cls(Batch(ids, kwargs, model), [row], [row.n_prompt])
        commit(states.batch, outputs)
        if not isinstance(states.cache, Cache):
            raise ValueError(
                f"{type(model).__name__} decodes without a cache of a known kind, so its rows cannot be "
                "rewound or forked. Decode them with `generate`."
            )
        slots.check_declared(states.cache)
        row.n_cached = row.n_prompt
        row.outputs = states.outputs_of(outputs, 0)

    @property
    def can_crop(self) -> bool:
        """Whether the newest tokens can be dropped: there is no state of all tokens, and no full window."""
        if self.model.config.model_type in eligibility.UNSTEADY:
            return False
        # Keys above the limit are rotated otherwise than those of a shorter text.
        if eligibility.is_length_dependent(self.model, max(self.held)):
            return False
        for layer in layers_of(self.cache):
            kind = upstream_kind(layer)
            if kind is DynamicSlidingWindowLayer and layer.get_seq_length() < layer.sliding_window:
                continue
            if kind not in FULL:
                return False
        return True

    @property
    def cache(self) -> Any:
        return families.given_cache(self.batch.model_kwargs)

    @property
    def nbytes(self) -> int:
        cross = getattr(self.cache, "cross_attention_cache", None)
        layers = [*layers_of(self.cache), *layers_of(cross)]
        return sum(t.nbytes for layer in layers for t in slots.states_of(layer).values())

    @property
    def can_extend(self) -> bool:
        """Whether several tokens can be forwarded at once behind the cache."""
        text = self.model.config.get_text_config(decoder=True)
        is_bidirectional = getattr(text, "use_bidirectional_attention", None) in (True, "all")
        if is_bidirectional or self.model.config.model_type in eligibility.UNSTEADY:
            return False
        if families.counts_positions_of_ids(self.model):  # from those of a forward, without pads
            return False
        return all(upstream_kind(layer) in eligibility.CUTTABLE for layer in layers_of(self.cache))

    def drop(self, row: Row) -> None:
        """``row`` has left; its states stay until the others are copied."""
        if not self.is_shared and self.rows[row.place] is row:
            self.rows[row.place] = None

    # ------------------------------------------------------------ which rows

    def taken(self, rows: Sequence[Row]) -> States:
        """States of ``rows`` alone, in this order, copied."""
        places = torch.tensor([row.place for row in rows])
        held = [self.held[row.place] for row in rows]
        batch = self.batch.extract(places)
        for row in rows:
            self.drop(row)
        batch.trim_to(max(held) + 1)
        return States(batch, rows, held)

    def crop(self, n: int) -> None:
        """Drop the last ``n`` tokens of all rows."""
        for cache in self.batch.caches.values():
            roll_back(cache, n, families.layers_of_images(self.model))
        self.batch.model_kwargs = resized(self.batch, -n)
        self.batch.ids = self.batch.ids[:, :-n]
        self.held = [length - n for length in self.held]

    def absorb(self, other: States) -> None:
        """Append the rows of ``other``. Raises ``ValueError``, before anything is changed, if they cannot join."""
        self.batch.append(other.batch)
        self.held += other.held
        self._add(other.rows)

    # ------------------------------------------------------------ a forward

    def forward(self, n: int) -> None:
        """Forward the next ``n`` tokens of each row, which get outputs."""
        rows: list[Any] = self.rows
        batch = self.batch
        at_once = n if n == 1 or self.can_extend else 1
        newest = torch.stack([row.run.ids[0, -n:] for row in rows])
        for start in range(0, n, at_once):
            tokens = newest[:, start : start + at_once]
            batch.ids = torch.cat([batch.ids[:, :-1], tokens], dim=1)
            batch.model_kwargs = resized(batch, at_once - 1)
            with edited(rows[0], batch, max(self.held) + start + at_once):
                outputs = next_token(batch, batch.model.__call__, n_new=at_once)
            commit(batch, outputs)
            batch.ids = torch.nn.functional.pad(batch.ids, (0, 1))
        self.held = [length + n for length in self.held]
        for place, row in enumerate(rows):
            row.n_cached += n
            row.outputs = self.outputs_of(outputs, place)

    def outputs_of(self, outputs: Any, place: int) -> Any:
        """The outputs of one row, without a cache."""
        of_row = outputs_of(outputs, torch.tensor([place]), len(self.rows))
        of_row["logits"] = of_row["logits"][:, -1:]
        return of_row


@contextmanager
def edited(row: Row, sequences: Any, n: int) -> Iterator[None]:
    """Run a forward with the interventions of ``row``, which all rows have.

    ``sequences``: has ``ids (rows, columns)``, up to those that are forwarded, the last ``n`` of which are no padding.
    """
    edits = row.call.interventions
    if edits is None:
        yield
        return
    n_padding = sequences.ids.new_tensor([sequences.ids.shape[1] - n])
    prompt_length = int(n_padding) + row.n_prompt
    with edits.on(row.model, n_padding, prompt_length, lambda: sequences.ids.shape[1]):
        yield
    edits.check_used()


def gathered(rows: Sequence[Row], may_join: MayJoinStates) -> list[States]:
    """Put ``rows`` into as few batches as possible, which are theirs alone, and cropped to their tokens."""

    def key(row: Row) -> tuple[int, int]:
        assert row.states is not None
        return id(row.states), row.states.held[row.place] - row.n_cached

    parts: list[States] = []
    remaining: dict[States, None] = {}
    for (_, n_more), group in groupby(sorted(rows, key=key), key=key):
        members = sorted(group, key=lambda row: row.place)
        states = members[0].states
        assert states is not None
        if states.is_shared or states.rows != members:
            if not states.is_shared:
                remaining[states] = None
            states = states.taken(members)
        if n_more:
            states.crop(n_more)
        parts.append(states)
    for states in remaining:  # so that the rows that were taken free their memory
        if others := [row for row in states.rows if row is not None]:
            states.taken(others)
    joined: list[States] = []
    for part in sorted(parts, key=lambda part: -part.batch.ids.numel()):
        for states in joined:
            if may_join.of(states, part):
                with suppress(ValueError):
                    states.absorb(part)
                    break
        else:
            joined.append(part)
    return joined


def forward(rows: list[Row], may_join: MayJoinStates, snapshot_every: int) -> None:
    """Forward what the caches lack of ``rows``, so that each has outputs."""
    try:
        for row in rows:
            if row.states is None:
                States.of_prompt(row)
                row.take_snapshot(is_prompt=True)
                if row.n_tokens > row.n_prompt:
                    row.outputs = None
        missing = [row for row in rows if row.outputs is None]
        for n in sorted({row.n_tokens - row.n_cached for row in missing}):
            same = [row for row in missing if row.n_tokens - row.n_cached == n]
            for states in gathered(same, may_join):
                states.forward(n)
    except BaseException:
        for row in rows:  # what the caches hold is not known
            row.leave_states()
        raise
    for row in missing:
        if (row.n_tokens - row.n_prompt) % snapshot_every == 0:
            row.take_snapshot()


def logits_of(rows: list[Row]) -> Tensor:
    """``(rows, vocab)`` float32, by the outputs of each row."""
    device = rows[0].run.ids.device
    outputs: Any = [row.outputs for row in rows]
    return torch.cat([last_logits(each, device) for each in outputs])


class MayJoinStates(MayJoin):
    """Whether two batches of a session can be one: rows do not depend on each other, nor on padding."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.is_row_wise = foreign_code(model) is None

    def of(self, states: States, other: States) -> bool:
        rows = [row for row in (*states.rows, *other.rows) if row is not None]
        edits = {
            (row.n_prompt, row.n_tokens, id(getattr(row.call.interventions, "placed", None)))
            for row in rows
        }
        if len(edits) > 1 and any(row.call.interventions for row in rows):
            return False  # hooks are told the position of a column once, for all rows
        longest = max(int(row.run.config.max_length) for row in rows)
        return self.is_row_wise and self(other.batch, states.batch, longest)
