"""The graph of a decoder layer: the stand-ins that it is compiled for, and how steps call it.

``torch.compile`` checks guards before it calls a graph with a list of tensors and sizes. Some are a call's
own, by names such as ``L['hidden']`` or ``L['keys'].size()[2]``; the rest are the layer's, and stay within a
call. So guards are checked once per call, and later steps call the graph directly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

#: Sizes of the stand-ins, the same in every process: rows, new tokens, tokens seen, room for tokens.
ROWS, NEW, SEEN, ROOM = 2, 3, 37, 53

#: How the compiler names what belongs to the layer.
OF_LAYER = "L['hfgen_layer']"
#: What differs from layer to layer of one forward, by the compiler's names.
OF_EACH = ("L['hidden']", "L['keys']", "L['values']")

#: By names of ``forward_layer``'s arguments.
Arguments = dict[str, Any]

_noted = threading.local()


# ---------------------------------------------------------------- what a graph is compiled for


class OneLayerCache(Cache):
    """The cache of one layer: keys and values ``(rows, heads, seen, size)``.

    ``update`` writes to the columns ``positions (new,)``.
    """

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        self.keys, self.values, self.positions = keys, values, positions

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.positions, key_states)
        self.values.index_copy_(2, self.positions, value_states)
        return self.keys, self.values


def forward_layer(
    hfgen_layer: nn.Module,
    hidden: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    kwargs: dict[str, Any],
) -> Any:
    """The function that is compiled: a layer's own forward, with a cache of this layer only."""
    cache = OneLayerCache(keys, values, positions)
    return type(hfgen_layer).forward(hfgen_layer, hidden, past_key_values=cache, **kwargs)


def stand_in(value: Any, sizes: dict[int, tuple[int, int]]) -> Any:
    """Zeros in place of tensors, with stand-in sizes for those of the call; other values as they are.

    ``sizes``: by dimension, the size in the call and its stand-in.
    """
    if isinstance(value, tuple):
        return tuple(stand_in(part, sizes) for part in value)
    if not isinstance(value, Tensor):
        return value
    shape = list(value.shape)
    dims = {4: (0, 2, 3), 3: (0, 1), 2: (0, 1), 1: (1,)}.get(len(shape), ())
    dynamic = []
    for dim in dims:
        place = 0 if len(shape) == 1 else dim
        size_of_call, size = sizes[dim]
        if shape[place] == size_of_call:
            shape[place] = size
            dynamic += [place] if size > 1 else []
    zeros = value.new_zeros(shape)
    for dim in dynamic:
        torch._dynamo.maybe_mark_dynamic(zeros, dim)
    return zeros


def has_stand_in(value: Any) -> bool:
    """Whether ``stand_in`` knows values of this type."""
    if isinstance(value, tuple):
        return all(map(has_stand_in, value))
    return value is None or type(value) in (Tensor, bool, str)


def room_like(states: Tensor, rows: int) -> Tensor:
    """Keys or values of the stand-ins; their strides are no products of sizes."""
    _, heads, _, size = states.shape
    room = states.new_zeros((rows, heads, ROOM, size))[:, :, :SEEN]
    for dim in (0, 2):
        torch._dynamo.maybe_mark_dynamic(room, dim)
    return room


# ---------------------------------------------------------------- how a graph is called


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
        of_call = [
            i for i, name in enumerate(names) if name.startswith("L[") and OF_LAYER not in name
        ]
        tensors = [i for i in of_call if isinstance(values[i], Tensor)]
        shapes = values[tensors[0]].fake_mode.shape_env
        guards = ["True"]
        if shapes is not None:
            guards += shapes.produce_guards(
                [values[i] for i in tensors], [sources[i] for i in tensors], ignore_static=False
            )
        self.places, self.each = of_call, [names.index(name) for name in OF_EACH]
        read, holds = ", ".join(names[i] for i in of_call), " and ".join(f"({g})" for g in guards)
        self.look = eval(f"lambda L: ([{read}], {holds})", dict(SYMPY_INTERP))

    def __call__(self, *inputs: Any) -> Any:
        outputs = self.run(*inputs)
        if (calls := getattr(_noted, "calls", None)) is not None:
            calls.append((self, inputs, outputs))
        return outputs


class Step:
    """The inputs that all layers of one forward share, and whether a graph's guards hold for them."""

    def __init__(self, graph: Any, arguments: Arguments) -> None:
        self.graph = graph
        self.kind = kind_of(arguments)
        self.shapes = _shapes(arguments)
        self.positions, self.kwargs = arguments["positions"], tuple(arguments["kwargs"].values())
        values, self.holds = graph.look(arguments)
        self.inputs = dict(zip(graph.places, values, strict=True))
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
            and _shapes(arguments) == self.shapes
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
        results = self.graph.run(*inputs)
        if isinstance(self.outputs, int):
            return results[self.outputs]
        return tuple(None if i is None else results[i] for i in self.outputs)


def checked(
    function: Callable[..., Any], layer: Any, arguments: Arguments
) -> tuple[Any, Checked | None]:
    """Call a compiled function; return its result, and its graph if that can be called directly from now on."""
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
    layer_inputs = list(inputs)
    for place in graph.places:
        layer_inputs[place] = None
    return result, Checked(graph, kind_of(arguments), layer_inputs, returned)


def _places(result: Any, outputs: Any) -> int | tuple[int | None, ...] | None:
    """The place of a layer's result among the outputs of a graph; None if it is none of them."""
    at = {id(output): i for i, output in enumerate(outputs)}
    if isinstance(result, Tensor):
        return at.get(id(result))
    if type(result) is not tuple:
        return None
    if not all(part is None or id(part) in at for part in result):
        return None
    return tuple(None if part is None else at[id(part)] for part in result)


def kind_of(value: Any) -> Any:
    """All that has to be equal in two calls of a graph but sizes: types, devices, names, constants."""
    if isinstance(value, Tensor):
        return type(value), value.dtype, value.device, value.dim(), value.requires_grad
    if isinstance(value, dict):
        return tuple(value), tuple(map(kind_of, value.values()))
    if isinstance(value, tuple):
        return tuple(map(kind_of, value))
    return value


def _shapes(arguments: Arguments) -> Any:
    hidden, keys, values = arguments["hidden"], arguments["keys"], arguments["values"]
    strides = hidden.stride(), keys.stride(), values.stride()
    return hidden.shape, keys.shape, values.shape, strides, keys.dtype
