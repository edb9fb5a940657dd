"""A fingerprint of a model: stored prefixes and recorded steps are valid only for the same fingerprint.

``identity`` is for one process, and cheap. ``content`` is for any, and reads all weights.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..state.hooks import is_idle

#: Numbers of each tensor that are looked at in every call.
N_SAMPLES = 8
#: The names with an underscore that count: by them PEFT chooses adapters.
ADAPTERS = ("_active_adapter", "_disable_adapters")
#: Fields that say where a model came from.
ORIGIN = ("name_or_path", "transformers_version")
#: Values that are compared as they are.
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)

_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_next_number = itertools.count()


class Identity:
    """What keys and values of a model depend on besides the tokens; equal ones are one object."""

    def __init__(self, state: tuple[Hashable, ...]) -> None:
        self.state = state


_identities: WeakValueDictionary[tuple[Hashable, ...], Identity] = WeakValueDictionary()
_lock = Lock()


def identity(model: Any) -> Identity:
    """The identity of ``model`` as it is now.

    Weights show by address, version and a few values, since an edit through ``.data`` leaves the version
    as it is. Config and attributes of modules show by value, functions and classes as objects, hooks by
    handle. What a hook or a function reads elsewhere does not show, nor do tensors in attributes.
    """
    tensors, state = _inspect(model)
    state = (*state, tuple(settings(model).items()), _samples(tensors))
    with _lock:
        return _identities.setdefault(state, Identity(state))


def state(model: Any) -> Hashable:
    """All of ``identity`` but the values of weights, so that nothing is read off the device."""
    return *_inspect(model)[1], *settings(model).items()


def is_unchanged(model: Any, known: Identity) -> bool:
    """Whether ``identity(model)`` is still ``known``, but for edits through ``.data`` and kernels."""
    return _inspect(model)[1] == known.state[:-2]


def _inspect(model: Any) -> tuple[list[Tensor], tuple[Hashable, ...]]:
    """The parameters and buffers of a model, and all of its identity but settings and values."""
    hooks: list[tuple[int, int]] = []
    weights: list[Tensor] = []
    rewritten: list[Tensor] = []  # rotary frequencies, which some models write anew in each forward
    modules = list(model.modules())  # walking through a model takes time
    for index, module in enumerate(modules):
        attributes = vars(module)
        weights += [t for t in attributes["_parameters"].values() if t is not None]
        for name, buffer in attributes["_buffers"].items():
            if buffer is not None:
                is_rewritten = name in attributes["_non_persistent_buffers_set"]
                (rewritten if is_rewritten else weights).append(buffer)
        if attributes["_forward_pre_hooks"] or attributes["_forward_hooks"]:
            hooks += [(index, handle) for handle in _hooks(attributes)]
    places = tuple(map(_place, weights))
    plain = _plain_attributes(model.config, modules, _number)
    return weights + rewritten, (_number(model), *plain, tuple(hooks), places)


def _plain_attributes(
    config: Any, modules: list[nn.Module], name: Callable[[Any], Hashable]
) -> tuple[Hashable, Hashable]:
    """The plain attributes of a model's configs and of its modules; ``name`` stands for callables."""
    configs: list[Any] = [config]

    def attributes(owner: Any) -> tuple[Hashable, ...]:
        parts: list[Hashable] = []
        for key, value in tuple(vars(owner).items()):
            if (key[0] == "_" and key not in ADAPTERS) or key in ORIGIN or value is None:
                continue
            part = value if type(value) in PLAIN else plain(value)
            if part is not None:
                parts += (key, part)
        return tuple(parts)

    def plain(value: Any) -> Hashable:
        if isinstance(value, PreTrainedConfig):
            if not any(value is config for config in configs):
                configs.append(value)
            return [id(config) for config in configs].index(id(value))
        if isinstance(value, dict):
            return tuple((str(key), plain(part)) for key, part in value.items())
        if isinstance(value, list | tuple):
            return tuple(map(plain, value))
        if isinstance(value, set | frozenset):
            return tuple(sorted(map(repr, value)))
        if isinstance(value, PLAIN):
            return value
        return name(value) if callable(value) else None

    of_modules = tuple((name(type(module)), attributes(module)) for module in modules)
    return tuple(attributes(config) for config in configs), of_modules


