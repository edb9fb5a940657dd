"""The tree of a beam search: the hypotheses after each step, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from ...decoding.strategies.beam import Beam as Search
from ...decoding.strategies.hypotheses import NEG_INF
from .records import Beam

NONE = NEG_INF / 2  # hypotheses below this score stand for none


@dataclass(slots=True)
class Node:
    """A hypothesis of a prompt after a step."""

    beam: Beam
    row: int | None  # its index among the prompt's rows, if it runs on


class Tree:
    """Collects the beams of each prompt, step by step."""

    def __init__(self, strategy: Search) -> None:
        self.n_beams, self.n_prompts = strategy.beams, strategy.batch
        #: Of each prompt, the nodes after each step.
        self.steps: list[list[list[Node]]] = [[] for _ in range(self.n_prompts)]
        #: Whether later steps may still change its result.
        self.is_open = [True] * self.n_prompts

    def add(self, run: Any, strategy: Search) -> None:
        """Note the hypotheses that run on, and those that have just ended; read behind ``stop``."""
        running, finished = strategy.running, strategy.finished
        n_steps = running.parents.shape[2]
        has_new = finished.parents.shape[2] == n_steps
        for prompt in range(self.n_prompts):
            if not self.is_open[prompt]:
                continue
            nodes = []
            found = [(running, list(range(self.n_beams)))]
            if has_new:
                ended = finished.is_done[prompt] & (finished.parents[prompt, :, -1] >= 0)
                found.append((finished, ended.nonzero().flatten().tolist()))
            for hypotheses, places in found:
                parents = (hypotheses.parents[prompt, :, -1] - prompt * self.n_beams).tolist()
                tokens = hypotheses.ids[prompt, :, -1].tolist()
                scores = hypotheses.scores[prompt].tolist()
                for place in places:
                    if scores[place] > NONE:
                        parent = self.number(prompt, parents[place])
                        fate = "open" if hypotheses is running else "finished"
                        beam = Beam(parent, tokens[place], scores[place], fate)  # type: ignore[arg-type]
                        nodes.append(Node(beam, place if hypotheses is running else None))
            self.steps[prompt].append(nodes)
        closed: Tensor | None = getattr(strategy, "is_closed", None)
        is_open = strategy.is_open(run)[:, 0] if closed is None else ~closed
        both = zip(self.is_open, is_open.tolist(), strict=True)
        self.is_open = [was and now for was, now in both]

    def number(self, prompt: int, row: int) -> int | None:
        """The number among the nodes of the last step of the one that went on in ``row``."""
        nodes = self.steps[prompt][-1] if self.steps[prompt] else []
        return next((n for n, node in enumerate(nodes) if node.row == row), None)

    def result(self, paths: Tensor, sequences: Tensor) -> tuple[tuple[tuple[Beam, ...], ...], ...]:
        """The beams with their fates, of ``sequences (returned, length)`` with ``paths (returned, n)``.

        ``paths`` has the row that scored each token, or -1 behind a sequence's end.
        """
        n_each = len(paths) // self.n_prompts
        tokens = sequences[:, sequences.shape[1] - paths.shape[1] :].tolist()
        for index, (path, ids) in enumerate(zip(paths.tolist(), tokens, strict=True)):
            rows = [row for row in path if row >= 0]
            self.mark(index // n_each, rows, ids[: len(rows)])
        for steps in self.steps:
            for nodes, later in pairwise(steps):
                going_on = {node.beam.parent for node in later}
                for number, node in enumerate(nodes):
                    if node.beam.fate == "open" and number not in going_on:
                        node.beam = replace(node.beam, fate="died")
        beams = [[tuple(node.beam for node in nodes) for nodes in each] for each in self.steps]
        return tuple(map(tuple, beams))

    def mark(self, prompt: int, rows: list[int], ids: list[int]) -> None:
        """Mark the beams that became the sequence whose tokens ``ids`` were scored in ``rows``."""
        steps, first = self.steps[prompt], prompt * self.n_beams
        for step, nodes in enumerate(steps[: len(rows)]):
            for node in nodes:
                if step < len(rows) - 1:
                    is_it = node.row == rows[step + 1] - first
                else:
                    is_it = node.row is None and node.beam.token_id == ids[step]
                    if is_it and step > 0:
                        parent = node.beam.parent
                        row = None if parent is None else steps[step - 1][parent].row
                        is_it = row == rows[step] - first
                if is_it:
                    node.beam = replace(node.beam, fate="returned")
