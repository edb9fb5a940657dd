"""The graph of a decoder layer: the stand-ins that it is compiled for, and how steps call it.

``torch.compile`` checks guards before it calls a graph with a list of tensors and sizes. Some are a call's
own, by names such as ``L['hidden']`` or ``L['keys'].size()[2]``; the rest are the layer's, and stay within a
call. So guards are checked once per call, and later steps call the graph directly: 12 to 21 % of a token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from transformers.cache_utils import Cache

from ...families import CACHE
from ...memory.caches.static_layers import mark_dynamic
from .lowering import lower

#: Sizes of the stand-ins, the same in every process: rows, new tokens, tokens seen, room for tokens.
ROWS, NEW, SEEN, ROOM = 2, 3, 37, 53

#: By number of dimensions, which are rows, new tokens and tokens seen.
DIMS = {
    4: ((0, "rows"), (2, "new"), (3, "seen")),
    3: ((0, "rows"), (1, "new")),
    2: ((0, "rows"), (1, "new")),
    1: ((0, "new"),),
}

#: How the compiler names what belongs to the layer.
OF_LAYER = "L['hfgen_layer']"
#: What differs from layer to layer of one forward.
OF_EACH = ("hidden", "keys", "values")

#: By names of ``forward_layer``'s arguments.
Arguments = dict[str, Any]

_noted = threading.local()


# ---------------------------------------------------------------- what a graph is compiled for


class OneLayerCache(Cache):
    """Keys and values ``(rows, heads, seen, size)``; ``update`` writes to ``positions (new,)``."""

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
    return type(hfgen_layer).forward(hfgen_layer, hidden, **{CACHE: cache}, **kwargs)


def stand_ins(hidden: Tensor, keys: Tensor, values: Tensor, kwargs: dict[str, Any]) -> Arguments:
    """Zeros in place of a call's tensors, with stand-in sizes for rows and tokens, which are dynamic.

    One row and one token stay as they are. Raises ``TypeError`` for values of other types.
    """
    rows, n_new = hidden.shape[:2]
    mask = kwargs.get("attention_mask")
    n_seen = SEEN if mask is None else mask.shape[-1]
    new = n_new, 1 if n_new == 1 else NEW
    sizes = {"rows": (rows, 1 if rows == 1 else ROWS), "new": new, "seen": (n_seen, SEEN)}

    def stand_in(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(stand_in, value))
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is not Tensor:
            raise TypeError(f"a layer gets a {type(value).__name__}")
        shape = list(value.shape)
        named = DIMS.get(value.dim(), ())
        dims = [(dim, sizes[name]) for dim, name in named if shape[dim] == sizes[name][0]]
        for dim, (_, size) in dims:
            shape[dim] = size
        return mark_dynamic(value.new_zeros(shape), *(dim for dim, _ in dims))

    def room(states: Tensor) -> Tensor:  # its strides are no products of sizes
        shape = (sizes["rows"][1], states.shape[1], ROOM, states.shape[3])
        return mark_dynamic(states.new_zeros(shape)[:, :, :SEEN], 0, 2)

    return {
        "hidden": stand_in(hidden),
        "keys": room(keys),
        "values": room(values),
        "positions": mark_dynamic(torch.arange(new[1], device=hidden.device), 0),
        "kwargs": {name: stand_in(value) for name, value in kwargs.items()},
    }


# ---------------------------------------------------------------- how a graph is called


class Graph:
    """A backend of ``torch.compile``, and one graph that it made: its code, and where its inputs come from."""

    def __init__(self, backend: Callable[..., Any], module: Any, inputs: list[Any]) -> None:
        lower(module)
        nodes = module.graph.find_nodes(op="placeholder")
        self._compiled = backend(module, inputs)
        #: Takes a list of inputs, which it empties.
        self.run: Callable[[list[Any]], Any] = lambda values: self._compiled(*values)
        #: Which inputs are a call's own; the places of those that differ between layers, by name.
        self.places: list[int] = []
        self.layer_places: dict[str, int] = {}
        #: Of a call: these inputs, and whether its sizes are the graph's. None if that is not known.
        self.look: Callable[[Arguments], tuple[list[Any], bool]] | None = None
        with suppress(Exception):  # another torch has other names: its own guards are checked then
            from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP  # takes time: sympy

            sources = [node.meta["grapharg"].source for node in nodes]
            names = [s.name if isinstance(s.name, str) else s.name() for s in sources]
            places = [i for i, n in enumerate(names) if n.startswith("L[") and OF_LAYER not in n]
            read, guards = ", ".join(names[i] for i in places), ["True"]
            values = {i: nodes[i].meta["example_value"] for i in places}
            tensors: dict[int, Any] = {i: v for i, v in values.items() if isinstance(v, Tensor)}
            if (shapes := next(iter(tensors.values())).fake_mode.shape_env) is not None:
                of_tensors = [*tensors.values()], [sources[i] for i in tensors]
                guards += shapes.produce_guards(*of_tensors, ignore_static=False)
            self.layer_places = {name: names.index(f"L['{name}']") for name in OF_EACH}
            self.places, holds = places, " and ".join(f"({guard})" for guard in guards)
            self.look = eval(f"lambda L: ([{read}], {holds})", dict(SYMPY_INTERP))

    def __call__(self, *inputs: Any) -> Any:
        if (calls := getattr(_noted, "calls", None)) is None:
            return self._compiled(*inputs)
        with _calls_of_inductor() as inner:
            outputs = self._compiled(*inputs)
        calls.append((self, inputs, outputs))
        if len(inner) == 1 and _are(inner[0][1], inputs) and _are(inner[0][2], outputs):
            # What wraps the code, 6 % of a token, hands them on; and it counts writes, as ``Checked`` does.
            self.run = getattr(inner[0][0], "current_callable", None) or self.run
        return outputs


@contextmanager
def _calls_of_inductor() -> Iterator[list[Any]]:
    """Note the graphs of inductor that this thread calls, with inputs and outputs; others' calls go on."""
    from torch._inductor import output_code

    of_inductor: Any = output_code.CompiledFxGraph
    original, thread, calls = of_inductor.__call__, threading.get_ident(), list[Any]()

    def call(graph: Any, inputs: Any) -> Any:
        values = tuple(inputs)
        outputs = original(graph, inputs)
        if threading.get_ident() == thread:
            calls.append((graph, values, outputs))
        return outputs

    of_inductor.__call__ = call
    try:
        yield calls
    finally:
        of_inductor.__call__ = original


