"""A trial of the whole model: rows of random tokens alone, in padded batches, and in steps with a cache."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import families

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
