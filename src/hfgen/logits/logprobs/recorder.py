"""An observer of ``loop.drive`` that records the requested log-probabilities of each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...state.run import Run, Step, Strategy
from .result import Logprobs, Measures, measure
from .settings import ALL, LogprobRequest, Settings, mode_of


@dataclass(frozen=True, slots=True)
class Position:
    """One generated position with ``m`` tokens: one of each row, or those that beams may return."""

    tokens: Tensor  # (m,)
    rows: Tensor | None  # (m,): the rows that scored them; ``None`` for all in order
    is_token: Tensor | None  # (m,): and no padding; ``None`` for all
    measures: Measures  # top and asked ones are those of all rows
    #: ``(n, 2)``: rows and tokens that processors left, with ``logprobs_support``.
    support: Tensor | None = None


class Recorder:
    """Collects ``logprobs``: of each step only ``(rows, k)`` numbers, left on the device.

    Raw are the model's own logits: of beams before the search adds its scores, of DoLa the last
    layer's, of contrastive search before similarity counts, of drafted tokens the target model's.
    Processed are the scores that processors return: for DoLa, of the contrast; for beams, of
    log-probabilities, which are not normalised again in ``"processed_logits"``.
    """

    def __init__(self, run: Run) -> None:
        requests = [LogprobRequest.of(config) for config in run.configs]
        self.settings, self.n_rows = Settings(requests, mode_of(run.config)), len(run.ids)
        self.nothing = run.ids[:, :0]
        self.has_support = bool(getattr(run.config, "logprobs_support", None))
        self.asked_ids = self.settings.token_ids(len(run.ids), run.ids.device)
        self.positions: list[Position] = []

    @property
    def is_narrow(self) -> bool:
        """Whether each position has few values: neither the vocabulary, nor the ids that samplers left."""
        return not self.has_support and self.settings.n_top not in (None, ALL)

    def add(self, run: Run, strategy: Strategy, step: Step) -> None:
        """Measure the tokens of a step."""
        name = "scores" if self.settings.is_processed else "logits"
        scores: Any = getattr(step, name)
        if scores is None:
            raise ValueError(
                f"`logprobs` need `Step.{name}`, which {type(strategy).__name__} does not set."
            )
        if (scored := getattr(strategy, "scored", None)) is not None:
            rows, tokens = scored()
            measures = measure(scores[0], tokens, self.settings, self.asked_ids, rows)
            support = self.support(strategy, step, 0, self.n_rows)
            self.positions.append(Position(tokens, rows, None, measures, support))
            return
        is_token_of = getattr(strategy, "is_token", None)
        is_token = None if is_token_of is None else is_token_of(run, step)
        for place, tokens in enumerate(step.tokens.unbind(dim=1)):
            # A model with guidance of its own scores each row twice: first with its prompt.
            measures = measure(scores[place][: len(tokens)], tokens, self.settings, self.asked_ids)
            is_counted = None if is_token is None else is_token[:, place]
            support = self.support(strategy, step, place, len(tokens))
            self.positions.append(Position(tokens, None, is_counted, measures, support))

    def support(self, strategy: Strategy, step: Step, place: int, n_rows: int) -> Tensor | None:
        """``(n, 2)``: rows and tokens that processors left at a position, with ``logprobs_support``."""
        if not self.has_support:
            return None
        if step.scores is None:
            raise ValueError(
                f"`logprobs_support` needs `Step.scores`, which {type(strategy).__name__} does not set."
            )
        return (step.scores[place][:n_rows] > -torch.inf).nonzero()

    def finish(self, run: Run, strategy: Strategy, result: dict[str, Tensor | None]) -> None:
        """Set ``output.logprobs`` to those of the returned sequences."""
        paths: Any = result.get("beam_indices")
        sequences: Any = result["sequences"]
        run.extras["logprobs"] = (
            self.collected() if paths is None else self.of_paths(sequences, paths)
        )

    def collected(self, start: int = 0) -> Logprobs:
        """Log-probabilities of all rows from generated position ``start`` on; not for beams."""
        if not (positions := self.positions[start:]):
            return Logprobs.empty(self.nothing, self.asked_ids, self.settings)
        tokens = torch.stack([p.tokens for p in positions], dim=1)
        is_token = torch.ones_like(tokens, dtype=torch.bool)
        for place, position in enumerate(positions):
            if position.is_token is not None:
                is_token[:, place] = position.is_token
        measures = _stacked([p.measures for p in positions])
        support = [(p.support, None) for p in positions] if self.has_support else None
        return Logprobs.of(
            tokens, is_token, measures, self.asked_ids, self.settings, support=support
        )

    def of_paths(self, sequences: Tensor, paths: Tensor, start: int = 0) -> Logprobs:
        """Log-probabilities of the last ``n`` tokens of ``sequences (returned, length)``.

        The rows ``paths (returned, n)`` scored them, from generated position ``start`` on.
        """
        if paths.shape[1] == 0:
            return Logprobs.empty(paths, self.asked_of(len(paths)), self.settings)
        is_token = paths >= 0
        rows = paths.clamp(min=0).long()
        tokens = sequences[:, sequences.shape[1] - paths.shape[1] :]
        positions = self.positions[start : start + paths.shape[1]]
        measures = _stacked(
            [_at(p, tokens[:, place], rows[:, place]) for place, p in enumerate(positions)]
        )
        asked_ids = self.asked_of(len(paths))
        support = None
        if self.has_support:
            support = [(p.support, rows[:, place]) for place, p in enumerate(positions)]
        return Logprobs.of(tokens, is_token, measures, asked_ids, self.settings, support=support)

    def asked_of(self, n: int) -> Tensor | None:
        """``(n, m)``: the ids that ``n`` returned sequences ask for, the same in all rows of a prompt."""
        if self.asked_ids is None:
            return None
        rows = torch.arange(n, device=self.asked_ids.device) * self.n_rows // n
        return self.asked_ids[rows]


def _at(position: Position, tokens: Tensor, rows: Tensor) -> Measures:
    """The measures of ``tokens (n,)`` by the scores of ``rows (n,)``."""
    measures, scored_rows = position.measures, position.rows
    if scored_rows is None:
        scored_rows = torch.arange(len(position.tokens), device=tokens.device)
    is_same = (scored_rows == rows[:, None]) & (position.tokens == tokens[:, None])
    index = is_same.int().argmax(dim=1)
    # A token that a caller's processor wrote into the ids was never scored.
    logprobs = measures.logprobs[index].masked_fill(~is_same.any(dim=1), torch.nan)
    of_rows = (column[rows] for column in measures[2:])  # of top and asked ids
    return Measures(logprobs, measures.ranks[index], *of_rows)


def _stacked(measures: list[Measures]) -> Measures:
    """``(n, …)`` of each position as ``(n, positions, …)``."""
    return Measures(*(torch.stack(column, dim=1) for column in zip(*measures, strict=True)))
