"""Continuous batching: requests enter and leave while others decode, each as its own ``generate`` would."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch

from .. import validate
from ..call import Request
from ..mixin import driven, mixed_view
from ..stopping import FinishReason
from ..streaming import StreamEvent
from .decoding import Decoding
from .errors import EngineClosedError, ResultTakenError, UnknownRequestError
from .joined import JoinedRows
from .memory import Memory
from .prompts import model_inputs
from .request import EngineEvent, EngineRequest, RequestOutput
from .scheduler import Chunk, Item, Scheduler

CANCELLED, TIMEOUT, ERROR = map(FinishReason, ("cancelled", "timeout", "error"))


@dataclass(slots=True)
class EngineStats:
    """What an engine has done so far."""

    n_steps: int = 0
    n_forwards: int = 0
    prefill_tokens: int = 0
    decoded_tokens: int = 0
    n_finished: int = 0
    n_failed: int = 0
    n_cancelled: int = 0
    #: Cells of the cache over all decoding forwards, and those among them that were padding.
    n_cells: int = 0
    n_padding: int = 0

    @property
    def padding(self) -> float:
        """The share of padding in the cache, over all decoding forwards."""
        return self.n_padding / max(self.n_cells, 1)


class Engine:
    """Decodes many requests at once; each gets the tokens that ``model.generate`` gives it alone.

    There is no thread in it: ``step``, ``events`` and ``result`` decode in the caller's. ``add`` and
    ``cancel`` may be called from any thread.

    Args:
        model: A model with hfgen's mixin; any other is used through a view that has it.
        tokenizer: For prompts that are text, stop strings, and the text of results.
        max_rows: Rows that decode at once; a request has one for each beam or returned sequence.
        memory: For the KV cache: bytes, or up to 1.0 a share of what is free.
        prefill_tokens: Tokens of prompts that are forwarded between two tokens of decoding rows, at
            most, where a prompt can be cut.
        policy: ``"fcfs"``, ``"srpt"`` or ``"priority"``; see ``scheduler.Scheduler``.
        max_queue: Requests that may wait; ``QueueFullError`` beyond that.
        prefix_cache: A ``hfgen.PrefixCache`` for all requests.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        max_rows: int = 32,
        memory: float = 0.8,
        prefill_tokens: int = 2048,
        policy: str = "fcfs",
        max_queue: int | None = None,
        prefix_cache: Any = None,
    ) -> None:
        self.model: Any = mixed_view(model)
        self.tokenizer = tokenizer
        self.prefix_cache = prefix_cache
        self.memory = Memory(memory, self.model.device)
        self.scheduler = Scheduler(
            max_rows=max_rows,
            max_bytes=self.memory.limit,
            prefill_tokens=prefill_tokens,
            policy=policy,  # type: ignore[arg-type]
            max_queue=max_queue,
        )
        self.stats = EngineStats()
        self.joined: list[JoinedRows] = []
        #: Requests that decode by themselves, beside the batches.
        self.alone: list[EngineRequest] = []
        self.requests: dict[str, EngineRequest] = {}
        self._of_item: dict[Item, EngineRequest] = {}
        self._ready: list[EngineEvent] = []
        self._numbers = itertools.count()
        self._lock = Lock()
        self._is_closed = False

    # ------------------------------------------------------------ requests

    def add(
        self, prompt: Any, *, priority: int = 0, timeout: float | None = None, **kwargs: Any
    ) -> EngineRequest:
        """Queue a request.

        ``prompt``: text, token ids as a list or a tensor ``(n,)`` or ``(1, n)``, a list of chat messages,
        or a mapping of model inputs with one row each. ``priority``: higher is sooner, with that policy.
        ``timeout``: seconds after which it ends with what it has. ``kwargs`` are those of ``generate``;
        ``stop`` is ``stop_strings``.

        Raises what ``generate`` raises for arguments that cannot be used, ``QueueFullError``,
        ``DoesNotFitError`` for a request that never fits, and ``EngineClosedError``.
        """
        self._check_open()
        now = time.monotonic()
        arguments = self._arguments(prompt, kwargs)
        number = next(self._numbers)
        deadline = None if timeout is None else now + timeout
        request = EngineRequest(f"req_{number}", self, arguments, priority, deadline, added=now)
        is_whole = True
        if self._is_prepared_at_once(arguments):
            self._prepare(request)
            decoding = request.decoding
            assert decoding is not None
            item = Item(n_tokens=decoding.prompt_length, n_rows=decoding.n_rows, priority=priority)
            is_whole = decoding.prompt_length <= self.scheduler.prefill_tokens
            item.is_whole = is_whole or not decoding.can_be_cut
            item.n_bytes = self.memory.needed(decoding)
        else:
            item = Item(n_tokens=1, priority=priority, is_whole=True)
        request.item = item
        with self._lock:
            self.scheduler.add(item, now)
            self.requests[request.id] = request
            self._of_item[item] = request
        return request

    def _arguments(self, prompt: Any, kwargs: dict[str, Any]) -> Request:
        kwargs = dict(kwargs)
        if "stop" in kwargs:
            kwargs["stop_strings"] = kwargs.pop("stop")
        if self.tokenizer is not None:
            kwargs.setdefault("tokenizer", self.tokenizer)
        if self.prefix_cache is not None:
            kwargs.setdefault("prefix_cache", self.prefix_cache)
        inputs = model_inputs(prompt, kwargs.get("tokenizer"), self.model.device)
        own = {"return_dict_in_generate": True, "drop_finished": False}
        return driven(self.model, Request.of(**inputs | kwargs | own))

    def _is_prepared_at_once(self, arguments: Request) -> bool:
        """Whether preparing a request forwards nothing: there is no encoder, of text or of images."""
        known = {"input_ids", "attention_mask", "position_ids"}
        tensors = {n for n, v in arguments.kwargs.items() if isinstance(v, torch.Tensor)}
        return not self.model.config.is_encoder_decoder and tensors <= known

    def _prepare(self, request: EngineRequest) -> None:
        decoding = Decoding(self.model, request.arguments)
        request.decoding = decoding
        config = decoding.run.config
        request.n_sequences = int(config.num_return_sequences or 1)

    def cancel(self, request: EngineRequest | str) -> None:
        """End a request with what it has, before the next step. One that is done stays as it is."""
        self._find(request).ends_as = CANCELLED

    def result(self, request: EngineRequest | str) -> RequestOutput:
        """The output of a request, handed over once; steps until it is there."""
        found = self._find(request)
        while not found.done:
            self._ready += self.step()
        with self._lock:
            if self.requests.pop(found.id, None) is None:
                raise ResultTakenError(f"The result of {found.id} was handed over before.")
        assert found.output is not None
        return found.output

    def _find(self, request: EngineRequest | str) -> EngineRequest:
        if isinstance(request, EngineRequest):
            if request.engine is not self:
                raise UnknownRequestError(f"{request.id} belongs to another engine.")
            return request
        found = self.requests.get(request)
        if found is None:
            raise UnknownRequestError(
                f"There is no request {request!r}: it never was, or its result was handed over."
            )
        return found

    # ------------------------------------------------------------ decoding

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._of_item)

    @property
    def n_rows(self) -> int:
        """Rows that are decoding, or being prefilled."""
        return self.scheduler.n_rows

    @property
    def n_waiting(self) -> int:
        return len(self.scheduler.waiting)

    def events(self) -> Iterator[EngineEvent]:
        """Step until nothing is left to do; what each sequence gains."""
        while self.has_work or self._ready:
            ready, self._ready = self._ready, []
            yield from ready or self.step()

    @torch.no_grad()
    def step(self) -> list[EngineEvent]:
        """Take out what has to end, prefill some of the prompts that wait, and decode a token of each row.

        A request whose processor, grammar or callback raises ends with ``finish_reason`` ``"error"``; a
        model whose forward raises ends all that it was about. Raises ``EngineClosedError`` after ``close``.
        """
        self._check_open()
        self.stats.n_steps += 1
        events: deque[EngineEvent] = deque()
        self._take_out(events)
        with self._lock:
            plan = self.scheduler.plan(time.monotonic())
        decoding = list(self.joined)
        alone = list(self.alone)
        for chunk in plan:
            self._forward_chunk(chunk, events)
        for rows in decoding:
            self._decode(rows, events)
        for request in alone:
            self._advance(request, events)
        return list(events)

    def _take_out(self, events: deque[EngineEvent]) -> None:
        now = time.monotonic()
        for request in list(self._of_item.values()):
            if request.deadline is not None and now >= request.deadline:
                request.ends_as = request.ends_as or TIMEOUT
            if request.ends_as is not None:
                self._end(request, events)

    def _forward_chunk(self, chunk: Chunk, events: deque[EngineEvent]) -> None:
        item, request = chunk.item, self._of_item.get(chunk.item)
        if request is None:
            return
        with self._failures(request, events):
            if request.times.queue_time is None:
                request.times.queue_time = time.monotonic() - request.added
            if request.decoding is None:
                self._prepare(request)
            decoding = request.decoding
            assert decoding is not None
            if request.state == "waiting":
                request.state = "prefill"
                item.n_done = decoding.begin()
            if not decoding.joins:
                self.scheduler.advance(item, item.n_tokens)
                request.state = "decoding"
                self.alone.append(request)
                return
            n = min(chunk.n_tokens, item.n_tokens - item.n_done)
            is_last = item.n_done + n >= item.n_tokens
            gained = decoding.prefill(n, is_last)
            self.stats.prefill_tokens += n
            self.scheduler.advance(item, n)
            self._gain(request, gained, events)
            if not is_last:
                return
            request.state = "decoding"
            if decoding.run.finished:
                self._end(request, events)
            else:
                self._join(decoding)

    def _join(self, decoding: Decoding) -> None:
        for rows in self.joined:
            try:
                rows.join(decoding)
                return
            except ValueError:
                continue
        rows = JoinedRows(self.model)
        rows.join(decoding)
        self.joined.append(rows)

    def _decode(self, rows: JoinedRows, events: deque[EngineEvent]) -> None:
        requests = {r.decoding: r for r in self._of_item.values() if r.decoding in rows.moves}
        if not len(rows):
            return
        self.stats.n_cells += rows.n_cells
        self.stats.n_padding += rows.n_cells - rows.n_filled
        try:
            outputs = rows.forward()
        except BaseException as error:
            self.joined.remove(rows)
            for request in requests.values():
                self._end(request, events, error)
            if not isinstance(error, Exception):
                raise
            return
        self.stats.n_forwards += 1
        # Rows that leave change the places of others: each gets its part before.
        parts = [(decoding, rows.outputs_of(decoding, outputs)) for decoding in rows.members]
        for decoding, own in parts:
            request = requests[decoding]
            with self._failures(request, events):
                self._gain(request, decoding.step(own), events)
                self.stats.decoded_tokens += decoding.n_rows
                if decoding.run.finished:
                    self._end(request, events)
        if len(rows):
            rows.append_newest()
        elif rows in self.joined:
            self.joined.remove(rows)

    def _advance(self, request: EngineRequest, events: deque[EngineEvent]) -> None:
        decoding = request.decoding
        if decoding is None:
            return
        with self._failures(request, events):
            self._gain(request, decoding.advance(), events)
            if decoding.run.finished:
                self._end(request, events)

    # ------------------------------------------------------------ what requests gain, and how they end

    def _gain(
        self, request: EngineRequest, gained: list[StreamEvent], events: deque[EngineEvent]
    ) -> None:
        now = time.monotonic()
        for event in gained:
            request.gain(event, now)
            events.append(EngineEvent.of(request, event))

    def _end(
        self,
        request: EngineRequest,
        events: deque[EngineEvent],
        error: BaseException | None = None,
    ) -> None:
        """End a request, in any state: with its result, with what it has, or with an error."""
        decoding, generated = request.decoding, None
        if decoding is not None:
            self._leave(decoding)
            if error is None and request.ends_as is None:
                try:
                    gained, generated = decoding.finish()
                    self._gain(request, gained, events)
                except Exception as failure:
                    error = failure
            decoding.close()
        if error is not None:
            request.ends_as = ERROR
        open_rows = [
            row
            for row in range(request.n_sequences)
            if row not in request.sequences or request.sequences[row].finish_reason is None
        ]
        request.end(time.monotonic(), error, generated)
        events += (EngineEvent(request, row, (), "", None, request.ends_as) for row in open_rows)
        if request in self.alone:
            self.alone.remove(request)
        self.stats.n_finished += request.ends_as is None
        self.stats.n_failed += error is not None
        self.stats.n_cancelled += request.ends_as is not None and error is None
        with self._lock:
            item = next((i for i, r in self._of_item.items() if r is request), None)
            if item is not None:
                self.scheduler.leave(item)
                del self._of_item[item]

    def _leave(self, decoding: Decoding) -> None:
        for rows in self.joined:
            if decoding in rows.moves:
                rows.leave(decoding)
        self.joined = [rows for rows in self.joined if len(rows)]

    @contextmanager
    def _failures(self, request: EngineRequest, events: deque[EngineEvent]) -> Iterator[None]:
        """What is raised within ends the request, and no other."""
        try:
            with validate.explaining_misfit(self.model, None):
                yield
        except Exception as error:
            self._end(request, events, error)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosedError("The engine was closed: make another one.")

    def close(self) -> None:
        """Cancel all requests, and let go of their memory. Results that are there can still be had."""
        if self._is_closed:
            return
        for request in list(self._of_item.values()):
            request.ends_as = request.ends_as or CANCELLED
        self._take_out(deque())
        self._is_closed = True

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
