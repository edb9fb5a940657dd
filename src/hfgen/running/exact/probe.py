"""Tests on this machine whether rows are exact: each kind of operation by itself, then the whole model."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import bidirectional_mask_function

from ... import families
from . import spans
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
    for length in sorted(
        {least, n_keys - 3, n_keys, KEYS + least, min(KEYS + n_keys - 3, LONGEST)}
    ):
        for n_queries in sorted({min(n, length) for n in (*QUERIES, length)}):
            for padding in (0, 3, 200):
                out = _beside(q, k, v, length, n_queries, padding)
                if not torch.equal(out, whole[0, length - n_queries : length]):
                    return f"{n_queries} queries of {length} keys behind {padding} of padding"
        # Beside a longer row that begins in the same column, blocks follow that this row does not see.
        own, beside = (_both_ways(q, k, v, length, n_all) for n_all in (length, length + KEYS + 1))
        if not torch.equal(own, beside):
            return f"{length} keys beside a row of {length + KEYS + 1}"
    return None


def _beside(q: Tensor, k: Tensor, v: Tensor, length: int, n_queries: int, padding: int) -> Tensor:
    """The last queries ``(n_queries, heads, size)`` of ``length`` tokens, behind padding, beside a longer row."""
    first = length - n_queries
    kept = torch.ones(2, padding + length, dtype=torch.bool)
    kept[0, :padding] = False
    keys, values = (
        torch.cat([F.pad(x[:, :, :length], (0, 0, padding, 0)), x[:, :, : padding + length] * 2])
        if padding + length <= LONGEST
        else F.pad(x[:, :, :length], (0, 0, padding, 0)).expand(2, -1, -1, -1)
        for x in (k, v)
    )
    mask = exact_mask(
        batch_size=2,
        q_length=n_queries,
        kv_length=padding + length,
        q_offset=padding + first,
        attention_mask=kept,
    )
    queries = q[:, :, first:length].expand(2, -1, -1, -1)
    return exact_attention(nn.Module(), queries, keys, values, mask)[0][0]


def _both_ways(q: Tensor, k: Tensor, v: Tensor, length: int, n_all: int) -> Tensor:
    """``length`` queries that see each other's keys, the first of two rows; the other one has ``n_all`` keys."""
    kept = torch.arange(n_all) < torch.tensor([[length], [n_all]])
    mask = exact_mask(
        batch_size=2,
        q_length=length,
        kv_length=n_all,
        attention_mask=kept,
        mask_function=bidirectional_mask_function,
    )
    missing = max(n_all - LONGEST, 0)
    keys, values = (
        F.pad(x[:, :, :n_all], (0, 0, 0, missing)).expand(2, -1, -1, -1) for x in (k, v)
    )
    queries = q[:, :, :length].expand(2, -1, -1, -1)
    return exact_attention(nn.Module(), queries, keys, values, mask)[0][0]


def operations(inputs: dict[str, tuple[nn.Module, Tensor]]) -> Iterator[Operation]:
    """Try each kind of layer on random rows like its ``inputs``: of a layer of each kind, with an input that it got."""
    tried: dict[tuple[str, str, str], str | None] = {}
    for module, example in inputs.values():
        size, dtype = example.shape[-1], example.dtype
        kind = (kind_of(module), f"rows of {size}", str(dtype).removeprefix("torch."))
        if kind in tried:
            continue
        generator = torch.Generator().manual_seed(size)
        values = torch.randn(ROWS, size, generator=generator).to(dtype)
        tried[kind] = try_rows(module, values)
        yield Operation(*kind, tried[kind])


def kind_of(module: nn.Module) -> str:
    """The class of a layer and the shapes of its weights."""
    shapes = ", ".join(" x ".join(map(str, p.shape)) for p in module.parameters(recurse=False))
    return f"{type(module).__name__}({shapes})"


# ------------------------------------------------------------- the whole model

#: Tokens of the rows of the trial, of which one is long enough that queries are more than a tile.
TOKENS = (3, 14, 21)
#: How many tokens at once the last ones are forwarded with a cache.
STEPS = (1, 2, 1)


