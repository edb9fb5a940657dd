"""Layers whose rows do not depend on how many rows there are.

Matrix products are computed in whole tiles (``tiles.py``). torch computes functions like ``exp`` in vectors, and the numbers that
are left at the end of a tensor, or of a thread's part of it, one by one, which rounds otherwise: here, the tensor is
padded to whole vectors.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import RLock, get_ident
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook as after_each
from torch.nn.modules.module import register_module_forward_pre_hook as before_each
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface

from ...state import hooks
from ..optimization.forward import PackedForward, own_forward
from .attention import NAME, exact_attention
from .tiles import LINEAR, RowWise, in_tiles, tiled

#: Products of activations with a weight, by the functions that models call.
ADDMM = (torch.addmm, Tensor.addmm)
MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
BMM = (torch.bmm, Tensor.bmm)
#: Functions of each number for which a vector and a single number are rounded differently.
POINTWISE = (
    *(F.silu, F.gelu, F.softplus, F.mish, F.elu, F.logsigmoid, F.selu, F.celu, Tensor.__pow__),
    *(torch.special.expit, torch._C._nn.gelu, torch._C._nn.silu, Tensor.__rpow__),
    *(
        getattr(owner, name)
        for owner in (torch, Tensor)
        for name in "exp exp2 expm1 log log1p sigmoid tanh erf cos sin sinh cosh atanh pow".split()
    ),
)
#: Numbers that torch computes at once, at most, and fewest numbers for which it uses another thread.
VECTOR, GRAIN = 64, 32768
#: Products of activations that ``followed.py`` follows, beside those of ``MATMUL``.
BADDBMM = (torch.baddbmm, Tensor.baddbmm)
ATTENDING = (*BMM, *BADDBMM, F.scaled_dot_product_attention)
#: Products that are not computed in tiles: what calls them is refused.
OTHERS = (
    *(torch.einsum, torch.addbmm, torch.tensordot, torch.inner, torch.mv, torch.chain_matmul),
    *(Tensor.__rmatmul__, F.multi_head_attention_forward, F.bilinear),
    *(torch.logcumsumexp, torch.cumprod, Tensor.cumprod),
)


class TiledForward:
    """Set as ``forward`` of a linear layer: computes its rows in whole tiles.

    A layer that ``hfgen.optimize`` has given a kernel, ``packed``, keeps it. Raises ``ValueError`` where gradients
    are recorded and the kernel has rounded weights: the layer's own forward would give other numbers.
    """

    def __init__(self, module: nn.Module, packed: PackedForward | None) -> None:
        self.module = module
        self.packed = packed

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.module, self.packed)

    def __deepcopy__(self, memo: dict[int, Any]) -> TiledForward:
        packed = None if self.packed is None else self.packed.__deepcopy__(memo)
        return type(self)(memo.get(id(self.module), self.module), packed)

    def __call__(self, input: Tensor) -> Tensor:
        module: Any = self.module
        if (packed := self.packed) is None:
            return tiled(F.linear, input, module.weight, module.bias)
        own_rows = input.reshape(-1, input.shape[-1])
        rows = own_rows if packed.kernel.is_row_wise else in_tiles(own_rows)
        if not torch.is_grad_enabled():
            output = _computed(packed, rows)
        elif packed.kernel.weights is None:
            output = RowWise.apply(rows, module.weight, module.bias, partial(_computed, packed))
        else:
            raise ValueError(
                f"exact: the kernel {packed.kernel.name!r} of hfgen.optimize rounds weights, so it has no "
                "gradients. Train the model without it, or score under torch.no_grad()."
            )
        return output[: len(own_rows)].reshape(*input.shape[:-1], len(module.weight))


def _computed(packed: PackedForward, rows: Tensor) -> Tensor:
    if (output := packed.compute(rows)) is None:
        raise ValueError(
            f"exact: the kernel {packed.kernel.name!r} of hfgen.optimize does not take {rows.dtype} activations, "
            "or the weight as it is now. Call hfgen.restore(model), and prepare it again."
        )
    return output


class ExactCalls(TorchFunctionMode):
    """Within: products with a weight are computed in whole tiles, functions of each number in whole vectors."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        exact = exact_call(function, args, kwargs)
        return function(*args, **kwargs) if exact is None else exact()


def exact_call(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Tensor] | None:
    """``function(*args, **kwargs)`` in whole tiles or vectors; ``None`` where neither is needed, or known."""
    if function in LINEAR:
        return partial(tiled, function, *args, **kwargs)
    if function in ADDMM and not kwargs and args[1].dim() == 2:
        return partial(tiled, _addmm, args[1], args[2], args[0])
    is_weight = len(args) > 1 and isinstance(args[1], nn.Parameter)
    if not kwargs and (
        (function in MATMUL and args[1].dim() == 2) or (function in BMM and is_weight)
    ):
        return partial(tiled, function, *args)
    if function in POINTWISE:
        is_tensor = [isinstance(value, Tensor) for value in (*args, *kwargs.values())]
        if is_tensor[0] and sum(is_tensor) == 1 and args[0].dim() > 0:
            return partial(in_vectors, function, *args, **kwargs)
    return None


def _addmm(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, rows, weight)


