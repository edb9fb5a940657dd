"""A request of the engine as a state of transformers' continuous batching, one for each sequence."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.generation.continuous_batching import RequestState, RequestStatus

from .request import EngineEvent, EngineRequest

#: How rows end that count as failed.
FAILURES = ("error", "cancelled", "timeout")


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
        names = [*(f"{request_id}__child#{i}" for i in range(n - 1)), request_id]
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
            for name in names
        ]

    @property
    def names(self) -> list[str]:
        return [state.request_id for state in self.states]

    @property
    def unfinished(self) -> list[RequestState]:
        return [state for state in self.states if state.status < RequestStatus.FINISHED]

    def enter(self, request: EngineRequest) -> None:
        """Be a request of the engine from now on."""
        self.request = request
        if not self.ids:  # a text, or a chat
            self.ids += ids_of(request.arguments.kwargs)
        #: By the clock of upstream's times, which need not be the engine's.
        self.entered = request.added + time.perf_counter() - time.monotonic()

    def gain(self, event: EngineEvent) -> RequestState | None:
        """Take in what a row has gained; its state, if that is to be handed over."""
        state, times = self.states[event.row], event.request.times
        if state.status >= RequestStatus.FINISHED:  # cancelled
            return None
        if state.status == RequestStatus.PENDING:
            state.status = RequestStatus.DECODING
            state.lifespan = self.entered + (times.queue_time or 0.0), -1
        state.generated_tokens += event.token_ids
        state.logprobs += [entry.logprob for entry in event.logprobs or ()]
        state._timestamps += [time.perf_counter()] * len(event.token_ids)
        if event.finish_reason in FAILURES:  # ``conclude`` says why
            return None
        if event.finish_reason is not None:
            state.status = RequestStatus.FINISHED
            return state
        return state if state.streaming and event.token_ids else None

    def conclude(self) -> BaseException:
        """Take the result of the request, which is done; why those of its sequences failed that did."""
        assert self.request is not None
        output = self.request.result()
        if output.error is not None:
            return output.error
        return RuntimeError(f"The request ended as {output.finish_reason!s}.")


def ids_of(prompt: Any) -> list[int]:
    """The ids of a prompt that is given as such; none of a text or a chat."""
    ids: Any = prompt.get("input_ids") if isinstance(prompt, Mapping) else prompt
    if isinstance(ids, Tensor):
        return ids.flatten().tolist()
    is_ids = isinstance(ids, list | tuple) and all(isinstance(one, int) for one in ids)
    return [*ids] if is_ids else []
