"""The kernels for linear layers on a CPU, and which weights each of them supports."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

#: What computes a layer: activations ``(..., in)`` and a bias ``(out,)`` or None to ``(..., out)``.
Product = Callable[[Tensor, Tensor | None], Tensor]

#: Values of ``weights=`` besides None.
WEIGHTS = ("fp16", "bf16", "int8", "int4")
#: Types of weights that are looked at.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Share of a row's norm. A sum of some hundred products in float32 rounds more: about 2**-21 of it.
ROUNDING = 2**-22
#: The kernel of fp16 for weights that it does not hold exactly.
ROUNDED_FP16 = "fp16, rounded"
#: Weights of a row of a matrix that share a scale in int4.
GROUP = 32
#: Rows that the int4 kernel packs together.
INT4_ROWS = 16
#: Values of a row that the int8 kernel reads at once. It reads past the end of others, and may crash.
INT8_VALUES = 16


@dataclass(frozen=True, slots=True)
class Kernel:
    """One way to compute a linear layer.

    ``weights``: the argument that allows it; None: it keeps the values. ``bits``: of a packed weight;
    None: as many as it has.
    """

    name: str
    weights: str | None
    bits: int | None
    prepare: Callable[[Tensor], Product]
    misfit: Callable[[Tensor], str | None]  # why a weight cannot be computed by it

    @property
    def is_exact(self) -> bool:
        """Whether results differ from the layer's own by rounding only."""
        return self.weights is None

    def packed_bytes(self, weight: Tensor) -> int:
        """How large a packed weight is, but for scales and padding."""
        return weight.numel() * (self.bits or 8 * weight.element_size()) // 8


def candidates(weights: str | None) -> list[Kernel]:
    """The kernels that ``weights`` allows and this machine has."""
    allowed = (kernel for kernel in KERNELS if kernel.weights in (None, weights))
    return [kernel for kernel in allowed if _works(kernel.name)]


def named(name: str) -> Kernel:
    """The kernel of that name; ``KeyError`` if there is none."""
    return _BY_NAME[name]


@cache
def _works(name: str) -> bool:
    """Whether this machine and this torch have a kernel: it is tried out on a small layer."""
    kernel, generator = named(name), torch.Generator().manual_seed(0)
    plain: Any = {"generator": generator, "device": "cpu", "dtype": torch.float32}
    weight, x = (torch.randn(n, 64, **plain) for n in (32, 2))
    weight = weight.bfloat16().float()
    try:
        with torch.no_grad():
            found = kernel.prepare(weight)(x, None)
        expected = x @ weight.T
        return bool((found - expected).abs().max() < (2.0 if "int4" in name else 0.5))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


# --- which weights fit --------------------------------------------------------------------------


def overflow(weight: Tensor) -> str | None:
    """Why a weight is not representable in fp16, or None."""
    limit = torch.finfo(torch.float16).max
    low, high = torch.aminmax(weight.detach())
    largest = max(-float(low), float(high))
    if largest <= limit:
        return None
    return f"its largest value is {largest:.4g}, and fp16 ends at {limit:.0f}"


