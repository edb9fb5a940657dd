"""The forward method of one linear layer with another kernel, used while its weight is unchanged."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch import library as operators

from ...memory.caches.growing import n_writes
from .kernels import DTYPES, KERNELS, Product
from .native import Native, shape_of_linear

#: Places of a weight that are compared at each call, and values at each: a cache line of bfloat16 is read
#: in any case, and small edits change few values of such types.
N_PLACES, N_VALUES = 8, 16


class Packed:
    """A weight as it was when it was packed. ``product``: None if the kernel does not take it.

    The view, or a product that reads the weight as it is, keeps the memory: another tensor cannot get its address
    while this one is compared with it.
    """

    __slots__ = ("address", "product", "values", "version", "view", "weight")

    def __init__(self, weight: Tensor, product: Product | None) -> None:
        self.weight, self.product = weight, product
        self.address, self.version = weight.data_ptr(), n_writes(weight)
        is_read = isinstance(product, Native) and product.tensors[0].data_ptr() == self.address
        #: None: the product reads the weight, so that nothing has to be compared.
        self.view = None if is_read else _samples(weight)
        self.values = None if self.view is None else self.view.tobytes()

    def is_of(self, weight: Tensor | None) -> bool:
        """Whether ``weight`` is the one that was packed, and unchanged: edits of ``.data`` show by samples only."""
        return self.holds(weight) and (self.view is None or self.view.tobytes() == self.values)

    def holds(self, weight: Tensor | None) -> bool:
        """``is_of`` without samples."""
        is_same = weight is self.weight and self.weight.data_ptr() == self.address
        return is_same and (self.view is None or n_writes(self.weight) == self.version)


def _samples(weight: Tensor) -> Any:
    """Some values of a weight, as bits: a view of its memory in numpy."""
    bits = torch.int32 if weight.element_size() == 4 else torch.int16
    flat = weight.detach().view(bits).flatten()
    width = min(N_VALUES, len(flat))
    last = len(flat) - width
    step = max(last // (N_PLACES - 1), 1)
    return flat.as_strided((1 + min(last, N_PLACES - 1), width), (step, 1)).numpy()


class PackedForward:
    """Set as ``forward`` of an ``nn.Linear``, which stays as it is in everything else.

    The layer's own forward runs in training mode, where gradients are recorded and where ``compute`` returns
    None. A weight is packed again when it is no longer the ``Packed`` one; copies and pickles pack at their
    first call. A compiled graph has an operator that comes back here: it finds this object by a ``number (1,)``,
    an argument of the graph, so that layers can share graphs.
    """

    def __init__(self, module: nn.Linear, kernel: str) -> None:
        self.module = module
        self.kernel = KERNELS[kernel]
        self._packed: Packed | None = None
        self.is_offloaded = False
        n = next(_numbers)
        with torch.inference_mode(False):
            self.number = torch.tensor([n], device="cpu")
        _BY_TENSOR[id(self.number)] = _BY_NUMBER[n] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedForward, (self.module, self.kernel.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedForward:
        # A module that is being copied is in the memo; a copy of this object alone stays with it.
        module = memo.get(id(self.module), self.module)
        return PackedForward(module, self.kernel.name)

    def __call__(self, input: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() or self.module.training):
            if torch.compiler.is_compiling():
                if _is_exporting():  # for other processes, where this object is not
                    return own_forward(self.module)(input)
                return torch.ops.hfgen.linear(input, None, self.number, self.module.out_features)
            if (result := self.compute(input)) is not None:
                return result
        return own_forward(self.module)(input)

    def view(self) -> nn.Linear:
        """The layer as a compiled graph takes it: alike for all layers of a shape."""
        packed = self.packed()
        product: Any = None if packed is None else packed.product
        is_native = isinstance(product, Native)
        linear = product.linear if is_native else torch.ops.hfgen.linear.default
        tensors = product.tensors if is_native else (self.number,)
        view: Any = object.__new__(PackedLinear)
        vars(view).update(vars(self.module), linear=linear)
        del vars(view)["forward"]
        vars(view)["_buffers"] = {f"packed_{i}": tensor for i, tensor in enumerate(tensors)}
        return view

    def compute(self, x: Tensor) -> Tensor | None:
        """The layer by its kernel: ``(..., in)`` to ``(..., out)``; None if it cannot be used."""
        packed = self.packed()
        if packed is None or packed.product is None or type(x) not in (Tensor, nn.Parameter):
            return None
        if x.dtype != packed.weight.dtype or not x.is_cpu or x.shape[-1] != packed.weight.shape[1]:
            return None
        if x.dim() < 2 or not x.numel() or torch.is_autocast_enabled("cpu"):
            return None
        return packed.product(x, self.module._parameters["bias"])

    def packed(self) -> Packed | None:
        """The weight as it is now, packed; None if it is none that can be packed."""
        parameters = self.module._parameters
        packed, weight = self._packed, parameters.get("weight")
        if packed is not None and packed.is_of(weight) and "bias" in parameters:
            return packed
        self._packed = None
        if weight is not None and misfit(self.module) is None:
            with torch.no_grad():
                fits = self.kernel.misfit(weight) is None
                self._packed = Packed(weight, self.kernel.prepare(weight) if fits else None)
        return self._packed

    def move(self, values: Tensor) -> None:
        """Replace the weight's memory by ``values``, which are equal; the packed weight stays."""
        packed, weight = self.packed(), self.module.weight
        weight.data = values
        if packed is not None:
            self._packed = Packed(weight, packed.product)
        self.is_offloaded = True


