"""A call as an iterator, decoded in the consumer's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

import torch

from ..decoding import loop
from ..decoding.outputs import GenerateOutput
from ..memory.checks import explaining_misfit
from ..prepare.stages import prepare
from ..state.call import Request
from .events import Rows, StreamEvent


class Stream(Iterator[StreamEvent]):
    """The events of a call, decoded in the consumer's thread as it asks for them.

    A row has an event for each step in which it gains something. Closing the stream ends decoding
    and frees its memory: by ``close()``, by leaving ``with stream:``, or when nothing refers to it.
    An exception of the call is raised by ``next()``, and closes the stream as well.
    """

    #: What ``generate`` returns, from the last event on; also ``StopIteration.value``.
    result: GenerateOutput | torch.Tensor | None = None

    def __init__(self, model: Any, request: Request) -> None:
        self._ready: deque[StreamEvent] = deque()
        self._steps = _decode(model, request)
        self._advance()

    def __next__(self) -> StreamEvent:
        while not self._ready:
            self._advance()
        return self._ready.popleft()

    @torch.no_grad()  # while decoding, not in the code of the consumer
    def _advance(self) -> None:
        try:
            events = next(self._steps)
        except StopIteration as end:
            if end.value is None:  # it has come to its end before, or was closed
                raise StopIteration(self.result) from None
            events, self.result = end.value
        self._ready.extend(events)

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


def _decode(
    model: Any, request: Request
) -> Generator[list[StreamEvent], None, tuple[list[StreamEvent], GenerateOutput | torch.Tensor]]:
    """Prepare the call and yield an empty list, then yield the events of each step but the last.

    Returns the events of the last step, and what ``generate`` returns.
    """
    call = prepare(model, request)
    try:
        run, strategy = call.start(model)
        yield []
        recording = loop.begin(run)
        rows, events = Rows(run, strategy), list[StreamEvent]()
        with explaining_misfit(model, call.cache):
            with closing(loop.drive(run, strategy)) as steps:
                for step in steps:
                    events = rows.advance(step)
                    if not run.finished:
                        yield events
            result, output = loop.conclude(run, strategy, recording)
        return [*events, *rows.finish(result)], output
    finally:
        call.release()
