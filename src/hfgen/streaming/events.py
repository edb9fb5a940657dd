"""What each row gained in a step, and where rows end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..decoding.results import Ending, context, skips_and_includes, text_of
from ..logits.logprobs import Logprobs, Recorder, TokenLogprob
from ..logits.stopping import FinishReason, StoppingCriteriaList
from ..logits.stopping.causes import UNKNOWN, Causes, first
from ..logits.stopping.strings import TextCriteria
from ..state.run import Run, Step, Strategy
from ..state.text import Detokenizer


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """What one row has gained.

    All events of a row together have the tokens of its sequence, from behind the prompt up to and
    including the one that ended it, and its text; padding never comes.
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

    A strategy may tell that by ``row_ends(run)``, asked after ``stop`` and ``settled``: for each row of
    the step's settled tokens the length at which it has ended, or ``None`` if it goes on. Of rows that
    have ended before, any length from there on will do. Without it, or if it returns ``None`` in place
    of the list, rows end where the stopping criteria tell by what was generated.
    """

    def __init__(self, run: Run, strategy: Strategy) -> None:
        self.run, self.strategy, run.is_streamed = run, strategy, True
        self.streams = getattr(strategy, "streams", True)
        self.prompt_length = run.ids.shape[1]
        #: Whether hypotheses are returned; only the best of each prompt is settled before the end.
        self.is_search = hasattr(strategy, "scored")
        self.n_rows = len(run.ids)
        #: Generated tokens that are settled of all rows.
        self.n_settled = 0
        self.rows: dict[int, Row] = {}
        self.recorder = next((o for o in run.observers if isinstance(o, Recorder)), None)
        if isinstance(run.criteria, StoppingCriteriaList):
            run.criteria.take_notes()

    def advance(self, step: Step) -> list[StreamEvent]:
        """The events of ``step``; none in a mode whose tokens are not final before the end."""
        if not self.streams:
            return []
        start = self.n_settled
        settled = step.tokens if step.settled is None else step.settled()
        self.n_settled += settled.shape[1]
        copies = int(self.run.config.num_return_sequences) if self.is_search else 1
        self.n_rows = len(settled) * copies
        logprobs = self.logprobs(settled, start)
        ends = getattr(self.strategy, "row_ends", lambda run: None)(self.run)
        events = []
        for place, tokens in enumerate(settled.tolist()):
            row = self.row(place * copies)
            if ends is None:
                end = self.end(row, tokens)
            else:
                end = None if ends[place] is None else ends[place] - self.prompt_length
            n = None if end is None else max(end - start, 0)
            entries = None if logprobs is None else logprobs[place]
            events += self.gain(row, tokens[:n], end, entries)
        return events

    def logprobs(self, settled: Tensor, start: int) -> Logprobs | None:
        """Of tokens ``(rows, n)`` from generated position ``start`` on, if they are asked for."""
        if self.recorder is None or settled.shape[1] == 0:
            return None
        if self.is_search:
            parents: Any = self.strategy.settled_parents  # type: ignore[attr-defined]
            return self.recorder.of_paths(settled, parents, start)
        return self.recorder.collected(start)

    def finish(self, result: dict[str, Any]) -> list[StreamEvent]:
        """The last events of rows that have had none: beams but the best, modes that do not stream."""
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
            entries = None if logprobs is None else logprobs[index]
            events += self.gain(row, tokens[n:end], end, entries and entries[n:])
        return events

    def row(self, index: int) -> Row:
        if index not in self.rows:
            skips, includes = skips_and_includes(self.run, index, self.n_rows)
            row = self.rows[index] = Row(index)
            if hasattr(self.run.tokenizer, "decode"):
                before = context(self.run, index, self.n_rows)
                row.detokenizer = Detokenizer(self.run.tokenizer, skips, before)
            if not includes:
                row.stops = [c for c in self.causes(row) if isinstance(c, TextCriteria)]
        return self.rows[index]

    def causes(self, row: Row) -> list[Any]:
        """What may have ended a row, up to the newest step."""
        causes = Causes.of_run(self.run, self.prompt_length)
        return causes.of(row.index, self.n_rows, self.is_search)

    def end(self, row: Row, tokens: list[int]) -> int | None:
        """After how many tokens a row ends by the criteria, with ``tokens`` behind those it has."""
        n, reason, _ = first(self.causes(row), row.ids + tokens)
        return n if reason is not UNKNOWN or self.run.finished else None

    def gain(
        self, row: Row, tokens: list[int], end: int | None, logprobs: list[TokenLogprob] | None
    ) -> list[StreamEvent]:
        """The event of ``tokens``, if there is one; the row ends after ``end`` tokens in all."""
        if row.has_ended:
            return []
        row.ids += tokens
        return self.event(row, tokens, end, logprobs)

    def event(
        self, row: Row, tokens: list[int], end: int | None, logprobs: list[TokenLogprob] | None
    ) -> list[StreamEvent]:
        """``gain`` of a row whose ids have got the ``tokens``."""
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
    #: What may yet take a piece of text back.
    stops: list[TextCriteria] = field(default_factory=list)
    #: Tokens whose text is known to stay, and characters that have been streamed.
    n_certain: int = 0
    n_streamed: int = 0

    def new_text(self) -> str:
        """The text that ``ids`` have made certain since the last time."""
        if self.detokenizer is None:
            return ""
        n_open = max((stop.n_open(self.ids) for stop in self.stops), default=0)
        n = max(len(self.ids) - n_open, self.n_certain)
        new = self.detokenizer.push(self.ids[self.n_certain : n])
        self.n_certain, self.n_streamed = n, self.n_streamed + len(new)
        return new
