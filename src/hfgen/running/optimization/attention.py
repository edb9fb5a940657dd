"""Attention in compiled layers by the operator of ``native.cpp``, where transformers would call torch's."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import native

#: The name of this attention in ``config._attn_implementation``, and of torch's.
NAME = "hfgen_native"
TORCHS = "sdpa"
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

    Queries without a mask see all keys; several of them are left to torch, which knows who sees which. So are
    masks of other sizes than queries and keys: torch repeats them, or raises.
    """
    fits = query.device.type == "cpu" and query.dtype in DTYPES and key.dtype == query.dtype
    fits = fits and not any(size % native.LANES for size in (query.shape[3], value.shape[3]))
    if attention_mask is None:
        fits = fits and query.shape[2] == 1
    else:
        fits = fits and attention_mask.dtype in (torch.bool, query.dtype)
        fits = fits and attention_mask.dim() == 4 and attention_mask.shape[3] == key.shape[2]
        sizes = zip(attention_mask.shape, query.shape[:3], strict=False)
        fits = fits and all(size in (1, of_queries) for size, of_queries in sizes)
    others = (kwargs.get(name) for name in ("position_bias", "softcap", "s_aux", "cache"))
    if dropout or not fits or any(other is not None for other in others):
        arguments = module, query, key, value, attention_mask
        return sdpa_attention_forward(*arguments, dropout=dropout, scaling=scaling, **kwargs)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    operator = torch.ops.hfgen_native.attention
    return operator(query.transpose(1, 2), key, value, attention_mask, scale), None


def with_native_attention(config: Any, module: nn.Module) -> Any:
    """A view of a module's config with this attention in place of torch's.

    The config itself if it has another, if another function is registered in torch's place, or if the module asks
    whether it has torch's: it may prepare a mask for that alone.
    """
    if getattr(config, "_attn_implementation", None) != TORCHS or native.failure() is not None:
        return config
    if ALL_ATTENTION_FUNCTIONS.get(TORCHS) is not sdpa_attention_forward or _asks(type(module)):
        return config
    kind: Any = type(config)
    try:
        view = object.__new__(_kind(kind))
        view.__dict__ = vars(config)
    except TypeError:  # a class that takes no part in this: without a __dict__, say
        return config
    return view


def _asks(kind: type) -> bool:
    """Whether the name of torch's attention is in the code of a module's class."""
    own = (cls for cls in kind.__mro__ if not issubclass(nn.Module, cls))
    values = (getattr(value, "__func__", value) for cls in own for value in vars(cls).values())
    functions = (inspect.unwrap(value) for value in values if callable(value))
    return any(_has_name(getattr(function, "__code__", None)) for function in functions)


def _has_name(value: Any) -> bool:
    """Whether a constant is the name of torch's attention, or has it: a tuple, or the code of a function."""
    if isinstance(value, tuple | frozenset):
        return any(map(_has_name, value))
    return value == TORCHS or _has_name(getattr(value, "co_consts", ()))


class _View:
    """What views of all classes of configs have before them: the name of this attention.

    A config's class hears nothing of its views: it may list its subclasses, or want arguments.
    """

    __slots__ = ()
    _attn_implementation = NAME

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


@cache
def _kind(kind: type) -> type:
    """The class of views of configs of a class."""
    return type(kind.__name__, (_View, kind), {})


AttentionInterface.register(NAME, native_attention)
