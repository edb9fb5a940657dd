"""A simulated accelerator: tensors say that they are on another device, and are computed on the CPU.

What makes an accelerator wait can be counted without one. While an ``Accelerator`` is active, each
operation on its tensors is an ``Event``: a kernel, a copy to the device, or a read of the device
(``.item()``, ``.tolist()``, ``bool()``, ``.cpu()``, ``nonzero``, boolean indexing, …). Reads and copies
say which line made them. An operation on tensors of two devices raises, as it would there.

The random numbers are the CPU's, so that tokens can be compared with those of a CPU. Torch knows the
device by its experimental hook for backends in Python.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

from hfgen.running.graphs import reads


class Backend(_DummyBackendModule):
    """What torch asks about the device. There is none of it, say to other tests of the process."""

    __name__ = "simulated"

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 0


_setup_privateuseone_for_python_backend("simulated", Backend())
DEVICE = torch.device("simulated", 0)

#: Operations that the host does alone: no kernel runs.
VIEWS = {
    "_reshape_alias",
    "_unsafe_view",
    "alias",
    "as_strided",
    "detach",
    "diagonal",
    "expand",
    "lift_fresh",
    "permute",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unfold",
    "unsqueeze",
    "view",
}

Kind = Literal["kernel", "read", "copy"]


@dataclass(frozen=True)
class Event:
    """One operation: its kind, its name, what it was called with, and for reads and copies where."""

    kind: Kind
    name: str
    #: Shapes and types of tensors, and everything else as it is.
    arguments: tuple[Any, ...] = ()
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name} {self.where}"


class DeviceTensor(torch.Tensor):
    """``value``, a CPU tensor, as if it were on ``DEVICE``."""

    value: Tensor

    @staticmethod
    def __new__(cls, value: Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            value.shape,
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
            device=DEVICE,
        )
        made.value = value
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _execute(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl

    def tolist(self) -> Any:
        _note("read", "tolist")
        return self.value.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceTensor:
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        return memo[id(self)]

    def __format__(self, spec: str) -> str:
        return format(self.item() if self.ndim == 0 else str(self), spec)

    def numpy(self, **kwargs: Any) -> Any:
        raise TypeError("numpy() of a tensor that is not on the CPU")

    def data_ptr(self) -> int:
        return self.value.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.value.untyped_storage()

    def __repr__(self, **kwargs: Any) -> str:
        return f"on {DEVICE}: {self.value}"


class Accelerator(TorchDispatchMode):
    """While active, tensors can be made on ``DEVICE``, and ``events`` gets what happens there."""

    active: Accelerator | None = None

    def __init__(self, watched: Any = None) -> None:
        """Of ``watched``, a model, forwards are told apart, and the arguments of kernels noted."""
        super().__init__()
        self.events: list[Event] = []
        #: Index in ``events`` of each look-up of ids: where a forward begins.
        self.forwards: list[int] = []
        self.embedding = None if watched is None else watched.get_input_embeddings().weight

    def __enter__(self) -> Accelerator:
        self.before = (Accelerator.active, torch._C._only_lift_cpu_tensors())
        Accelerator.active = self
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        Accelerator.active, lifts = self.before
        torch._C._set_only_lift_cpu_tensors(lifts)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _execute(func, args, kwargs or {})

    def of_kind(self, kind: Kind, since: int = 0) -> list[Event]:
        return [event for event in self.events[since:] if event.kind == kind]

    def steps(self) -> list[list[Event]]:
        """The events from each forward to the next; those before the first are left out."""
        ends = [*self.forwards[1:], len(self.events)]
        return [self.events[a:b] for a, b in zip(self.forwards, ends, strict=True)]


def to_device(value: Any) -> Any:
    """``value``, a tensor or something made of tensors, on the device; no copy is counted."""
    return tree_map(
        lambda leaf: (
            DeviceTensor(leaf) if _is_on_host(leaf) and leaf.layout == torch.strided else leaf
        ),
        value,
    )


def to_host(value: Any) -> Any:
    """The reverse."""
    return tree_map(lambda leaf: leaf.value if isinstance(leaf, DeviceTensor) else leaf, value)


def on_device(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose parameters, buffers and other tensors are on the device."""
    model, moved = copy.deepcopy(model), {}

    def move(tensor: Any) -> Any:
        if not _is_on_host(tensor):
            return tensor
        if id(tensor) not in moved:  # tied weights stay one tensor
            inner = DeviceTensor(tensor.detach())
            is_parameter = isinstance(tensor, nn.Parameter)
            moved[id(tensor)] = (
                tensor,  # kept, so that its id is not given to another one
                nn.Parameter(inner, requires_grad=False) if is_parameter else inner,
            )
        return moved[id(tensor)][1]

    for module in model.modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers"):
                value.update({key: move(tensor) for key, tensor in value.items()})
            elif isinstance(value, Tensor) or (
                isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value)
            ):
                setattr(module, name, tree_map(move, value))
    return model


