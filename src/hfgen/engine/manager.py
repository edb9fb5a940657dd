"""transformers' manager of continuous batching, on hfgen's engine, which one thread steps."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus
from transformers.generation.continuous_batching.requests import GenerationOutput

from .arguments import engine_options
from .engine import Engine
from .sequences import Sequences
from .worker import STOPPED, Worker, eager_for_paged, logger

#: Seconds that a request waits for room in a queue of ``max_queue_size``, as upstream's does.
WAIT_FOR_ROOM = 10.0


class Manager(Worker, ContinuousBatchingManager):
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
        # Not upstream's, which changes the model's attention and reserves its memory.
        Worker.__init__(self, model, generation_config, continuous_batching_config)
        self.options = engine_options(continuous_batching_config)
        self.is_tp_driver = self.warmed_up = True
        self.batch_processor = None

    @property
    def num_return_sequences(self) -> int:
        """Of a request that does not say."""
        return self.n_sequences({})

    def n_sequences(self, arguments: dict[str, Any]) -> int:
        """How many sequences a request with ``arguments`` returns."""
        name = "num_return_sequences"
        configs = (
            arguments.get("generation_config", self.generation_config),
            self.model.generation_config,
        )
        counts = arguments.get(name), *(getattr(config, name, None) for config in configs)
        return next((n for n in counts if n is not None), 1)

    # The thread. ``is_running``, ``join`` and ``pause`` are upstream's.

    def warmup(self) -> None:
        """Nothing: what is compiled is compiled at its first use."""

    def start(self) -> None:
        """Start the thread. Raises what ``Engine`` raises for the model and the options."""
        if self.is_running():
            logger.warning("Manager thread is already running.")
            return
        with ExitStack() as attention:
            attention.enter_context(eager_for_paged(self.model))
            engine = Engine(self.model, **self.options)
            self._attention = attention.pop_all()
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
        return self.enter(input_ids, request_id, kwargs, streaming, record_timestamps)

    def enter(
        self, input_ids: Any, request_id: str | None, kwargs: dict[str, Any], *options: bool
    ) -> str:
        """Queue a request of several that come together: it has a result, also if the thread fails meanwhile."""
        n = self.n_sequences(kwargs)
        with self._request_lock:
            if request_id is None:
                request_id = self._new_ids(1)[0]
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
            # It has stopped since, and nobody else would.
            self._fail_all(self.background_thread_status.fatal_error or STOPPED)
        return request_id

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
            names = self._new_ids(len(inputs))
        if (denial := self.background_thread_status.can_accept_new_requests()) is not None:
            logger.warning(f"{denial} {len(inputs)} requests are dropped.")
            return names
        for name, prompt in zip(names, inputs, strict=True):
            own = {"max_new_tokens": max_new_tokens, **kwargs}
            self.enter(prompt, name, own, streaming, record_timestamps)
        return names

    def _new_ids(self, n: int) -> list[str]:
        start, self._request_counter = self._request_counter, self._request_counter + n
        return [f"req_{i}" for i in range(start, start + n)]

    # Results

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """The next result, of any request or of one; waits ``timeout`` seconds for it, or without end.

        ``None`` if there is none by then, or none and the thread does not run.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            is_running, left = self.is_running(), deadline - time.monotonic()
            wait = max(min(left, 0.1), 0.0) if is_running else 0.0
            output = self.output_router.take(request_id, wait)
            if output is not None or not is_running or left <= wait:
                return output

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Results as they come; ends when the thread has ended and all have been handed over."""
        return self._results()

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """The results of one request, up to its last."""
        return self._results(request_id)

    def _results(self, request_id: str | None = None) -> Iterator[GenerationOutput]:
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
        """Call ``callback`` on the running event loop with each result of a request.

        Results that wait already come first. The handler is dropped after the last one. If the loop is
        closed before, the request is cancelled.
        """
        self.output_router.register(request_id, callback)
