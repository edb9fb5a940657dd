"""The compiler's guards of a layer, checked once per call: later steps call its graph directly.

When guards hold, ``torch.compile`` calls a graph with a list of tensors and sizes. Some are a call's own, by
names such as ``L['hidden']`` or ``L['keys'].size()[2]``; the rest are the layer's, and stay within a call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor

#: How the compiler names what belongs to the layer.
OF_LAYER = "L['hfgen_layer']"
#: What differs from layer to layer of one forward, by the compiler's names.
OF_EACH = ("L['hidden']", "L['keys']", "L['values']")

#: By names of ``_forward``'s arguments.
Arguments = dict[str, Any]

_noted = threading.local()


class Graph:
    """A backend of ``torch.compile``, and one graph that it made: its code, and where its inputs come from."""

    def __init__(self, backend: Callable[..., Any], module: Any, inputs: list[Any]) -> None:
        nodes = module.graph.find_nodes(op="placeholder")
        known = [(n.meta.get("grapharg"), n.meta.get("example_value")) for n in nodes]
        sources = [getattr(argument, "source", None) for argument, _ in known]
        self.run = backend(module, inputs)
        #: Which inputs are a call's own.
        self.places: list[int] = []
        #: Of these, which differ between the layers of a forward, in the order of ``OF_EACH``.
        self.each: list[int] = []
        #: Of a call: these inputs, and whether its sizes are the graph's. None if that is not known.
        self.look: Callable[[Arguments], tuple[list[Any], bool]] | None = None
        with suppress(Exception):  # another torch has other names: its own guards are checked then
            self._find(sources, [value for _, value in known])

    def _find(self, sources: list[Any], values: list[Any]) -> None:
        from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP  # takes time: sympy

        names = [
            source.name if isinstance(source.name, str) else source.name() for source in sources
        ]
        own = [i for i, name in enumerate(names) if name.startswith("L[") and OF_LAYER not in name]
        tensors = [i for i in own if isinstance(values[i], Tensor)]
        shapes = values[tensors[0]].fake_mode.shape_env
        guards = ["True"]
        if shapes is not None:
            guards += shapes.produce_guards(
                [values[i] for i in tensors], [sources[i] for i in tensors], ignore_static=False
            )
        self.places, self.each = own, [names.index(name) for name in OF_EACH]
        read, holds = ", ".join(names[i] for i in own), " and ".join(f"({g})" for g in guards)
        self.look = eval(f"lambda L: ([{read}], {holds})", dict(SYMPY_INTERP))

    def __call__(self, *inputs: Any) -> Any:
        outputs = self.run(*inputs)
        if (calls := getattr(_noted, "calls", None)) is not None:
            calls.append((self, inputs, outputs))
        return outputs


class Step:
    """What the layers of one forward have in common, and whether it is what a graph was made for."""

    def __init__(self, graph: Any, arguments: Arguments) -> None:
        self.graph = graph
        self.kind = kind_of(arguments)
        self.shapes = _shapes(arguments["hidden"], arguments["keys"], arguments["values"])
        self.positions, self.kwargs = arguments["positions"], tuple(arguments["kwargs"].values())
        read, self.holds = graph.look(arguments)
        self.inputs = dict(zip(graph.places, read, strict=True))
        for place in graph.each:
            del self.inputs[place]

    def is_of(self, graph: Graph, arguments: Arguments) -> bool:
        """Whether ``arguments`` of another layer belong to the same forward."""
        kwargs = arguments["kwargs"].values()
        return (
            self.graph is graph
            and arguments["positions"] is self.positions
            and len(kwargs) == len(self.kwargs)
            and all(map(is_, kwargs, self.kwargs))
            and _shapes(arguments["hidden"], arguments["keys"], arguments["values"]) == self.shapes
        )


@dataclass(slots=True)
class Checked:
    """A layer's graph, whose guards held in this call.

    ``inputs``: those of the graph, of which the layer's own are there. ``outputs``: which of the graph's
    outputs the layer returns, None where it returns None; a number if it returns one tensor alone.
    """

    graph: Graph
    kind: Any
    inputs: list[Any]
    outputs: int | tuple[int | None, ...]

    def __call__(self, step: Step, arguments: Arguments) -> Any:
        inputs = self.inputs.copy()
        for place, value in step.inputs.items():
            inputs[place] = value
        hidden, keys, values = self.graph.each
        inputs[hidden] = arguments["hidden"]
        inputs[keys], inputs[values] = arguments["keys"], arguments["values"]
        found = self.graph.run(*inputs)
        outputs = self.outputs
        if isinstance(outputs, int):
            return found[outputs]
        return tuple(None if i is None else found[i] for i in outputs)


def checked(
    function: Callable[..., Any], layer: Any, arguments: Arguments
) -> tuple[Any, Checked | None]:
    """What a compiled function returns; its graph, if it can be called without it from now on."""
    calls: list[tuple[Graph, Any, Any]] = []
    _noted.calls = calls
    try:
        result = function(layer, **arguments)
    finally:
        _noted.calls = None
    if len(calls) != 1:
        return result, None
    graph, inputs, outputs = calls[0]
    if graph.look is None or (returned := _places(result, outputs)) is None:
        return result, None
    kept = list(inputs)
    for place in graph.places:
        kept[place] = None
    return result, Checked(graph, kind_of(arguments), kept, returned)


def _places(result: Any, outputs: Any) -> int | tuple[int | None, ...] | None:
    """Where a layer's result is among the outputs of a graph; None if it is not."""
    at = {id(output): i for i, output in enumerate(outputs)}
    if isinstance(result, Tensor):
        return at.get(id(result))
    if type(result) is not tuple:
        return None
    if not all(part is None or id(part) in at for part in result):
        return None
    return tuple(None if part is None else at[id(part)] for part in result)


def kind_of(value: Any) -> Any:
    """What must be equal in two calls of a graph besides sizes: types, devices, names, constants."""
    if isinstance(value, Tensor):
        return type(value), value.dtype, value.device, value.dim(), value.requires_grad
    if isinstance(value, dict):
        return tuple(value), tuple(map(kind_of, value.values()))
    if isinstance(value, tuple):
        return tuple(map(kind_of, value))
    return value


def _shapes(hidden: Tensor, keys: Tensor, values: Tensor) -> Any:
    return (
        hidden.shape,
        hidden.stride(),
        keys.shape,
        keys.stride(),
        keys.dtype,
        values.shape,
        values.stride(),
    )