def in_vectors(function: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``function`` of each number of ``input``, which is padded until all threads have whole vectors."""
    numbers = input.numel()
    parts = min(torch.get_num_threads(), -(-numbers // GRAIN)) or 1
    missing = -numbers % (VECTOR * parts)
    if not missing and input.is_contiguous():
        return function(input, *args, **kwargs)
    output = function(F.pad(input.reshape(-1), (0, missing)), *args, **kwargs)
    return output[:numbers].reshape(input.shape)


def with_exact_calls(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module that calls matrix products by itself, as routers and experts do."""
    with ExactCalls():
        return own_forward(module)(*args, **kwargs)


def set_forward(module: nn.Module, function: Callable[..., Any]) -> None:
    """Set ``function(module, …)`` as the forward of ``module``, with the signature of its own."""
    forward: Any = partial(function, module)  # views of the module and copies bind it anew
    forward.__signature__ = inspect.signature(own_forward(module))
    vars(module)["forward"] = forward


#: One ``Recorder`` at a time is registered in the place of ``exact_attention``.
_registering = RLock()


class Recorder(TorchFunctionMode):
    """Within: notes which modules call matrix products by themselves.

    ``callers``: modules with products that tiles serve. ``attending``: those with products of activations, as
    attention has, and the function. ``refused``: those with other products, and the function. ``shapes``: numbers of
    heads, of heads of keys, and a head's size, in calls of ``exact_attention``, inside of which nothing is noted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[nn.Module] = []
        #: Rows of a multiple of this many numbers are whole vectors, however many there are.
        self.whole = VECTOR * math.lcm(*range(1, torch.get_num_threads() + 1))
        self.callers: set[nn.Module] = set()
        self.attending: dict[nn.Module, str] = {}
        self.refused: dict[nn.Module, str] = {}
        self.shapes: set[tuple[int, int, int]] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.stack and type(module := self.stack[-1]).forward is not nn.Linear.forward:
            if exact_call(function, args, kwargs) is not None:
                if function not in POINTWISE or args[0].shape[-1] % self.whole:
                    self.callers.add(module)
            # The product of rotary positions has one summand.
            elif function in ATTENDING or (function in MATMUL and args[0].shape[-1] > 1):
                self.attending[module] = function.__name__
            elif function in OTHERS:
                self.refused[module] = function.__name__
        return function(*args, **kwargs)

    @contextmanager
    def following(self) -> Iterator[Recorder]:
        """Record within, and know the module that is running in this thread."""
        thread = get_ident()

        def push(module: nn.Module, args: Any) -> None:
            self.stack.append(module)

        def pop(module: nn.Module, args: Any, output: Any) -> None:
            self.stack.pop()

        def unseen(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
            if get_ident() != thread:
                return exact_attention(module, query, key, *args, **kwargs)
            self.shapes.add((query.shape[1], key.shape[1], query.shape[3]))
            with torch._C.DisableTorchFunction():
                return exact_attention(module, query, key, *args, **kwargs)

        with _registering, self, ExitStack() as stack:
            hooks.add(stack, before_each, push)
            hooks.add(stack, after_each, pop, always_call=True)
            AttentionInterface.register(NAME, unseen)
            try:
                yield self
            finally:
                AttentionInterface.register(NAME, exact_attention)


def refusal(module: nn.Module, function: str) -> ValueError:
    """The error of a ``module`` that calls a product that neither tiles nor ``followed.py`` serve."""
    return ValueError(
        f"exact: {type(module).__name__} calls torch's {function} on activations, which is not known to be exact. "
        "Models are exact whose attention is a softmax of scaled products, with masks of transformers."
    )


#: Chunked scans, and the recurrences that give the same but for rounding, by their names in modelling code.
RECURRENCES = {"torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule"}


def scans(module: nn.Module) -> bool:
    """Whether the forward of ``module`` calls one of the chunked scans in ``RECURRENCES``."""
    function = inspect.unwrap(type(module).forward)
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    return any(name in names for name in RECURRENCES)


def with_recurrence(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module with a chunked scan, by the recurrence: slower, but steps round as a prompt does."""
    function = inspect.unwrap(type(module).forward)
    names = function.__globals__
    recurrent = {scan: names[step] for scan, step in RECURRENCES.items() if scan in names}
    of_function = function.__name__, function.__defaults__, function.__closure__
    forward = FunctionType(function.__code__, {**names, **recurrent}, *of_function)
    with ExactCalls():
        return forward(module, *args, **kwargs)


def check_dropout(model: nn.Module) -> None:
    """Raise ``ValueError`` if a layer of ``model`` draws random numbers."""
    for name, module in model.named_modules():
        if module.training and isinstance(module, _DropoutNd) and module.p > 0:
            raise ValueError(f"exact: {name!r} drops values at random. Call model.eval().")


@contextmanager
def hooked(model: nn.Module, hook: Callable[..., None]) -> Iterator[None]:
    """Within, each module calls ``hook(module, args, kwargs, output)`` after a forward of this thread."""
    with ExitStack() as stack:
        for module in model.modules():
            hooks.add(stack, module.register_forward_hook, hook, with_kwargs=True)
        yield
