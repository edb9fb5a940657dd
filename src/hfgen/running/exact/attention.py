"""Attention that computes a row from its own keys alone, in blocks of a fixed size.

torch's kernel sums over blocks of 512 keys, and computes queries in tiles. A sum's last bits depend on where blocks
begin, and on the shapes. Here the first key of each row begins a block; keys are padded to whole blocks, and queries
to whole tiles. Blocks that a mask hides add zeros, which change no bit. So a query has the same result in a padded
batch, alone, in a step of one token and in one forward of the whole sequence. ``trial.py`` tests on this machine that
it is so. Which keys a row sees, a ``Span`` says; masks carry them through a model's layers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ... import families

#: The name of this attention in ``config._attn_implementation``.
NAME = families.EXACT_ATTENTION

#: Keys of a block, and queries that are computed together.
KEYS = families.EXACT_KEYS
#: Queries of a tile, and rows of a tile of linear layers.
TILE = 4
#: Up to this many queries, heads that share keys are computed as queries of one head.
FOLDED = 8
#: Numbers of keys that the last block may have, in order, by dtype and size of a head: those that have passed.
LAST_KEYS: dict[tuple[torch.dtype, int], tuple[int, ...]] = {}
#: A number that hides a key if it is added to its score, or a smaller one.
HIDDEN = -1e4
#: The attribute of a mask with its ``Span``s.
_SPANS = "hfgen_spans"
#: The attribute of a mask that a model has made of one, with what ``spans_within`` returns.
_WITHIN = "hfgen_spans_within"


class _Newest(threading.local):
    """The last masks of this thread, of full attention and of a window: models may take some of their queries."""

    def __init__(self) -> None:
        self.masks: deque[Tensor] = deque(maxlen=2)


_newest = _Newest()


@dataclass
class Span:
    """Rows of a batch whose keys lie in the same columns.

    ``start``: the column of their first key. ``n_dropped``: keys of its block that the cache no longer has, behind a
    window. ``columns``: of all keys, if columns of padding lie between them; else None.
    ``visible (rows, 1, queries, keys)``: True where a query sees a key, from ``start`` to the last key that is seen.
    """

    rows: slice
    start: int
    n_dropped: int
    columns: Tensor | None
    visible: Tensor
    _biases: dict[tuple[int, int, torch.dtype, int], Tensor] = field(
        default_factory=dict, repr=False
    )

    def take(self, states: Tensor, n_keys: int) -> Tensor:
        """The first keys or values ``(rows, heads, n_keys, size)`` of these rows, and zeros where they have none."""
        n_held = n_keys - self.n_dropped
        columns = slice(self.start, self.start + n_held)
        states = states[self.rows] if len(states) > 1 else states  # a bias may be of all rows
        states = states[:, :, columns if self.columns is None else self.columns[:n_held]]
        n_behind = n_held - states.shape[2]
        if n_behind or self.n_dropped:
            states = F.pad(states, (0, 0, self.n_dropped, n_behind))
        return states

    def bias(self, start: int, stop: int, like: Tensor, group: int) -> Tensor:
        """What is added to scores ``(rows, 1, group * queries in tiles, keys)``: 0, or minus infinity where hidden.

        For the queries from ``start`` to ``stop``; ``like (…, size)`` has their dtype. Its keys are whole blocks.
        """
        key = (start, stop, like.dtype, group)
        if key not in self._biases:
            visible = self.visible[:, :, start:stop]
            is_seen = visible.flatten(0, 2).any(dim=0).nonzero()
            n_seen = self.n_dropped + (int(is_seen[-1]) + 1 if len(is_seen) else 0)
            n_before = max(n_seen - 1, 0) // KEYS * KEYS  # of whole blocks
            allowed = LAST_KEYS.get((like.dtype, like.shape[-1]), (KEYS,))
            n_keys = n_before + next(n for n in allowed if n_before + n >= n_seen)
            n_held = n_keys - self.n_dropped
            missing = self.n_dropped, max(n_held - visible.shape[3], 0)
            hidden = F.pad(~visible[..., :n_held], missing, value=True)
            bias = like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
            self._biases[key] = in_tiles(bias.repeat(1, 1, group, 1))
        return self._biases[key]


def in_tiles(rows: Tensor, least: int = 1) -> Tensor:
    """``(…, rows, size)`` with zeros behind, so that the rows are whole tiles, and at least ``least``."""
    missing = max(least - rows.shape[-2], 0)
    missing += -(rows.shape[-2] + missing) % TILE
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


# --------------------------------------------------------------------- masks


def exact_mask(
    *, kv_offset: int = 0, attention_mask: Tensor | None = None, **arguments: Any
) -> Tensor:
    """The mask ``(rows, 1, queries, keys)`` of transformers' interface, which carries the rows' spans."""
    arguments |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Any = sdpa_mask(kv_offset=kv_offset, attention_mask=attention_mask, **arguments)
    mask = mask.contiguous()  # whoever makes it so gets this object, with its spans
    setattr(mask, _SPANS, list(_spans(mask, attention_mask, int(kv_offset))))
    _newest.masks.append(mask)
    return mask


def spans_of(mask: Tensor) -> list[Span] | None:
    """The spans of a mask of ``exact_mask``, or of some consecutive queries of one; None for any other."""
    spans: list[Span] | None = getattr(mask, _SPANS, None)
    if spans is not None or mask.dim() != 4:
        return spans
    address = mask.untyped_storage().data_ptr()
    for whole in _newest.masks:
        if whole.untyped_storage().data_ptr() != address or mask.stride() != whole.stride():
            continue
        first, rest = divmod(int(mask.storage_offset()), mask.stride(2))
        if rest or (len(mask), mask.shape[3]) != (len(whole), whole.shape[3]):
            return None
        some = slice(first, first + mask.shape[2])
        spans = [
            replace(s, visible=s.visible[:, :, some], _biases={}) for s in getattr(whole, _SPANS)
        ]
        setattr(mask, _SPANS, spans)
        return spans
    return None


def spans_within(mask: Tensor) -> tuple[list[Span], Tensor] | None:
    """The spans of a mask that a model has made of one of ``exact_mask``, and what it has added to it.

    ``mask (rows or 1, heads or 1, queries, keys)``: bools, or numbers that are added to scores. ``None`` if no
    newest mask of that shape hides less, or if the rows' first keys are others.
    """
    result: tuple[list[Span], Tensor] | None = getattr(mask, _WITHIN, None)  # of another layer
    if result is not None or mask.dim() != 4:
        return result
    is_seen = mask if mask.dtype == torch.bool else mask > HIDDEN
    for whole in reversed(_newest.masks):
        is_like = whole.shape[2:] == mask.shape[2:] and len(mask) in (1, len(whole))
        if not is_like or (is_seen & ~whole).any():
            continue
        spans: list[Span] = getattr(whole, _SPANS)
        is_key = (is_seen & whole).any(dim=2).any(dim=1)
        firsts = is_key.int().argmax(dim=1)
        starts = torch.zeros_like(firsts)
        for span in spans:
            starts[span.rows] = span.start if span.columns is None else span.columns[0]
        if (is_key.any(dim=1) & (firsts != starts)).any():
            continue
        added = mask
        if mask.dtype == torch.bool:
            added = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
        result = spans, added.masked_fill(~whole, 0.0)
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


# ---------------------------------------------------------------- attention


def exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' interface of attention: ``query (rows, heads, queries, size)`` to ``(rows, queries, heads, size)``.

    Raises ``ValueError`` for dropout, autocast, and masks that a model has made or changed by itself.
    """
    if dropout:
        raise ValueError(
            f"exact: attention drops values at random ({dropout=}). Call model.eval()."
        )
    if torch.is_autocast_enabled(query.device.type):
        raise ValueError("exact: autocast changes dtypes between kernels. Leave torch.autocast.")
    n_queries, n_kv = query.shape[2], key.shape[1]
    if attention_mask is None:
        n_keys = key.shape[2]
        visible = torch.ones(1, 1, n_queries, n_keys, dtype=torch.bool, device=query.device)
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if causal and n_queries > 1:
            visible = visible.tril(n_keys - n_queries)
        spans = [Span(slice(0, len(query)), 0, 0, None, visible)]
    elif (of_mask := spans_of(attention_mask)) is not None:
        spans = of_mask
    elif (within := spans_within(attention_mask)) is not None:
        spans, added = within
        added = added.float().expand(len(added), query.shape[1], n_queries, -1)
        position_bias = added if position_bias is None else position_bias + added
    else:
        raise ValueError(
            f"exact: {type(module).__name__} makes its attention mask by itself, not by transformers' "
            "create_causal_mask and the like; so its rows' first keys are not known."
        )
    group = query.shape[1] // n_kv
    is_fused = position_bias is None and softcap is None and s_aux is None and query.is_cpu
    n_folded = group if n_queries <= FOLDED or not is_fused else 1
    query = query.reshape(len(query), n_kv * group // n_folded, n_folded, n_queries, query.shape[3])
    outputs = []
    for span in spans:
        parts = []
        for start in range(0, n_queries, KEYS):
            part = query[span.rows, :, :, start : start + KEYS]
            bias = span.bias(start, start + part.shape[3], part, n_folded)
            q = in_tiles(part.flatten(2, 3))
            k, v = span.take(key, bias.shape[3]), span.take(value, bias.shape[3])
            if is_fused:
                out = fused(q, k, v, bias, scaling)
            else:
                if position_bias is not None:  # (rows or 1, heads, queries, columns)
                    by_key = position_bias[:, :, start : start + KEYS].transpose(2, 3)
                    by_key = span.take(by_key, bias.shape[3]).transpose(2, 3)
                    bias = bias + in_tiles(by_key.reshape(len(by_key), n_kv, -1, bias.shape[3]))
                sinks = None
                if s_aux is not None:
                    by_head = s_aux.view(1, n_kv, -1, 1)
                    sinks = in_tiles(by_head.repeat_interleave(part.shape[3], dim=2))
                out = in_parts(q, k, v, bias, scaling, softcap, sinks)
            out = out[:, :, : n_folded * part.shape[3]]
            parts.append(out.reshape(len(q), n_kv * group, part.shape[3], value.shape[3]))
        outputs.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.transpose(1, 2).contiguous(), None


def fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scaling: float | None) -> Tensor:
    """torch's flash attention for CPUs, on whole tiles and whole blocks; called by name: it has no fallback.

    ``q (rows, heads, queries, size)``; ``k`` and ``v`` may have fewer heads, for groups of those of ``q``.
    """
    size = v.shape[3]
    if (missing := q.shape[3] - size) > 0:
        v = F.pad(v, (0, missing))
    elif missing:
        scaling = q.shape[3] ** -0.5 if scaling is None else scaling
        q, k = F.pad(q, (0, -missing)), F.pad(k, (0, -missing))
    n_rows, n_kv, group = len(q), k.shape[1], q.shape[1] // k.shape[1]
    if group > 1:  # the heads of a group read the same keys, without a copy
        q = q.reshape(n_rows * n_kv, group, *q.shape[2:])
        k, v = (x.reshape(n_rows * n_kv, 1, *x.shape[2:]).expand(-1, group, -1, -1) for x in (k, v))
        bias = bias.expand(n_rows, n_kv, -1, -1).reshape(n_rows * n_kv, 1, *bias.shape[2:])
    out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=bias, scale=scaling
    )[0]
    out = out.reshape(n_rows, n_kv * group, *out.shape[2:])
    return out[..., :size] if missing > 0 else out


