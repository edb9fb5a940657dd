"""Requests that draft, in one batch: a forward verifies the drafts of all rows.

Each row is fed its newest token and its draft; shorter drafts are padded on the right. Rows accept different
numbers of tokens. All keep as many columns as the row that accepts most, and where a row has accepted fewer, the
others are gaps, which its mask hides. Two rows::

           fed           accepted   kept        newest
    row 0  31  41 42 43  41 42      31  41 42   50
    row 1  32  51  ·  ·  none       32   ·  ·   52

When gaps are a good part of the batch, they are moved before the rows, where padding is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

from ..decoding.drafters.schedule import Costs
from ..memory.caches.layers import roll_back
from ..running import verify
from .decoding import Decoding
from .joined import JoinedRows

#: The id in a column that is a gap in its row.
GAP = -1

#: The share of gaps in the cells of a batch above which they are moved.
MANY_GAPS = 0.2

#: Where no drafts pay, so many tokens are verified in one of so many rounds, to see whether they do now.
TRIAL, TRIAL_EVERY = 3, 16


class DraftingRows(JoinedRows):
    """The rows of requests that draft: a forward brings each of them on by any number of tokens."""

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
        ids = torch.cat([self.ids, drafts], dim=1)
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
        return CausalLMOutputWithPast(logits=logits, past_key_values=self.moves[decoding])

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
        self._append_columns(self._by_place(torch.cat(parts)))
        n_gaps = sum(decoding.n_rows * decoding.n_gaps for decoding in self.moves)
        if n_gaps > MANY_GAPS * self.ids.numel():
            self.close_gaps()

    def _append_columns(self, new: Tensor) -> None:
        """Append ``new (rows, n)`` ids, and the columns of mask and positions."""
        kwargs, is_token = self.batch.model_kwargs, new != GAP
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if mask is None and not is_token.all():
            mask = torch.ones_like(self.ids)
        if mask is not None:
            kwargs["attention_mask"] = torch.cat([mask, is_token.to(mask.dtype)], dim=1)
        if positions is not None:
            positions = positions.expand(*positions.shape[:-2], len(new), -1)
            more = positions[..., -1:] + is_token.cumsum(dim=1)
            kwargs["position_ids"] = torch.cat([positions, more], dim=-1)
        self.batch.ids = torch.cat([self.ids, new], dim=1)

    def close_gaps(self) -> None:
        if any(decoding.n_gaps for decoding in self.moves):
            self.batch.move_gaps(self.ids == GAP)
            self.batch.ids = self.ids.clamp(min=0)
            for decoding in self.moves:
                decoding.n_gaps = 0