# ---------------------------------------------------------------- graphs


class Operation:
    """One operation on the device, to be repeated on the same addresses.

    Numbers stay what they were. Tensors that operations of the graph have made are kept by it; all
    others, as weights and inputs, it only knows by their addresses.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.func = func
        assert Recorder.active is not None
        own = Recorder.active.own
        self.given = _mapped(lambda leaf: _address(leaf, own), (args, kwargs))
        storages = {_storage(leaf) for leaf in _leaves((args, kwargs)) if _is_on_host(leaf)}
        made = [leaf for leaf in _leaves(result) if isinstance(leaf, Tensor)]
        own.update({_storage(leaf): leaf for leaf in made if _storage(leaf) not in storages})
        self.result = [_address(leaf, own) for leaf in made]

    def repeat(self) -> None:
        args, kwargs = _mapped(_opened, self.given)
        results = (x for x in _leaves(self.func(*args, **kwargs)) if isinstance(x, Tensor))
        for made, address in zip(results, self.result, strict=True):
            kept = _opened(address)
            if made.data_ptr() != kept.data_ptr():  # neither a view nor in place
                kept.copy_(made)


@dataclass(frozen=True)
class Address:
    """Memory of a tensor that a graph does not keep."""

    storage: StorageWeakRef
    dtype: torch.dtype
    place: tuple[Any, ...]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _address(leaf: Any, own: dict[int, Tensor]) -> Any:
    if not isinstance(leaf, Tensor) or _storage(leaf) in own:
        return leaf
    place = (leaf.storage_offset(), leaf.shape, leaf.stride())
    return Address(StorageWeakRef(leaf.untyped_storage()), leaf.dtype, place)


def _opened(leaf: Any) -> Any:
    if not isinstance(leaf, Address):
        return leaf
    if leaf.storage.expired():
        raise RuntimeError("a graph was replayed that uses memory which is free")
    storage = torch.UntypedStorage._new_with_weak_ptr(leaf.storage.cdata)
    return torch.empty(0, dtype=leaf.dtype).set_(storage, *leaf.place)


class Recorder:
    """Records the operations of a function on the device, and repeats them: as a CUDA graph does.

    While it records, a read and a copy from the host raise.
    """

    active: Recorder | None = None
    #: How many have recorded something.
    count = 0

    def __init__(self, device: torch.device, sibling: Any = None) -> None:
        self.operations: list[Operation] = []
        #: Tensors that operations have made, by storage.
        self.own: dict[int, Tensor] = {}

    def record(self, function: Any, reset: Any) -> Any:
        reset()
        function()  # to warm up
        reset()
        Recorder.active = self
        try:
            result = function()
        finally:
            Recorder.active = None
        Recorder.count += 1
        return result

    def replay(self) -> None:
        if (accelerator := Accelerator.active) is not None:
            accelerator.forwards.append(len(accelerator.events))
        _note("kernel", "replay")
        for operation in self.operations:
            operation.repeat()


# ---------------------------------------------------------------- one operation


def _leaves(value: Any) -> list[Any]:
    """What is in the lists, tuples and dicts of an operation's arguments: quicker than torch's trees."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return [value]
    return [leaf for each in value for leaf in _leaves(each)]


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to its ``_leaves``."""
    if isinstance(value, dict):
        return {name: _mapped(function, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_mapped(function, each) for each in value])
    return function(value)


def _is_on_host(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, DeviceTensor)


def _is_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


def _execute(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run one operation on the CPU, note what it is, and put the result where it belongs."""
    leaves = _leaves((args, kwargs))
    on_device = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
    name, target = func.overloadpacket.__name__, kwargs.get("device")
    result_is_on_device = bool(on_device) or _is_device(target)
    if result_is_on_device:
        kind: Kind = "read" if on_device and reads(name, args, kwargs) else "kernel"
        if name in ("_to_copy", "copy_"):
            kind, result_is_on_device = _transfer(name, args, target)
        elif on_device:
            _refuse_two_devices(func, leaves)
        if kind != "kernel" or name not in VIEWS:
            _note(kind, name, leaves, args)

    wrappers = {id(tensor.value): tensor for tensor in on_device}

    def wrap(leaf: Any) -> Any:
        if not _is_on_host(leaf):
            return leaf
        return wrappers[id(leaf)] if id(leaf) in wrappers else DeviceTensor(leaf)

    kwargs = {
        k: torch.device("cpu") if k == "device" and _is_device(v) else v for k, v in kwargs.items()
    }
    args, kwargs = _mapped(
        lambda leaf: leaf.value if isinstance(leaf, DeviceTensor) else leaf, (args, kwargs)
    )
    if name == "histc":  # of integers: the CPU has none
        args = (args[0].float(), *args[1:])
    result = func(*args, **kwargs)
    if result_is_on_device and Recorder.active is not None:
        Recorder.active.operations.append(Operation(func, args, kwargs, result))
    return _mapped(wrap, result) if result_is_on_device else result


