"""``hfgen.optimize``, ``hfgen.restore``, ``hfgen.optimized``: switching a model to faster kernels and back."""

from __future__ import annotations

import ctypes
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ...memory.caches.offloaded import Folder
from .compiled_layers import CompiledLayer, LayerGraph, find_layers
from .forward import PackedForward, misfit, own_forward
from .kernels import DTYPES, KERNELS, OWN, WEIGHTS, Kernel, overflow, preferred, works
from .native import has_tiles
from .pages import in_huge_pages

T = TypeVar("T", bound=nn.Module)

#: Where a module keeps its forward: itself, and behind a hook of accelerate.
PLACES = ("forward", "_old_forward")
#: What ``optimize`` sets there.
SET_HERE = (PackedForward, CompiledLayer)
#: Kernels for all layers, or by name of a layer.
Kernels = str | Mapping[str, str]
#: Values of ``Report.tokens``.
SAME = "the same: nothing is changed"
ROUNDED = "can change by rounding, where two tokens are as likely as each other to the last digits"


@dataclass(frozen=True, slots=True)
class Report:
    """``model.optimization``: the kernel of each linear layer, and what it costs. ``str()`` is a text of some lines.

    ``kernels``: by name of the layer; ``optimize(model, kernels=...)`` takes it. ``layers``: shape
    ``(out, in)`` and type of each. ``left_alone``: why the others keep their own forward method.
    ``tokens``: whether generated tokens can differ from those before. ``extra_bytes``: packed copies, beside
    the weights. ``file_bytes``: weights in files. ``read_bytes``: weights of all ``layers`` as a step reads
    them. ``seconds``: of ``optimize``. ``graph``: shared by decoder layers with ``compile=True``; its
    ``failure`` says why they run uncompiled, if they do.
    """

    weights: str | None
    kernels: dict[str, str]
    layers: dict[str, str]
    left_alone: dict[str, str]
    tokens: str
    extra_bytes: int
    file_bytes: int
    read_bytes: int
    seconds: float
    graph: LayerGraph | None = None
    compiled_layers: tuple[str, ...] = ()

    def __str__(self) -> str:
        pairs = Counter((self.layers[name], kernel) for name, kernel in self.kernels.items())
        lines = [f"{n} x {layer}: {kernel}" for (layer, kernel), n in pairs.items()]
        reasons = Counter(self.left_alone.values())
        lines += [f"{n} left alone: {reason}" for reason, n in reasons.items()]
        if self.graph is not None and not self.compiled_layers:
            lines.append("no decoder layer can be compiled")
        elif self.graph is not None:
            why = f": {self.graph.failure}" if self.graph.failure else ""
            n_layers = f"{self.graph.n_layers} of {len(self.compiled_layers)}"
            lines.append(f"{n_layers} decoder layers compiled so far{why}")
        lines.append(f"tokens: {self.tokens}")
        in_files = f", {self.file_bytes / 2**20:,.1f} MiB in files" if self.file_bytes else ""
        lines.append(f"{self.extra_bytes / 2**20:,.1f} MiB more{in_files}, {self.seconds:.1f} s")
        return "\n".join(lines)


