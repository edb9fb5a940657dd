"""Choosing the tokens of many rows at once, for requests that record nothing else.

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

from ..decoding.outputs import Recording
from ..decoding.results import Results
from ..decoding.strategies.base import InvalidScoresError
from ..decoding.strategies.sample import Sample
from ..logits.logprobs.prompt import PromptRecorder
from ..logits.processors.lists import reads_scores_only
from ..logits.stopping.causes import is_noted
from ..running.prefix.session import PrefixSession
from ..state import seeds
from ..streaming import StreamEvent
from .decoding import Decoding
from .errors import as_exception

#: Index tensors that are kept: those of a few steps in which rows have joined or left.
MAX_INDICES = 256

#: Observers that need only the first step of a call, which the request takes by itself, and its end.
OF_ENDS = (PrefixSession, PromptRecorder, Recording, Results)


def is_plain(decoding: Decoding) -> bool:
    """Whether a request has one row, and nothing of a step is recorded but its token."""
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
    """A key that is equal for lists of processors that do the same to scores; ``None``: equal to no other."""
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
    """The row of a plain request: its tokens stay numbers until ``run.ids`` is read."""

    decoding: Decoding
    kind: tuple[Any, ...] | None
    #: Key of its noise ``(1,)``; ``None`` if it is greedy.
    key: Tensor | None
    #: Tokens that are not in ``run.ids`` yet.
    unwritten: list[int]
    causes: list[Any]

    @classmethod
    def of(cls, decoding: Decoding) -> PlainRow | None:
        """The row of a request, or ``None`` if the request is not plain."""
        if not is_plain(decoding):
            return None
        run, rows = decoding.run, decoding.rows
        key = None if run.row_choice is None else run.row_choice.keys
        return cls(decoding, kind_of(run.processors), key, [], rows.causes(rows.row(0)))

    @property
    def n_generated(self) -> int:
        return len(self.decoding.rows.row(0).ids)

    def write(self) -> None:
        """Append the unwritten tokens to the ids."""
        if self.unwritten:
            tokens, self.unwritten = self.unwritten, []
            self._append(self.decoding.run.ids.new_tensor([tokens]))

    def _append(self, tokens: Tensor) -> None:
        run, strategy = self.decoding.run, cast(Sample, self.decoding.strategy)
        run.ids = strategy.buffer.append(tokens)
        strategy.n_steps += tokens.shape[1]

    def take(self, token: int, on_device: Tensor) -> list[StreamEvent]:
        """Append ``token`` (also on the device as ``on_device (1, 1)``) and return the request's new events."""
        if self.kind is None and not self.unwritten:  # the next step reads the ids
            self._append(on_device)
        else:
            self.unwritten.append(token)
        rows = self.decoding.rows
        row = rows.row(0)
        row.ids.append(token)
        n = len(row.ids)
        has_ended = any(cause.reason(row.ids, n) is not None for cause in self.causes)
        if has_ended:
            self.write()
            # Criteria remember where rows have ended.
            self.decoding.strategy.stop(self.decoding.run)
            self.decoding.run.finished = True
        return rows.event(row, [token], n if has_ended else None, None)


class Indices:
    """Index tensors ``(n,)`` that are copied to a device once, for all steps with the same rows."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}

    def on(self, device: torch.device, places: Sequence[int]) -> Tensor:
        """``places`` as a tensor, which is not to be written to."""
        key = (device, tuple(places))
        if key not in self._tensors:
            if len(self._tensors) >= MAX_INDICES:
                self._tensors.clear()
            self._tensors[key] = torch.tensor(places, device=device)
        return self._tensors[key]


class Choices:
    """Chooses the next tokens of the plain rows of a batch, and keeps on the device what that takes."""

    def __init__(self) -> None:
        self.indices = Indices()
        #: Rows of the last draw with their number of generated tokens after it.
        self._drawn: list[tuple[PlainRow, int]] = []
        #: Keys ``(rows,)`` of their next noise.
        self._keys: Tensor | None = None

    def choose(self, rows: list[PlainRow], logits: Tensor) -> tuple[Tensor, list[int | Exception]]:
        """The next tokens ``(rows,)`` by ``logits (rows, vocab)``, and the same as numbers, in one read.

        The list has an exception in place of the token of a request that ends with it.
        """
        failures: dict[int, Exception] = {}
        scores = self._processed(rows, logits.float(), failures)
        tokens, is_invalid = self._chosen(rows, scores)
        chosen: list[int | Exception] = []
        for i, (token, invalid) in enumerate(torch.stack([tokens, is_invalid.long()]).T.tolist()):
            if invalid and i not in failures:
                failures[i] = InvalidScoresError([0], rows[i].n_generated)
            chosen.append(failures.get(i, token))
        return tokens, chosen

    def _processed(
        self, rows: list[PlainRow], logits: Tensor, failures: dict[int, Exception]
    ) -> Tensor:
        """Scores ``(rows, vocab)``: rows whose processors do the same go through them together."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for i, row in enumerate(rows):
            groups.setdefault((i,) if row.kind is None else row.kind, []).append(i)
        if list(groups) == [()]:
            return logits
        scores = torch.empty_like(logits)
        for kind, places in groups.items():
            row, index = rows[places[0]], self.indices.on(logits.device, places)
            group_scores = logits[index]
            try:
                if row.kind is None:  # its processors look at the ids
                    row.write()
                if kind:
                    run = row.decoding.run
                    group_scores = run.processors(run.ids, group_scores)
                scores[index] = group_scores.to(scores.dtype)  # a processor may return float64
            except BaseException as error:  # a processor of the caller, or a panic of its library
                if isinstance(error, KeyboardInterrupt):
                    raise
                failures |= dict.fromkeys(places, as_exception(error))
                scores[index] = 0.0
        return scores

    def _chosen(self, rows: list[PlainRow], scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens, and whether a row had none to choose: two tensors ``(rows,)``."""
        tokens = scores.argmax(dim=-1)  # NaN counts as the largest
        places = [i for i, row in enumerate(rows) if row.key is not None]
        index = self.indices.on(tokens.device, places)
        if places:
            keys = self._next_keys([rows[i] for i in places])
            drawn_scores = scores if len(places) == len(rows) else scores[index]
            tokens[index] = seeds.perturbed(drawn_scores, keys, -1).argmax(dim=-1)
        best = scores.gather(1, tokens[:, None]).squeeze(1)
        is_invalid = best.isnan()
        if places:
            is_invalid[index] |= best[index] == -torch.inf
        return tokens, is_invalid

    def _next_keys(self, drawn: list[PlainRow]) -> Tensor:
        """Keys ``(rows,)`` whose noise at position -1 is that of each row's next token."""
        places = [(row, row.n_generated) for row in drawn]
        if self._keys is None or places != self._drawn:  # rows may have been in another batch
            keys = torch.cat([row.key for row in drawn])  # type: ignore[misc]
            positions = torch.tensor([n for _, n in places], device=keys.device)
            self._keys = seeds.keys_at(keys, positions)
        self._drawn = [(row, n + 1) for row, n in places]
        keys, self._keys = self._keys, seeds.keys_at(self._keys, 0)
        return keys
