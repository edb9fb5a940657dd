"""Results of continuous batching: the states of a request's sequences, and their router."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers.generation.continuous_batching import RequestState, RequestStatus
from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput

from .request import EngineEvent, EngineRequest

#: Finish reasons of sequences that count as failed.
FAILURES = ("error", "cancelled", "timeout")


class Router(OutputRouter):
    """transformers' router, for handlers on several event loops.

    ``cancel(request_id)`` is called for a request whose handler's loop has been closed.
    """

    def __init__(self, cancel: Callable[[str], None]) -> None:
        super().__init__()
        self._cancel = cancel
        self._arrived = threading.Condition(self._lock)

    def deliver(self, output: GenerationOutput) -> None:
        """Give ``output`` to the handler of its request, or keep it for ``take``."""
        with self._arrived:
            if (handler := self.result_handlers.get(output.request_id)) is None:
                self.output_queue.put(output)
                self._arrived.notify_all()
                return
        callback, loop = handler
        try:
            loop.call_soon_threadsafe(callback, output)
        except RuntimeError:  # the loop is closed
            self.forget(output.request_id)
            self._cancel(output.request_id)

    def take(self, request_id: str | None = None, timeout: float = 0.0) -> GenerationOutput | None:
        """Remove and return the oldest output of a request, or of any; waits up to ``timeout`` seconds."""
        with self._arrived:
            return self._arrived.wait_for(lambda: self._pop(request_id), timeout)

    def register(self, request_id: str, callback: Callable[[GenerationOutput], Any]) -> None:
        """Call ``callback`` on the running event loop with each output, first with those that wait."""
        loop = asyncio.get_running_loop()

        def handle(output: GenerationOutput) -> None:
            if output.is_finished():
                self.forget(request_id)
            callback(output)

        with self._lock:
            while (output := self._pop(request_id)) is not None:
                loop.call_soon(handle, output)
            self.result_handlers[request_id] = (handle, loop)

    def forget(self, request_id: str) -> None:
        """Drop the handler of a request."""
        with self._lock:
            self.result_handlers.pop(request_id, None)

    def _pop(self, request_id: str | None) -> GenerationOutput | None:
        with self.output_queue.mutex:
            waiting = self.output_queue.queue
            for i, output in enumerate(waiting):
                if request_id in (None, output.request_id):
                    del waiting[i]
                    return output
        return None


class Sequences:
    """The sequences of one request, by upstream's ids: those of its children, then its own.

    ``index`` counts the requests of a manager.
    """

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt: Any,
        arguments: dict[str, Any],
        n: int = 1,
        streaming: bool = False,
        record_timestamps: bool = False,
    ) -> None:
        self.request_id, self.index = request_id, index
        self.prompt, self.arguments = prompt, arguments
        self.request: EngineRequest | None = None
        self.names = [*(f"{request_id}__child#{i}" for i in range(n - 1)), request_id]
        self.ids = ids_of(prompt)
        self.states = [
            RequestState(
                name,
                self.ids,
                streaming=streaming,
                record_timestamps=record_timestamps,
                max_new_tokens=arguments.get("max_new_tokens"),
                num_children=n - 1 if name == request_id else 0,
            )
            for name in self.names
        ]

    @property
    def unfinished(self) -> list[RequestState]:
        return [state for state in self.states if state.status < RequestStatus.FINISHED]

    def enter(self, request: EngineRequest) -> None:
        """Set the request of the engine that decodes these sequences."""
        self.request = request
        if not self.ids:  # a text, or a chat
            self.ids += ids_of(request.arguments.kwargs)
        #: By the clock of upstream's times, which need not be the engine's.
        self.entered = request.added + time.perf_counter() - time.monotonic()

    def gain(self, event: EngineEvent) -> RequestState | None:
        """Add an event to the state of its row; returns the state if it is to be delivered."""
        state, times = self.states[event.row], event.request.times
        if state.status >= RequestStatus.FINISHED:  # cancelled
            return None
        if state.status == RequestStatus.PENDING:
            state.status = RequestStatus.DECODING
            state.lifespan = self.entered + (times.queue_time or 0.0), -1
        state.generated_tokens += event.token_ids
        state.logprobs += [entry.logprob for entry in event.logprobs or ()]
        state._timestamps += [time.perf_counter()] * len(event.token_ids)
        if event.finish_reason in FAILURES:  # the manager delivers it with the error
            return None
        if event.finish_reason is not None:
            state.status = RequestStatus.FINISHED
            return state
        return state if state.streaming and event.token_ids else None


def ids_of(prompt: Any) -> list[int]:
    """The ids of a prompt that is given as such; none of a text or a chat."""
    ids: Any = prompt.get("input_ids") if isinstance(prompt, Mapping) else prompt
    if isinstance(ids, Tensor):
        return ids.flatten().tolist()
    is_ids = isinstance(ids, list | tuple) and all(isinstance(one, int) for one in ids)
    return [*ids] if is_ids else []
