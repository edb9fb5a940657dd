"""Radix trees of token sequences with their keys and values: what ``prefix.PrefixCache`` stores in.

There is one tree per key. A node holds a run of tokens, and in each layer their states; sequences
that begin alike share the nodes of what they share. Nodes are never written to: whoever has looked
one up may read it without a lock, also after it has been split or evicted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

#: Keys and values of a run of tokens, one layer after the other: each ``(heads, n, size)``.
KeyValues = tuple[Tensor, ...]


@dataclass(eq=False, slots=True)
class Node:
    """A run of tokens that follows its parent's.

    ``tokens (n,)`` int64 on the CPU, ``states`` with as many; a root has neither.
    """

    tokens: Tensor
    states: KeyValues
    parent: Node | None = None
    children: dict[int, Node] = field(default_factory=dict)
    #: When it was last used, in operations of its forest. Never before one of its children.
    used: int = 0

    @property
    def n_bytes(self) -> int:
        return self.tokens.nbytes + sum(states.nbytes for states in self.states)

    def bytes_per_token(self) -> int:
        return self.n_bytes // len(self.tokens)

    def add(self, child: Node) -> None:
        child.parent = self
        self.children[int(child.tokens[0])] = child

    def part(self, start: int, end: int) -> KeyValues:
        """The states of ``tokens[start:end]``, as views."""
        return tuple(states[:, start:end] for states in self.states)


def new_root() -> Node:
    return Node(torch.empty(0, dtype=torch.long), ())


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of a sequence: ``length`` tokens, ``nodes`` from the root on."""

    length: int
    nodes: tuple[Node, ...]

    def runs(self, length: int) -> Iterator[tuple[int, KeyValues]]:
        """Of the first ``length`` tokens: where each run starts, and its states."""
        start = 0
        for node in self.nodes:
            n = min(len(node.tokens), length - start)
            if n <= 0:
                return
            yield start, node.part(0, n)
            start += n


def n_common(a: Tensor, b: Tensor) -> int:
    """How many tokens two sequences begin with alike."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.int().argmax()) if differs.any() else n


class Forest:
    """Trees by key, of ``max_bytes`` at most in all; the least recently used leaves go first.

    Not safe under threads by itself: its owner has the lock.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.roots: dict[Hashable, Node] = {}
        self.n_bytes = 0
        self.n_evicted = 0
        self.clock = 0

    def nodes(self, root: Node) -> Iterator[Node]:
        """All nodes of a tree but its root, parents before their children."""
        waiting = list(root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def match(self, key: Hashable, tokens: Tensor) -> Match:
        """The longest prefix of ``tokens (n,)`` in the tree of ``key``; it counts as used now."""
        self.clock += 1
        node, length, path = self.roots.get(key), 0, []
        while node is not None and length < len(tokens):
            node = node.children.get(int(tokens[length]))
            if node is None:
                break
            n = n_common(node.tokens, tokens[length:])
            node.used = self.clock
            path.append(node)
            length += n
            if n < len(node.tokens):
                break
        return Match(length, tuple(path))

    def insert(
        self,
        key: Hashable,
        tokens: Tensor,
        states: Callable[[int, int], KeyValues],
        bytes_per_token: int,
    ) -> None:
        """Store ``tokens (n,)``, or as many of the first of them as fit into ``max_bytes``.

        ``states(start, end)`` copies those of ``tokens[start:end]``; it is asked for what is missing.
        """
        match = self.match(key, tokens)
        if match.length == len(tokens):
            return
        parent = match.nodes[-1] if match.nodes else None
        end = min(len(tokens), self.max_bytes // bytes_per_token)
        if end <= match.length:
            return
        if parent is not None and (within := _within(match)) < len(parent.tokens):
            parent = self._split(parent, within)
        self._make_room((end - match.length) * bytes_per_token)
        node = Node(tokens[match.length : end].clone(), states(match.length, end), used=self.clock)
        # The tree may have gone to make room, if nothing of it is a prefix of these tokens.
        self.attach(self.roots.setdefault(key, new_root()) if parent is None else parent, node)

    def attach(self, parent: Node, node: Node) -> None:
        parent.add(node)
        self.n_bytes += node.n_bytes

    def _split(self, node: Node, n: int) -> Node:
        """Let the first ``n`` tokens of ``node`` be a node of their own, which is returned.

        Both halves are copies, so that evicting one gives its memory back.
        """
        parent: Node = node.parent  # type: ignore[assignment]
        upper, lower = (
            Node(
                node.tokens[a:b].clone(), tuple(s.clone() for s in node.part(a, b)), used=node.used
            )
            for a, b in ((0, n), (n, len(node.tokens)))
        )
        for child in node.children.values():
            lower.add(child)
        upper.add(lower)
        parent.add(upper)
        return upper

    def _make_room(self, n_bytes: int) -> None:
        """Evict leaves until ``n_bytes`` more are allowed."""
        if self.n_bytes + n_bytes <= self.max_bytes:
            return
        leaves = [
            (node.used, id(node), node, key)
            for key, root in self.roots.items()
            for node in self.nodes(root)
            if not node.children
        ]
        heapq.heapify(leaves)
        while leaves and self.n_bytes + n_bytes > self.max_bytes:
            _, _, leaf, key = heapq.heappop(leaves)
            parent: Node = leaf.parent  # type: ignore[assignment]
            del parent.children[int(leaf.tokens[0])]
            self.n_bytes -= leaf.n_bytes
            self.n_evicted += 1
            if parent.children:
                continue
            if parent.parent is None:
                del self.roots[key]
            else:
                heapq.heappush(leaves, (parent.used, id(parent), parent, key))


def _within(match: Match) -> int:
    """How many tokens of its last node a match covers."""
    return match.length - sum(len(node.tokens) for node in match.nodes[:-1])
