"""Choosing the tokens of many calls at once, where little of a step is recorded.

Most requests of an engine, and rows of a session, are greedy or sampled and record at most
log-probabilities. For these, a step of each strategy would be a dozen small operations a call, and a read
of the device. Here all rows are read together; penalties and other processors that look at ids still run
for each call by itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from itertools import compress
from operator import or_
from typing import Any, cast

import torch
from torch import Tensor

from ..decoding.activations import Recorder as ActivationRecorder
from ..decoding.outputs import Recording, Results
from ..decoding.strategies.sample import Sample
from ..logits.logprobs import Recorder, TokenLogprob
from ..logits.logprobs.recorder import Position, PromptRecorder
from ..logits.logprobs.result import ALL, Measures, measure, token_logprobs
from ..logits.processors.lists import reads_scores_only
from ..logits.stopping.reasons import is_noted
from ..running.prefix.session import PrefixSession
from ..state import seeds
from .events import Rows, StreamEvent

#: Index tensors that are kept: those of a few steps in which rows have joined or left.
MAX_INDICES = 256

#: Observers that need only the first step of a call, which the request takes by itself, and its end.
OF_ENDS = (ActivationRecorder, PrefixSession, PromptRecorder, Results)


def is_light(observer: Any) -> bool:
    """Whether an observer takes nothing of a step but its tokens and their log-probabilities."""
    if type(observer) is Recording:
        return not observer.recorded
    if type(observer) is Recorder:  # neither the vocabulary, nor the ids that samplers left
        return not observer.has_support and observer.settings.n_top not in (None, ALL)
    return type(observer) in OF_ENDS


def kind_of(processors: Sequence[Any]) -> Hashable | None:
    """A key that is equal for lists of processors that do the same to scores; ``None``: equal to no other."""
    kind = []
    for processor in processors:
        values = vars(processor)
        is_simple = all(isinstance(value, float | int | None) for value in values.values())
        if not (reads_scores_only(processor) and is_simple):
            return None
        kind.append((type(processor), *values.items()))
    return tuple(kind)


class PlainRows:
    """The rows of a plain call: their tokens stay numbers until ``run.ids`` is read."""

    # Of a step; written by ``Choices.choose``.
    places: range  # of its rows among those of all plain calls
    failure: BaseException | None  # what a processor has raised: there are no tokens
    tokens: list[int]  # the next ones: an entry for each row
    newest: Tensor  # (n_rows,): the same, on the device
    is_invalid: list[bool]  # no token could be chosen: scores are NaN, or all ruled out
    measures: Measures | None  # if the call asks for log-probabilities
    logprobs: list[TokenLogprob] | None

    @classmethod
    def of(cls, events: Rows, kind: type[Sample] = Sample) -> PlainRows | None:
        """The rows of a call; ``None`` if its step is not that of ``kind``, or more of it is recorded."""
        run, strategy = events.run, events.strategy
        is_plain = (
            type(strategy) is kind
            and strategy.active is None
            and run.rows is None
            and run.scores is None
            and not run.config.output_metrics
            and all(map(is_light, run.observers))
            and not any(map(is_noted, run.criteria))
        )
        return cls(events) if is_plain else None

    def __init__(self, events: Rows) -> None:
        run, strategy = events.run, cast(Sample, events.strategy)
        self.run, self.strategy, self.events, self.n_rows = run, strategy, events, len(run.ids)
        self.newest = run.ids[:, -1]
        self.kind = kind_of(run.processors)
        #: Keys of their noise ``(n_rows,)``; ``None`` if they are greedy.
        self.keys = None if run.row_choice is None else run.row_choice.keys
        #: Columns of tokens that are not in ``run.ids`` yet.
        self.unwritten: list[list[int]] = []
        self.rows = [events.row(index) for index in range(self.n_rows)]
        self.causes = [events.causes(row) for row in self.rows]
        self.recorder = events.recorder
        self.pad = 0 if strategy.pad is None else int(strategy.pad)

    @property
    def n_generated(self) -> int:
        """Tokens of a row so far, padding included."""
        return self.run.ids.shape[1] + len(self.unwritten) - self.events.prompt_length

    def write(self) -> None:
        """Append the unwritten tokens to the ids."""
        if self.unwritten:
            columns, self.unwritten = self.unwritten, []
            self._append(self.run.ids.new_tensor(columns).T)

    def _append(self, tokens: Tensor) -> None:
        self.run.ids = torch.cat([self.run.ids, tokens], dim=1)
        self.strategy.n_steps += tokens.shape[1]

    def take(self) -> list[StreamEvent]:
        """Append the tokens that were chosen, and return the new events; rows that have ended get padding.

        Raises ``InvalidScoresError`` if no row has a token, and what a processor has raised.
        """
        if self.failure is not None:
            raise self.failure
        run, strategy = self.run, self.strategy
        tokens, on_device = self.tokens, self.newest
        has_ended = [row.has_ended for row in self.rows]
        if any(self.is_invalid):
            goes_on = ~on_device.new_tensor(has_ended, dtype=torch.bool)
            is_invalid = on_device.new_tensor(self.is_invalid, dtype=torch.bool)
            strategy.invalid.mark(is_invalid, self.n_generated, goes_on)
            strategy.invalid.steps()
            strategy.end_invalid()
        has_no_token = [*map(or_, has_ended, self.is_invalid)]
        if any(has_no_token) and strategy.is_padded:
            for index in compress(range(self.n_rows), has_no_token):
                tokens[index] = on_device[index] = self.pad
        if self.kind is None and not self.unwritten:  # the next step reads the ids
            self._append(on_device[:, None])
        else:
            self.unwritten.append(tokens)
        if self.recorder is not None and self.measures is not None:
            is_token = None
            if any(has_no_token):
                is_token = ~on_device.new_tensor(has_no_token, dtype=torch.bool)
            self.recorder.positions.append(Position(on_device, None, is_token, self.measures))
        events: list[StreamEvent] = []
        for index, row in enumerate(self.rows):
            if has_ended[index]:
                continue
            if self.is_invalid[index]:
                events += self.events.event(row, [], len(row.ids), None)
                continue
            row.ids.append(tokens[index])
            n = len(row.ids)
            ends = any(cause.reason(row.ids, n) is not None for cause in self.causes[index])
            entries = None if self.logprobs is None else [self.logprobs[index]]
            events += self.events.event(row, [tokens[index]], n if ends else None, entries)
        if any(event.finish_reason is not None for event in events):
            self.write()
            strategy.stop(run)  # criteria remember where rows have ended
            run.finished = all(row.has_ended for row in self.rows)
        return events


def grouped(keyed: Iterable[tuple[Hashable, PlainRows]]) -> list[list[PlainRows]]:
    """The rows of calls by their keys; those whose key is ``None`` are alone."""
    groups: dict[Hashable, list[PlainRows]] = {}
    for key, rows in keyed:
        groups.setdefault(id(rows) if key is None else key, []).append(rows)
    return [*groups.values()]


class Choices:
    """Chooses the next tokens of the plain calls of a batch, and keeps on the device what that takes."""

    def __init__(self) -> None:
        #: Index tensors ``(n,)`` that are copied to a device once, for all steps with the same rows.
        self._tensor = lru_cache(MAX_INDICES)(torch.tensor)
        #: Calls of the last draw with their number of generated tokens after it.
        self._drawn: list[tuple[PlainRows, int]] = []
        #: Keys ``(rows,)`` of their next noise.
        self._keys: Tensor | None = None

    def index(self, device: torch.device, places: Sequence[int]) -> Tensor:
        """``places`` as a tensor, which is not to be written to."""
        return self._tensor(tuple(places), device=device)

    def choose(self, calls: list[PlainRows], logits: Tensor) -> None:
        """Choose the next tokens of each call by ``logits (rows, vocab)``; ``PlainRows.take`` appends them."""
        n = 0
        for rows in calls:
            rows.places = range(n, n + rows.n_rows)
            n += rows.n_rows
            rows.failure = rows.measures = rows.logprobs = None
        logits = logits.float()
        scores = self._processed(calls, logits)
        tokens, is_invalid = self._chosen(calls, scores)
        self._measure(calls, tokens, logits, scores)
        numbers, flags = torch.stack([tokens, is_invalid.long()]).tolist()
        for rows in calls:
            part = slice(rows.places.start, rows.places.stop)
            rows.tokens, rows.newest = numbers[part], tokens[part]
            rows.is_invalid = [bool(flag) for flag in flags[part]]

    def _on(self, logits: Tensor, calls: list[PlainRows]) -> Tensor:
        """The places of the rows of ``calls``, as a tensor on the device of ``logits``."""
        return self.index(logits.device, [place for rows in calls for place in rows.places])

    def _processed(self, calls: list[PlainRows], logits: Tensor) -> Tensor:
        """Scores ``(rows, vocab)``: rows whose processors do the same go through them together."""
        if all(rows.kind == () for rows in calls):
            return logits
        scores = torch.empty_like(logits)
        for group in grouped((rows.kind, rows) for rows in calls):
            first, index = group[0], self._on(logits, group)
            group_scores = logits[index]
            try:
                if first.kind is None:  # its processors look at the ids
                    first.write()
                if first.kind != ():
                    group_scores = first.run.processors(first.run.ids, group_scores)
                scores[index] = group_scores.to(scores.dtype)  # a processor may return float64
            except BaseException as error:  # a processor of the caller, or a panic of its library
                if isinstance(error, KeyboardInterrupt):
                    raise
                for rows in group:
                    rows.failure = error
                scores[index] = 0.0
        return scores

    def _chosen(self, calls: list[PlainRows], scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens, and whether a row had none to choose: two tensors ``(rows,)``."""
        tokens = scores.argmax(dim=-1)  # NaN counts as the largest
        drawn = [rows for rows in calls if rows.keys is not None]
        index = self._on(scores, drawn)
        if drawn:
            places = [(rows, rows.n_generated) for rows in drawn]
            if self._keys is None or places != self._drawn:  # rows may have been in another batch
                keys = torch.cat([rows.keys for rows in drawn])  # type: ignore[misc]
                positions = [n for rows, n in places for _ in range(rows.n_rows)]
                self._keys = seeds.keys_at(keys, torch.tensor(positions, device=keys.device))
            self._drawn = [(rows, n + 1) for rows, n in places]
            # Keys ``(rows,)`` whose noise at position -1 is that of each row's next token.
            keys, self._keys = self._keys, seeds.keys_at(self._keys, 0)
            drawn_scores = scores if len(index) == len(scores) else scores[index]
            tokens[index] = seeds.perturbed(drawn_scores, keys, -1).argmax(dim=-1)
        best = scores.gather(1, tokens[:, None]).squeeze(1)
        is_invalid = best.isnan()
        if drawn:
            is_invalid[index] |= best[index] == -torch.inf
        return tokens, is_invalid

    def _measure(
        self, calls: list[PlainRows], tokens: Tensor, logits: Tensor, scores: Tensor
    ) -> None:
        """Measure the chosen ``tokens (rows,)``, at once for the calls that ask for the same."""
        asking = [(rows.recorder.settings, rows) for rows in calls if rows.recorder is not None]
        for group in grouped((settings.key, rows) for settings, rows in asking):
            index, settings = self._on(tokens, group), cast(Recorder, group[0].recorder).settings
            values = scores if settings.is_processed else logits
            values = values if len(index) == len(values) else values[index]
            asked_ids = settings.token_ids(len(index), tokens.device)
            measures = measure(values, tokens[index], settings, asked_ids)
            entries = token_logprobs(tokens[index], measures, settings.requests[0].token_ids)
            start = 0
            for rows in group:
                part = slice(start, start + rows.n_rows)
                rows.measures = Measures(*(column[part] for column in measures))
                rows.logprobs, start = entries[part], part.stop
