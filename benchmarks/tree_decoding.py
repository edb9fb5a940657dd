"""A prototype of drafting with trees: a round forwards all nodes of a tree at once, for one greedy row.

Each node sees the known tokens and its ancestors (Miao et al. 2023, SpecInfer). A chain is a tree with one
branch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hfgen.caches.dynamic import GrowingCache
from hfgen.drafters.lookup import as_text, continuations

#: The node above the first drafted tokens: the last known token.
ROOT = -1

#: Earlier occurrences that are looked at for branches.
OCCURRENCES = 16


class Tree:
    """Drafted tokens as a prefix tree.

    ``lines``: of each node its ancestors, from the first drafted token on, and itself.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.lines: list[list[int]] = []
        self.children: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int) -> int:
        """The node for ``token`` behind ``parent``; a new one if there is none."""
        node = self.children.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.lines.append([*(self.lines[parent] if parent != ROOT else ()), node])
        return node


class Context:
    """A model, and its cache: of known tokens, and of nodes of a tree behind them."""

    def __init__(self, model: Any, cache: Any) -> None:
        self.model, self.cache = model, cache
        self.n_known = 0
        self.nodes: list[int] = []

    def forward(self, known: Tensor, tree: Tree, nodes: Sequence[int] = ()) -> Tensor:
        """Logits behind the last of the tokens ``known (n,)``, if any, and behind each of ``nodes``.

        Before the first nodes, all known tokens have to be forwarded, or be among ``known``.
        """
        n_cached, n_new = self.n_known + len(self.nodes), len(known) + len(nodes)
        self.n_known += len(known)
        self.nodes += nodes
        is_chain = not nodes or self.nodes == tree.lines[nodes[-1]]
        positions = torch.arange(n_cached, n_cached + n_new)
        mask = None
        if n_new > 1 or not is_chain:
            mask = torch.ones(n_new, n_cached + n_new, dtype=torch.bool).tril_(n_cached)
        if mask is not None and not is_chain:
            mask[len(known) :, self.n_known :] = self._seen(tree, nodes)
            depths = torch.tensor([len(tree.lines[node]) for node in nodes])
            positions[len(known) :] = self.n_known - 1 + depths
        tokens = known.new_tensor([tree.tokens[node] for node in nodes])
        outputs = self.model(
            input_ids=torch.cat([known, tokens])[None],
            attention_mask=None if mask is None else mask[None, None],
            position_ids=positions[None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=len(nodes) + bool(len(known)),
        )
        logits: Tensor = outputs.logits[0]
        return logits

    def _seen(self, tree: Tree, nodes: Sequence[int]) -> Tensor:
        """Which nodes of the cache each of ``nodes`` sees: ``(n, n in the cache)``."""
        columns = {node: column for column, node in enumerate(self.nodes)}
        rows = [[False] * len(columns) for _ in nodes]
        for row, node in zip(rows, nodes, strict=True):
            for seen in tree.lines[node]:
                row[columns[seen]] = True
        return torch.tensor(rows)

    def keep(self, path: Sequence[int]) -> None:
        """Nodes of ``path`` become known tokens, as far as they were forwarded; drop the others' columns."""
        columns = [self.nodes.index(node) for node in path if node in self.nodes]
        start, self.n_known = self.n_known, self.n_known + len(columns)
        if columns != [*range(len(columns))]:
            index = torch.tensor(columns) + start
            for layer in self.cache.layers:
                for states in (layer.keys, layer.values):
                    states[:, :, start : self.n_known] = states[:, :, index]
        if len(self.nodes) > len(columns):
            self.cache.crop(len(columns) - len(self.nodes))
        self.nodes = []


@dataclass
class Lookup:
    """What followed earlier occurrences of the last tokens: ``n_tokens``, and ``side`` in further branches."""

    n_tokens: int
    n_branches: int = 1
    side: int = 0
    max_ngram: int = 2

    def draft(self, known: Tensor, room: int) -> Tree:
        tree, text, n_found = Tree(), as_text(known), 0
        for begin in islice(continuations(text, self.max_ngram), OCCURRENCES):
            n, node, n_before = self.side if n_found else self.n_tokens, ROOT, len(tree.tokens)
            for token in text[begin : begin + min(n, room)]:
                node = tree.add(node, ord(token))
            n_found += len(tree.tokens) > n_before
            if n_found == self.n_branches:
                break
        return tree

    def keep(self, path: Sequence[int]) -> None:
        """It remembers nothing."""


class ByModel:
    """What a smaller model, or the first layers of the model, would say: up to ``n_tokens`` levels.

    A level has the likeliest token behind each of the ``n_lines`` likeliest nodes of the level before that are
    reached with a probability of ``go_on``; and of the ``n_next`` likeliest, those that are reached with ``worth``.
    """

    def __init__(
        self,
        model: Any,
        n_tokens: int,
        go_on: float = 0.0,
        n_next: int = 1,
        n_lines: int = 1,
        worth: float = 0.05,
    ) -> None:
        self.n_tokens, self.go_on, self.n_next = n_tokens, go_on, n_next
        self.n_lines, self.worth = n_lines, worth
        self.context = Context(model, GrowingCache(config=model.config))

    def draft(self, known: Tensor, room: int) -> Tree:
        tree, lines = Tree(), [(1.0, ROOT)]
        nodes: list[int] = []
        for _ in range(min(self.n_tokens, room)):
            logits = self.context.forward(known[self.context.n_known :], tree, nodes)
            likeliest = logits.softmax(dim=-1).topk(self.n_next)
            rows = zip(likeliest.values.tolist(), likeliest.indices.tolist(), strict=True)
            found = [
                (reached * share, tree.add(node, token))
                for (reached, node), (shares, tokens) in zip(lines, rows, strict=True)
                for rank, (share, token) in enumerate(zip(shares, tokens, strict=True))
                if not rank or reached * share >= self.worth
            ]
            lines = sorted(found, reverse=True)[: self.n_lines]
            lines = [line for line in lines if line[0] >= self.go_on]
            if not lines:
                break
            nodes = [node for _, node in lines]
        return tree

    def keep(self, path: Sequence[int]) -> None:
        self.context.keep(path)


def decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    *,
    make_drafter: Callable[[], Any],
    **model_kwargs: Any,
) -> Tensor:
    """Greedy decoding of one row ``input_ids (1, length)`` with drafts, as a ``custom_generate``."""
    target, drafter = Context(model, model_kwargs["past_key_values"]), make_drafter()
    length, end = input_ids.shape[1], generation_config.max_length
    ids = torch.cat([input_ids, input_ids.new_zeros(1, end - length)], dim=1)
    while True:
        tree = drafter.draft(ids[0, :length], end - length - 1)
        logits = target.forward(ids[0, target.n_known : length], tree, range(len(tree.tokens)))
        node: int | None = ROOT
        path: list[int] = []
        while node is not None:
            scores = logits_processor(ids[:, :length], logits[node + 1][None])
            ids[0, length] = token = int(scores.argmax())
            length += 1
            if stopping_criteria(ids[:, :length], None).all():
                return ids[:, :length]
            node = tree.children.get((node, token))
            path += [] if node is None else [node]
        target.keep(path)
        drafter.keep(path)
