"""``hfgen.optimize``, ``hfgen.restore``, ``hfgen.optimized``: switching a model to the fastest kernels and back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from ..execution.compiled_layers import CompiledLayer, LayerGraph, find_layers
from . import known, whole
from .forward import ROWS, PackedForward, misfit, own_forward
from .kernels import ROUNDED_FP16, WEIGHTS, candidates, named, overflow
from .measure import CHANGED, OWN, Times, best, measure
from .report import ROUNDED, SAME, Choice, Report

T = TypeVar("T", bound=nn.Module)

#: Where a module keeps its forward: itself, and behind a hook of accelerate.
PLACES = ("forward", "_old_forward")
#: What ``optimize`` sets there.
SET_HERE = (PackedForward, CompiledLayer)
#: Layers of one shape: out, in, type of the weight, whether there is a bias.
Shape = tuple[int, int, torch.dtype, bool]


def optimize(
    model: T, *, weights: str | None = None, compile: bool = False, calibrate: bool = True
) -> T:
    """Compute the linear layers of ``model`` with the kernels that are fastest here; return the model.

    Kernels are measured on the model's own layers, by shape and number of rows (1, 2, 4, 8, 16, and
    prefill), against the layers' own forward. Times are kept in a file, so the second time takes no
    measuring. A kernel is used where the layers are faster by it, and a step of the whole model as well;
    where nothing is faster, nothing changes. ``model.optimization`` is a report (``Report``).

    Modules, weights, hooks and adapters stay as they are. A weight that changes is packed again at
    the next call; its layer's own forward runs in training mode and where gradients are recorded.

    Args:
        model: A model in dense float32, bfloat16 or float16 on the CPU. Layers with weights of other
            libraries, and those of classes of their own, are left alone.
        weights: None keeps the values of all weights, so that logits change by rounding only.
            ``"fp16"``, ``"bf16"``, ``"int8"`` and ``"int4"`` also allow kernels that round weights so.
        compile: True also lets ``torch.compile`` make one graph of a decoder layer, which all layers use
            from the first call on. It takes some seconds then. Logits change by rounding.
        calibrate: False measures nothing: what the file does not know stays unchanged.

    Raises:
        TypeError: ``model`` is no module, or an argument is of another type.
        ValueError: ``weights`` is none of these; the model is optimised already, spread over devices,
            or has weights on the meta device; ``weights="fp16"`` and a weight is too large for it;
            ``weights="int4"`` and no layer's shape fits.
    """
    start = time.perf_counter()
    _check_arguments(model, weights, compile=compile, calibrate=calibrate)
    _check_model(model)
    groups, left_alone = _layers(model)
    _check_weights(groups, weights)
    stored = known.read()
    found: dict[str, Times] = {}
    changes: list[whole.Change] = []
    choices = []
    for shape, modules in groups.items():
        choices.append(_choose(shape, modules, weights, calibrate, stored, found, changes))
    steps: Times = {}
    if changes and whole.takes_ids(model):
        steps = _steps(model, choices, changes, calibrate, stored, found)
        choices, changes = _without(whole.slower(steps), choices, changes)
    if found:
        known.write(found)
    for _, forward in changes:
        forward.packed()  # here, and not in the first call
    whole.apply(changes)
    graph, layers = LayerGraph(), find_layers(model) if compile else {}
    for name, index in layers.items():
        layer = model.get_submodule(name)
        vars(layer)["forward"] = CompiledLayer(layer, index, graph)
    report = Report(
        weights=weights,
        choices=tuple(choices),
        left_alone=left_alone,
        tokens=_promise(choices, compiles=bool(layers)),
        steps=steps,
        extra_bytes=sum(choice.extra_bytes for choice in choices),
        seconds=time.perf_counter() - start,
        graph=graph if compile else None,
        compiled_layers=tuple(layers),
    )
    vars(model)["optimization"] = report
    return model


def restore(model: T) -> T:
    """Undo ``optimize``, and return the model, which is then as it was before.

    Raises ``TypeError`` for what is no model, and ``ValueError`` if it is not optimised.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"restore() takes a model, but got {type(model).__name__}.")
    if not is_optimized(model):
        raise ValueError("restore(): this model is not optimised; hfgen.optimize(model) does it.")
    for module in model.modules():
        state = vars(module)
        state.pop("optimization", None)
        for place in PLACES:
            if not isinstance(state.get(place), SET_HERE):
                continue
            if place == "forward":
                del state[place]
            else:
                state[place] = own_forward(module)
    return model