def optimize(
    model: T,
    *,
    weights: str | None = None,
    kernels: Kernels | None = None,
    compile: bool = False,
    offload: str | os.PathLike[str] | None = None,
) -> T:
    """Compute the linear layers of ``model`` with faster kernels; return the model.

    A layer has one kernel for all numbers of rows. Type, weights and processor decide which, and never a
    measurement: the same call gives the same numbers in every process. ``model.optimization`` is a
    report (``Report``). Modules, values of weights, hooks and adapters stay as they are. A weight that changes is
    packed again at the next call; its layer's own forward runs in training mode and where gradients are
    recorded.

    Args:
        model: A model in dense float32, bfloat16 or float16 on the CPU. Layers with weights of other
            libraries, and those of classes of their own, are left alone.
        weights: None keeps the values of all weights, so that logits change by rounding only.
            ``"fp16"``, ``"int8"`` and ``"int4"`` round the weights of the layers that fit.
        kernels: Names of kernels instead: one for all layers that it fits, or one for each of the named
            layers, as in ``model.optimization.kernels``. ``"own"``: the layer's own forward method.
        compile: True also lets ``torch.compile`` make one graph of a decoder layer, which all layers use
            from the first call on. It takes some seconds then. Logits change by rounding.
        offload: A folder. The weights of the layers that get a kernel are moved to unnamed files in it, from
            which the layers' own forward methods, tied embeddings and ``state_dict`` read them; packed ones
            stay in memory. ``restore`` brings them back, bit by bit.

    Raises:
        TypeError: ``model`` is no module, or an argument is of another type.
        ValueError: ``weights`` is none of these; the model is optimised or exact already, spread over devices,
            or has weights on the meta device; ``weights="fp16"`` and a weight is too large for it;
            ``weights="int4"`` and no layer's shape fits; ``kernels`` names no such kernel or layer, a
            kernel that this machine does not have, or one that does not fit.
        OSError: The folder of ``offload`` has no space. Weights that were moved already stay in files.
    """
    start = time.perf_counter()
    _check_arguments(model, weights, kernels, compile, offload)
    _check_model(model)
    folder = None if offload is None else Folder(offload)
    layers, left_alone = _layers(model)
    chosen = _chosen(layers, weights, kernels, left_alone)
    shapes: dict[str, str] = {}
    extra_bytes = read_bytes = file_bytes = 0
    bf16 = [name for name, kernel in chosen.items() if kernel.name == "bf16" and folder is None]
    read_as_is = {name for name in bf16 if has_tiles(layers[name].weight)}
    if read_as_is:
        _move_weights(model)
    for name, module in layers.items():
        n_out, n_in = module.weight.shape
        shapes[name] = f"{n_out} x {n_in} {str(module.weight.dtype).removeprefix('torch.')}"
        n_bytes = module.weight.numel() * module.weight.element_size()
        if (kernel := chosen.get(name)) is not None:
            vars(module)["forward"] = forward = PackedForward(module, kernel.name)
            forward.packed()  # here, and not in the first call
            if folder is not None:
                forward.move(folder.holding(module.weight))
                file_bytes += n_bytes
            if kernel.bits is not None:
                n_bytes = module.weight.numel() * kernel.bits // 8  # but for scales and padding
            extra_bytes += n_bytes * (name not in read_as_is)
        read_bytes += n_bytes
    # glibc keeps what was freed; others have no such call
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
    graph, compiled = LayerGraph(), find_layers(model) if compile else {}
    for name, index in compiled.items():
        layer = model.get_submodule(name)
        vars(layer)["forward"] = CompiledLayer(layer, index, graph)
    rounding = sorted({kernel.name for kernel in chosen.values() if kernel.weights is not None})
    if rounding:
        tokens = f"can change: weights are rounded ({'; '.join(rounding)})"
    else:
        tokens = ROUNDED if chosen or compiled else SAME
    vars(model)["optimization"] = Report(
        weights=weights,
        kernels={name: chosen[name].name if name in chosen else OWN for name in layers},
        layers=shapes,
        left_alone=left_alone,
        tokens=tokens,
        extra_bytes=extra_bytes,
        file_bytes=file_bytes,
        read_bytes=read_bytes,
        seconds=time.perf_counter() - start,
        graph=graph if compile else None,
        compiled_layers=tuple(compiled),
    )
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
            if not isinstance(forward := state.get(place), SET_HERE):
                continue
            if isinstance(forward, PackedForward) and forward.is_offloaded:
                forward.module.weight.data = forward.module.weight.data.clone()
            del state[place]
            if place != "forward":
                state[place] = own_forward(module)
    return model


@contextmanager
def optimized(
    model: T,
    *,
    weights: str | None = None,
    kernels: Kernels | None = None,
    compile: bool = False,
    offload: str | os.PathLike[str] | None = None,
) -> Iterator[T]:
    """``optimize`` within, ``restore`` after it; the same arguments and errors."""
    optimize(model, weights=weights, kernels=kernels, compile=compile, offload=offload)
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


