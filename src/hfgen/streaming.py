"""``stream()`` and ``astream()``: a call as an iterator of what each row has gained."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from . import loop, validate
from .call import Request, Run, Step, Strategy
from .outputs import GenerateOutput
from .prepare import prepare
from .text import Detokenizer

#: Events that an ``AsyncStream`` decodes ahead of its consumer.
AHEAD = 4


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
    #: Why the row has ended: set in its last event, which may have no tokens.
    finish_reason: str | None = None


class Stream(Iterator[StreamEvent]):
    """The events of a call, decoded in the consumer's thread as it asks for them.

    A row has an event for each step in which it gains something. Closing the stream ends decoding
    and frees its memory: by ``close()``, by leaving ``with stream:``, or when nothing refers to it.
    An exception of the call is raised by ``next()``, and closes the stream as well.
    """

    #: What ``generate`` returns, once the stream has come to its end; also ``StopIteration.value``.
    result: GenerateOutput | torch.Tensor | None = None

    def __init__(self, model: Any, request: Request) -> None:
        self._ready: deque[StreamEvent] = deque()
        self._steps = _decode(model, request)
        self._advance()

    def __next__(self) -> StreamEvent:
        while not self._ready:
            try:
                self._advance()
            except StopIteration as end:
                self.result = self.result if end.value is None else end.value
                raise
        return self._ready.popleft()

    @torch.no_grad()  # while decoding, and not while the consumer has its turn
    def _advance(self) -> None:
        self._ready.extend(next(self._steps))

    @torch.no_grad()
    def close(self) -> None:
        """End decoding, if it has not come to its end; no more events come."""
        self._steps.close()
        self._ready.clear()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_steps"):
            self.close()


class AsyncStream(AsyncIterator[StreamEvent]):
    """The events of a call, decoded in a thread of its own, a few events ahead of the consumer.

    The thread starts with the first event that is asked for. Decoding ends at the next step when the
    task is cancelled or runs out of time as it waits for an event, after ``aclose()``, or when nothing
    refers to the stream. An exception of the call is raised where the consumer waits.
    """

    #: What ``generate`` returns, once the stream has come to its end.
    result: GenerateOutput | torch.Tensor | None = None

    def __init__(self, model: Any, request: Request) -> None:
        self._start: Callable[[], Stream] | None = partial(Stream, model, request)
        self._device_type = model.device.type
        self._worker: _Worker | None = None

    async def __anext__(self) -> StreamEvent:
        if self._start is not None:
            self._worker = _Worker(self._start, self._device_type)
            self._start = None
        if self._worker is None:
            raise StopAsyncIteration
        try:
            item = await self._worker.take()
        except asyncio.CancelledError:
            self._worker.stop()
            raise
        if isinstance(item, StreamEvent):
            return item
        self.result, error, item.error = item.result, item.error, None
        try:
            raise StopAsyncIteration if error is None else error
        finally:
            del error  # which holds this frame

    async def aclose(self) -> None:
        """End decoding, if it has not come to its end; returns when its memory is free."""
        self._start = None
        if self._worker is not None:
            self._worker.stop()
            while not isinstance(await self._worker.take(), _End):
                pass

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if (worker := getattr(self, "_worker", None)) is not None:
            worker.stop()


@dataclass(slots=True)
class _End:
    """How a worker has ended."""

    result: GenerateOutput | torch.Tensor | None = None
    error: BaseException | None = None


class _Worker:
    """A stream in a thread, and the queue to the event loop. It does not know the ``AsyncStream``."""

    def __init__(self, start: Callable[[], Stream], device_type: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[StreamEvent | _End] = asyncio.Queue()
        self.room = threading.Semaphore(AHEAD)
        self.is_stopped = False
        is_cast = torch.is_autocast_enabled(device_type)  # which threads do not inherit
        dtype = torch.get_autocast_dtype(device_type) if is_cast else None
        self.autocast = torch.autocast(device_type, dtype, enabled=is_cast)
        work = partial(contextvars.copy_context().run, self.work, start)
        threading.Thread(target=work, name="hfgen-astream", daemon=True).start()

    def work(self, start: Callable[[], Stream]) -> None:
        """What the thread does."""
        end = _End()
        try:
            with self.autocast, start() as stream:
                while self.room.acquire() and not self.is_stopped:
                    if (event := next(stream, None)) is None:
                        end.result = stream.result
                        break
                    self.send(event)
        except BaseException as error:
            end.error = error
        self.send(end)

    def send(self, item: StreamEvent | _End) -> None:
        try:
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody will take it
            self.is_stopped = True

    async def take(self) -> StreamEvent | _End:
        """The next event; at the end, and from then on, an ``_End``."""
        item = await self.queue.get()
        if isinstance(item, _End):
            self.queue.put_nowait(item)
        else:
            self.room.release()
        return item

    def stop(self) -> None:
        self.is_stopped = True
        self.room.release()


def _decode(
    model: Any, request: Request
) -> Generator[list[StreamEvent], None, GenerateOutput | torch.Tensor]:
    """Prepare the call, and yield nothing; then yield the events of each step."""
    call = prepare(model, request)
    try:
        run, strategy = call.start(model)
        rows = Rows(run, strategy)
        yield []
        recording = loop.begin(run)
        with validate.explaining_misfit(model, call.cache):
            with closing(loop.drive(run, strategy)) as steps:
                for step in steps:
                    yield rows.advance(step)
            result, output = loop.conclude(run, strategy, recording)
        yield rows.finish(result)
        return output
    finally:
        call.release()


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
        events = (
            self.event(index * stride, new[: None if end is None else max(end - start, 0)], end)
            for index, (new, end) in enumerate(zip(tokens, ends, strict=True))
        )
        return [event for event in events if event is not None]

    def finish(self, result: dict[str, Any]) -> list[StreamEvent]:
        """The last events of rows that have had none: beams but the best, modes that do not stream."""
        sequences, parents = result["sequences"].tolist(), result.get("beam_indices")
        if parents is None:
            ends = self.ends_by_eos(
                [row[self.prompt_length :] for row in sequences], self.prompt_length
            )
        else:
            ends = (self.prompt_length + (parents >= 0).sum(dim=1)).tolist()
        events = (
            self.event(
                index, row[self.prompt_length + len(self.row(index).tokens) : end], end or len(row)
            )
            for index, (row, end) in enumerate(zip(sequences, ends, strict=True))
        )
        return [event for event in events if event is not None]

    def ends_by_eos(self, tokens: list[list[int]], start: int) -> list[int | None]:
        """Where rows end that have ``tokens`` from ``start`` on, if the strategy does not tell."""
        last = self.length if self.run.finished else None
        return [
            next((start + i for i, token in enumerate(row, 1) if token in self.eos), last)
            for row in tokens
        ]

    def event(self, index: int, tokens: list[int], end: int | None) -> StreamEvent | None:
        """The event of ``tokens``, after which the row may have come to its ``end``."""
        row = self.row(index)
        if row.has_ended:
            return None
        row.tokens += tokens
        row.has_ended = end is not None and self.prompt_length + len(row.tokens) >= end
        if not tokens and not row.has_ended:
            return None
        reason = self.reason(row) if row.has_ended else None
        return StreamEvent(index, tuple(tokens), row.text(tokens), reason)

    def reason(self, row: _Row) -> str:
        if row.tokens and row.tokens[-1] in self.eos:
            return "eos"
        limit = self.run.criteria.max_length
        is_full = limit is not None and self.prompt_length + len(row.tokens) >= limit
        return "length" if is_full else "stop"
