"""A trial of the whole model: rows of random tokens alone, in padded batches, and in steps with a cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
    missing = [max(r.shape[1] for r in rows) - row.shape[1] for row in rows]
    pads = [(n, 0) if side == "left" else (0, n) for n in missing]
    value = families.position_pad(model)  # such a model counts positions by itself
    ids = [F.pad(row, pad, value=value or 0) for row, pad in zip(rows, pads, strict=True)]
    mask = torch.cat(
        [F.pad(torch.ones_like(row), pad) for row, pad in zip(rows, pads, strict=True)]
    )
    inputs = {"input_ids": torch.cat(ids), "attention_mask": mask}
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
    return {
        "alone": lambda: [_logits(model, inputs)[0] for inputs in alone],
        "padded on the right": lambda: [
            logits[:n] for logits, n in zip(_logits(model, right), TOKENS, strict=True)
        ],
        "padded on the left": lambda: [
            logits[-n:] for logits, n in zip(_logits(model, left), TOKENS, strict=True)
        ],
        "in steps with a cache": lambda: [
            logits[-n:] for logits, n in zip(_in_steps(model, left, {}), TOKENS, strict=True)
        ],
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
    logits: Tensor = _forward(model, {**arguments, "use_cache": False}).logits
    return logits


@contextmanager
def hooked(model: nn.Module, hook: Callable[..., None]) -> Iterator[None]:
    """Within, each module calls ``hook(module, args, kwargs, output)`` after its forward."""
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        yield


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