def _are(values: Any, others: Any) -> bool:
    """Whether these are the same objects."""
    return [*map(id, values)] == [*map(id, others)]


class Step:
    """The inputs that all layers of one forward share, and whether a graph's guards hold for them."""

    def __init__(self, graph: Any, arguments: Arguments) -> None:
        self.graph, self.kind = graph, kind_of(arguments)
        self.key = _key(arguments)
        self.shared = arguments["positions"], *arguments["kwargs"].values()  # by id in the key
        values, self.holds = graph.look(arguments)
        inputs, own_places = zip(graph.places, values, strict=True), graph.layer_places.values()
        self.inputs = {place: value for place, value in inputs if place not in own_places}

    def is_of(self, graph: Graph, arguments: Arguments) -> bool:
        """Whether ``arguments`` of another layer belong to the same forward."""
        return self.graph is graph and self.key == _key(arguments)


@dataclass(slots=True)
class Checked:
    """A layer's graph, whose guards held in this call: its inputs, those of the layer filled in.

    ``place``: of the layer's result among the outputs.
    """

    graph: Graph
    kind: Any
    inputs: list[Any]
    place: int

    def __call__(self, step: Step, arguments: Arguments) -> Any:
        inputs = self.inputs.copy()
        for place, value in step.inputs.items():
            inputs[place] = value
        for name, place in self.graph.layer_places.items():
            inputs[place] = arguments[name]
        increment_version((arguments["keys"], arguments["values"]))
        return self.graph.run(inputs)[self.place]


def checked(
    function: Callable[..., Any], layer: Any, arguments: Arguments
) -> tuple[Any, Checked | None]:
    """Call a compiled function; return its result, and its graph if that can be called directly from now on."""
    _noted.calls = calls = list[tuple[Graph, Any, Any]]()
    try:
        result = function(layer, **arguments)
    finally:
        _noted.calls = None
    if len(calls) != 1:
        return result, None
    graph, inputs, outputs = calls[0]
    places = [i for i, output in enumerate(outputs) if output is result]
    if graph.look is None or not places:  # a tuple is not looked into
        return result, None
    layer_inputs = list(inputs)
    for place in graph.places:
        layer_inputs[place] = None
    return result, Checked(graph, kind_of(arguments), layer_inputs, places[0])


def kind_of(value: Any) -> Any:
    """All that has to be equal in two calls of a graph but sizes: types, devices, names, constants."""
    if isinstance(value, Tensor):
        return type(value), value.dtype, value.device, value.dim(), value.requires_grad
    if isinstance(value, dict):
        return tuple(value), tuple(map(kind_of, value.values()))
    if isinstance(value, tuple):
        return tuple(map(kind_of, value))
    return value


def _key(arguments: Arguments) -> Any:
    """What is equal for the layers of one forward: objects that they share, and shapes of the others."""
    hidden, keys, values = arguments["hidden"], arguments["keys"], arguments["values"]
    shared = arguments["positions"], *arguments["kwargs"].values()
    strides = hidden.stride(), keys.stride(), values.stride()
    return (*map(id, shared), hidden.shape, keys.shape, values.shape, strides, keys.dtype)
