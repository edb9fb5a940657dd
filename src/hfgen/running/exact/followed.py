"""Attention that a module computes by itself: the model's own products and softmax, followed and computed exactly.

``FollowedCalls`` answers the product of queries and keys with ``Scores``, which are not computed. What the module does
with them is noted: scales, masks, biases, the softmax. Its product with the values is ``exact_attention`` then. What is
not known of attention raises ``ValueError``, when the model is tried.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..optimization.forward import own_forward
from .attention import exact_attention
from .layers import ATTENDING, BADDBMM, MATMUL, ExactCalls, refusal
from .spans import HIDDEN, groups_of

#: Products of activations that may be attention.
FOLLOWED = (*MATMUL, *ATTENDING)

#: Methods by their names, since operators and functions of torch share them.
FACTS = "__get__ size dim numel is_contiguous is_floating_point stride".split()
SHAPES = "view reshape contiguous".split()
CASTS = "to type float half bfloat16 double type_as".split()
FACTORS = {"mul": 1, "__mul__": 1, "__rmul__": 1, "__imul__": 1, "mul_": 1}
FACTORS |= {"div": -1, "__truediv__": -1, "__itruediv__": -1, "div_": -1, "true_divide": -1}
SUMS = "add __add__ __radd__ __iadd__ add_".split()

#: The arguments of torch's attention, in order, by their names in ``exact_attention``.
FUSED = {name: name for name in ("query", "key", "value")}
FUSED |= {"attn_mask": "attention_mask", "dropout_p": "dropout", "is_causal": "is_causal"}
FUSED |= {"scale": "scaling"}


@dataclass(frozen=True)
class Product:
    """What is known of scores: ``scale * queries @ keys + biases``, where a mask shows them.

    ``queries (…, queries, size)``, ``keys (…, keys, size)``; ``mask``: one of ``exact_mask``; ``is_normalised``: the softmax
    has been taken.
    """

    function: str
    queries: Tensor
    keys: Tensor
    scale: float = 1.0
    biases: tuple[Tensor, ...] = ()
    mask: Tensor | None = None
    is_normalised: bool = False


class Scores(Tensor):
    """A tensor without numbers, with the shape and dtype of a module's scores, and the ``product`` that they are."""

    product: Product
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(product: Product, shape: Any, dtype: torch.dtype) -> Scores:
        make: Any = Tensor._make_wrapper_subclass
        scores: Scores = make(Scores, tuple(shape), dtype=dtype, device=product.queries.device)
        scores.product = product
        return scores

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise ValueError(
            f"exact: {func} was called on scores of attention, which are not computed."
        )


