"""Attention that computes a row from its own keys alone, in blocks of a fixed size.

torch's kernel sums over blocks of 512 keys, and computes queries in tiles. A sum's last bits depend on where blocks
begin, and on the shapes. Here the first key of each row begins a block; keys are padded to whole blocks, and queries
to whole tiles. Blocks that a mask hides add zeros, which change no bit. So a query has the same result in a padded
batch, alone, in a step of one token and in one forward of the whole sequence. ``trial.py`` tests on this machine that
it is so.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ... import families
from .spans import FOLDED, KEYS, Group, Span, exact_mask, groups_of, groups_within
from .tiles import in_tiles

#: The name of this attention in ``config._attn_implementation``.
NAME = families.EXACT_ATTENTION


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
        groups = [Group([Span(slice(0, len(query)), 0, 0, None, visible)])]
    elif (of_mask := groups_of(attention_mask)) is not None:
        groups = of_mask
    elif (within := groups_within(attention_mask)) is not None:
        groups, added = within
        added = added.float().expand(len(added), query.shape[1], n_queries, -1)
        position_bias = added if position_bias is None else position_bias + added
    else:
        raise ValueError(
            f"exact: {type(module).__name__} makes its attention mask by itself, not by transformers' "
            "create_causal_mask and the like; so its rows' first keys are not known."
        )
    n_shared = query.shape[1] // n_kv  # heads of queries with the same keys
    is_fused = position_bias is None and softcap is None and s_aux is None and query.is_cpu
    n_folded = n_shared if n_queries <= FOLDED or not is_fused else 1
    query = query.reshape(
        len(query), n_kv * n_shared // n_folded, n_folded, n_queries, query.shape[3]
    )
    outputs = []
    for group in groups:
        parts = []
        for start in range(0, n_queries, KEYS):
            part = query[group.rows, :, :, start : start + KEYS]
            bias = group.bias(start, start + part.shape[3], part, n_folded)
            q = in_tiles(part.flatten(2, 3))
            k, v = group.take(key, bias.shape[3]), group.take(value, bias.shape[3])
            if is_fused:
                out = fused(q, k, v, bias, scaling)
            else:
                if position_bias is not None:  # (rows or 1, heads, queries, columns)
                    by_key = position_bias[:, :, start : start + KEYS].transpose(2, 3)
                    by_key = group.take(by_key, bias.shape[3]).transpose(2, 3)
                    bias = bias + in_tiles(by_key.reshape(len(by_key), n_kv, -1, bias.shape[3]))
                sinks = None
                if s_aux is not None:
                    by_head = s_aux.view(1, n_kv, -1, 1)
                    sinks = in_tiles(by_head.repeat_interleave(part.shape[3], dim=2))
                out = in_parts(q, k, v, bias, scaling, softcap, sinks)
            out = out[:, :, : n_folded * part.shape[3]]
            parts.append(out.reshape(len(q), n_kv * n_shared, part.shape[3], value.shape[3]))
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