def _inexact_in_fp16(weight: Tensor) -> str | None:
    """As ``overflow``; or a row changes by more than ``ROUNDING`` of its norm.

    Values of bfloat16 from 2**-17 on are the same in fp16; smaller ones move by 2**-25 at most.
    """
    if (reason := overflow(weight)) is not None:
        return reason
    for part in weight.detach().split(max(1, 2**22 // weight.shape[1])):
        values = part.float()
        change = (values.half().float() - values).norm(dim=1)
        if bool((change > ROUNDING * values.norm(dim=1)).any()):
            return "its values are not those of fp16"
    return None


def _not_float32(weight: Tensor) -> str | None:
    return None if weight.dtype == torch.float32 else f"it is in {_short(weight)} already"


def _not_for_onednn(weight: Tensor) -> str | None:
    if weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and _works("bf16")):
        return None
    return f"it is in {_short(weight)}"


def _not_finite(weight: Tensor) -> str | None:
    low, high = torch.aminmax(weight.detach())
    return None if bool(low.isfinite() & high.isfinite()) else "it has values that are not finite"


def _odd_for_int8(weight: Tensor) -> str | None:
    if weight.shape[1] % INT8_VALUES:
        return f"its rows of {weight.shape[1]} values are no multiple of {INT8_VALUES}"
    return _not_finite(weight)


def _odd_for_int4(weight: Tensor) -> str | None:
    n_out, n_in = weight.shape
    if n_in % GROUP:
        return f"its rows of {n_in} values are not made of groups of {GROUP}"
    if n_out % INT4_ROWS:
        return f"its {n_out} rows are no multiple of {INT4_ROWS}"
    return _not_finite(weight)


def _short(weight: Tensor) -> str:
    return str(weight.dtype).removeprefix("torch.")


# --- how they compute ---------------------------------------------------------------------------


def _onednn(weight: Tensor) -> Product:
    """oneDNN with the weight in an order of its own: ``torch.ops.mkldnn._linear_pointwise``."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    linear = torch.ops.mkldnn._linear_pointwise.default
    return lambda x, bias: linear(x, packed, bias, "none", [], "")


def _bf16(weight: Tensor) -> Product:
    product = _onednn(weight.detach().bfloat16())

    def run(x: Tensor, bias: Tensor | None) -> Tensor:
        return _plus(product(x.bfloat16(), None).to(x.dtype), bias)

    return run


def _fp16(weight: Tensor) -> Product:
    """fbgemm: weights of fp16, activations and sums of float32 (``linear_dynamic_fp16``)."""
    packed = torch.ops.quantized.linear_prepack_fp16(weight.detach().float(), None)
    return _in_float32(_scripted(_Fp16(packed)))


def _dynamic_int8(weight: Tensor) -> Product:
    """A scale per row of the weight, and one for all activations of a call (``linear_dynamic``)."""
    values = weight.detach().float()
    scales = (values.abs().amax(1) / 127).clamp(min=1e-12)
    zeros = torch.zeros_like(scales, dtype=torch.long)
    with warnings.catch_warnings():  # torch will drop such tensors; the kernel is then not there
        warnings.simplefilter("ignore")
        quantised = torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(quantised, None)
    return _in_float32(_scripted(_Int8(packed)))


class _Fp16(nn.Module):
    def __init__(self, packed: object) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)


class _Int8(_Fp16):
    def forward(self, x: Tensor) -> Tensor:
        # Half the range of activations: sums of pairs overflow 16 bits where there is no VNNI.
        return torch.ops.quantized.linear_dynamic(x, self.packed, True)


def _scripted(product: nn.Module) -> Callable[[Tensor], Tensor]:
    """Its forward in TorchScript: from Python, an operator takes 8 µs to be given a packed weight."""
    try:
        with (
            warnings.catch_warnings()
        ):  # torch advises to compile, which these operators are not for
            warnings.simplefilter("ignore")
            forward: Callable[[Tensor], Tensor] = torch.jit.script(product).forward
    except (RuntimeError, OSError):  # of torch without TorchScript, and of code without its source
        return product.forward
    return forward


def _in_float32(linear: Callable[[Tensor], Tensor]) -> Product:
    def run(x: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype == torch.float32:
            return _plus(linear(x), bias)
        found = linear(x.float())
        return (found if bias is None else found + bias).to(x.dtype)

    return run


def _int8(weight: Tensor) -> Product:
    """A scale per row; activations of bfloat16, since under float32 it is 13 times slower and more."""
    values = weight.detach().float()
    scales = (values.abs().amax(1) / 127).clamp(min=1e-12)
    packed = (values / scales[:, None]).round().to(torch.int8)
    scales = scales.bfloat16()
    return _in_bfloat16(lambda x: torch._weight_int8pack_mm(x, packed, scales), len(values))


def _int4(weight: Tensor) -> Product:
    """A scale and a lowest value per ``GROUP`` weights of a row; activations of bfloat16."""
    values = weight.detach().float()
    n_out, n_in = values.shape
    groups = values.view(n_out, n_in // GROUP, GROUP)
    low, high = torch.aminmax(groups, dim=-1)
    scales = ((high - low) / 15).clamp(min=1e-6)
    levels = ((groups - low[..., None]) / scales[..., None]).round().clamp(0, 15)
    middles = low + 8 * scales  # the kernel computes (level - 8) * scale + middle
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
        levels.view(n_out, n_in).to(torch.int32), 1
    )
    both = torch.stack([scales, middles], dim=-1).transpose(0, 1).contiguous().bfloat16()
    linear = torch.ops.aten._weight_int4pack_mm_for_cpu.default
    return _in_bfloat16(lambda x: linear(x, packed, GROUP, both), n_out)


def _in_bfloat16(linear: Callable[[Tensor], Tensor], n_out: int) -> Product:
    def run(x: Tensor, bias: Tensor | None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).bfloat16().contiguous()
        return _plus(linear(flat).view(*x.shape[:-1], n_out).to(x.dtype), bias)

    return run


def _plus(found: Tensor, bias: Tensor | None) -> Tensor:
    return found if bias is None else found.add_(bias)


KERNELS = (
    Kernel("onednn", None, None, _onednn, _not_for_onednn),
    Kernel("fp16", None, 16, _fp16, _inexact_in_fp16),
    Kernel(ROUNDED_FP16, "fp16", 16, _fp16, overflow),
    Kernel("bf16", "bf16", 16, _bf16, _not_float32),
    Kernel("int8, dynamic", "int8", 8, _dynamic_int8, _not_finite),
    Kernel("int8", "int8", 8, _int8, _odd_for_int8),
    Kernel("int4", "int4", 4, _int4, _odd_for_int4),
)
_BY_NAME = {kernel.name: kernel for kernel in KERNELS}
