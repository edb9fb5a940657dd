"""Delivering results of continuous batching: to a caller that waits, or to a handler on an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput


class Router(OutputRouter):
    """transformers' router, for handlers on several event loops, of which some may have been closed.

    ``cancel(request_id)`` is called for a request whose handler's loop is closed.
    """

    def __init__(self, cancel: Callable[[str], None]) -> None:
        super().__init__()
        self._cancel = cancel
        self._arrived = threading.Condition(self._lock)

    def deliver(self, output: GenerationOutput) -> None:
        """Hand ``output`` to the handler of its request, or keep it until somebody takes it."""
        with self._arrived:
            if (handler := self.result_handlers.get(output.request_id)) is None:
                self.output_queue.put(output)
                self._arrived.notify_all()
                return
        callback, loop = handler
        try:
            loop.call_soon_threadsafe(callback, output)
        except RuntimeError:  # the loop is closed: nobody waits for this request any more
            self.forget(output.request_id)
            self._cancel(output.request_id)

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        """Deliver each of ``outputs``, in their order."""
        for output in outputs:
            self.deliver(output)

    def take(self, request_id: str | None = None, timeout: float = 0.0) -> GenerationOutput | None:
        """The oldest output of a request, or of any; waits ``timeout`` seconds for it at most."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._place(request_id) is not None, timeout)
            return self._pop(request_id)

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

    def _place(self, request_id: str | None) -> int | None:
        """Where the oldest output of a request, or of any, waits."""
        waiting = enumerate(self.output_queue.queue)
        return next((i for i, o in waiting if request_id in (None, o.request_id)), None)

    def _pop(self, request_id: str | None) -> GenerationOutput | None:
        with self.output_queue.mutex:
            if (place := self._place(request_id)) is None:
                return None
            output = self.output_queue.queue[place]
            del self.output_queue.queue[place]
            return output