def settings(model: Any) -> dict[str, str]:
    """What decides which kernels compute, and in which precision."""
    device = model.device.type
    configs = (model.config, model.config.get_text_config(decoder=True))
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else "off"
    return {
        "dtype": str(model.dtype),
        "attention": "/".join(str(c._attn_implementation) for c in configs),
        "experts": "/".join(str(getattr(c, "_experts_implementation", None)) for c in configs),
        "autocast": str(autocast),
        "precision of matrix products": torch.get_float32_matmul_precision(),
    }


def content(model: Any) -> dict[str, str]:
    """``identity`` for any process, by name. Raises ``ValueError`` for hooks and offloaded weights."""
    unknown = {
        "forward hooks": any(list(_hooks(vars(module))) for module in model.modules()),
        "offloaded weights": any(tensor.is_meta for tensor in model.parameters()),
    }
    for reason, applies in unknown.items():
        if applies:
            raise ValueError(
                f"Prefixes of a model with {reason} cannot be saved or loaded: their effect on keys and "
                "values cannot be compared."
            )
    configs, modules = _plain_attributes(
        model.config,
        list(model.modules()),
        lambda value: getattr(value, "__qualname__", str(type(value))),
    )
    return {
        "model": type(model).__name__,
        "config": digest_of_text(configs),
        **settings(model),
        "modules": digest_of_text(modules),
        "weights": digest(model.state_dict()),
    }


def _number(value: Any) -> Hashable:
    """A number that no other object ever has; a class itself."""
    if isinstance(value, type):
        return value
    try:
        return _numbers.setdefault(value, next(_next_number))
    except TypeError:  # no weak references: methods of C types, which stay
        return id(value)


def _hooks(attributes: dict[str, Any]) -> Iterator[int]:
    """Handles of a module's forward hooks, but for transformers', which record outputs, and other threads'."""
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        for handle, function in tuple(attributes[name].items()):  # others may add theirs now
            is_recorder = getattr(function, "__module__", "").startswith("transformers.")
            if not (is_recorder or is_idle(function)):
                yield handle


def _place(tensor: Tensor) -> tuple:
    try:
        return id(tensor), tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
    except RuntimeError:  # tensors of other libraries, without memory
        return (id(tensor),)


def _samples(tensors: list[Tensor]) -> bytes:
    """``N_SAMPLES`` numbers of each tensor, bit for bit, read at once from each device."""
    groups: dict[tuple, list[Tensor]] = {}
    for tensor in tensors:
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not is_plain or not (span := tensor.numel()) or tensor.is_meta:
            continue  # other libraries' tensors say nothing of what they hold
        if not tensor.is_contiguous():
            pairs = zip(tensor.shape, tensor.stride(), strict=True)
            span = 1 + sum((n - 1) * stride for n, stride in pairs)
        step = max((span - 1) // (N_SAMPLES - 1), 1)
        sampled = tensor.as_strided((min(span, N_SAMPLES),), (step,))
        if sampled.element_size() == 1:  # bytes can be joined, not all kinds of float8
            sampled = sampled.view(torch.uint8)
        groups.setdefault((tensor.device, tensor.dtype), []).append(sampled)
    joined = (torch.cat(group).detach().cpu().view(torch.uint8) for group in groups.values())
    return b"".join(numbers.numpy().tobytes() for numbers in joined)


def digest(tensors: Mapping[str, Any]) -> str:
    """A checksum of tensors: their names, shapes and types, and what they hold, row by row."""
    checksum = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if not isinstance(tensor, Tensor):
            checksum.update(f"{name} {tensor!r}".encode())
            continue
        checksum.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat: Any = tensor.detach().cpu().contiguous().flatten()
        checksum.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
    return checksum.hexdigest()


def digest_of_text(value: Any) -> str:
    """A checksum of what a value looks like."""
    return hashlib.sha256(repr(value).encode()).hexdigest()
