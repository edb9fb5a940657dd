"""Tests on this machine whether each kind of operation is exact, and then the whole model (``ways``)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.rnn import pad_sequence
from transformers.masking_utils import bidirectional_mask_function

from ... import families
from .attention import exact_attention
from .layers import hooked
from .spans import KEYS, LAST_KEYS, exact_mask, local

#: Tokens of the rows of the trial, of which one is long enough that queries are more than a tile.
TOKENS = (3, 14, 21)
#: How many tokens at once the last ones are forwarded with a cache.
STEPS = (1, 2, 1)


def _rows(model: Any) -> list[Tensor]:
    """Random ids ``(1, tokens)`` for the trial, without the first ids, which are often special tokens."""
    vocab = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(min(8, vocab - 1), vocab, (1, n), generator=generator) for n in TOKENS]


def _padded(model: Any, rows: list[Tensor], side: str) -> dict[str, Tensor]:
    """The rows as a batch, padded on ``side``, with their mask and positions."""
    value = families.position_pad(model)  # such a model counts positions by itself
    ids = pad_sequence([row[0] for row in rows], True, value or 0, padding_side=side)
    mask = pad_sequence([torch.ones_like(row[0]) for row in rows], True, padding_side=side)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if value is None:
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return inputs


#: Computes the logits ``(tokens, vocab)`` of each row of the trial.
Way = Callable[[], list[Tensor]]


def drops_positions(model: Any) -> bool:
    """Whether ``generate`` forwards the model without positions, so that padding on the left counts."""
    if model.config.is_encoder_decoder or "position_ids" not in families.parameters(model.forward):
        return False
    inputs: dict[str, Any] = _padded(model, _rows(model), "left")
    is_first = {"is_first_iteration": True, "use_cache": False}
    prepared = model.prepare_inputs_for_generation(**inputs, **is_first)
    return "position_ids" in inputs and prepared.get("position_ids") is None


#: How far logits may be from those without exact mode, as a share of the largest.
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


@torch.no_grad()
def logits_alone(model: Any) -> Tensor:
    """The logits ``(tokens, vocab)`` of the rows of the trial, each forwarded alone."""
    return torch.cat(ways(model)["alone"]())


def differs_by_rounding(model: Any, expected: Tensor) -> bool:
    """Whether ``logits_alone`` differ from ``expected`` by rounding, at most tokens: a router may choose another expert."""
    logits = logits_alone(model)
    differences = (logits - expected).abs().amax(dim=1) / expected.abs().amax(dim=1)
    return bool(differences.median() <= ROUNDING[logits.dtype])


@torch.no_grad()
def run_model(model: Any) -> None:
    """Forward the rows of the trial in all ways, for those who watch."""
    for way in ways(model).values():
        way()


@torch.no_grad()
def try_model(model: Any) -> str | None:
    """In which way, and in which layer first, a row's logits differ from those of the row alone; None if in no bit."""
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

    def cut(logits: Tensor, side: str) -> list[Tensor]:
        rows = zip(logits, TOKENS, strict=True)
        return [row[-n:] if side == "left" else row[:n] for row, n in rows]

    return {
        "alone": lambda: [_logits(model, inputs)[0] for inputs in alone],
        "padded on the right": lambda: cut(_logits(model, right), "right"),
        "padded on the left": lambda: cut(_logits(model, left), "left"),
        "in steps with a cache": lambda: cut(_in_steps(model, left, {}), "left"),
    }


def _in_steps(model: Any, tokens: dict[str, Tensor], encoded: dict[str, Any]) -> Tensor:
    """The logits of a decoder's ``tokens`` and their mask and positions, ``(rows, tokens, vocab)``."""
    past: dict[str, Any] = {}
    logits = []
    name = families.cache_argument(model)
    length = next(iter(tokens.values())).shape[1]
    bounds = [0, *(length - sum(STEPS[n:]) for n in range(len(STEPS) + 1))]
    for start, stop in itertools.pairwise(bounds):
        part = {name: value[:, start:stop] for name, value in tokens.items()}
        if "attention_mask" in tokens:
            part["attention_mask"] = tokens["attention_mask"][:, :stop]
        output = _forward(model, {**encoded, **part, **past, "use_cache": True})
        logits.append(output.logits)
        past = {name: getattr(output, name)}
    return torch.cat(logits, dim=1)


def _ways_of_encoder_decoder(model: Any, rows: list[Tensor]) -> dict[str, Way]:
    """The same where ``rows`` are inputs of an encoder; the decoder's tokens are those of the second row."""
    decoded = {"decoder_input_ids": rows[1][:, :6]}
    repeated = {"decoder_input_ids": rows[1][:, :6].expand(len(rows), -1)}
    inputs = _padded(model, rows, "right")

    def in_steps() -> list[Tensor]:
        prompt = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        states = model.get_encoder()(**prompt, return_dict=True)
        return list(_in_steps(model, repeated, {**inputs, "encoder_outputs": states}))

    return {
        "alone": lambda: [_logits(model, {"input_ids": row, **decoded})[0] for row in rows],
        "padded on the right": lambda: list(_logits(model, {**inputs, **repeated})),
        "in steps with a cache": in_steps,
    }


