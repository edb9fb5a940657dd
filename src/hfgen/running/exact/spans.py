"""Which keys a row sees, and where they lie: masks of exact attention, which carry this through a model's layers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from ... import families
from .tiles import in_tiles

#: Keys of a block, and queries that are computed together.
KEYS = families.EXACT_KEYS
#: Up to this many queries, heads that share keys are computed as queries of one head, and all rows in one call.
FOLDED = 8
#: Numbers of keys that the last block may have, in order, by dtype and size of a head: those that have passed.
LAST_KEYS: dict[tuple[torch.dtype, int], tuple[int, ...]] = {}
#: A number that hides a key if it is added to its score, or a smaller one.
HIDDEN = -1e4
#: The attribute of a mask with its ``Group``s.
_GROUPS = "hfgen_groups"
#: The attribute of a mask that a model has made of one, with what ``groups_within`` returns.
_WITHIN = "hfgen_groups_within"


class _OfThread(threading.local):
    """What attention knows of this thread.

    ``masks``: the last ones, of full attention and of a window, since models may take some of their queries.
    ``tried_keys``: the ``LAST_KEYS`` of a trial. Others attend meanwhile.
    """

    tried_keys: tuple[int, ...] | None = None

    def __init__(self) -> None:
        self.masks: deque[Tensor] = deque(maxlen=2)


local = _OfThread()


@dataclass(frozen=True)
class Span:
    """Rows of a padded batch whose keys lie in the same columns, of which the first begins a block.

    ``start``: the column of their first key. ``n_dropped``: keys of its block that the cache no longer has, behind a
    window. ``columns``: of all keys, if columns of padding lie between them; else None.
    ``visible (rows, 1, queries, keys)``: True where a query sees a key, from ``start`` to the last key that is seen.
    """

    rows: slice
    start: int
    n_dropped: int
    columns: Tensor | None
    visible: Tensor

    def take(self, states: Tensor, n_keys: int) -> Tensor:
        """The first ``n_keys`` keys or values of these rows, as many of them as there are and are not dropped."""
        n_held = n_keys - self.n_dropped
        columns = slice(self.start, self.start + n_held)
        states = states[self.rows] if len(states) > 1 else states  # a bias may be of all rows
        return states[:, :, columns if self.columns is None else self.columns[:n_held]]

    def n_seen(self, queries: slice) -> int:
        """How many keys there are up to the last one that the queries see."""
        is_seen = self.visible[:, :, queries].flatten(0, 2).any(dim=0).nonzero()
        return self.n_dropped + (int(is_seen[-1]) + 1 if len(is_seen) else 0)

    def hidden(self, queries: slice, n_keys: int) -> Tensor:
        """``(rows, 1, queries, n_keys)``: True where a query does not see a key."""
        visible = self.visible[:, :, queries, : n_keys - self.n_dropped]
        n_behind = n_keys - self.n_dropped - visible.shape[3]
        return F.pad(~visible, (self.n_dropped, n_behind), value=True)


@dataclass
class Group:
    """Consecutive rows that are computed together, with keys in one set of columns for each of ``spans``."""

    spans: list[Span]
    _biases: dict[tuple[int, int, torch.dtype, int], Tensor] = field(
        default_factory=dict, repr=False
    )

    @property
    def rows(self) -> slice:
        return slice(self.spans[0].rows.start, self.spans[-1].rows.stop)

    def take(self, states: Tensor, n_keys: int) -> Tensor:
        """The first keys or values ``(rows, heads, n_keys, size)`` of these rows, and zeros where they have none."""
        first, *others = self.spans
        if not others:
            taken = first.take(states, n_keys)
            n_behind = n_keys - first.n_dropped - taken.shape[2]
            is_whole = not n_behind and not first.n_dropped
            return taken if is_whole else F.pad(taken, (0, 0, first.n_dropped, n_behind))
        all_taken = states.new_zeros(
            self.rows.stop - self.rows.start, states.shape[1], n_keys, states.shape[3]
        )
        for span in self.spans:
            taken = span.take(states, n_keys)
            all_taken[span.rows, :, span.n_dropped : span.n_dropped + taken.shape[2]] = taken
        return all_taken

    def bias(self, start: int, stop: int, like: Tensor, n_folded: int) -> Tensor:
        """What is added to scores ``(rows, 1, n_folded * queries in tiles, keys)``: 0, or minus infinity where hidden.

        For the queries from ``start`` to ``stop``; ``like (…, size)`` has their dtype. Its keys are whole blocks.
        """
        key = (start, stop, like.dtype, n_folded)
        if key not in self._biases:
            queries = slice(start, stop)
            n_seen = max(span.n_seen(queries) for span in self.spans)
            n_before = max(n_seen - 1, 0) // KEYS * KEYS  # of whole blocks
            allowed = local.tried_keys or LAST_KEYS.get((like.dtype, like.shape[-1]), (KEYS,))
            n_keys = n_before + next(n for n in allowed if n_before + n >= n_seen)
            hidden = torch.cat([span.hidden(queries, n_keys) for span in self.spans])
            bias = like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
            self._biases[key] = in_tiles(bias.repeat(1, 1, n_folded, 1))
        return self._biases[key]


def exact_mask(
    *, kv_offset: int = 0, attention_mask: Tensor | None = None, **arguments: Any
) -> Tensor:
    """The mask ``(rows, 1, queries, keys)`` of transformers' interface, which carries its ``Group``s.

    Raises ``ValueError`` for rows of several texts: blocks of keys begin with the row.
    """
    if families.separates_texts(arguments.get("mask_function")):
        raise ValueError(
            "exact: positions begin anew within a row, as those of packed texts. Give each text a row."
        )
    arguments |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Any = sdpa_mask(kv_offset=kv_offset, attention_mask=attention_mask, **arguments)
    mask = mask.contiguous()  # whoever makes it so gets this object, with its groups
    spans = list(_spans(mask, attention_mask, int(kv_offset)))
    # A step of all rows is one call of the kernel. In prompts, calls of single rows skip the keys of longer ones.
    groups = [Group(spans)] if mask.shape[2] <= FOLDED else [Group([span]) for span in spans]
    setattr(mask, _GROUPS, groups)
    local.masks.append(mask)
    return mask


def groups_of(mask: Tensor) -> list[Group] | None:
    """The groups of a mask of ``exact_mask``, or of some consecutive queries of one; None for any other."""
    groups: list[Group] | None = getattr(mask, _GROUPS, None)
    if groups is not None or mask.dim() != 4:
        return groups
    address = mask.untyped_storage().data_ptr()
    for whole in local.masks:
        if whole.untyped_storage().data_ptr() != address or mask.stride() != whole.stride():
            continue
        first, rest = divmod(int(mask.storage_offset()), mask.stride(2))
        if rest or (len(mask), mask.shape[3]) != (len(whole), whole.shape[3]):
            return None
        some = slice(first, first + mask.shape[2])
        groups = [
            Group([replace(span, visible=span.visible[:, :, some]) for span in group.spans])
            for group in getattr(whole, _GROUPS)
        ]
        setattr(mask, _GROUPS, groups)
        return groups
    return None


def groups_within(mask: Tensor) -> tuple[list[Group], Tensor] | None:
    """The groups of a mask that a model has made of one of ``exact_mask``, and what it has added to it.

    ``mask (rows or 1, heads or 1, queries, keys)``: bools, or numbers that are added to scores. ``None`` if no
    newest mask of that shape hides less, or if the rows' first keys are others.
    """
    result: tuple[list[Group], Tensor] | None = getattr(mask, _WITHIN, None)  # of another layer
    if result is not None or mask.dim() != 4:
        return result
    is_seen = mask if mask.dtype == torch.bool else mask > HIDDEN
    for whole in reversed(local.masks):
        is_like = whole.shape[2:] == mask.shape[2:] and len(mask) in (1, len(whole))
        if not is_like or (is_seen & ~whole).any():
            continue
        groups: list[Group] = getattr(whole, _GROUPS)
        is_key = (is_seen & whole).any(dim=2).any(dim=1)
        firsts = is_key.int().argmax(dim=1)
        starts = torch.zeros_like(firsts)
        for span in (span for group in groups for span in group.spans):
            starts[span.rows] = span.start if span.columns is None else span.columns[0]
        if (is_key.any(dim=1) & (firsts != starts)).any():
            continue
        added = mask
        if mask.dtype == torch.bool:
            added = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
        result = groups, added.masked_fill(~whole, 0.0)
        setattr(mask, _WITHIN, result)
        return result
    return None


def _spans(mask: Tensor, attention_mask: Tensor | None, offset: int) -> Iterator[Span]:
    """Split the rows of ``mask`` into runs of rows that begin in the same column.

    ``attention_mask (rows, columns)`` is 0 at padding. The cache has dropped ``offset`` columns.
    """
    is_seen = mask.any(dim=2).any(dim=1)  # (rows, keys)
    columns = torch.arange(1, is_seen.shape[1] + 1, device=mask.device)
    ends = (is_seen * columns).amax(dim=1).tolist()  # columns up to the last one that a query sees
    firsts, is_scattered = [0] * len(mask), [False] * len(mask)
    if attention_mask is not None:
        is_token = attention_mask.bool()
        n_tokens = is_token.sum(dim=1)
        n_before, n_behind = (x.int().argmax(dim=1) for x in (is_token, is_token.flip(1)))
        firsts = n_before.tolist()  # 0 where a row has no token
        is_whole = (n_tokens == 0) | (n_before + n_tokens + n_behind == is_token.shape[1])
        is_scattered = (~is_whole).tolist()
    beginnings = [(first, row if is_scattered[row] else -1) for row, first in enumerate(firsts)]
    stop = 0
    for (first, row), run in groupby(beginnings):
        rows = slice(stop, stop + len(list(run)))
        stop, end = rows.stop, max(ends[rows])
        if row >= 0:
            columns = is_token[row, offset : offset + end].nonzero()[:, 0]
            n_dropped = int(is_token[row, :offset].sum()) % KEYS
            yield Span(rows, 0, n_dropped, columns, mask[rows][..., columns])
        else:
            start, n_dropped = max(first - offset, 0), max(offset - first, 0) % KEYS
            yield Span(rows, start, n_dropped, None, mask[rows, :, :, start:end])
