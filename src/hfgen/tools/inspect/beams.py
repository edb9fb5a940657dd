"""The tree of a beam search: the hypotheses after each step, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from ...decoding.strategies.beam import Beam as Search
from ...decoding.strategies.hypotheses import NEG_INF
from .records import Beam, Fate

NONE = NEG_INF / 2  # hypotheses below this score stand for none


@dataclass(slots=True)
class PromptTree:
    """The beams of one prompt after each step, and there the number of the beam that goes on in a row."""

    steps: list[list[Beam]] = field(default_factory=list)
    numbers: list[dict[int, int]] = field(default_factory=list)
    is_open: bool = True  # whether later steps may still change its result


class Tree:
    """Collects the beams of each prompt, step by step."""

    def __init__(self, strategy: Search) -> None:
        self.n_beams = strategy.beams
        self.prompts = [PromptTree() for _ in range(strategy.batch)]

    def add(self, run: Any, strategy: Search) -> None:
        """Note the hypotheses that run on, and those that have just ended; read behind ``stop``."""
        running, finished = strategy.running, strategy.finished
        has_new = finished.parents.shape[2] == running.parents.shape[2]
        is_open = strategy.is_open(run)[:, 0]
        for prompt, tree in enumerate(self.prompts):
            if not tree.is_open:
                continue
            rows_before = tree.numbers[-1] if tree.numbers else {}
            beams: list[Beam] = []
            numbers: dict[int, int] = {}
            for hypotheses in (running, finished) if has_new else (running,):
                parents = hypotheses.parents[prompt, :, -1].tolist()
                tokens = hypotheses.ids[prompt, :, -1].tolist()
                columns = parents, tokens, hypotheses.scores[prompt].tolist()
                is_new = finished.is_done[prompt].tolist()
                for row, (parent, token, score) in enumerate(zip(*columns, strict=True)):
                    if score <= NONE or (
                        hypotheses is finished and (not is_new[row] or parent < 0)
                    ):
                        continue
                    if hypotheses is running:
                        numbers[row] = len(beams)
                    number = rows_before.get(parent - prompt * self.n_beams)
                    fate: Fate = "open" if hypotheses is running else "finished"
                    beams.append(Beam(number, token, score, fate))
            tree.steps.append(beams)
            tree.numbers.append(numbers)
            tree.is_open = bool(is_open[prompt])

    def result(self, paths: Tensor, sequences: Tensor) -> tuple[tuple[tuple[Beam, ...], ...], ...]:
        """The beams with their fates, of ``sequences (returned, length)`` with ``paths (returned, n)``.

        ``paths`` has the row that scored each token, or -1 behind a sequence's end.
        """
        n_each = len(paths) // len(self.prompts)
        tokens = sequences[:, sequences.shape[1] - paths.shape[1] :].tolist()
        for index, (path, ids) in enumerate(zip(paths.tolist(), tokens, strict=True)):
            tree, first = self.prompts[index // n_each], index // n_each * self.n_beams
            last = sum(row >= 0 for row in path) - 1
            if last < 0:
                continue
            parent = tree.numbers[last - 1].get(path[last] - first) if last > 0 else None
            key = parent, ids[last]
            ended = [(b.parent, b.token_id) if b.fate != "open" else None for b in tree.steps[last]]
            number = ended.index(key) if key in ended else None
            for beams in reversed(tree.steps[: last + 1]):
                if number is not None:
                    beams[number] = replace(beams[number], fate="returned")
                    number = beams[number].parent
        for tree in self.prompts:
            for beams, later in pairwise(tree.steps):
                parents = {beam.parent for beam in later}
                for number, beam in enumerate(beams):
                    if beam.fate == "open" and number not in parents:
                        beams[number] = replace(beam, fate="died")
        return tuple(tuple(map(tuple, tree.steps)) for tree in self.prompts)
