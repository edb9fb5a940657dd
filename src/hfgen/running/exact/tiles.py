"""Matrix products whose rows do not depend on how many rows there are.

Libraries choose a kernel by the number of rows, and kernels add a row's products in different orders. Here all calls
have numbers of rows that give the same bits on this machine, found by trying once for each kind of product. Weights that
hfgen's own kernel takes as they are need none of this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..optimization import native

#: Queries of a tile of attention, and the fewest rows of a call.
TILE = 4
#: Numbers of rows that a call may have, and those that the longest one may have.
SIZES = (*range(TILE, 33, TILE), 48, 64, 128, 256, 512)
LONGEST = (512, 64, 32, 16)
#: Products of rows with a weight ``(out, in)``; others take it as ``(in, out)``.
LINEAR = (F.linear, torch._C._nn.linear)

#: The sizes that have passed, by kind of product, shapes and threads.
_passed: dict[Any, tuple[int, ...]] = {}


def in_tiles(rows: Tensor) -> Tensor:
    """``(…, rows, size)`` with zeros behind, so that the rows are whole tiles."""
    missing = -rows.shape[-2] % TILE
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


class RowWise(torch.autograd.Function):
    """``product(rows (n, in))`` by a kernel of hfgen, with the gradients of a linear layer."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, product: Any
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.has_bias = bias is not None
        return product(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        rows, weight = ctx.saved_tensors
        of_rows, of_weight, of_bias, _ = ctx.needs_input_grad
        return (
            gradient @ weight if of_rows else None,
            gradient.T @ rows if of_weight else None,
            gradient.sum(dim=0) if ctx.has_bias and of_bias else None,
            None,
        )


def tiled(
    product: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """``product(rows, weight, bias)`` of the rows of ``input (…, in)``, or of those of each batch if ``weight`` has batches."""
    rows = input if weight.dim() == 3 else input.reshape(-1, input.shape[-1])
    if product in LINEAR and weight.dtype == input.dtype and native.has_tiles(weight):
        kernel = native.Native(torch.ops.hfgen_native.linear.default, (weight,), len(weight))
        with_bias = partial(kernel, bias=bias)
        has_gradients = torch.is_grad_enabled()
        output = RowWise.apply(rows, weight, bias, with_bias) if has_gradients else with_bias(rows)
        return output.reshape(*input.shape[:-1], output.shape[-1])
    others = (weight,) if bias is None else (weight, bias)
    shapes = tuple((other.shape, other.stride(), other.dtype) for other in others)
    kind = product, shapes, torch.get_num_threads()
    counts, n = list[int](), rows.shape[-2]
    with torch._C.DisableTorchFunction():  # a product would come here again from ``ExactCalls``
        if (sizes := _passed.get(kind)) is None:
            sizes = _passed[kind] = _passing(product, rows, *others)
        while n >= min(sizes[-1], 64):
            counts.append(max(size for size in sizes if size <= n))
            n -= counts[-1]
        if n or not counts:
            counts.append(min(size for size in sizes if size >= n))
        missing = sum(counts) - rows.shape[-2]
        filled = F.pad(rows, (0, 0, 0, missing)) if missing else rows
        outputs = [product(part.contiguous(), *others) for part in filled.split(counts, dim=-2)]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-2)
    output = output[..., : rows.shape[-2], :].contiguous()
    return output.reshape(*input.shape[:-1], output.shape[-1])


@torch.no_grad()
def _passing(product: Callable[..., Tensor], rows: Tensor, *others: Tensor) -> tuple[int, ...]:
    """The ``SIZES`` from the smallest possible one on whose calls of ``product`` give the same bits.

    The sums that are tried are 0 but for rounding: in bfloat16, too, they show the order in which numbers were added.
    """
    weight, *biases = others
    generator = torch.Generator().manual_seed(0)
    n = rows.shape[-1]
    order = torch.randperm(n - n % 2, generator=generator)

    def mirrored(n_rows: int, sign: int) -> Tensor:
        """Rows of numbers of which one half is ``sign`` times the other, in ``order``."""
        half = 16 * torch.randn(*rows.shape[:-2], n_rows, n // 2, generator=generator)
        whole = torch.cat([half, sign * half], dim=-1)[..., order]
        return F.pad(whole, (0, n % 2)).to(weight.dtype)

    values, outputs = mirrored(LONGEST[0], -1), mirrored(LONGEST[0], 1)
    of_weight = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype)
    for part in (of_weight if product in LINEAR else of_weight.mT).split(LONGEST[0], dim=-2):
        part.copy_(outputs[..., : part.shape[-2], :])
    zeros = [torch.zeros_like(bias) for bias in biases]
    passing: list[list[int]] = []
    for longest in LONGEST:
        whole = product(values[..., :longest, :].contiguous(), of_weight, *zeros)
        sizes = [longest]
        for size in reversed([size for size in SIZES if size < longest]):
            start = (longest - size) // 3 | 1
            part = product(values[..., start : start + size, :].contiguous(), of_weight, *zeros)
            if not torch.equal(part, whole[..., start : start + size, :]):
                break
            sizes.insert(0, size)
        passing.append(sizes)
    return tuple(min(passing, key=min))
