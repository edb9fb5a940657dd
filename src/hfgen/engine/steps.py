"""One step of the engine: finished rows leave, prompts are forwarded, rows join, and each row decodes a token."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

from .. import families
from ..logits.stopping import FinishReason
from ..memory.batch import Batch
from ..settings.kinds import is_zero
from ..streaming import StreamEvent
from ..streaming.plain import PlainRows
from .classes import Classes
from .decoding import Decoding
from .errors import DoesNotFitError, as_exception
from .joined import DraftingRows, JoinedRows
from .memory import Memory, make_way, put_back
from .request import EngineEvent, EngineRequest, EngineStats, keeps_states
from .scheduler import Chunk, Scheduler

#: A prompt shares a forward with longer ones if it has at least this share of the longest's tokens.
SHORTEST = 0.75

CANCELLED, TIMEOUT, ERROR = map(FinishReason, ("cancelled", "timeout", "error"))


class Steps:
    """The requests of an engine that are not done, and what a step does with them."""

    def __init__(self, model: Any, scheduler: Scheduler, memory: Memory) -> None:
        self.model, self.scheduler, self.memory = model, scheduler, memory
        self.stats = EngineStats()
        #: Batches of decoding rows: for each form of caches, and there for rows of similar length.
        self.joined: list[JoinedRows] = []
        self.classes = Classes(model, memory)
        self.requests: dict[str, EngineRequest] = {}
        self.lock = Lock()
        #: Some were added since the model was last looked at, which takes 1 ms.
        self.has_new_requests = False
        self.events: list[EngineEvent] = []

    def enter(self, request: EngineRequest, now: float) -> None:
        """Queue a request; from any thread. Raises ``QueueFullError`` and ``DoesNotFitError``."""
        with self.lock:
            self.has_new_requests = True
            self.scheduler.add(request, now)
            self.requests[request.id] = request

    @torch.inference_mode(False)  # one that another step goes on with
    @torch.no_grad()
    def step(self) -> list[EngineEvent]:
        """Make one step and return the new events of all sequences; raises as ``Engine.step``."""
        try:
            self._step()
        except BaseException as error:  # interrupted: what was forwarded and chosen is not known
            self.joined = []
            for request in list(self.requests.values()):
                if request.state != "waiting":
                    self.end(request, error)
            raise
        return self.taken_events()

    def taken_events(self) -> list[EngineEvent]:
        """Return the new events, and forget them."""
        events, self.events = self.events, []
        return events

    def _step(self) -> None:
        self.stats.n_steps += 1
        self.take_out()
        if self.scheduler.optimistic:
            make_way(self)
        with self.lock:
            if self.has_new_requests:
                self.scheduler.one_at_a_time = keeps_states(self.model)
                self.has_new_requests = False
            plan = self.scheduler.plan(time.monotonic())
        plan = [chunk for chunk in plan if not put_back(self, chunk)]
        joined = list(self.joined)
        alone = [request for request in self.scheduler.decoding if request.stays]
        self._forward_prompts(plan)
        for rows in joined:
            self._decode(rows)
        for request in alone:
            if (decoding := request.decoding) is not None:
                with self.failures_of(request):
                    self._gain(request, decoding.advance())
        self.classes.arrange(self.joined)

    def take_out(self) -> None:
        """End the requests that were cancelled, or whose time is over."""
        now = time.monotonic()
        for request in list(self.requests.values()):
            if request.deadline is not None and now >= request.deadline:
                request.ends_as = request.ends_as or TIMEOUT
            if request.ends_as is not None:
                self.end(request)

    # ------------------------------------------------------------ prompts

    def _forward_prompts(self, plan: list[Chunk]) -> None:
        """Forward the chunks of this step; whole prompts of similar length together."""
        chunks: list[Chunk] = []
        for chunk in plan:
            request = chunk.item
            with self.failures_of(request):
                decoding = request.decoding
                if request.times.queue_time is None:  # it begins
                    request.times.queue_time = time.monotonic() - request.arrived
                    decoding = request.prepare(self.model)
                    request.stays = not decoding.joins
                    request.n_done = min(decoding.begin(), request.n_tokens - 1)
                if is_zero(decoding.run.config.max_new_tokens):
                    self.end(request)
                else:
                    chunks.append(chunk)
        groups: list[list[Chunk]] = []
        for chunk in sorted(chunks, key=lambda chunk: -chunk.n_tokens):
            longest = groups[-1][0] if groups else chunk
            is_near = chunk.n_tokens >= SHORTEST * longest.n_tokens and chunk is not longest
            if is_near and self._may_share(chunk) and self._may_share(longest):
                groups[-1].append(chunk)
            else:
                groups.append([chunk])
        for group in groups:
            if len(group) > 1:
                self._forward_group([chunk.item for chunk in group])
            else:
                self._forward_chunk(group[0].item, group[0].n_tokens)

    def _may_share(self, chunk: Chunk) -> bool:
        """Whether a prompt may be forwarded together with others."""
        is_whole = chunk.n_tokens == chunk.item.n_tokens
        hides_padding = self.classes.hides.get(False, False)
        return is_whole and hides_padding and chunk.item.decoding.may_share_prompt

    def _forward_group(self, requests: list[EngineRequest]) -> None:
        """Forward whole prompts at once; their rows join those that decode."""
        decodings: list[Any] = [request.decoding for request in requests]
        try:
            rows, outputs = JoinedRows.of_prompts(decodings)
        except Exception as error:
            for request in requests:
                self.end(request, error)
            return
        self.joined.append(rows)
        for request, decoding, own_outputs in zip(requests, decodings, outputs, strict=True):
            self.stats.prefill_tokens += request.n_tokens
            self.scheduler.advance(request, request.n_tokens)
            with self.failures_of(request):
                self._gain(request, decoding.rows.step(own_outputs))
        if len(rows):
            for decoding in rows.members:
                decoding.plain = PlainRows.of(decoding.rows)
            rows.append_newest()
            rows.trim()
            self.classes.join_nearest(rows, self.joined)

    def _forward_chunk(self, request: EngineRequest, n_tokens: int) -> None:
        """Forward a part of a prompt; after the last one, its rows join those that decode."""
        decoding = request.prepare(self.model)
        run = decoding.run
        with self.failures_of(request):
            if not decoding.joins:
                self.scheduler.advance(request, request.n_left)
                return
            n = min(n_tokens, request.n_left)
            is_last = n == request.n_left
            events = decoding.prefill(n, is_last)
            self.stats.prefill_tokens += n
            self.scheduler.advance(request, n)
            if is_last:
                if not self.memory.measured:
                    self._measure(decoding)
                self._gain(request, events)
                if not run.finished:
                    if (session := decoding.call.prefix_session) is not None:
                        session.detach()
                    decoding.check()
                    decoding.plain = PlainRows.of(decoding.rows)
                    self.place(decoding, Batch(run.ids.clone(), run.model_kwargs, run.model))

    def _measure(self, decoding: Decoding) -> None:
        """Measure a row's bytes on the first cache; end waiting requests that can never fit."""
        if (cache := families.given_cache(decoding.run.model_kwargs)) is None:
            return
        self.memory.measure(cache)
        with self.lock:
            for request in self.requests.values():
                if (other := request.decoding) is not None:
                    lengths = other.longest, min(other.length + 1, other.longest)
                    bytes_at = [self.memory.needed(request.n_rows, n) for n in lengths]
                    self.scheduler.resize(request, *bytes_at)
            too_large, limit = self.scheduler.never_fit(), self.scheduler.max_bytes
        for request in too_large:
            text = f"the request needs {request.n_bytes:,.0f} bytes; there are {limit:,.0f}"
            self.end(request, DoesNotFitError(text))

    def place(self, decoding: Decoding, batch: Batch) -> None:
        """Add the rows of a request, those of ``batch``, to a batch of their form or to a new one."""
        rows = (DraftingRows if decoding.drafts else JoinedRows)([decoding], batch)
        self.joined.append(rows)
        self.classes.join_nearest(rows, self.joined)

    # ------------------------------------------------------------ tokens

    def _decode(self, rows: JoinedRows) -> None:
        """Forward the newest token of each row; each request chooses its next tokens."""
        for decoding in rows.members if rows.drafts else ():
            with self.failures_of(decoding.request):
                decoding.strategy.make_draft(decoding.run, decoding.length)
        if not len(rows):
            return
        self.stats.n_forwards += 1
        try:
            outputs = rows.forward()
        except Exception as error:
            for decoding in rows.members:
                self.end(decoding.request, error)
            return
        n_filled = sum(decoding.n_rows * decoding.length for decoding in rows.members)
        self.stats.n_cells += rows.batch.ids.numel()
        self.stats.n_padding += rows.batch.ids.numel() - n_filled
        # Rows that fail change the places of others, so outputs are split before.
        others = [decoding for decoding in rows.members if decoding.plain is None]
        parts = [(decoding, rows.outputs_of(decoding, outputs)) for decoding in others]
        gained: list[tuple[EngineRequest, list[StreamEvent]]] = []
        for decoding in rows.choose(outputs):
            with self.failures_of(decoding.request):
                gained.append((decoding.request, decoding.plain.take()))
        for decoding, own_outputs in parts:
            with self.failures_of(decoding.request):
                gained.append((decoding.request, decoding.rows.step(own_outputs)))
        if len(rows):
            rows.append_newest()
        for request, events in gained:
            with self.failures_of(request):
                self._gain(request, events)
        rows.trim()

    # ------------------------------------------------------------ what requests gain, and how they end

    def _gain(self, request: EngineRequest, events: list[StreamEvent]) -> None:
        """Record the events of a step; end the request if it has finished."""
        self._record(request, events)
        if request.decoding is not None and request.decoding.run.finished:
            self.end(request)

    def _record(self, request: EngineRequest, events: list[StreamEvent]) -> None:
        now = time.monotonic()
        for event in events:
            request.gain(event, now)
            self.stats.decoded_tokens += len(event.token_ids)
            values = event.row, event.token_ids, event.text, event.logprobs, event.finish_reason
            self.events.append(EngineEvent(*values, request=request))

    def end(self, request: EngineRequest, error: BaseException | None = None) -> None:
        """End a request, in any state: with its result, with what it has, or with an error."""
        decoding, generated = request.decoding, None
        # One that has come to its end may be cancelled by another thread just now.
        has_ended = decoding is not None and decoding.run.finished
        reason = None if has_ended else request.ends_as
        if decoding is not None:
            for rows in self.joined:
                if decoding in rows.moves:
                    rows.store(decoding)
                    rows.leave(decoding)
            self.joined = [rows for rows in self.joined if len(rows)]
            if error is None and reason is None:
                try:
                    events, generated = decoding.finish()
                    self._record(request, events)
                except BaseException as failure:
                    error = as_exception(failure)
            decoding.close()
        request.ends_as = reason = reason if error is None else ERROR
        self.stats.n_finished += reason is None
        self.stats.n_failed += error is not None
        self.stats.n_cancelled += reason is not None and error is None
        # Who sees the state "done" in another thread finds the output.
        ended_rows = request.end(time.monotonic(), error, generated)
        with self.lock:
            self.scheduler.leave(request)
            del self.requests[request.id]
        for row in ended_rows:
            self.events.append(EngineEvent(row, (), finish_reason=reason, request=request))

    @contextmanager
    def failures_of(self, request: EngineRequest) -> Iterator[None]:
        """Catch an exception and end this request with it, whatever its class; others go on."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            if request.id in self.requests:
                self.end(request, as_exception(error))
