"""Attention in compiled layers by the operator of ``native.cpp``, where transformers would call torch's."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from . import native

#: The name of this attention in ``config._attn_implementation``.
NAME = "hfgen_native"
DTYPES = (torch.float32, torch.bfloat16)


def native_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' interface of attention: ``query (rows, heads, new, size)`` to ``(rows, new, heads, size)``.

    Queries without a mask see all keys; several of them are left to torch, which knows who sees which.
    """
    fits = query.device.type == "cpu" and query.dtype in DTYPES and key.dtype == query.dtype
    fits = fits and not any(size % native.LANES for size in (query.shape[3], value.shape[3]))
    if attention_mask is None:
        fits = fits and query.shape[2] == 1
    else:
        fits = fits and attention_mask.dtype in (torch.bool, query.dtype)
        fits = fits and attention_mask.dim() == 4
    others = (kwargs.get(name) for name in ("position_bias", "softcap", "s_aux", "cache"))
    if dropout or not fits or any(other is not None for other in others):
        arguments = module, query, key, value, attention_mask
        return sdpa_attention_forward(*arguments, dropout=dropout, scaling=scaling, **kwargs)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    operator = torch.ops.hfgen_native.attention
    return operator(query.transpose(1, 2), key, value, attention_mask, scale), None


def with_native_attention(config: Any) -> Any:
    """A view of a config with this attention in place of torch's; the config itself if it has another."""
    if getattr(config, "_attn_implementation", None) != "sdpa" or native.failure() is not None:
        return config
    kind: Any = type(config)
    view = object.__new__(_kind(kind))
    view.__dict__ = vars(config)
    return view


@cache
def _kind(kind: Any) -> Any:
    """The class ``kind``, whose objects name this attention."""
    view: Any = type(kind.__name__, (kind,), {})
    view._attn_implementation = NAME
    return view


AttentionInterface.register(NAME, native_attention)