def in_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The same in torch's matrix products, block after block: for what the fused kernel does not take."""
    scaling = q.shape[3] ** -0.5 if scaling is None else scaling
    limits = torch.finfo(torch.float32)
    scores = []
    for block, hidden in zip(k.split(KEYS, dim=2), bias.split(KEYS, dim=3), strict=True):
        score = torch.matmul(q, block.transpose(2, 3)).float() * scaling
        score = score if softcap is None else torch.tanh(score / softcap) * softcap
        scores.append(score + hidden.float())
    largest = torch.stack([s.amax(dim=3, keepdim=True) for s in scores]).amax(dim=0)
    if sinks is not None:
        largest = torch.maximum(largest, sinks.float())
    largest = largest.detach().clamp(min=limits.min)  # a row of padding sees no key
    total = torch.zeros_like(largest) if sinks is None else (sinks.float() - largest).exp()
    out = torch.zeros((*q.shape[:3], v.shape[3]), dtype=torch.float32, device=q.device)
    for score, block in zip(scores, v.split(KEYS, dim=2), strict=True):
        weights = (score - largest).exp()
        total = total + weights.sum(dim=3, keepdim=True)
        out = out + torch.matmul(weights.to(v.dtype), block).float()
    return (out / total.clamp(min=limits.tiny)).to(q.dtype)


AttentionInterface.register(NAME, exact_attention)
AttentionMaskInterface.register(NAME, exact_mask)