class PackedLinear(nn.Linear):
    """The layer that ``PackedForward.view`` returns. Its buffers are the packed weight, or else the number.

    Who calls the graph makes sure that a packed weight is still that of the layer.
    """

    linear: Callable[..., Tensor]

    def forward(self, input: Tensor) -> Tensor:
        return self.linear(input, self.bias, *self._buffers.values(), self.out_features)


_numbers = itertools.count()
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # 2.7
_BY_NUMBER: WeakValueDictionary[int, PackedForward] = WeakValueDictionary()
# By id of the tensor with the number, which its owner keeps: it is quicker than to read it.
_BY_TENSOR: WeakValueDictionary[int, PackedForward] = WeakValueDictionary()


def _linear(x: Tensor, bias: Tensor | None, number: Tensor, n_out: int) -> Tensor:
    """The operator in compiled graphs: as ``PackedForward`` does it, with the layer's own bias."""
    forward = _BY_TENSOR.get(id(number)) or _BY_NUMBER[int(number)]
    result = forward.compute(x)
    return own_forward(forward.module)(x) if result is None else result


_OPERATORS = operators.Library("hfgen", "DEF")
_OPERATORS.define("linear(Tensor x, Tensor? bias, Tensor number, SymInt n_out) -> Tensor")
_OPERATORS.impl("linear", _linear, "CompositeExplicitAutograd")
operators.register_fake("hfgen::linear", shape_of_linear, lib=_OPERATORS)


def own_forward(module: nn.Module) -> Callable[..., Tensor]:
    """The forward that a module has by its class."""
    return type(module).forward.__get__(module)


def misfit(module: nn.Module) -> str | None:
    """Why no kernel is tried for a linear layer, or None."""
    weight = module._parameters.get("weight")
    # Pruning and parametrizations compute a weight or a bias anew: it is no parameter then.
    is_plain = weight is not None and "bias" in module._parameters
    if type(module).forward is not nn.Linear.forward or not is_plain:
        return "a class of its own"
    if type(weight) is not nn.Parameter or weight.layout is not torch.strided:
        return f"weights of another library: {type(weight).__name__}"
    if weight.device.type != "cpu":
        return f"on {weight.device}: the kernels are those of CPUs"
    if weight.dtype not in DTYPES:
        return f"weights of {weight.dtype}"
    if not weight.is_contiguous() or weight.dim() != 2 or not weight.numel():
        return "weights that are not contiguous, or none"
    return None