def _forward(model: Any, arguments: dict[str, Any]) -> Any:
    known = families.parameters(model.forward)
    device = families.device_of(model)
    return model(**{k: families.moved(v, device) for k, v in arguments.items() if k in known})


def _logits(model: Any, arguments: dict[str, Any]) -> Tensor:
    return _forward(model, {**arguments, "use_cache": False}).logits


def first_difference(model: nn.Module, alone: Way, beside: Way, row: int) -> str:
    """The first layer whose output for the tokens of ``row`` differs between two ways to compute it."""
    names = {module: name for name, module in model.named_modules()}

    def outputs_of(way: Way) -> dict[str, list[Tensor]]:
        outputs: dict[str, list[Tensor]] = {}

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, Tensor):
                name = f"{names[module]} ({type(module).__name__})"
                outputs.setdefault(name, []).append(output)

        with hooked(model, note):
            way()
        return outputs

    outputs_beside = outputs_of(beside)
    for name, calls in outputs_of(alone).items():
        if len(calls) <= row or calls[row].dim() != 3:  # a layer is called once for each row
            continue
        expected, others = calls[row][0], outputs_beside.get(name, [])  # (tokens, size)
        n, size = expected.shape
        parts = [o[row] for o in others if o.dim() == 3 and row < len(o) and o.shape[2] == size]
        if sum(map(len, parts)) < n:
            continue  # rows and tokens in another order: the next layer tells
        tokens = torch.cat(parts)
        if not (torch.equal(expected, tokens[:n]) or torch.equal(expected, tokens[-n:])):
            return f"the first layer with another output is {name}"
    return "no layer's output differs, but the logits do"


# ---------------------------------------------------------------- kinds of operations

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
def of_attention(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype, threads: int
) -> Operation:
    """Try attention with ``heads`` of queries and ``kv_heads`` of keys, of ``size`` numbers.

    It differs where a query's output depends on how many queries, keys or rows are computed with it. Chooses
    which parts of a block the last one may be. ``threads``: of torch, which the answer holds for.
    """
    shape = f"{heads} heads of queries, {kv_heads} of keys, of {size}"
    of_differing = partial(Operation, "attention", shape, str(dtype)[len("torch.") :])
    passing = []
    try:
        for n_keys in range(KEYS, 0, -64):  # whole blocks first
            local.tried_keys = (n_keys, KEYS)
            differs = _try_last(n_keys, heads, kv_heads, size, dtype)
            if differs is None:
                passing.append(n_keys)
            elif n_keys == KEYS:
                return of_differing(differs)
    finally:
        local.tried_keys = None
    former = LAST_KEYS.get((dtype, size), range(KEYS + 1))  # of other heads
    LAST_KEYS[dtype, size] = tuple(n for n in sorted(passing) if n in former)
    return of_differing(None)


def _try_last(n_keys: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> str | None:
    """Where steps whose last block has ``n_keys`` differ from one forward of ``LONGEST`` tokens."""
    generator = torch.Generator().manual_seed(heads * size)
    shapes = [(1, n, LONGEST, size) for n in (heads, kv_heads, kv_heads)]
    q, k, v = states = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    mask = exact_mask(batch_size=1, q_length=LONGEST, kv_length=LONGEST)
    whole = exact_attention(nn.Module(), q, k, v, mask)[0]
    least = 1 if n_keys == KEYS else n_keys - 3
    longest = min(KEYS + n_keys - 3, LONGEST)
    for length in sorted({least, n_keys - 3, n_keys, KEYS + least, longest}):
        for n_queries in sorted({min(n, length) for n in (*QUERIES, length)}):
            for padding in (0, 3, 200):
                out = _first_row(states, length, n_queries, padding, padding + length)
                if not torch.equal(out, whole[0, length - n_queries : length]):
                    return f"{n_queries} queries of {length} keys behind {padding} of padding"
        # Beside a longer row that begins in the same column, blocks follow that this row does not see.
        both_ways = {"mask_function": bidirectional_mask_function}
        own, beside = (
            _first_row(states, length, length, 0, n_all, **both_ways)
            for n_all in (length, length + KEYS + 1)
        )
        if not torch.equal(own, beside):
            return f"{length} keys beside a row of {length + KEYS + 1}"
    return None


def _first_row(
    states: list[Tensor], length: int, n_queries: int, padding: int, n_all: int, **options: Any
) -> Tensor:
    """The last ``n_queries`` of ``length`` tokens behind padding, beside a row of ``n_all``: ``(queries, heads, size)``."""
    q, k, v = states
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
        if not is_layer or not is_of_one or kwargs:
            return
        if args[0].dim() > 1 and args[0].is_floating_point():
            inputs[module] = args[0]

    with hooked(model, note):
        run_model(model)
    tried = set()
    for module, example in inputs.items():
        size, dtype = example.shape[-1], example.dtype
        shapes = ", ".join(" x ".join(map(str, p.shape)) for p in module.parameters(recurse=False))
        name = f"{type(module).__name__}({shapes})"
        if (name, size, dtype) not in tried:
            tried.add((name, size, dtype))
            generator = torch.Generator().manual_seed(size)
            values = torch.randn(ROWS, size, generator=generator).to(dtype)
            differs = try_rows(module, values)
            yield Operation(name, f"rows of {size}", str(dtype)[len("torch.") :], differs)