def _rows(model: Any) -> list[Tensor]:
    """Random ids ``(1, tokens)`` for the trial, without the first ids, which are often special tokens."""
    vocab = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    low = min(8, vocab - 1)
    return [torch.randint(low, vocab, (1, n), generator=generator) for n in TOKENS]


def _padded(model: Any, rows: list[Tensor], side: str) -> dict[str, Tensor]:
    """The rows as a batch, padded on ``side``, with their mask and positions."""
    length = max(row.shape[1] for row in rows)
    at = 0 if side == "left" else 1
    missing = [((length - row.shape[1]), 0)[:: 1 - 2 * at] for row in rows]
    value = families.position_pad(model)  # such a model counts positions by itself
    ids = torch.cat(
        [F.pad(row, pad, value=value or 0) for row, pad in zip(rows, missing, strict=True)]
    )
    ones = [F.pad(torch.ones_like(row), pad) for row, pad in zip(rows, missing, strict=True)]
    inputs = {"input_ids": ids, "attention_mask": torch.cat(ones)}
    if value is None:
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return inputs


#: Computes the logits ``(tokens, vocab)`` of each row of the trial.
Way = Callable[[], list[Tensor]]


def drops_positions(model: Any) -> bool:
    """Whether ``generate`` forwards the model without positions, so that padding on the left counts."""
    if model.config.is_encoder_decoder or "position_ids" not in families.parameters(model.forward):
        return False
    inputs = _padded(model, _rows(model), "left")
    prepared = model.prepare_inputs_for_generation(
        **inputs, is_first_iteration=True, use_cache=False
    )
    return "position_ids" in inputs and prepared.get("position_ids") is None


#: How far logits may be from those without exact mode, as a share of the largest.
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


@torch.no_grad()
def logits_alone(model: Any) -> Tensor:
    """The logits ``(tokens, vocab)`` of the rows of the trial, each forwarded alone."""
    return torch.cat(ways(model)["alone"]())


def are_close(logits: Tensor, expected: Tensor) -> bool:
    """Whether logits ``(tokens, vocab)`` differ by rounding alone, at most tokens: a router may choose another expert."""
    differences = (logits - expected).abs().amax(dim=1) / expected.abs().amax(dim=1)
    return bool(differences.median() <= ROUNDING[logits.dtype])


@torch.no_grad()
def run_model(model: Any) -> None:
    """Forward the rows of the trial in all ways, for those who watch."""
    for way in ways(model).values():
        way()


@torch.no_grad()
def try_model(model: Any) -> str | None:
    """Where the logits of a row in a padded batch, or in steps with a cache, differ from those of the row alone.

    None if they are the same, bit by bit; else the way, and the first layer whose output differs.
    """
    all_ways = ways(model)
    alone = all_ways["alone"]()
    for name, way in all_ways.items():
        for row, (logits, expected) in enumerate(zip(way(), alone, strict=True)):
            if not torch.equal(logits, expected):
                return f"{name}; {first_difference(model, all_ways['alone'], way, row)}"
    return None


def ways(model: Any) -> dict[str, Way]:
    """Ways to compute the same logits, by name; the first is ``"alone"``."""
    rows = _rows(model)
    if model.config.is_encoder_decoder:
        return _ways_of_encoder_decoder(model, rows)
    alone = [_padded(model, [row], "left") for row in rows]
    left, right = (_padded(model, rows, side) for side in ("left", "right"))
    return {
        "alone": lambda: [_logits(model, inputs)[0] for inputs in alone],
        "padded on the right": lambda: [
            logits[:n] for logits, n in zip(_logits(model, right), TOKENS, strict=True)
        ],
        "padded on the left": lambda: [
            logits[-n:] for logits, n in zip(_logits(model, left), TOKENS, strict=True)
        ],
        "in steps with a cache": lambda: _in_steps(model, left),
    }


