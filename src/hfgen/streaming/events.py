"""What each row gained in a step, and where rows end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..decoding.outputs import Ending, spelling, text_of
from ..logits.logprobs import Recorder, TokenLogprob
from ..logits.stopping import FinishReason, StoppingCriteriaList
from ..logits.stopping.reasons import UNKNOWN, Causes, first
from ..logits.stopping.strings import TextCriteria
from ..state.run import Run, Step, Strategy
from ..state.text import Detokenizer


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """The new tokens of one row.

    The events of a row hold all generated tokens of its sequence, the one that ended it included, and its
    text; padding is left out.
    """

    #: Index of the row in the sequences that ``generate`` returns.
    row: int
    token_ids: tuple[int, ...]
    #: With ``tokenizer=``, the text that has become certain.
    text: str = ""
    #: With ``logprobs=`` or ``logprob_token_ids=``, an entry for each of the ``token_ids``.
    logprobs: tuple[TokenLogprob, ...] | None = None
    #: Why the row has ended: set in its last event, which may have no tokens.
    finish_reason: FinishReason | None = None


class Rows:
    """The rows of a call, and where they end.

    A strategy may have ``row_ends(run)``, which is called after ``stop`` and ``settled``. It returns, for
    each row of the step's settled tokens, the length at which it has ended, or ``None`` if it goes on; for
    rows that have ended before, any length from there on. Without it, or if it returns ``None`` in place of
    the list, the stopping criteria determine the end by the generated tokens.
    """

    def __init__(self, run: Run, strategy: Strategy, n_settled: int = 0) -> None:
        """``n_settled``: tokens at the end of ``run.ids`` that count as generated and have no events."""
        self.run, self.strategy, run.is_streamed = run, strategy, True
        self.prompt_length = run.ids.shape[1] - n_settled
        #: Whether hypotheses are returned; only the best of each prompt is settled before the end.
        self.is_search = hasattr(strategy, "scored")
        self.n_rows = len(run.ids)
        #: Generated tokens that are settled of all rows.
        self.n_settled = n_settled
        self.rows: dict[int, Row] = {}
        self.recorder = next((o for o in run.observers if isinstance(o, Recorder)), None)
        if isinstance(run.criteria, StoppingCriteriaList):
            run.criteria.take_notes()
        self.all_causes = Causes(run.criteria, self.prompt_length)

    def step(self, outputs: Any) -> list[StreamEvent]:
        """Choose the next tokens by ``outputs`` of the model; returns the new events."""
        step = self.strategy.step(self.run, outputs)
        self.strategy.stop(self.run)
        for observer in self.run.observers:
            observer.add(self.run, self.strategy, step)
        return self.advance(step)

    def advance(self, step: Step) -> list[StreamEvent]:
        """The events of ``step``; none in a mode whose tokens are not final before the end."""
        if not getattr(self.strategy, "streams", True):
            return []
        start = self.n_settled
        settled = step.tokens if step.settled is None else step.settled()
        self.n_settled += settled.shape[1]
        copies = int(self.run.config.num_return_sequences) if self.is_search else 1
        self.n_rows = len(settled) * copies
        logprobs: Any = None
        if self.recorder is not None and settled.shape[1]:
            if self.is_search:
                parents: Any = self.strategy.settled_parents  # type: ignore[attr-defined]
                logprobs = self.recorder.of_paths(settled, parents, start)
            else:
                logprobs = self.recorder.collected(start)
        ends = getattr(self.strategy, "row_ends", lambda run: None)(self.run)
        events = []
        for place, tokens in enumerate(settled.tolist()):
            row = self.row(place * copies)
            if ends is None:
                end = self.end(row, tokens)
            else:
                end = None if ends[place] is None else ends[place] - self.prompt_length
            events += self.gain(row, tokens, end, logprobs and logprobs[place])
        return events

    def finish(self, result: dict[str, Any]) -> list[StreamEvent]:
        """The last events of rows that were not streamed to their end: beams, and modes that do not stream."""
        rows = result["sequences"][:, self.prompt_length :].tolist()
        parents = result.get("beam_indices")
        self.n_rows, self.is_search = len(rows), parents is not None
        self.run.finished = True  # also if there was nothing to decode
        lengths = None if parents is None else (parents >= 0).sum(dim=1).tolist()
        logprobs = self.run.extras.get("logprobs")
        events = []
        for index, tokens in enumerate(rows):
            row = self.row(index)
            n = len(row.ids)
            end = self.end(row, tokens[n:]) if lengths is None else lengths[index]
            entries = logprobs and logprobs[index]
            events += self.gain(row, tokens[n:], end, entries and entries[n:])
        return events

    def row(self, index: int) -> Row:
        if index not in self.rows:
            skips, includes, before = spelling(self.run, index, self.n_rows)
            row = self.rows[index] = Row(index)
            if hasattr(self.run.tokenizer, "decode"):
                row.detokenizer = Detokenizer(self.run.tokenizer, skips, before)
            if not includes:
                row.stops = [c for c in self.causes(row) if isinstance(c, TextCriteria)]
        return self.rows[index]

    def causes(self, row: Row) -> list[Any]:
        """The criteria that may have ended a row, up to the newest step."""
        return self.all_causes.of(row.index, self.n_rows, self.is_search)

    def end(self, row: Row, tokens: list[int]) -> int | None:
        """The length at which the criteria end a row with ``tokens`` appended; ``None`` if it goes on."""
        n, reason, _ = first(self.causes(row), row.ids + tokens)
        return n if reason is not UNKNOWN or self.run.finished else None

    def gain(
        self, row: Row, tokens: list[int], end: int | None, logprobs: list[TokenLogprob] | None
    ) -> list[StreamEvent]:
        """Append ``tokens`` to a row that has not ended, up to its ``end``, and return its event."""
        if row.has_ended:
            return []
        if end is not None:
            tokens = tokens[: max(end - len(row.ids), 0)]
        row.ids += tokens
        return self.event(row, tokens, end, logprobs)

    def event(
        self, row: Row, tokens: list[int], end: int | None, logprobs: list[TokenLogprob] | None
    ) -> list[StreamEvent]:
        """The event of ``tokens``, which are in the row's ids, if any; it ends after ``end`` tokens in all."""
        row.has_ended = end is not None and len(row.ids) >= end
        if not tokens and not row.has_ended:
            return []
        entries = None if logprobs is None else tuple(logprobs[: len(tokens)])
        if not row.has_ended:
            return [StreamEvent(row.index, tuple(tokens), row.new_text(), entries)]
        causes, place = self.causes(row), (row.index, self.n_rows)
        ending = Ending.of(self.run, causes, *place, row.ids, is_end=True)
        text = ""
        if row.detokenizer is not None:
            text = text_of(self.run, row.index, ending, self.n_rows)[row.n_streamed :]
        return [StreamEvent(row.index, tuple(tokens), text, entries, ending.reason)]


@dataclass(slots=True)
class Row:
    """What has been streamed of one row."""

    index: int
    #: Generated tokens that have been streamed.
    ids: list[int] = field(default_factory=list)
    has_ended: bool = False
    detokenizer: Detokenizer | None = None
    #: Criteria that may still remove the end of the text.
    stops: list[TextCriteria] = field(default_factory=list)
    #: Tokens whose text is known to stay, and characters that have been streamed.
    n_certain: int = 0
    n_streamed: int = 0

    def new_text(self) -> str:
        """The text that has become certain since the last call."""
        if self.detokenizer is None:
            return ""
        n_open = max((stop.n_open(self.ids) for stop in self.stops), default=0)
        n = max(len(self.ids) - n_open, self.n_certain)
        new = self.detokenizer.push(self.ids[self.n_certain : n])
        self.n_certain, self.n_streamed = n, self.n_streamed + len(new)
        return new
