"""The graph of a decoder layer: the stand-ins that it is compiled for, and how steps call it.

``torch.compile`` checks guards before it calls a graph with a list of tensors and sizes. Some are a call's
own, by names such as ``L['hidden']`` or ``L['keys'].size()[2]``; the rest are the layer's, and stay within a
call. So guards are checked once per call, and later steps call the graph directly: 12 to 21 % of a token.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ...families import CACHE
from ...memory.caches.static_layers import mark_dynamic
from . import native
from .kernels import DTYPES

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
        use_native_attention(module)
        join_products(module)
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
            # Nothing is done to inputs and outputs by what wraps the code, which is 6 % of a token.
            self.run = inner[0][0].current_callable
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


# ---------------------------------------------------------------- products and attention in a graph


def join_products(module: torch.fx.GraphModule) -> None:
    """Make native products of the same activations one call."""
    graph, groups = module.graph, dict[Any, list[torch.fx.Node]]()
    for node in graph.nodes:
        if str(node.target) in ("hfgen_native.linear.default", "hfgen_native.linear8.default"):
            groups.setdefault((node.target, node.args[0]), []).append(node)
    for (_, x), products in groups.items():
        if len(products) == 1:
            continue
        biases, packed = [n.args[1] for n in products], [w for n in products for w in n.args[2:-1]]
        with graph.inserting_before(products[0]):
            arguments = x, biases, packed, [n.args[-1] for n in products]
            joined = graph.call_function(torch.ops.hfgen_native.linears.default, arguments)
            parts = [graph.call_function(operator.getitem, (joined, i)) for i in range(len(products))]
        for node, part in zip(products, parts, strict=True):
            node.replace_all_uses_with(part)
            graph.erase_node(node)
    module.recompile()


#: What ``F.scaled_dot_product_attention`` is, where nobody has replaced it.
TORCHS = torch._C._nn.scaled_dot_product_attention
#: How transformers adds a dimension to keys, along which it repeats them for the heads of a group.
FOR_GROUPS = (slice(None), slice(None), None, slice(None), slice(None))


def use_native_attention(module: torch.fx.GraphModule) -> None:
    """Replace torch's attention in a graph of torch.compile's front end, where the operator computes the same."""
    for node in module.graph.find_nodes(op="call_function", target=TORCHS):
        with module.graph.inserting_before(node):
            if (output := _native(module.graph, *node.args, **node.kwargs)) is not None:
                node.replace_all_uses_with(output)
                module.graph.erase_node(node)
    module.recompile()


def _native(
    graph: torch.fx.Graph,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    scale: Any = None,
    enable_gqa: Any = False,
) -> torch.fx.Node | None:
    """The node of the operator for the arguments of ``scaled_dot_product_attention``; None if it does not take them."""
    key, value = _not_repeated(key), _not_repeated(value)
    states = [node.meta["example_value"] for node in (query, key, value)]
    q, k, v = states
    fits = all(x.dim() == 4 and x.device.type == "cpu" and x.dtype == q.dtype for x in states)
    if not fits or q.dtype not in DTYPES or dropout_p != 0 or is_causal is not False:
        return None
    if any(x.shape[3] % native.LANES for x in states):
        return None
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes time: sympy

    equal = [(k.shape[0], q.shape[0]), (v.shape[0], q.shape[0]), (v.shape[1], k.shape[1])]
    equal += [(q.shape[1] % k.shape[1], 0)]
    if attn_mask is not None:
        mask: Tensor = attn_mask.meta["example_value"]
        if mask.dtype not in (torch.bool, q.dtype) or mask.dim() != 4:
            return None
        sizes = zip(mask.shape[:3], q.shape[:3], strict=True)
        equal += [pair for pair in sizes if not statically_known_true(pair[0] == 1)]
        equal += [(mask.shape[3], k.shape[2])]
    if not all(statically_known_true(one == other) for one, other in equal):
        return None
    if native.failure() is not None:
        return None
    scale = q.shape[3] ** -0.5 if scale is None else scale
    arguments = graph.call_method("transpose", (query, 1, 2)), key, value, attn_mask, scale
    output = graph.call_function(torch.ops.hfgen_native.attention.default, arguments)
    return graph.call_method("transpose", (output, 1, 2))


def _not_repeated(states: Any) -> Any:
    """The node of the keys or values that ``states`` repeats for the heads of a group; ``states`` if it does not."""
    chain = [states]
    for name in ("reshape", "expand"):
        if chain[-1].op != "call_method" or chain[-1].target != name:
            return states
        chain.append(chain[-1].args[0])
    if chain[-1].target is not operator.getitem or chain[-1].args[1] != FOR_GROUPS:
        return states
    own = chain[-1].args[0]
    rows, heads, *sizes = own.meta["example_value"].shape
    n = chain[1].meta["example_value"].shape[2]
    shapes = [tuple(node.meta["example_value"].shape) for node in chain[:2]]
    is_repeated = shapes == [(rows, heads * n, *sizes), (rows, heads, n, *sizes)]
    return own if is_repeated else states
