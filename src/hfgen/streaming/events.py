"""What the rows of a call have gained by a step, and where they end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..call import Run, Step, Strategy
from ..logprobs import Logprobs, Recorder, TokenLogprob
from ..text import Detokenizer


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """What one row has gained.

    All events of a row together have the tokens of its sequence, from behind the prompt up to and
    including the one that ended it; padding never comes.
    """

    #: Index of the row in the sequences that ``generate`` returns.
    row: int
    token_ids: tuple[int, ...]
    #: With ``tokenizer=``, the text that has become certain.
    text: str = ""
    #: With ``logprobs=`` or ``logprob_token_ids=``, an entry for each of the ``token_ids``.
    logprobs: tuple[TokenLogprob, ...] | None = None
    #: Why the row has ended: set in its last event, which may have no tokens.
    finish_reason: str | None = None


@dataclass(slots=True)
class _Row:
    """How far one row has been streamed."""

    tokens: list[int] = field(default_factory=list)
    has_ended: bool = False
    detokenizer: Detokenizer | None = None

    def text(self, tokens: list[int]) -> str:
        """What ``tokens``, the next ones of the row, make certain."""
        if self.detokenizer is None:
            return ""
        text = self.detokenizer.push(tokens)
        return text + self.detokenizer.finish() if self.has_ended else text


class Rows:
    """The rows of a call, and where they end.

    A strategy tells that by ``row_ends(run)``, asked after ``stop`` and ``settled``: for each row of the
    step's settled tokens the length at which it has ended, or ``None`` if it goes on. Of rows that
    have ended before, any length from there on will do. Without it, rows end at an EOS.
    """

    def __init__(self, run: Run, strategy: Strategy) -> None:
        self.run, self.strategy = run, strategy
        self.streams = getattr(strategy, "streams", True)
        eos = run.config._eos_token_tensor
        self.eos: set[int] = set() if eos is None else set(eos.tolist())
        #: Tokens that are settled of all rows, prompt included.
        self.prompt_length = self.length = run.ids.shape[1]
        self.rows: dict[int, _Row] = {}
        self.recorder = next((o for o in run.observers if isinstance(o, Recorder)), None)

    def row(self, index: int) -> _Row:
        if index not in self.rows:
            tokenizer = self.run.tokenizer
            self.rows[index] = _Row(
                detokenizer=None if tokenizer is None else Detokenizer(tokenizer)
            )
        return self.rows[index]

    def advance(self, step: Step) -> list[StreamEvent]:
        """The events of ``step``; none in a mode whose tokens are not final before the end."""
        if not self.streams:
            return []
        run, start = self.run, self.length
        settled = step.tokens if step.settled is None else step.settled()
        # Of beams, the best of each prompt.
        stride = 1 if len(settled) == len(run.ids) else int(run.config.num_return_sequences)
        tokens = settled.tolist()
        self.length += settled.shape[1]
        if hasattr(self.strategy, "row_ends"):
            ends = self.strategy.row_ends(run)
        else:
            ends = self.ends_by_eos(tokens, start)
        logprobs = self.logprobs(settled, start - self.prompt_length)
        events = []
        for place, (new, end) in enumerate(zip(tokens, ends, strict=True)):
            n = None if end is None else max(end - start, 0)
            entries = None if logprobs is None else logprobs[place]
            events.append(self.event(place * stride, new[:n], end, entries and entries[:n]))
        return [event for event in events if event is not None]

    def logprobs(self, settled: torch.Tensor, start: int) -> Logprobs | None:
        """Of tokens ``(rows, n)`` from generated position ``start`` on, if they are asked for."""
        if self.recorder is None or settled.shape[1] == 0:
            return None
        if (parents := getattr(self.strategy, "settled_parents", None)) is not None:
            return self.recorder.of_paths(settled, parents, start)
        return self.recorder.collected(start)

    def finish(self, result: dict[str, Any]) -> list[StreamEvent]:
        """The last events of rows that have had none: beams but the best, modes that do not stream."""
        rows = [row[self.prompt_length :] for row in result["sequences"].tolist()]
        if (parents := result.get("beam_indices")) is None:
            self.run.finished = True  # also if there was nothing to decode
            ends = self.ends_by_eos(rows, self.prompt_length)
        else:
            ends = (self.prompt_length + (parents >= 0).sum(dim=1)).tolist()
        logprobs = self.run.extras.get("logprobs")
        events = []
        for index, (tokens, end) in enumerate(zip(rows, ends, strict=True)):
            new = slice(len(self.row(index).tokens), (end or 0) - self.prompt_length)
            entries = None if logprobs is None else logprobs[index]
            events.append(self.event(index, tokens[new], end, entries and entries[new]))
        return [event for event in events if event is not None]

    def ends_by_eos(self, rows: list[list[int]], start: int) -> list[int | None]:
        """Where rows end that have tokens from ``start`` on, if the strategy does not tell."""
        is_over = self.run.finished
        return [
            next(
                (start + i for i, token in enumerate(row, 1) if token in self.eos),
                start + len(row) if is_over else None,
            )
            for row in rows
        ]

    def event(
        self,
        index: int,
        tokens: list[int],
        end: int | None,
        logprobs: list[TokenLogprob] | None,
    ) -> StreamEvent | None:
        """The event of ``tokens``, after which the row may have come to its ``end``."""
        row = self.row(index)
        if row.has_ended:
            return None
        row.tokens += tokens
        row.has_ended = end is not None and self.prompt_length + len(row.tokens) >= end
        if not tokens and not row.has_ended:
            return None
        reason = self.reason(row) if row.has_ended else None
        entries = None if logprobs is None else tuple(logprobs)
        return StreamEvent(index, tuple(tokens), row.text(tokens), entries, reason)

    def reason(self, row: _Row) -> str:
        if row.tokens and row.tokens[-1] in self.eos:
            return "eos"
        limit = self.run.criteria.max_length
        is_full = limit is not None and self.prompt_length + len(row.tokens) >= limit
        return "length" if is_full else "stop"