@contextmanager
def optimized(
    model: T, *, weights: str | None = None, compile: bool = False, calibrate: bool = True
) -> Iterator[T]:
    """``optimize`` within, ``restore`` after it; the same arguments and errors."""
    optimize(model, weights=weights, compile=compile, calibrate=calibrate)
    try:
        yield model
    finally:
        if is_optimized(model):
            restore(model)


def is_optimized(model: nn.Module) -> bool:
    """Whether a module of ``model`` has been through ``optimize``."""
    return any(
        isinstance(vars(module).get("optimization"), Report)
        or any(isinstance(vars(module).get(place), SET_HERE) for place in PLACES)
        for module in model.modules()
    )


def _check_arguments(model: Any, weights: Any, **switches: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"optimize() takes a model, but got {type(model).__name__}.")
    if weights is not None and weights not in WEIGHTS:
        allowed = ", ".join(map(repr, WEIGHTS))
        raise ValueError(f"weights must be None or one of {allowed}, got {weights!r}.")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}.")


def _check_model(model: nn.Module) -> None:
    if is_optimized(model):
        raise ValueError("This model is optimised already: call hfgen.restore(model) first.")
    devices: dict[str, str] = {}
    for name, weight in model.named_parameters():
        if weight.is_meta:
            raise ValueError(
                f"optimize() needs weights in memory, but {name!r} is on the meta device (it is "
                "offloaded, or not loaded)."
            )
        if type(weight).__name__ == "DTensor" or hasattr(weight, "device_mesh"):
            raise ValueError(f"optimize() takes no sharded model, but {name!r} is a part of one.")
        devices.setdefault(str(weight.device), name)
    if len(devices) > 1:
        spread = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(f"optimize() takes a model on one device, but this one has {spread}.")


def _layers(model: nn.Module) -> tuple[dict[Shape, dict[str, nn.Linear]], dict[str, str]]:
    """The linear layers that may get another kernel, by shape; why others do not."""
    groups: dict[Shape, dict[str, nn.Linear]] = {}
    left_alone: dict[str, str] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        reason = misfit(module)
        if reason is None and any(place in vars(module) for place in PLACES):
            reason = "another forward is set already"
        if reason is not None:
            left_alone[name] = reason
            continue
        n_out, n_in = module.weight.shape
        shape = (n_out, n_in, module.weight.dtype, module.bias is not None)
        groups.setdefault(shape, {})[name] = module
    return groups, left_alone


def _check_weights(groups: dict[Shape, dict[str, nn.Linear]], weights: str | None) -> None:
    """Raise for weights that what was asked for cannot hold."""
    layers = [item for group in groups.values() for item in group.items()]
    if weights == "fp16":
        for name, module in layers:
            if (reason := overflow(module.weight)) is not None:
                raise ValueError(f"weights='fp16': {name + '.weight'!r} does not fit, {reason}.")
    if weights == "int4" and layers:
        reasons = {name: named("int4").misfit(module.weight) for name, module in layers}
        if all(reasons.values()):
            name, reason = next(iter(reasons.items()))
            raise ValueError(f"weights='int4' fits no layer: of {name + '.weight'!r}, {reason}.")


