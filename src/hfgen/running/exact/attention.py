"""Attention that computes a row from its own keys alone, in blocks of a fixed size.

torch's kernel sums over blocks of 512 keys, and computes queries in tiles. A sum's last bits depend on where blocks
begin, and on the shapes. Here the first key of each row begins a block; keys are padded to whole blocks, and queries
to whole tiles. Blocks that a mask hides add zeros, which change no bit. So a query has the same result in a padded
batch, alone, in a step of one token and in one forward of the whole sequence. ``probe.py`` tests on this machine that
it is so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
#: Keys that the last block is padded to, by dtype and size of a head, where fewer than ``KEYS`` have passed.
LAST_KEYS: dict[tuple[torch.dtype, int], int] = {}
#: Up to this many queries, heads that share keys are computed as queries of one head.
FOLDED = 8

#: The attribute of a mask with its ``Span``s.
_SPANS = "hfgen_spans"
#: The newest masks, of which models may have taken some queries.
_masks: deque[Tensor] = deque(maxlen=8)


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
        n_zeros, length = getattr(states, "n_zeros", 0), states.shape[2]
        states = states[self.rows]
        if self.columns is not None:
            states = states[:, :, self.columns[: n_keys - self.n_dropped]]
        elif not self.n_dropped and length < self.start + n_keys <= length + n_zeros:
            at = states.storage_offset() + self.start * states.stride(2)
            return states.as_strided(
                (*states.shape[:2], n_keys, states.shape[3]), states.stride(), at
            )
        else:
            states = states[:, :, self.start : self.start + n_keys - self.n_dropped]
        n_behind = n_keys - self.n_dropped - states.shape[2]
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
            last = LAST_KEYS.get((like.dtype, like.shape[-1]), KEYS)
            n_keys = max(-(-n_seen // last), 1) * last
            n_tokens = min(n_keys - self.n_dropped, visible.shape[3])
            zeros = torch.zeros((*visible.shape[:3], n_keys), dtype=like.dtype, device=like.device)
            hidden = F.pad(
                ~visible[..., :n_tokens],
                (self.n_dropped, n_keys - self.n_dropped - n_tokens),
                value=True,
            )
            bias = zeros.masked_fill_(hidden, -torch.inf)
            self._biases[key] = in_tiles(bias.repeat(1, 1, group, 1))
        return self._biases[key]


def in_tiles(rows: Tensor, least: int = 1) -> Tensor:
    """``(…, rows, size)`` with zeros behind, so that the rows are whole tiles, and at least ``least``."""
    missing = max(least - rows.shape[-2], 0)
    missing += -(rows.shape[-2] + missing) % TILE
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


# --------------------------------------------------------------------- masks


def exact_mask(
    *,
    kv_length: int,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **arguments: Any,
) -> Tensor:
    """The mask ``(rows, 1, queries, keys)`` of transformers' interface, which carries the rows' spans."""
    mask: Tensor | None = sdpa_mask(
        kv_length=kv_length,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        **arguments,
    )
    assert mask is not None
    mask = mask.contiguous()  # whoever makes it so gets this object, with its spans
    setattr(mask, _SPANS, list(_spans(mask, attention_mask, int(kv_offset))))
    _masks.append(mask)
    return mask


def spans_of(mask: Tensor) -> list[Span] | None:
    """The spans of a mask of ``exact_mask``, or of some consecutive queries of one; None for any other."""
    spans: list[Span] | None = getattr(mask, _SPANS, None)
    if spans is not None or mask.dim() != 4:
        return spans
    address = mask.untyped_storage().data_ptr()
    for whole in _masks:
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


def _spans(mask: Tensor, attention_mask: Tensor | None, offset: int) -> Iterator[Span]:
    """Split the rows of ``mask`` into runs of rows that begin in the same column.

    ``attention_mask (rows, columns)`` is 0 at padding. The cache has dropped ``offset`` columns.
    """
    ends = _ends(mask)
    n_rows = len(mask)
    if attention_mask is None:
        yield _span(mask, slice(0, n_rows), 0, offset, max(ends))
        return
    is_token = attention_mask.bool()
    firsts = is_token.int().argmax(dim=1).tolist()  # 0 where a row has no token
    counts = is_token.sum(dim=1).tolist()
    lasts = (is_token.shape[1] - 1 - is_token.flip(1).int().argmax(dim=1)).tolist()
    row = 0
    while row < n_rows:
        if counts[row] and lasts[row] - firsts[row] + 1 != counts[row]:
            yield _scattered(mask, row, is_token[row], offset, ends[row])
            row += 1
            continue
        stop = row + 1
        while (
            stop < n_rows
            and firsts[stop] == firsts[row]
            and (not counts[stop] or lasts[stop] - firsts[stop] + 1 == counts[stop])
        ):
            stop += 1
        yield _span(mask, slice(row, stop), firsts[row], offset, max(ends[row:stop]))
        row = stop


def _ends(mask: Tensor) -> list[int]:
    """For each row, the number of columns up to the last one that a query sees."""
    is_seen = mask.any(dim=2).any(dim=1)  # (rows, keys)
    columns = torch.arange(1, is_seen.shape[1] + 1, device=mask.device)
    ends: list[int] = (is_seen * columns).amax(dim=1).tolist()
    return ends


def _span(mask: Tensor, rows: slice, first: int, offset: int, end: int) -> Span:
    start = max(first - offset, 0)
    return Span(rows, start, max(offset - first, 0) % KEYS, None, mask[rows, :, :, start:end])


def _scattered(mask: Tensor, row: int, is_token: Tensor, offset: int, end: int) -> Span:
    columns = is_token[offset : offset + end].nonzero()[:, 0]
    rows = slice(row, row + 1)
    n_dropped = int(is_token[:offset].sum()) % KEYS
    return Span(rows, 0, n_dropped, columns, mask[rows][..., columns])


# ----------------------------------------------------------------- attention


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
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        spans = [_without_mask(query, key, bool(causal) and n_queries > 1)]
    elif (found := spans_of(attention_mask)) is not None:
        spans = found
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
                if position_bias is not None:
                    bias = bias + _folded(position_bias, span, start, bias, n_kv)
                sinks = None if s_aux is None else s_aux.view(1, n_kv, -1, 1)
                if sinks is not None:
                    sinks = in_tiles(sinks.repeat_interleave(part.shape[3], dim=2))
                out = in_parts(q, k, v, bias, scaling, softcap, sinks)
            out = out[:, :, : n_folded * part.shape[3]]
            parts.append(out.reshape(len(q), n_kv * group, part.shape[3], value.shape[3]))
        outputs.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.transpose(1, 2).contiguous(), None


def _without_mask(query: Tensor, key: Tensor, is_causal: bool) -> Span:
    n_queries, n_keys = query.shape[2], key.shape[2]
    visible = torch.ones(1, 1, n_queries, n_keys, dtype=torch.bool, device=query.device)
    visible = visible.tril(n_keys - n_queries) if is_causal else visible
    return Span(slice(0, len(query)), 0, 0, None, visible)


def _folded(position_bias: Tensor, span: Span, start: int, bias: Tensor, n_kv: int) -> Tensor:
    """``(rows or 1, heads, queries, columns)`` as ``(rows or 1, kv heads, group * queries in tiles, keys)``."""
    if len(position_bias) > 1:
        position_bias = position_bias[span.rows]
    position_bias = position_bias[:, :, start : start + KEYS]
    n_keys = bias.shape[3]
    if span.columns is not None:
        position_bias = position_bias[..., span.columns]
    else:
        position_bias = position_bias[..., span.start :]
    position_bias = position_bias[..., : n_keys - span.n_dropped]
    behind = n_keys - span.n_dropped - position_bias.shape[3]
    position_bias = F.pad(position_bias, (span.n_dropped, behind))
    return in_tiles(position_bias.reshape(len(position_bias), n_kv, -1, n_keys))


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
    scores = []
    for block in k.split(KEYS, dim=2):
        score = torch.matmul(q, block.transpose(2, 3)).float() * scaling
        scores.append(score if softcap is None else torch.tanh(score / softcap) * softcap)
    scores = [s + b.float() for s, b in zip(scores, bias.split(KEYS, dim=3), strict=True)]
    largest = torch.stack([s.amax(dim=3, keepdim=True) for s in scores]).amax(dim=0)
    if sinks is not None:
        largest = torch.maximum(largest, sinks.float())
    largest = largest.detach().clamp(
        min=torch.finfo(torch.float32).min
    )  # a row of padding sees no key
    total = torch.zeros_like(largest) if sinks is None else (sinks.float() - largest).exp()
    out = torch.zeros((*q.shape[:3], v.shape[3]), dtype=torch.float32, device=q.device)
    for score, block in zip(scores, v.split(KEYS, dim=2), strict=True):
        weights = (score - largest).exp()
        total = total + weights.sum(dim=3, keepdim=True)
        out = out + torch.matmul(weights.to(v.dtype), block).float()
    return (out / total.clamp(min=torch.finfo(torch.float32).tiny)).to(q.dtype)


AttentionInterface.register(NAME, exact_attention)
AttentionMaskInterface.register(NAME, exact_mask)
