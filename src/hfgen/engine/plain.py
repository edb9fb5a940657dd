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

#: Index tensors that are kept: those of a few steps in which rows have joined or left.
MAX_INDICES = 256

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
            tokens, self.unwritten = self.unwritten, []
            self._append(self.decoding.run.ids.new_tensor([tokens]))

    def _append(self, tokens: Tensor) -> None:
        run, strategy = self.decoding.run, cast(Sample, self.decoding.strategy)
        run.ids = strategy.buffer.append(tokens)
        strategy.n_steps += tokens.shape[1]

    def take(self, token: int, on_device: Tensor) -> list[StreamEvent]:
        """Let ``token`` be the newest, which is in ``on_device (1, 1)``; what the request has gained."""
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
        #: Rows that were drawn for last, where they are after it, and the keys ``(rows,)`` of their next noise.
        self._drawn: list[tuple[PlainRow, int]] = []
        self._keys: Tensor | None = None

    def choose(self, rows: list[PlainRow], logits: Tensor) -> tuple[Tensor, list[int | Exception]]:
        """The next token of each row by ``logits (rows, vocab)``: ``(rows,)``, which are read at once.

        Of a request that is to end with an exception, the list has that.
        """
        failures: dict[int, Exception] = {}
        scores = self._processed(rows, logits.float(), failures)
        tokens, is_invalid = self._chosen(rows, scores)
        chosen: list[int | Exception] = []
        for i, (token, invalid) in enumerate(torch.stack([tokens, is_invalid.long()]).T.tolist()):
            failure = failures.get(i)
            if failure is None and invalid:
                failure = InvalidScoresError([0], rows[i].n_generated)
            chosen.append(token if failure is None else failure)
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
            own = logits[index]
            try:
                if row.kind is None:
                    own = row.processed(own)
                elif kind:
                    own = row.decoding.run.processors(row.decoding.run.ids, own)
                scores[index] = own.to(scores.dtype)  # of float64, as numpy's
            except Exception as error:  # of the request's own
                failures |= dict.fromkeys(places, error)
                scores[index] = 0.0
        return scores

    def _chosen(self, rows: list[PlainRow], scores: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens ``(rows,)``, and of which rows there was none to choose."""
        tokens = scores.argmax(dim=-1)  # NaN counts as the largest
        places = [i for i, row in enumerate(rows) if row.key is not None]
        index = self.indices.on(tokens.device, places)
        if places:
            keys = self._next_keys([rows[i] for i in places])
            own = scores if len(places) == len(rows) else scores[index]
            tokens[index] = seeds.perturbed(own, keys, -1).argmax(dim=-1)
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
