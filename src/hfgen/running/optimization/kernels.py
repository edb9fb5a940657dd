"""The kernels for linear layers on a CPU, and which weights each of them supports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import native

#: What computes a layer: activations ``(..., in)`` and a bias ``(out,)`` or None to ``(..., out)``.
Product = Callable[[Tensor, Tensor | None], Tensor]

#: Values of ``weights=`` besides None.
WEIGHTS = ("fp16", "int8", "int4")
#: Types of weights that are looked at.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Share of a row's norm. A sum of some hundred products in float32 rounds more: about 2**-21 of it.
ROUNDING = 2**-22
#: The name of the layer's own forward method.
OWN = "own"
#: Weights of a row of a matrix that share a scale in int4.
GROUP = 32
#: Rows that the int4 kernel packs together.
INT4_ROWS = 16


@dataclass(frozen=True, slots=True)
class Kernel:
    """One way to compute a linear layer.

    ``weights``: the argument that asks for it; None: it keeps their values, so that results differ from the
    layer's own by rounding only. ``bits``: of a packed weight; None: as many as it has. ``is_row_wise``: a row's
    product does not depend on how many there are.
    """

    name: str
    weights: str | None
    bits: int | None
    prepare: Callable[[Tensor], Product]
    misfit: Callable[[Tensor], str | None]  # why a weight cannot be computed by it
    is_row_wise: bool = False


def preferred(weights: str | None, dtype: torch.dtype) -> list[Kernel]:
    """The kernels of this machine for weights of ``dtype``, the fastest first, as benchmarks found them.

    They follow from the argument, the type and the processor. No clock is read here: kernels differ in
    rounding, so that a measurement would decide which tokens come out.
    """
    names: tuple[str, ...] = () if weights is None else (weights,)
    if weights == "fp16":
        names += ("fp16, rounded",)
    if dtype != torch.float16:
        names += ("bf16", "fp16", "fp32", "onednn")
    elif not _mkldnn_has("fp16"):
        names += ("fp16",)
    if native.LANES == 4:  # torch's products are faster with vectors that short
        names = tuple(name for name in names if not name.startswith(("bf", "fp")))
    return [KERNELS[name] for name in names if works(name)]


def _mkldnn_has(name: str) -> bool:
    """Whether oneDNN multiplies ``"bf16"`` or ``"fp16"`` on this processor."""
    has = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return has is not None and bool(has())


@cache
def works(name: str) -> bool:
    """Whether this machine and this torch have a kernel: it is tried out on a small layer."""
    kernel, generator = KERNELS[name], torch.Generator().manual_seed(0)
    plain: Any = {"generator": generator, "device": "cpu", "dtype": torch.float32}
    weight, x = (torch.randn(n, 64, **plain) for n in (32, 2))
    weight = weight.bfloat16().float()
    try:
        with torch.no_grad():
            result = kernel.prepare(weight)(x, None)
        expected = x @ weight.T
        return bool((result - expected).abs().max() < (2.0 if "int4" in name else 0.5))
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


def _inexact_in_bf16(weight: Tensor) -> str | None:
    if weight.dtype == torch.float16 or weight.shape[1] % 2:
        return "it is in float16" if weight.dtype == torch.float16 else "its rows have an odd width"
    for part in weight.detach().split(max(1, 2**22 // weight.shape[1])):
        if not torch.equal(part.bfloat16().to(part.dtype), part):
            return "its values are not those of bfloat16"
    return None


def _not_float32(weight: Tensor) -> str | None:
    is_float32 = weight.dtype == torch.float32
    return None if is_float32 else f"it is in {str(weight.dtype).removeprefix('torch.')}"


def _not_for_onednn(weight: Tensor) -> str | None:
    is_fast = weight.dtype == torch.bfloat16 and _mkldnn_has("bf16")
    return None if is_fast else _not_float32(weight)


def _not_finite(weight: Tensor) -> str | None:
    low, high = torch.aminmax(weight.detach())
    return None if bool(low.isfinite() & high.isfinite()) else "it has values that are not finite"


def _odd_for_int4(weight: Tensor) -> str | None:
    n_out, n_in = weight.shape
    if n_in % GROUP:
        return f"its rows of {n_in} values are not made of groups of {GROUP}"
    if n_out % INT4_ROWS:
        return f"its {n_out} rows are no multiple of {INT4_ROWS}"
    return _not_finite(weight)


# --- how they compute ---------------------------------------------------------------------------


def _to(dtype: torch.dtype) -> Callable[[Tensor], Product]:
    return lambda weight: native.of_numbers(weight, dtype)


def _onednn(weight: Tensor) -> Product:
    """oneDNN with the weight in an order of its own: ``torch.ops.mkldnn._linear_pointwise``."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    linear = torch.ops.mkldnn._linear_pointwise.default
    return lambda x, bias: linear(x, packed, bias, "none", [], "")


def _int4(weight: Tensor) -> Product:
    """A scale and a lowest value per ``GROUP`` weights of a row; activations of bfloat16."""
    values = weight.detach().float()
    groups = values.unflatten(1, (-1, GROUP))
    low, high = torch.aminmax(groups, dim=-1)
    scales = ((high - low) / 15).clamp(min=1e-6)
    levels = ((groups - low[..., None]) / scales[..., None]).round().clamp(0, 15)
    middles = low + 8 * scales  # the kernel computes (level - 8) * scale + middle
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.flatten(1).int(), 1)
    scaling = torch.stack([scales, middles], dim=-1).transpose(0, 1).contiguous().bfloat16()
    linear = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def run(x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.to(torch.bfloat16).flatten(0, -2).contiguous()
        result = linear(rows, packed, GROUP, scaling).unflatten(0, x.shape[:-1]).to(x.dtype)
        return result if bias is None else result.add_(bias).to(x.dtype)

    return run


_KERNELS = (
    Kernel("onednn", None, None, _onednn, _not_for_onednn),
    Kernel("fp32", None, None, _to(torch.float32), _not_float32, is_row_wise=True),
    Kernel("bf16", None, 16, _to(torch.bfloat16), _inexact_in_bf16, is_row_wise=True),
    Kernel("fp16", None, 16, _to(torch.float16), _inexact_in_fp16, is_row_wise=True),
    Kernel("fp16, rounded", "fp16", 16, _to(torch.float16), overflow, is_row_wise=True),
    Kernel("int8", "int8", 8, native.of_int8, _not_finite, is_row_wise=True),
    Kernel("int4", "int4", 4, _int4, _odd_for_int4),
)
#: The kernels by name.
KERNELS = {kernel.name: kernel for kernel in _KERNELS}
