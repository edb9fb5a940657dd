"""Tests on this machine whether each kind of operation is exact; ``trial.py`` tests the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from transformers.masking_utils import bidirectional_mask_function

from . import spans, trial
from .attention import exact_attention
from .spans import KEYS, exact_mask

#: Numbers of rows that every operation is computed with; the result of each is compared with that of ``ROWS`` rows.
COUNTS = (1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 31, 32, 33, 47, 63)
ROWS = 64


@dataclass(frozen=True)
class Operation:
    """A kind of operation: what it is, its shape and dtype, and where its rows differ, if they do."""

    name: str
    shape: str
    dtype: str
    differs: str | None = None


def try_rows(compute: Callable[[Tensor], Tensor], values: Tensor) -> str | None:
    """Where results of ``compute`` for some rows of ``values (ROWS, …)`` differ from those for all of them."""
    whole = compute(values)
    for count in COUNTS:
        for start in sorted({0, 1, (ROWS - count) // 2, ROWS - count}):
            part = compute(values[start : start + count])
            if not torch.equal(part, whole[start : start + count]):
                return f"{count} rows from row {start} on of {ROWS}"
    return None


#: Numbers of queries that are computed together, beside all of a row.
QUERIES = (1, 3, 8, 33)
#: Keys of the forward whose queries all others have to equal.
LONGEST = 2 * KEYS - 3


@cache
def try_attention(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype, threads: int
) -> str | None:
    """Where a query's output depends on how many queries, keys or rows are computed with it.

    Chooses which parts of a block the last one may be. ``threads``: of torch, which the answer holds for.
    """
    passing = []
    for n_keys in range(KEYS, 0, -64):  # whole blocks first
        spans.LAST_KEYS[dtype, size] = (n_keys, KEYS)
        differs = _try_last(n_keys, heads, kv_heads, size, dtype)
        if differs is None:
            passing.append(n_keys)
        elif n_keys == KEYS:
            return differs
    spans.LAST_KEYS[dtype, size] = tuple(sorted(passing))
    return None


def _try_last(n_keys: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> str | None:
    """Where steps whose last block has ``n_keys`` differ from one forward of ``LONGEST`` tokens."""
    generator = torch.Generator().manual_seed(heads * size)
    shapes = [(1, n, LONGEST, size) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    mask = exact_mask(batch_size=1, q_length=LONGEST, kv_length=LONGEST)
    whole = exact_attention(nn.Module(), q, k, v, mask)[0]
    least = 1 if n_keys == KEYS else n_keys - 3
    longest = min(KEYS + n_keys - 3, LONGEST)
    for length in sorted({least, n_keys - 3, n_keys, KEYS + least, longest}):
        for n_queries in sorted({min(n, length) for n in (*QUERIES, length)}):
            for padding in (0, 3, 200):
                out = _first_row(q, k, v, length, n_queries, padding, padding + length)
                if not torch.equal(out, whole[0, length - n_queries : length]):
                    return f"{n_queries} queries of {length} keys behind {padding} of padding"
        # Beside a longer row that begins in the same column, blocks follow that this row does not see.
        both_ways = {"mask_function": bidirectional_mask_function}
        own, beside = (
            _first_row(q, k, v, length, length, 0, n_all, **both_ways)
            for n_all in (length, length + KEYS + 1)
        )
        if not torch.equal(own, beside):
            return f"{length} keys beside a row of {length + KEYS + 1}"
    return None


def _first_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    length: int,
    n_queries: int,
    padding: int,
    n_all: int,
    **options: Any,
) -> Tensor:
    """The last ``n_queries`` of ``length`` tokens behind padding, beside a row of ``n_all``: ``(queries, heads, size)``."""
    is_token = torch.ones(2, n_all, dtype=torch.bool)
    is_token[0, :padding] = is_token[0, padding + length :] = False
    n_behind, n_missing = n_all - padding - length, max(n_all - LONGEST, 0)
    own = [F.pad(x[:, :, :length], (0, 0, padding, n_behind)) for x in (k, v)]
    beside = [F.pad(x[:, :, :n_all] * 2, (0, 0, 0, n_missing)) for x in (k, v)]
    keys, values = map(torch.cat, zip(own, beside, strict=True))
    first = length - n_queries
    shape = {"batch_size": 2, "q_length": n_queries, "kv_length": n_all}
    mask = exact_mask(**shape, q_offset=padding + first, attention_mask=is_token, **options)
    queries = q[:, :, first:length].expand(2, -1, -1, -1)
    return exact_attention(nn.Module(), queries, keys, values, mask)[0][0]


def of_layers(model: nn.Module) -> Iterator[Operation]:
    """Try a layer of each kind (class, shapes of weights, input) on random rows.

    Layers have no layers inside, and take one tensor of activations.
    """
    inputs: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        is_layer = not any(module.children()) and not isinstance(module, _ConvNd)
        is_of_one = len(args) == 1 and all(isinstance(x, Tensor) for x in (*args, output))
        if (
            is_layer
            and is_of_one
            and not kwargs
            and args[0].dim() > 1
            and args[0].is_floating_point()
        ):
            inputs[module] = args[0]

    with trial.hooked(model, note):
        trial.run_model(model)
    tried = set()
    for module, example in inputs.items():
        size, dtype = example.shape[-1], example.dtype
        shapes = ", ".join(" x ".join(map(str, p.shape)) for p in module.parameters(recurse=False))
        name = f"{type(module).__name__}({shapes})"
        if (name, size, dtype) not in tried:
            tried.add((name, size, dtype))
            generator = torch.Generator().manual_seed(size)
            values = torch.randn(ROWS, size, generator=generator).to(dtype)
            yield Operation(name, f"rows of {size}", _name(dtype), try_rows(module, values))


def of_attention(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> Operation:
    """Try attention with ``heads`` of queries and ``kv_heads`` of keys, of ``size`` numbers."""
    shape = f"{heads} heads of queries, {kv_heads} of keys, of {size}"
    differs = try_attention(heads, kv_heads, size, dtype, torch.get_num_threads())
    return Operation("attention", shape, _name(dtype), differs)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
