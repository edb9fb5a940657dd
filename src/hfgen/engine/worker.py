"""The thread of a manager: takes requests from a queue, steps the engine, delivers results."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import RequestState, RequestStatus
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus
from transformers.generation.continuous_batching.utils import drain_queue
from transformers.utils import logging

from .arguments import request_arguments
from .delivery import Router
from .engine import Engine
from .request import EngineEvent
from .sequences import Sequences

logger = logging.get_logger("ContinuousBatchingLogger")

#: Why requests fail that a manager leaves.
STOPPED = RuntimeError("The manager was stopped before this request was done.")

#: Requests that are prepared between two steps.
AT_ONCE = 16


#: Upstream's attention for continuous batching: it takes only upstream's packed batches.
PAGED = "paged|eager"

#: How many managers use a config whose attention is ``PAGED``, by its id.
_users: Counter[int] = Counter()
_users_lock = threading.Lock()


@contextmanager
def eager_for_paged(model: Any) -> Iterator[None]:
    """Run ``"paged|eager"`` attention as ``"eager"``, until the last manager of the model has ended."""
    parts = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    with _users_lock:
        configs = [
            config
            for key, config in parts.items()
            if _users[key] or getattr(config, "_attn_implementation", None) == PAGED
        ]
        for config in configs:
            config._attn_implementation_internal = "eager"
        _users.update(map(id, configs))
    try:
        yield
    finally:
        with _users_lock:
            _users.subtract(map(id, configs))
            for config in configs:
                if not _users[id(config)]:
                    config._attn_implementation_internal = PAGED


class Worker:
    """What the thread does, and what it shares with the others. Names are upstream's where it has them."""

    def __init__(
        self, model: Any, config: GenerationConfig, batching: ContinuousBatchingConfig
    ) -> None:
        self.model = model.eval()
        self.generation_config, self.continuous_batching_config = config, batching
        self.input_queue: queue.Queue[Any] = queue.Queue(batching.max_queue_size)
        self.cancel_queue: queue.Queue[str] = queue.Queue()
        self.background_thread_status: Any = BackgroundThreadStatus()
        self.output_router = Router(self.cancel_request)
        self._generation_thread: threading.Thread | None = None
        self._wake_up_loop = threading.Event()
        self._request_lock = threading.Lock()
        self._request_counter = self._n_added = 0
        #: Requests that are not done: by each id of theirs, and by the engine's.
        self._open: dict[str, Sequences] = {}
        self._by_engine: dict[str, Sequences] = {}
        self._attention = ExitStack()

    def cancel_request(self, request_id: str) -> None:
        """End a request, in whatever state, or one of its children; others and unknown ids are left."""
        self.cancel_queue.put(request_id)
        self._wake_up_loop.set()

    def _run_generation_loop(self, engine: Engine) -> None:
        status: Any = self.background_thread_status
        error: Exception = STOPPED
        try:
            if self.model.device.type == "cuda" and self.model.device.index is not None:
                torch.cuda.set_device(self.model.device)
            with torch.no_grad(), engine:
                while self._advance(engine):
                    pass
        except Exception as fatal:
            logger.error(f"The thread of continuous batching has failed: {fatal}", exc_info=True)
            status.record_fatal_error(fatal)
            error = fatal
        finally:
            self._attention.close()
            status.mark_as_stopped()
            self._fail_all(error)

    def _advance(self, engine: Engine) -> bool:
        """Take in requests, then one step of the engine, or a wait; whether there is more to do."""
        status = self.background_thread_status
        for _ in range(min(self.input_queue.qsize(), AT_ONCE)):
            self._admit(engine, self.input_queue.get())
        for request_id in drain_queue(self.cancel_queue):
            self._cancel(request_id)
        if status.local_status == status.HARD_STOP:
            return False
        if status.is_pause_requested():
            status.pause_and_wait()
        elif engine.has_work:
            self._take(engine.step())
        elif not self.input_queue.empty():
            pass
        elif status.local_status == status.FLUSH_AND_STOP:
            return False
        else:
            self._wake_up_loop.wait()
            self._wake_up_loop.clear()
        return True

    def _admit(self, engine: Engine, sequences: Sequences) -> None:
        """Give a request to the engine; one that this refuses fails, and the others go on."""
        try:
            configs = self.generation_config, self.continuous_batching_config
            arguments = request_arguments(self.model, *configs, sequences)
            sequences.enter(request := engine.add(sequences.prompt, **arguments))
        except Exception as error:
            self._fail(sequences.unfinished, error)
        else:
            self._by_engine[request.id] = sequences

    def _take(self, events: Sequence[EngineEvent]) -> None:
        """Hand over what the events of a step amount to."""
        for event in events:
            sequences = self._by_engine.get(event.request.id)
            if sequences is not None and (state := sequences.gain(event)) is not None:
                self._hand_over(state)
        for request in {event.request.id: event.request for event in events}.values():
            if request.done and (sequences := self._by_engine.pop(request.id, None)) is not None:
                self._fail(sequences.unfinished, sequences.conclude())

    def _cancel(self, request_id: str) -> None:
        """End a request, or one of its children alone."""
        if (sequences := self._open.get(request_id)) is None:
            return
        is_all = request_id == sequences.request_id
        states = [s for s in sequences.unfinished if is_all or s.request_id == request_id]
        self._fail(states, RuntimeError("The request was cancelled."))
        if not sequences.unfinished and sequences.request is not None:
            sequences.request.cancel()

    def _fail(self, states: Iterable[RequestState], error: BaseException) -> None:
        for state in states:
            state.status, state.error = RequestStatus.FAILED, str(error) or repr(error)
            self._hand_over(state)

    def _hand_over(self, state: RequestState) -> None:
        if state.status >= RequestStatus.FINISHED:
            self._open.pop(state.request_id, None)
        self.output_router.deliver(state.to_generation_output())

    def _fail_all(self, error: BaseException) -> None:
        """Fail what is left, also what the engine has not seen."""
        drain_queue(self.input_queue)
        with self._request_lock:
            for sequences in [*self._open.values()]:
                self._fail(sequences.unfinished, error)
        self._by_engine.clear()