class FollowedCalls(ExactCalls):
    """``ExactCalls`` within ``module``, whose products of activations are taken to be attention."""

    def __init__(self, module: nn.Module, n_rows: int) -> None:
        super().__init__()
        self.module, self.n_rows = module, n_rows

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = (*args, *kwargs.values())
        if any(isinstance(operand, Scores) for operand in operands):
            return self.follow(function, args, kwargs)
        if function is F.scaled_dot_product_attention:
            arguments: dict[str, Any] = {"attn_mask": None, "is_causal": False}
            arguments |= dict(zip(FUSED, args, strict=False)) | kwargs
            named = {FUSED.get(name, name): value for name, value in arguments.items()}
            return exact_attention(self.module, **named)[0].transpose(1, 2)
        is_attending = function in BADDBMM
        if function in FOLLOWED and not is_attending:
            one, two = operands[:2]
            is_weight = isinstance(two, nn.Parameter) or two.dim() == 2
            is_attending = not is_weight and one.dim() >= 3 and one.shape[-1] > 1
        if is_attending:
            return self.begin(function, args, kwargs)
        return super().__torch_function__(function, types, args, kwargs)

    def begin(self, function: Any, args: Any, kwargs: Any) -> Scores:
        """The scores that a product of queries and keys would have."""
        names = ("input", "batch1", "batch2") if function in BADDBMM else ("batch1", "batch2")
        operands = {"alpha": 1, "beta": 1} | dict(zip(names, args, strict=False)) | kwargs
        queries, keys, bias = (operands.get(name) for name in ("batch1", "batch2", "input"))
        biases: tuple[Tensor, ...] = ()
        if bias is not None and operands["beta"] and bias.any():
            biases = (bias * float(operands["beta"]),)
        shape = torch.broadcast_shapes(queries.shape[:-2], keys.shape[:-2])
        product = Product(
            function.__name__, queries, keys.transpose(-1, -2), float(operands["alpha"]), biases
        )
        return Scores.of(product, (*shape, queries.shape[-2], keys.shape[-1]), queries.dtype)

    def follow(self, function: Any, args: Any, kwargs: Any) -> Any:
        """What ``function`` makes of scores: other scores, a fact of them, or attention's output."""
        name = function.__name__
        if name in FACTS:
            with torch._C.DisableTorchFunction():
                return function(*args, **kwargs)
        scores = next(a for a in (*args, *kwargs.values()) if isinstance(a, Scores))
        product, shape, dtype = scores.product, scores.shape, scores.dtype
        others = [a for a in (*args, *kwargs.values()) if a is not scores]
        is_first = bool(args) and args[0] is scores
        result: Product | None = None
        if product.is_normalised and function in FOLLOWED and is_first and len(others) == 1:
            return self.attend(scores, others[0])
        if name in SHAPES and is_first:
            shape = getattr(torch.empty(shape, device="meta"), name)(*args[1:], **kwargs).shape
            result = product if shape[-2:] == scores.shape[-2:] else None
        elif name in CASTS and is_first:
            rest = [torch.empty(0, dtype=a.dtype) if isinstance(a, Tensor) else a for a in args[1:]]
            dtype = getattr(torch.empty(0, dtype=dtype), name)(*rest, **kwargs).dtype
            result = product
        elif name == "dropout":
            options = {"p": 0.5, "training": True}
            options |= dict(zip(options, args[1:], strict=False)) | kwargs
            result = None if options["training"] and options["p"] else product
        elif product.is_normalised:
            pass
        elif name == "softmax" and kwargs.get("dim", *args[1:2]) in (-1, len(shape) - 1):
            dtype = kwargs.get("dtype") or dtype
            result = replace(product, is_normalised=True)
        elif name in FACTORS and len(others) == 1 and _is_number(others[0]):
            factor = float(others[0]) ** FACTORS[name]
            biases = tuple(bias * factor for bias in product.biases)
            if factor > 0:  # another would make the largest score of a hidden one, minus infinity
                result = replace(product, scale=product.scale * factor, biases=biases)
        elif name in SUMS and len(others) == 1 and isinstance(others[0], Tensor):
            if groups_of(others[0]) is not None:
                result = replace(product, mask=others[0]) if product.mask is None else None
            elif others[0].dtype != torch.bool:
                result = replace(product, biases=(*product.biases, others[0]))
        elif name in ("masked_fill", "masked_fill_") and is_first and float(others[1]) <= HIDDEN:
            result = with_hidden(product, others[0])
        elif name == "where" and len(args) == 3 and args[1] is scores and args[2] <= HIDDEN:
            result = with_hidden(product, ~args[0])
        elif name in ("max", "maximum") and len(others) == 1 and float(others[0]) <= HIDDEN:
            result = product
        if result is None:
            raise refusal(self.module, product.function)
        if name.endswith("_") and not name.endswith("__"):
            scores.product = result
            return scores
        return Scores.of(result, shape, dtype)

    def attend(self, scores: Scores, values: Tensor) -> Tensor:
        """Attention's output, as the module's product of its weights and ``values (…, keys, size)`` would have it."""
        product, mask, n_rows = scores.product, scores.product.mask, self.n_rows
        n_queries, n_keys = scores.shape[-2:]
        operands = (product.queries, product.keys, values)
        q, k, v = (x.reshape(n_rows, -1, *x.shape[-2:]) for x in operands)
        bias: Any = None
        for term in product.biases:  # each becomes (rows or 1, heads or 1, queries or 1, keys)
            if term.dim() == 3 and len(term) == n_rows * q.shape[1]:
                term = term.unflatten(0, (n_rows, q.shape[1]))
            term = term[(None,) * (4 - term.dim())]
            bias = term if bias is None else bias + term
        if mask is None and bias is not None and bias.shape[2] == n_queries:
            mask, bias = bias, None  # a model that has added to its mask
        if bias is not None:
            bias = bias.expand(len(bias), q.shape[1], n_queries, n_keys).float()
        # Without a mask, nothing is hidden.
        options = {"scaling": product.scale, "is_causal": False, "position_bias": bias}
        output, _ = exact_attention(self.module, q, k.to(q.dtype), v.to(q.dtype), mask, **options)
        output = output.transpose(1, 2).reshape(*scores.shape[:-1], v.shape[-1])
        return output.to(values.dtype)


def with_hidden(product: Product, hidden: Tensor) -> Product:
    """``product`` with minus infinity where ``hidden`` is true."""
    bias = torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, -math.inf)
    return replace(product, biases=(*product.biases, bias))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def with_followed_calls(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module that computes attention by itself; it returns no weights of attention."""
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    n_rows = len(next(tensors))  # hidden states come first, (rows, tokens, size)
    with FollowedCalls(module, n_rows):
        return without_scores(own_forward(module)(*args, **kwargs))


def without_scores(output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(without_scores(item) for item in output)
    return None if isinstance(output, Scores) else output
