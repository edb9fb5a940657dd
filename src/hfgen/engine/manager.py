"""transformers' manager of continuous batching, on hfgen's engine, which one thread steps."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import (
    ContinuousBatchingManager,
    RequestState,
    RequestStatus,
)
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.generation.continuous_batching.utils import drain_queue
from transformers.utils import logging

from .arguments import eager_for_paged, engine_options, n_sequences, request_arguments
from .delivery import Router, Sequences
from .engine import Engine
from .request import EngineEvent
from .serving import MAX_ADDED

logger = logging.get_logger("ContinuousBatchingLogger")

#: The error of requests that are not done when the manager stops.
STOPPED = RuntimeError("The manager was stopped before this request was done.")

#: Seconds that a request waits for room in a queue of ``max_queue_size``, as upstream's does.
WAIT_FOR_ROOM = 10.0


class Manager(ContinuousBatchingManager):
    """What ``model.init_continuous_batching()`` returns: upstream's methods, arguments and results.

    A thread steps the engine between ``start()`` and ``stop()``. Other than upstream's, a request takes
    all that ``generate`` takes, and one that was cancelled is handed over, failed, with its tokens.
    """

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig,
        continuous_batching_config: ContinuousBatchingConfig,
        workload_hints: Any = None,
    ) -> None:
        # Upstream's is not called: it changes the model's attention and reserves its memory.
        self.model = model.eval()
        self.generation_config = generation_config
        self.continuous_batching_config = continuous_batching_config
        self.options = engine_options(continuous_batching_config)
        self.is_tp_driver = self.warmed_up = True
        self.batch_processor = None
        self.input_queue: queue.Queue[Any] = queue.Queue(continuous_batching_config.max_queue_size)
        self.cancel_queue: queue.Queue[str] = queue.Queue()
        self.background_thread_status: Any = BackgroundThreadStatus()
        self.output_router = Router(self.cancel_request)
        self._generation_thread: threading.Thread | None = None
        self._wake_up_loop = threading.Event()
        self._request_lock = threading.Lock()
        self._request_counter = self._n_added = 0
        #: Requests that are not done: by each of their ids, and by the engine's.
        self._open: dict[str, Sequences] = {}
        self._by_engine: dict[str, Sequences] = {}

    @property
    def num_return_sequences(self) -> int:
        """How many sequences a request without arguments returns."""
        return n_sequences(self.model, self.generation_config, {})

    # The thread. ``is_running``, ``join`` and ``pause`` are upstream's.

    def warmup(self) -> None:
        """Nothing: what is compiled is compiled at its first use."""

    def start(self) -> None:
        """Start the thread. Raises what ``Engine`` raises for the model and the options."""
        if self.is_running():
            logger.warning("Manager thread is already running.")
            return
        with eager_for_paged(self.model):
            engine = Engine(self.model, **self.options)
        self.background_thread_status.clear()
        self._generation_thread = threading.Thread(
            target=self._run_generation_loop, args=(engine,), name="hfgen-engine", daemon=True
        )
        self._generation_thread.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """End the thread when all requests are done; with ``hard_stop`` at once, and they fail.

        ``block`` waits for that, at most ``timeout`` seconds. ``keep_for_next_session`` leaves the
        manager with the model, for its next ``init_continuous_batching``.

        Raises ``RuntimeError`` within ``pause()``, where it would wait for ever.
        """
        if self._generation_thread is None:
            logger.warning("Manager not started.")
            return
        status = self.background_thread_status
        if status.is_pause_requested(local=True):
            raise RuntimeError("stop() within pause() would wait forever: leave the pause first.")
        status.request_stop(status.HARD_STOP if hard_stop else status.FLUSH_AND_STOP, 0)
        self._wake_up_loop.set()
        if block:
            self.join(time.perf_counter(), timeout)
        if keep_for_next_session:
            self.model._cached_continuous_batching_manager = self

    def destroy(self) -> None:
        """Stop the thread, if it runs."""
        if self.is_running():
            self.stop()

    # Requests

    def add_request(
        self,
        input_ids: Any,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **kwargs: Any,
    ) -> str | None:
        """Queue a request; returns its id, or ``None`` if the manager stops or has failed.

        Args:
            input_ids: The prompt's ids, or what else ``Engine.add`` takes.
            request_id: Default: ``"req_0"``, ``"req_1"``, …
            max_new_tokens: Default: the config's. If no config sets a length: as many as the model has
                positions for.
            streaming: Hand over a result at each step, and not only the last one.
            record_timestamps: Fill ``timestamps`` with the ``time.perf_counter()`` of each token.
            eos_token_id: Negative ids stand for none.
            kwargs: Those of ``generate``, also ``generation_config``, and those of ``Engine.add``.

        Raises:
            ValueError: A request of this id is not done.
            queue.Full: No room in a queue of ``max_queue_size`` for ten seconds.

        Other arguments that cannot be used fail their request, whose result has the ``error``.
        """
        if (denial := self.background_thread_status.can_accept_new_requests()) is not None:
            logger.warning(f"{denial} A request is dropped.")
            return None
        kwargs |= {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        return self.enter(input_ids, request_id, kwargs, streaming, record_timestamps).request_id

    def enter(
        self, input_ids: Any, request_id: str | None, kwargs: dict[str, Any], *options: bool
    ) -> Sequences:
        """Queue a request, which fails with a result if the thread has ended meanwhile."""
        n = n_sequences(self.model, self.generation_config, kwargs)
        with self._request_lock:
            if request_id is None:
                request_id = f"req_{self._request_counter}"
                self._request_counter += 1
            sequences = Sequences(request_id, self._n_added, input_ids, kwargs, n, *options)
            self._n_added += 1
            if taken := self._open.keys() & set(sequences.names):
                raise ValueError(
                    f"`request_id` {min(taken)!r} is that of a request that is not done."
                )
            self._open |= dict.fromkeys(sequences.names, sequences)
        try:
            self.input_queue.put(sequences, timeout=WAIT_FOR_ROOM)
        except queue.Full:
            for name in sequences.names:
                self._open.pop(name, None)
            raise
        self._wake_up_loop.set()
        if self.background_thread_status.local_status == BackgroundThreadStatus.STOPPED:
            # The thread ended after the request was queued, and failed only what it saw.
            self._fail_all(self.background_thread_status.fatal_error or STOPPED)
        return sequences

    def add_requests(
        self,
        inputs: list[Any],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """``add_request`` for each of ``inputs``, with the same arguments; returns their ids."""
        with self._request_lock:
            names = [f"req_{self._request_counter + i}" for i in range(len(inputs))]
            self._request_counter += len(inputs)
        if (denial := self.background_thread_status.can_accept_new_requests()) is not None:
            logger.warning(f"{denial} {len(inputs)} requests are dropped.")
            return names
        for name, prompt in zip(names, inputs, strict=True):
            arguments = {"max_new_tokens": max_new_tokens, **kwargs}
            self.enter(prompt, name, arguments, streaming, record_timestamps)
        return names

    def cancel_request(self, request_id: str) -> None:
        """End a request, in whatever state, or one of its children; others and unknown ids are left."""
        self.cancel_queue.put(request_id)
        self._wake_up_loop.set()

    # Results

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """The next result, of any request or of one; waits ``timeout`` seconds for it, or without end.

        ``None`` if there is none by then, or none and the thread does not run.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            is_running, remaining = self.is_running(), deadline - time.monotonic()
            wait = max(min(remaining, 0.1), 0.0) if is_running else 0.0
            output = self.output_router.take(request_id, wait)
            if output is not None or not is_running or remaining <= wait:
                return output

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Results as they come; ends when the thread has ended and all have been handed over."""
        return self.request_id_iter(None)

    def request_id_iter(self, request_id: str | None) -> Iterator[GenerationOutput]:
        """The results of one request, up to its last; ``None``: those of all requests."""
        while True:
            is_running = self.is_running()
            if (output := self.get_result(request_id, timeout=0.1)) is not None:
                yield output
                if request_id is not None and output.is_finished():
                    return
            elif not is_running:
                return

    def register_result_handler(
        self, request_id: str, callback: Callable[[GenerationOutput], Any]
    ) -> None:
        """Call ``callback`` on the running event loop with each result of a request, also those that wait.

        If the loop is closed before the last one, the request is cancelled.
        """
        self.output_router.register(request_id, callback)

    # In the thread

    def _run_generation_loop(self, engine: Engine) -> None:
        status: Any = self.background_thread_status
        error: Exception = STOPPED
        try:
            if self.model.device.type == "cuda" and self.model.device.index is not None:
                torch.cuda.set_device(self.model.device)
            with eager_for_paged(self.model), torch.no_grad(), engine:
                while self._advance(engine):
                    pass
        except Exception as fatal:
            logger.error(f"The thread of continuous batching has failed: {fatal}", exc_info=True)
            status.record_fatal_error(fatal)
            error = fatal
        finally:
            status.mark_as_stopped()
            self._fail_all(error)

    def _advance(self, engine: Engine) -> bool:
        """Take in requests, then one step of the engine, or a wait; whether there is more to do."""
        status = self.background_thread_status
        for _ in range(min(self.input_queue.qsize(), MAX_ADDED)):
            self._admit(engine, self.input_queue.get())
        for request_id in drain_queue(self.cancel_queue):
            self._cancel(request_id)
        if status.local_status == status.HARD_STOP:
            return False
        if status.is_pause_requested():
            status.pause_and_wait()
        elif engine.has_work:
            self._take(engine.step())
        elif self.input_queue.empty():
            if status.local_status == status.FLUSH_AND_STOP:
                return False
            self._wake_up_loop.wait()
            self._wake_up_loop.clear()
        return True

    def _admit(self, engine: Engine, sequences: Sequences) -> None:
        """Give a request to the engine; one that this refuses fails, and the others go on."""
        try:
            arguments = request_arguments(
                self.model, self.generation_config, self.continuous_batching_config, sequences
            )
            sequences.enter(request := engine.add(sequences.prompt, **arguments))
        except Exception as error:
            self._fail(sequences.unfinished, error)
        else:
            self._by_engine[request.id] = sequences

    def _take(self, events: Sequence[EngineEvent]) -> None:
        """Deliver the results of a step, by its events."""
        for event in events:
            sequences = self._by_engine.get(event.request.id)
            if sequences is not None and (state := sequences.gain(event)) is not None:
                self._hand_over(state)
        for event in events:
            request = event.request
            if request.done and (sequences := self._by_engine.pop(request.id, None)) is not None:
                output = request.result()
                reason = RuntimeError(f"The request ended as {output.finish_reason!s}.")
                self._fail(sequences.unfinished, output.error or reason)

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
        """Fail all requests that are not done, also those that the engine has not seen."""
        drain_queue(self.input_queue)
        with self._request_lock:
            for sequences in [*self._open.values()]:
                self._fail(sequences.unfinished, error)
        self._by_engine.clear()
