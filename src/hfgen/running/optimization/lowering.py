"""hfgen's operators in the graph of a decoder layer, before torch's compiler gets it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from . import native
from .kernels import DTYPES

#: What ``F.scaled_dot_product_attention`` is, where nobody has replaced it.
TORCHS = torch._C._nn.scaled_dot_product_attention
#: How transformers adds a dimension to keys, along which it repeats them for the heads of a group.
FOR_GROUPS = (slice(None), slice(None), None, slice(None), slice(None))
#: Products that are joined.
PRODUCTS = ("hfgen_native.linear.default", "hfgen_native.linear8.default")


def lower(module: torch.fx.GraphModule) -> None:
    """Replace torch's attention by hfgen's operator where that computes the same, and join products."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=TORCHS):
        with graph.inserting_before(node):
            if (output := _attention(graph, *node.args, **node.kwargs)) is not None:
                _replace(node, output)
    _join_products(graph)
    module.recompile()


def _join_products(graph: torch.fx.Graph) -> None:
    """Make native products of the same activations one call: each call takes as long as a small product."""
    groups: dict[Any, list[torch.fx.Node]] = {}
    n_writes, number = 0, {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        n_writes += _may_write(node)  # activations may be others from here on
        if str(node.target) in PRODUCTS:  # of operators that may not be loaded
            groups.setdefault((n_writes, node.target, node.args[0]), []).append(node)
    for (_, _, x), products in groups.items():
        inputs = [other for node in products for other in node.all_input_nodes]
        if len(products) == 1 or any(number[other] > number[products[0]] for other in inputs):
            continue
        # Their arguments: activations, bias, packed weights, number of outputs.
        biases, packed = [n.args[1] for n in products], [w for n in products for w in n.args[2:-1]]
        with graph.inserting_before(products[0]):
            arguments = x, biases, packed, [n.args[-1] for n in products]
            joined = graph.call_function(torch.ops.hfgen_native.linears.default, arguments)
            parts = [
                graph.call_function(operator.getitem, (joined, i)) for i, _ in enumerate(products)
            ]
        for node, part in zip(products, parts, strict=True):
            _replace(node, part)


def _may_write(node: torch.fx.Node) -> bool:
    """Whether an operation may write to one of its inputs."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    name = str(getattr(node.target, "__name__", node.target))
    is_operator = getattr(node.target, "__module__", None) == operator.add.__module__
    is_in_place = name.endswith("_") or (is_operator and (name[0] == "i" or name == "setitem"))
    flags = (node.kwargs.get("inplace"), *node.args)
    return is_in_place or "out" in node.kwargs or any(flag is True for flag in flags)


def _replace(node: torch.fx.Node, other: torch.fx.Node) -> None:
    """Use ``other`` in place of ``node``. Without what is known of it, the compiler stores no graph in its cache."""
    other.meta = node.meta.copy()
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def _attention(
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
    arguments = graph.call_function(torch.transpose, (query, 1, 2)), key, value, attn_mask, scale
    output = graph.call_function(torch.ops.hfgen_native.attention.default, arguments)
    return graph.call_function(torch.transpose, (output, 1, 2))


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