def _check_arguments(model: Any, weights: Any, kernels: Any, compile: Any, offload: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"optimize() takes a model, but got {type(model).__name__}.")
    if weights is not None and weights not in WEIGHTS:
        allowed = ", ".join(map(repr, WEIGHTS))
        raise ValueError(f"weights must be None or one of {allowed}, got {weights!r}.")
    if not isinstance(compile, bool):
        raise TypeError(f"compile must be True or False, got {compile!r}.")
    if not isinstance(kernels, str | Mapping | None):
        raise TypeError(f"kernels must be a name, or names by layer, got {kernels!r}.")
    for name in [kernels] if isinstance(kernels, str) else (kernels or {}).values():
        if name != OWN and name not in KERNELS:
            names = ", ".join(map(repr, (OWN, *KERNELS)))
            raise ValueError(f"kernels: {name!r} is none of {names}.")
        if name != OWN and not works(name):
            raise ValueError(f"kernels: this machine, or this torch, has no {name!r}.")
    if not isinstance(offload, str | os.PathLike | None):
        raise TypeError(f"offload must be a folder, got {offload!r}.")
    if offload is not None and not os.path.isdir(offload):
        raise ValueError(f"offload must be a folder, but {os.fspath(offload)!r} is none.")


def _check_model(model: nn.Module) -> None:
    if is_optimized(model):
        raise ValueError("This model is optimised already: call hfgen.restore(model) first.")
    if hasattr(model, "exactness"):
        raise ValueError(
            "This model is exact already: call hfgen.restore(model), optimise it, then exact()."
        )
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


@torch.inference_mode(False)
def _move_weights(model: nn.Module) -> None:
    """Move weights to huge pages: all of them, since one that stays keeps the mapping of a checkpoint's file.

    Those that share their memory, with other processes or with each other, stay where they are.
    """
    plain = [weight for weight in model.parameters() if type(weight) is nn.Parameter]
    weights = [each for each in plain if each.layout is torch.strided and each.dtype in DTYPES]
    uses = Counter(weight.untyped_storage().data_ptr() for weight in weights)
    for weight in weights:
        memory = weight.untyped_storage()
        is_alone = uses[memory.data_ptr()] == 1 and memory.nbytes() == weight.nbytes > 0
        if is_alone and weight.is_contiguous() and not weight.is_shared():
            weight.data = in_huge_pages(weight.data)


def _layers(model: nn.Module) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """The linear layers that may get another kernel, by name; why others do not."""
    layers: dict[str, nn.Linear] = {}
    left_alone: dict[str, str] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        reason = misfit(module)
        if reason is None and any(place in vars(module) for place in PLACES):
            reason = "another forward is set already"
        if reason is None:
            layers[name] = module
        else:
            left_alone[name] = reason
    return layers, left_alone


def _chosen(
    layers: dict[str, nn.Linear],
    weights: str | None,
    kernels: Kernels | None,
    left_alone: dict[str, str],
) -> dict[str, Kernel]:
    """Return the kernel of each layer that gets one; add to ``left_alone`` why others do not.

    Raises ``ValueError`` for ``weights`` or ``kernels`` that do not fit.
    """
    if weights == "fp16":
        for name, module in layers.items():
            if (reason := overflow(module.weight)) is not None:
                raise ValueError(f"weights='fp16': {name + '.weight'!r} does not fit, {reason}.")
    if weights == "int4" and layers:
        misfits = {name: KERNELS["int4"].misfit(module.weight) for name, module in layers.items()}
        if all(misfits.values()):
            name, reason = next(iter(misfits.items()))
            raise ValueError(f"weights='int4' fits no layer: of {name + '.weight'!r}, {reason}.")
    names = kernels if isinstance(kernels, Mapping) else dict.fromkeys(layers, kernels)
    if unknown := [name for name in names if name not in layers]:
        why = left_alone.get(unknown[0], "the model has no such linear layer")
        raise ValueError(f"kernels: {unknown[0]!r} cannot have one, {why}.")
    chosen: dict[str, Kernel] = {}
    for name, module in layers.items():
        by_name = names.get(name)
        if by_name == OWN:
            left_alone[name] = "as asked for"
            continue
        reasons = []
        for kernel in [KERNELS[by_name]] if by_name else preferred(weights, module.weight.dtype):
            reason = kernel.misfit(module.weight)
            if reason is None:
                chosen[name] = kernel
                break
            reasons.append(f"{kernel.name}: {reason}")
        else:
            left_alone[name] = "; ".join(reasons) or "this machine has no faster kernel"
            if by_name and isinstance(kernels, Mapping):
                raise ValueError(f"kernels: {name + '.weight'!r} does not fit, {reasons[0]}.")
    if isinstance(kernels, str) and kernels != OWN and layers and not chosen:
        name, reason = next((name, left_alone[name]) for name in layers)
        raise ValueError(f"kernels: no layer fits; of {name + '.weight'!r}, {reason}.")
    return chosen