def _transfer(name: str, args: Sequence[Any], target: Any) -> tuple[Kind, bool]:
    """What a copy is, and whether its result is on the device."""
    if name == "copy_":
        to, source = (isinstance(each, DeviceTensor) for each in args[:2])
    else:
        source = isinstance(args[0], DeviceTensor)
        to = source if target is None else _is_device(target)
    if source == to:
        return "kernel", to
    return ("copy", True) if to else ("read", False)


def _refuse_two_devices(func: Any, leaves: Sequence[Any]) -> None:
    """Raise as a device would. A number in a tensor is passed along, and the host may index."""
    on_host = [tuple(leaf.shape) for leaf in leaves if _is_on_host(leaf) and leaf.ndim > 0]
    if not on_host:
        return
    if "index" not in func.overloadpacket.__name__:
        raise RuntimeError(f"{func}: tensors of two devices, on the host those of shapes {on_host}")
    _note("copy", func.overloadpacket.__name__)


def _note(kind: Kind, name: str, leaves: Sequence[Any] = (), args: Sequence[Any] = ()) -> None:
    if kind != "kernel" and Recorder.active is not None:
        raise RuntimeError(f"{name} is not permitted while a graph is recorded")
    if (accelerator := Accelerator.active) is None:
        return
    arguments: tuple[Any, ...] = ()
    if accelerator.embedding is not None:
        if name == "embedding" and args[0] is accelerator.embedding:
            accelerator.forwards.append(len(accelerator.events))
        arguments = tuple(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else str(leaf)
            for leaf in leaves
        )
    where = "" if kind == "kernel" else _caller()
    accelerator.events.append(Event(kind, name, arguments, where))


def _caller() -> str:
    """Where in which packages an operation was asked for, the nearest first; torch is left out."""
    frame, found = sys._getframe(1), []
    while frame is not None and len(found) < 3:
        path = Path(frame.f_code.co_filename)
        package = next((p for p in ("hfgen", "transformers") if p in path.parts[:-1]), None)
        if package:
            parts = path.parts[::-1]
            inside = path.parts[len(parts) - 1 - parts.index(package) :]
            found.append(f"{'/'.join(inside)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)
