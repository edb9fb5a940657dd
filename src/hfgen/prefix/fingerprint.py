"""Which model computed some keys and values, and how: the key under which they are stored.

``identity`` is for one process, and cheap enough for every call. ``content`` is the same between
processes, and reads all weights.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Hashable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

#: Numbers of each tensor that are looked at in every call.
N_SAMPLES = 8

#: What PEFT's layers keep about which adapters are in use.
ADAPTER_STATE = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")

_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_next_number = itertools.count()


def identity(model: Any) -> tuple[Hashable, ...]:
    """What keys and values of ``model`` depend on besides the tokens, as it is now.

    Weights that are replaced or written to show by address, version and a few sampled values: an
    edit through ``.data`` leaves the version as it is. Hooks show by their handles, which are never
    given twice. What a hook or a module reads elsewhere does not show.
    """
    tensors, state = _look(model)
    return (*state, _samples(tensors))


def is_unchanged(model: Any, known: tuple[Hashable, ...]) -> bool:
    """Whether ``identity(model)`` is still what is ``known``, but for edits through ``.data``."""
    return _look(model)[1] == known[:-1]


def _look(model: Any) -> tuple[list[Tensor], tuple[Hashable, ...]]:
    """The parameters and buffers of a model, and all of its identity but their values."""
    hooks: list[tuple[int, int]] = []
    weights: list[Tensor] = []
    passing: list[Tensor] = []  # rotary frequencies, which some models write anew in each forward
    adapted: list[Hashable] = []
    for index, module in enumerate(model.modules()):
        state = vars(module)
        weights += [t for t in state["_parameters"].values() if t is not None]
        for name, buffer in state["_buffers"].items():
            if buffer is not None:
                is_passing = name in state["_non_persistent_buffers_set"]
                (passing if is_passing else weights).append(buffer)
        if state["_forward_pre_hooks"] or state["_forward_hooks"]:
            hooks += [(index, handle) for handle in _hooks(state)]
        if "forward" in state:  # a method of one object alone
            hooks.append((index, id(state["forward"])))
        if "_disable_adapters" in state:
            adapted += _adapters(index, state)
    place = tuple(map(_place, weights))
    numbers = (_number(model), tuple(settings(model).items()))
    return weights + passing, (*numbers, tuple(adapted), tuple(hooks), place)


def settings(model: Any) -> dict[str, str]:
    """What decides which kernels compute, and in which precision."""
    device = model.device.type
    configs = (model.config, model.config.get_text_config(decoder=True))
    autocast = "off"
    if torch.is_autocast_enabled(device):
        autocast = str(torch.get_autocast_dtype(device))
    return {
        "dtype": str(model.dtype),
        "attention": "/".join(str(c._attn_implementation) for c in configs),
        "experts": "/".join(str(getattr(c, "_experts_implementation", None)) for c in configs),
        "autocast": autocast,
        "precision of matrix products": torch.get_float32_matmul_precision(),
    }


def _adapters(index: int, state: dict[str, Any]) -> list[Hashable]:
    """Which adapters the module ``index`` uses, if it has any."""
    if "_disable_adapters" not in state:
        return []
    return [(index, *(repr(state.get(name)) for name in ADAPTER_STATE))]


def content(model: Any) -> dict[str, str]:
    """What ``identity`` says, by name, so that another process computes the same.

    Raises ``ValueError`` if hooks change the forward pass, which have no content.
    """
    states = [vars(module) for module in model.modules()]
    if any(True for state in states for _ in _hooks(state)):
        raise ValueError(
            "Prefixes of a model with forward hooks cannot be saved or loaded: what the hooks do is "
            "not known. Remove the hooks first."
        )
    adapted = [use for index, state in enumerate(states) for use in _adapters(index, state)]
    return {
        "model": type(model).__name__,
        "config": _digest([json.dumps(_lasting(model.config.to_dict()), default=str).encode()]),
        **settings(model),
        "adapters": _digest([repr(adapted).encode()]),
        "weights": _digest(_bytes_of_weights(model)),
    }


def _number(model: Any) -> int:
    """A number that no other object has, be it one at the same address later on."""
    return _numbers.setdefault(model, next(_next_number))


def _hooks(state: dict[str, Any]) -> Iterator[int]:
    """Handles of a module's forward hooks, but for those by which transformers records outputs."""
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        for handle, function in state[name].items():
            if not getattr(function, "__module__", "").startswith("transformers."):
                yield handle


def _place(tensor: Tensor) -> tuple:
    try:
        version = 0 if tensor.is_inference() else tensor._version
        return id(tensor), tensor.data_ptr(), version
    except (RuntimeError, NotImplementedError):  # tensors of other libraries, without memory
        return (id(tensor),)


def _samples(tensors: list[Tensor]) -> bytes:
    """``N_SAMPLES`` numbers of each tensor, bit for bit, read at once from each device."""
    groups: dict[tuple, list[Tensor]] = {}
    for tensor in tensors:
        n = tensor.numel()
        if (
            type(tensor) not in (Tensor, nn.Parameter)
            or tensor.layout is not torch.strided
            or not n
        ):
            continue  # other libraries' tensors say nothing of what they hold
        if not tensor.is_contiguous():
            n = sum((m - 1) * step for m, step in zip(tensor.shape, tensor.stride(), strict=True))
            n += 1
        step = max((n - 1) // (N_SAMPLES - 1), 1)
        sampled = tensor.as_strided((min(n, N_SAMPLES),), (step,))
        groups.setdefault((tensor.device, tensor.dtype), []).append(sampled)
    return b"".join(
        _joined(group).cpu().view(torch.uint8).numpy().tobytes()
        for (device, _), group in groups.items()
        if device.type != "meta"
    )


def _joined(group: list[Tensor]) -> Tensor:
    if group[0].element_size() == 1:  # bytes can be joined, not all kinds of float8
        group = [sampled.view(torch.uint8) for sampled in group]
    return torch.cat(group).detach()


def _bytes_of_weights(model: Any) -> Iterator[bytes | memoryview]:
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor):
            yield f"{name} {tensor!r}".encode()
            continue
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode()
        yield bytes_of(tensor)


def bytes_of(tensor: Tensor) -> memoryview:
    """What a tensor holds, row by row."""
    flat: Any = tensor.detach().cpu().contiguous().flatten()
    return memoryview(flat.view(torch.uint8).numpy() if flat.numel() else b"")


def _digest(parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _lasting(value: Any) -> Any:
    """A config without what says where it came from."""
    if isinstance(value, dict):
        return {
            str(name): _lasting(v)
            for name, v in sorted(value.items(), key=lambda item: str(item[0]))
            if not str(name).startswith("_") and name != "transformers_version"
        }
    return [_lasting(v) for v in value] if isinstance(value, list | tuple) else value
