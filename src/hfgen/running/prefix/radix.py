"""Radix trees of token sequences with their keys and values: the storage of ``PrefixCache``.

A node holds a run of tokens with their keys and values in each layer. There is one tree per key. The
tensors of a node are never written to, so they can be read without a lock, also after an eviction.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: Keys and values of a run of tokens, one layer after the other: each ``(heads, n, size)``.
KeyValues = tuple[Tensor, ...]

#: Where a first token is: ``("position", n)``, or ``("column", n)`` if the model takes no positions.
Offset = tuple[str, int]

#: What a node, and a tensor besides its numbers, take in memory: resident size of 100,000 of them.
NODE_BYTES, TENSOR_BYTES = 512, 512


def bytes_per_token(states: Iterable[Tensor]) -> int:
    """Bytes of a token: its id, and its part of each of ``states (…, heads, n, size)``."""
    sizes = (s.shape[-3] * s.shape[-1] * s.element_size() for s in states)
    return torch.long.itemsize + sum(sizes)


def size(n_tokens: int, bytes_per_token: int, n_states: int) -> int:
    """Bytes of a node with ``n_tokens``, and with ``n_states`` tensors of keys and values."""
    return n_tokens * bytes_per_token + NODE_BYTES + (1 + n_states) * TENSOR_BYTES


@dataclass(eq=False, slots=True)
class Node:
    """A run of tokens behind its parent's: ``tokens (n,)`` int64 on the CPU; a root has none."""

    tokens: Tensor
    states: KeyValues
    parent: Node | None = None
    children: dict[int, Node] = field(default_factory=dict)

    @classmethod
    def copy(cls, tokens: Tensor, states: KeyValues, start: int, end: int) -> Node:
        """A node with a copy of ``tokens[start:end]`` and their states."""
        copies = (s[:, start:end].clone(memory_format=torch.contiguous_format) for s in states)
        return cls(tokens[start:end].clone(), tuple(copies))

    @property
    def n_bytes(self) -> int:
        return size(len(self.tokens), bytes_per_token(self.states), len(self.states))

    def add(self, child: Node) -> None:
        child.parent = self
        self.children[int(child.tokens[0])] = child


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of a sequence: ``length`` tokens, ``nodes`` from the root on."""

    length: int
    nodes: tuple[Node, ...]

    def runs(self, length: int) -> Iterator[tuple[int, KeyValues]]:
        """The runs of the first ``length`` tokens: where each starts, and views of its states."""
        start = 0
        for node in self.nodes:
            n = min(len(node.tokens), length - start)
            if n <= 0:
                return
            yield start, tuple(states[:, :n] for states in node.states)
            start += n


class Forest:
    """Trees by key, of ``max_bytes`` in all; the least recently used leaves go first. No lock."""

    def __init__(self, max_bytes: int, n_evicted: int = 0) -> None:
        self.max_bytes, self.n_evicted = max_bytes, n_evicted
        self.n_bytes = 0
        self.roots: dict[Any, Node] = {}
        #: The key of each node, least recently used first, children before parents: first is a leaf.
        self.nodes: OrderedDict[Node, Any] = OrderedDict()

    def match(self, key: Hashable, tokens: Tensor) -> Match:
        """The longest prefix of ``tokens (n,)`` in the tree of ``key``; it counts as used now."""
        node, length, path = self.roots.get(key), 0, []
        while node is not None and length < len(tokens):
            if (node := node.children.get(int(tokens[length]))) is None:
                break
            beginning = tokens[length : length + len(node.tokens)]
            n = int((node.tokens[: len(beginning)] == beginning).int().cumprod(0).sum())
            path.append(node)
            length += n
            if n < len(node.tokens):
                break
        self._note_use(path)
        return Match(length, tuple(path))

    def insert(self, key: Hashable, tokens: Tensor, states: KeyValues) -> None:
        """Store ``tokens (n,)`` with ``states``, each ``(heads, n, size)``: the first that fit."""
        match, per_token = self.match(key, tokens), bytes_per_token(states)
        path = list(match.nodes)
        taken = match.length * per_token + (len(path) + 1) * size(0, 0, len(states))
        end = min(len(tokens), match.length + (self.max_bytes - taken) // per_token)
        if end <= match.length:
            return
        within = match.length - sum(len(node.tokens) for node in path[:-1])
        if path and within < len(path[-1].tokens):
            path[-1] = self._split(path[-1], within)
            self._note_use(path)  # children before parents again: only leaves can be evicted
        n_bytes = size(end - match.length, per_token, len(states))
        while self.nodes and self.n_bytes + n_bytes > self.max_bytes:
            self._evict()
        node = Node.copy(tokens, states, match.length, end)
        self.attach(key, path[-1] if path else None, node)
        self._note_use(path)

    def attach(self, key: Hashable, parent: Node | None, node: Node) -> None:
        """Put ``node`` below ``parent``, or first into the tree of ``key``; it counts as used now."""
        if parent is None:
            parent = self.roots.setdefault(key, Node(torch.empty(0, dtype=torch.long), ()))
        parent.add(node)
        self.nodes[node] = key
        self.n_bytes += node.n_bytes

    def _note_use(self, path: list[Node]) -> None:
        """Make the nodes of a path the most recently used, children before parents."""
        for node in reversed(path):
            self.nodes.move_to_end(node)

    def _split(self, node: Node, n: int) -> Node:
        """Split ``node`` behind its first ``n`` tokens into copies; returns the upper half."""
        parent: Any = node.parent
        upper = Node.copy(node.tokens, node.states, 0, n)
        lower = Node.copy(node.tokens, node.states, n, len(node.tokens))
        for child in node.children.values():
            lower.add(child)
        upper.add(lower)
        parent.add(upper)
        self.nodes[lower] = self.nodes[upper] = self.nodes.pop(node)
        self.n_bytes += upper.n_bytes + lower.n_bytes - node.n_bytes
        return upper

    def _evict(self) -> None:
        """Remove the leaf that was not used for the longest time."""
        leaf, key = self.nodes.popitem(last=False)
        parent: Any = leaf.parent
        del parent.children[int(leaf.tokens[0])]
        self.n_bytes -= leaf.n_bytes
        self.n_evicted += 1
        if parent is self.roots[key] and not parent.children:
            del self.roots[key]