def _in_steps(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    longest, logits = max(TOKENS), []
    past: dict[str, Any] = {}
    name = families.cache_argument(model)
    bounds = [0, *(longest - sum(STEPS[n:]) for n in range(len(STEPS) + 1))]
    for start, stop in itertools.pairwise(bounds):
        part = {name: value[:, start:stop] for name, value in inputs.items()}
        part["attention_mask"] = inputs["attention_mask"][:, :stop]
        output = _forward(model, {**part, **past, "use_cache": True})
        logits.append(output.logits)
        past = {name: getattr(output, name)}
    together = torch.cat(logits, dim=1)
    return [row[-n:] for row, n in zip(together, TOKENS, strict=True)]


def _ways_of_encoder_decoder(model: Any, rows: list[Tensor]) -> dict[str, Way]:
    """The same where ``rows`` are inputs of an encoder; the decoder's tokens are those of the second row."""
    decoded = rows[1][:, :6]
    inputs = _padded(model, rows, "right")

    def alone() -> list[Tensor]:
        return [_logits(model, {"input_ids": row, "decoder_input_ids": decoded})[0] for row in rows]

    def in_batch() -> list[Tensor]:
        ids = decoded.expand(len(rows), -1)
        return list(_logits(model, {**inputs, "decoder_input_ids": ids}))

    def in_steps() -> list[Tensor]:
        logits = []
        states = model.get_encoder()(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], return_dict=True
        )
        past: dict[str, Any] = {"encoder_outputs": states}
        for start, stop in ((0, 3), (3, 4), (4, 6)):
            ids = decoded[:, start:stop].expand(len(rows), -1)
            output = _forward(
                model, {**inputs, **past, "decoder_input_ids": ids, "use_cache": True}
            )
            logits.append(output.logits)
            past = {"past_key_values": output.past_key_values, "encoder_outputs": states}
        return list(torch.cat(logits, dim=1))

    return {"alone": alone, "padded on the right": in_batch, "in steps with a cache": in_steps}


def _forward(model: Any, arguments: dict[str, Any]) -> Any:
    known = families.parameters(model.forward)
    device = families.device_of(model)
    return model(**{k: families.moved(v, device) for k, v in arguments.items() if k in known})


def _logits(model: Any, arguments: dict[str, Any]) -> Tensor:
    logits: Tensor = _forward(model, {**arguments, "use_cache": False}).logits
    return logits


def first_difference(model: nn.Module, alone: Way, beside: Way, row: int) -> str:
    """The first layer whose output for the tokens of ``row`` differs between two ways to compute it."""
    outputs: list[list[tuple[str, Tensor]]] = [[], []]
    names = {module: name for name, module in model.named_modules()}
    for way, found in zip((alone, beside), outputs, strict=True):

        def note(module: nn.Module, args: Any, output: Any, found: Any = found) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, Tensor):
                found.append((f"{names[module]} ({type(module).__name__})", output))

        handles = [module.register_forward_hook(note) for module in names]
        try:
            way()
        finally:
            for handle in handles:
                handle.remove()
    in_way: dict[str, list[Tensor]] = {}
    for name, output in outputs[1]:
        in_way.setdefault(name, []).append(output)
    calls: Counter[str] = Counter()
    for name, output in outputs[0]:
        is_own = calls[name] == row  # each layer is called once for each row that is alone
        calls[name] += 1
        is_compared = is_own and output.dim() == 3 and name in in_way
        if is_compared and not _is_in(output[0], in_way[name], row):
            return f"the first layer with another output is {name}"
    return "no layer's output differs, but the logits do"


def _is_in(own: Tensor, others: list[Tensor], row: int) -> bool:
    """Whether the tokens of ``own (tokens, size)`` stand in what a layer gave for ``row`` in all its calls."""
    both = [o[row] for o in others if o.dim() == 3 and row < len(o) and o.shape[2] == own.shape[1]]
    if not both or sum(map(len, both)) < len(own):
        return True  # rows and tokens in another order: the next layer tells
    there = torch.cat(both)
    return any(
        torch.equal(own, there[start : start + len(own)]) for start in {0, len(there) - len(own)}
    )