def _choose(
    shape: Shape,
    modules: dict[str, nn.Linear],
    weights: str | None,
    calibrate: bool,
    stored: dict[str, Times],
    found: dict[str, Times],
    changes: list[whole.Change],
) -> Choice:
    """The choice for one shape; adds to ``found`` what is measured, to ``changes`` what it changes."""
    kernels = candidates(weights)
    n_out, n_in, dtype, _ = shape
    kept = Choice((n_out, n_in), str(dtype).removeprefix("torch."), len(modules))
    fitting: dict[str, list[nn.Linear]] = {}
    reasons: dict[str, str] = {}
    for kernel in kernels:
        if kernel.name == ROUNDED_FP16 and len(fitting.pop("fp16", ())) == len(modules):
            fitting["fp16"] = list(modules.values())  # nothing has to be rounded
            continue
        misfits = [kernel.misfit(module.weight) for module in modules.values()]
        takes = [m for m, why in zip(modules.values(), misfits, strict=True) if why is None]
        if takes:
            fitting[kernel.name] = takes
        if given := next(filter(None, misfits), None):
            reasons[kernel.name] = f"{kernel.name}: {given}"
    if not fitting:
        reason = "; ".join(reasons.values()) or "this machine has no other kernel"
        return replace(kept, reason=reason)
    key = known.key(shape, len(modules), weights)
    times = stored.get(key, {})
    if any(times.get(name, {}).keys() != set(ROWS) for name in (OWN, *fitting)):
        if not calibrate:
            return replace(kept, reason="it has not been measured")
        found[key] = times = measure(list(modules.values()), fitting)
    name, rows = best(times, list(fitting))
    if name is None:
        return replace(kept, reason="nothing is faster than its own forward", times=times)
    chosen = named(name)
    for module in fitting[name]:
        changes.append((module, PackedForward(module, name, rows)))
    return replace(
        kept,
        kernel=name,
        rows=tuple(sorted(rows)),
        reason=reasons.get(name, "it is faster"),
        times=times,
        n_left=len(modules) - len(fitting[name]),
        extra_bytes=sum(chosen.packed_bytes(module.weight) for module in fitting[name]),
    )


def _steps(
    model: nn.Module,
    choices: list[Choice],
    changes: list[whole.Change],
    calibrate: bool,
    stored: dict[str, Times],
    found: dict[str, Times],
) -> Times:
    """Times of whole steps, where a kernel may compute; adds to ``found`` what is measured."""
    rows = {n for choice in choices for n in choice.rows}
    key = known.key_of_steps(
        [f"{c.shape} {c.dtype} {c.n_modules} {c.kernel} {c.rows}" for c in choices]
    )
    times = stored.get(key, {})
    if any(times.get(name, {}).keys() != rows for name in (OWN, CHANGED)):
        times = whole.measure_steps(model, changes, rows) if calibrate else {}
        if times:
            found[key] = times
    return times


def _without(
    losing: frozenset[int], choices: list[Choice], changes: list[whole.Change]
) -> tuple[list[Choice], list[whole.Change]]:
    """Both without kernels at the numbers of rows at which they make no step faster."""
    if not losing:
        return choices, changes
    kept = []
    for choice in choices:
        rows = tuple(n for n in choice.rows if n not in losing)
        if choice.kernel and not rows:
            choice = replace(
                choice, kernel=None, n_left=0, extra_bytes=0, reason="no step is faster"
            )
        kept.append(replace(choice, rows=rows))
    for _, forward in changes:
        forward.rows -= losing
    return kept, [change for change in changes if change[1].rows]


def _promise(choices: list[Choice], *, compiles: bool) -> str:
    used = [named(choice.kernel) for choice in choices if choice.kernel]
    if not used:
        return ROUNDED if compiles else SAME
    rounding = sorted({kernel.name for kernel in used if not kernel.is_exact})
    return f"can change: weights are rounded ({'; '.join(rounding)})" if rounding else ROUNDED
