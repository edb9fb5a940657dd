"""Rows of many requests that choose their tokens at once, where nothing but the token is kept of a step.

Most requests are greedy or sampled, without log-probabilities. For these, a step of each strategy would
be a dozen small operations a row, and a read of the device. Here all rows are read together; penalties
and other processors that look at ids still run for each row by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from .. import seeds
from ..logprobs.prompt import PromptRecorder
from ..outputs import Recording
from ..prefix.session import PrefixSession
from ..processors.lists import reads_scores_only
from ..results import Results
from ..stopping.causes import is_noted
from ..strategies.base import InvalidScoresError
from ..strategies.sample import Sample
from ..streaming import StreamEvent
from .decoding import Decoding

#: Observers that want nothing of a step but its first one, which the request takes by itself.
OF_ENDS = (PrefixSession, PromptRecorder, Recording, Results)


def is_plain(decoding: Decoding) -> bool:
    """Whether a request has one row, of which a step leaves nothing but a token."""
    run = decoding.run
    return (
        type(decoding.strategy) is Sample
        and decoding.n_rows == 1
        and run.rows is None
        and run.scores is None
        and not decoding.recording.recorded
        and not run.config.output_metrics
        and all(type(observer) in OF_ENDS for observer in run.observers)
        and not any(map(is_noted, run.criteria))
    )


def kind_of(processors: Sequence[Any]) -> tuple[Any, ...] | None:
    """What two lists of processors have in common that do the same to scores; ``None``: no other does."""
    kind = []
    for processor in processors:
        values = vars(processor)
        is_simple = all(isinstance(value, float | int | None) for value in values.values())
        if not (reads_scores_only(processor) and is_simple):
            return None
        kind.append((type(processor), *values.items()))
    return tuple(kind)


@dataclass(eq=False, slots=True)
class PlainRow:
    """The row of such a request: its tokens are numbers until somebody has to see them as ids."""

    decoding: Decoding
    kind: tuple[Any, ...] | None
    #: Key of its noise ``(1,)``; ``None`` if it is greedy.
    key: Tensor | None
    #: Tokens that are not in ``run.ids`` yet.
    unwritten: list[int]
    causes: list[Any]

    @classmethod
    def of(cls, decoding: Decoding) -> PlainRow:
        run, rows = decoding.run, decoding.rows
        key = None if run.row_choice is None else run.row_choice.keys
        return cls(decoding, kind_of(run.processors), key, [], rows.causes(rows.row(0)))

    @property
    def n_generated(self) -> int:
        return len(self.decoding.rows.row(0).ids)

    def processed(self, logits: Tensor) -> Tensor:
        """Scores ``(1, vocab)`` by processors that look at the ids."""
        self.write()
        return self.decoding.run.processors(self.decoding.run.ids, logits)

    def write(self) -> None:
        """Put what was chosen behind the ids."""
        if self.unwritten:
            run, strategy = self.decoding.run, cast(Sample, self.decoding.strategy)
            run.ids = strategy.buffer.append(run.ids.new_tensor([self.unwritten]))
            strategy.n_steps += len(self.unwritten)
            self.unwritten = []

    def take(self, token: int) -> list[StreamEvent]:
        """Let ``token`` be the newest; what the request has gained."""
        self.unwritten.append(token)
        rows = self.decoding.rows
        row = rows.row(0)
        row.ids.append(token)
        n = len(row.ids)
        has_ended = any(cause.reason(row.ids, n) is not None for cause in self.causes)
        if has_ended:
            self.write()
            self.decoding.strategy.stop(
                self.decoding.run
            )  # criteria remember where rows have ended
            self.decoding.run.finished = True
        return rows.event(row, [token], n if has_ended else None, None)


def choose(rows: list[PlainRow], logits: Tensor) -> list[int | Exception]:
    """The next token of each row by ``logits (rows, vocab)``; or what its request is to end with."""
    failures: dict[int, Exception] = {}
    scores = _processed(rows, logits.float(), failures)
    tokens, is_invalid = _chosen(rows, scores)
    chosen: list[int | Exception] = []
    for i, (token, invalid) in enumerate(torch.stack([tokens, is_invalid.long()]).T.tolist()):
        failure = failures.get(i)
        if failure is None and invalid:
            failure = InvalidScoresError([0], rows[i].n_generated)
        chosen.append(token if failure is None else failure)
    return chosen


def _processed(rows: list[PlainRow], logits: Tensor, failures: dict[int, Exception]) -> Tensor:
    """Scores ``(rows, vocab)``: rows whose processors do the same go through them together."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault((i,) if row.kind is None else row.kind, []).append(i)
    if list(groups) == [()]:
        return logits
    scores = torch.empty_like(logits)
    for kind, places in groups.items():
        row = rows[places[0]]
        try:
            if row.kind is None:
                scores[places] = row.processed(logits[places])
            elif kind:
                scores[places] = row.decoding.run.processors(row.decoding.run.ids, logits[places])
            else:
                scores[places] = logits[places]
        except Exception as error:  # of the request's own
            failures |= dict.fromkeys(places, error)
            scores[places] = 0.0
    return scores


def _chosen(rows: list[PlainRow], scores: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens ``(rows,)``, and of which rows there was none to choose."""
    drawn = [i for i, row in enumerate(rows) if row.key is not None]
    tokens = scores.argmax(dim=-1)  # NaN counts as the largest
    if drawn:
        keys = torch.cat([rows[i].key for i in drawn])  # type: ignore[misc]
        positions = torch.tensor([rows[i].n_generated for i in drawn], device=keys.device)
        own = scores if len(drawn) == len(rows) else scores[drawn]
        tokens[drawn] = seeds.perturbed(own, seeds.keys_at(keys, positions), -1).argmax(dim=-1)
    best = scores.gather(1, tokens[:, None]).squeeze(1)
    is_invalid = best.isnan()
    if drawn:
        is_invalid[drawn] |= best[drawn] == -torch.inf
    return tokens, is_invalid
