"""``Engine``: continuous batching of requests, each with the tokens of its own ``generate``."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any
from weakref import WeakValueDictionary

import torch

from .. import families
from ..mixin import driven, mixed_view
from ..prepare import rows
from ..prepare.config import resolve
from ..state.call import Request
from .errors import EngineClosedError, EngineError, ResultTakenError, UnknownRequestError
from .memory import Memory
from .request import (
    EngineEvent,
    EngineRequest,
    EngineStats,
    RequestOutput,
    check_arguments,
    check_numbers,
    model_inputs,
)
from .scheduler import Scheduler
from .serving import Service
from .steps import CANCELLED, Steps

#: Requests that are done and whose result was not taken: so many of the last ones stay available by id.
MAX_DONE = 1024


class Engine(AbstractContextManager["Engine"]):
    """Decodes many requests at once; each gets the tokens that ``model.generate`` gives it alone.

    It has no thread: ``step``, ``events`` and ``result`` decode in the caller's. All methods may be called
    from any thread; threads that decode take turns, a step each.

    Args:
        model: A model with hfgen's mixin; any other is used through a view that has it.
        tokenizer: For prompts that are text, stop strings, and the text of results.
        max_rows: Rows that decode at once; a request has one for each beam or returned sequence.
        memory: For the KV cache: bytes, or up to 1.0 a share of what is free.
        prefill_tokens: Tokens of prompts that are forwarded between two tokens of decoding rows, at
            most, where a prompt can be cut.
        policy: ``"fcfs"``, ``"srpt"`` or ``"priority"``; see ``scheduler.Scheduler``.
        max_queue: Requests that may wait; ``QueueFullError`` beyond that.
        prefix_cache: A ``hfgen.PrefixCache`` for all requests that can use one.
        optimistic: Whether requests are admitted before all of their growth fits. When bytes run out,
            some are taken out of the batch, to the host, and go on later.
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
        optimistic: bool = False,
    ) -> None:
        check_arguments(model, tokenizer, prefix_cache)
        self.model: Any = mixed_view(model)
        self.tokenizer = tokenizer
        self.prefix_cache = prefix_cache
        row_memory = Memory(memory, families.device_of(self.model))
        self.scheduler = Scheduler(
            max_rows=max_rows,
            max_bytes=row_memory.limit,
            prefill_tokens=prefill_tokens,
            policy=policy,
            max_queue=max_queue,
            optimistic=optimistic,
        )
        self.steps = Steps(self.model, self.scheduler, row_memory)
        self.stats: EngineStats = self.steps.stats
        self._probe()
        #: Requests whose result was not handed over, by id. The caller keeps those that are done; the engine
        #: keeps the last ones, in ``_done``.
        self.requests: WeakValueDictionary[str, EngineRequest] = WeakValueDictionary()
        self._done: dict[str, EngineRequest] = {}
        #: Events of steps in ``result``, of requests whose result was not handed over.
        self._ready: dict[EngineRequest, list[EngineEvent]] = {}
        self._turns = threading.RLock()
        self._is_stepping = False
        self._numbers = itertools.count()
        self._is_closed = False
        self._server: threading.Thread | None = None

    def _probe(self) -> None:
        """Measure the memory of a row by forwarding one token, so that the first request can be sized."""
        arguments = self._arguments([1], {"max_new_tokens": 1})
        request = EngineRequest(id="probe", engine=self, arguments=arguments)
        # A model that needs more inputs is measured with its first request.
        with suppress(Exception), torch.no_grad():
            if self._is_prepared_at_once(request.arguments):
                decoding = request.prepare(self.model)
                decoding.prefill(1, is_last=True)
                self.steps.memory.measure(families.given_cache(decoding.run.model_kwargs))

    # ------------------------------------------------------------ requests

    @torch.inference_mode(False)  # steps write to its tensors
    @torch.no_grad()
    def add(
        self, prompt: Any, *, priority: int = 0, timeout: float | None = None, **kwargs: Any
    ) -> EngineRequest:
        """Queue a request.

        ``prompt``: text, token ids as a list or a tensor ``(n,)`` or ``(1, n)``, a list of chat messages,
        or a mapping of model inputs with one row each. ``priority``: higher is sooner, with that policy.
        ``timeout``: seconds after which it ends with what it has. ``kwargs`` are those of ``generate``.

        Raises what ``generate`` raises for arguments that cannot be used, ``QueueFullError``,
        ``DoesNotFitError`` for a request that never fits, and ``EngineClosedError``.
        """
        self._check_usable()
        check_numbers(priority, timeout)
        now = time.monotonic()
        request = EngineRequest(
            engine=self,
            arguments=self._arguments(prompt, kwargs),
            priority=priority,
            deadline=None if timeout is None else now + timeout,
            id=f"req_{next(self._numbers)}",  # behind the arguments, which may raise
        )
        self._size(request)
        self.steps.enter(request, now)
        self.requests[request.id] = request
        return request

    def _size(self, request: EngineRequest) -> None:
        """Write the rows and bytes that the request needs; prepares it unless that runs an encoder."""
        memory = self.steps.memory
        if self._is_prepared_at_once(request.arguments):
            decoding = request.prepare(self.model)
            decoding.check()
            n_rows, n_tokens, longest = decoding.n_rows, decoding.prompt_length, decoding.longest
            is_short = n_tokens <= self.scheduler.prefill_tokens
            request.is_whole = is_short or not decoding.can_be_cut
            if decoding.joins:  # in the step of its last chunk, it decodes a token besides
                request.n_bytes_now = memory.needed(n_rows, min(n_tokens + 1, longest))
        else:
            call, _ = resolve(self.model, request.arguments)
            call.release()
            config, request.is_whole, n_tokens = call.config, True, 1
            kwargs = request.arguments.kwargs
            ids = kwargs.get("input_ids", kwargs.get("inputs_embeds"))
            n_rows = max(config.num_beams or 1, config.num_return_sequences or 1)
            if isinstance(ids, torch.Tensor) and not self.model.config.is_encoder_decoder:
                n_tokens = ids.shape[1]
            longest = config.max_length or 0
            if config.max_new_tokens is not None:
                longest = n_tokens + config.max_new_tokens
        request.n_tokens, request.n_rows = n_tokens, n_rows
        request.n_bytes = memory.needed(n_rows, longest)

    def _arguments(self, prompt: Any, kwargs: dict[str, Any]) -> Request:
        """The arguments of ``generate`` for a prompt and the ``kwargs`` of ``add``."""
        if "stop" in kwargs:
            kwargs = rows.with_stop_strings(Request(kwargs=kwargs)).kwargs
        if self.tokenizer is not None:
            kwargs = {"tokenizer": self.tokenizer} | kwargs
        inputs = model_inputs(prompt, kwargs.get("tokenizer"), families.device_of(self.model))
        if doubled := inputs.keys() & kwargs.keys() & {"input_ids", "inputs", "inputs_embeds"}:
            raise ValueError(
                f"`{doubled.pop()}` is the prompt itself: do not pass it as an argument."
            )
        kwargs = kwargs | {"return_dict_in_generate": True, "drop_finished": False}
        return driven(self.model, Request.of(**inputs | rows.folded(kwargs)))

    def _is_prepared_at_once(self, arguments: Request) -> bool:
        """Whether preparing a request forwards nothing: there is no encoder, of text or of images."""
        known = {"input_ids", "attention_mask", "position_ids"}
        tensors = {n for n, v in arguments.kwargs.items() if isinstance(v, torch.Tensor)}
        return not self.model.config.is_encoder_decoder and tensors <= known

    def cancel(self, request: EngineRequest | str) -> None:
        """End a request with what it has, before the next step. One that is done stays as it is."""
        self._find(request).ends_as = CANCELLED

    def result(self, request: EngineRequest | str) -> RequestOutput:
        """Step until the request is done; returns its output, once."""
        request = self._find(request)
        while not request.done:
            with self._turns:
                if not request.done:  # another thread may have ended it
                    self._defer(self.step())
        with self._turns:
            self._ready.pop(request, None)
            self._done.pop(request.id, None)
            if self.requests.pop(request.id, None) is None:
                raise ResultTakenError(f"The result of {request.id} was handed over before.")
        assert request.output is not None
        return request.output

    def _find(self, request: EngineRequest | str) -> EngineRequest:
        if isinstance(request, EngineRequest):
            if request.engine is not self:
                raise UnknownRequestError(f"{request.id} belongs to another engine.")
            return request
        known = self.requests.get(request) if isinstance(request, str) else None
        if known is None:
            raise UnknownRequestError(
                f"There is no request {request!r}: it never was, its result was handed over, or nobody has "
                f"kept the request, and {MAX_DONE:,} others have ended since."
            )
        return known

    # ------------------------------------------------------------ decoding

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self.steps.requests)

    @property
    def n_rows(self) -> int:
        """Rows that are decoding, or being prefilled."""
        return self.scheduler.n_rows

    @property
    def n_waiting(self) -> int:
        return len(self.scheduler.waiting)

    def events(self) -> Iterator[EngineEvent]:
        """Step until nothing is left to do, and yield the events of all sequences.

        Includes those of steps in ``result``, but for the request of that result.
        """
        while self.has_work or self._ready:
            with self._turns:
                ready, self._ready = self._ready, {}
            yield from itertools.chain.from_iterable(ready.values()) if ready else self.step()

    def step(self) -> list[EngineEvent]:
        """Take out what has to end, forward prompts that wait, and decode a token of each row.

        Returns the new events. A request whose processor, grammar or callback raises ends with
        ``finish_reason`` ``"error"``; a forward pass that raises ends all requests in it. A step that is
        interrupted (``KeyboardInterrupt``) ends all requests but those that wait. Raises
        ``EngineClosedError`` after ``close``, and ``EngineError`` in a callback of a step.
        """
        with self._turn():
            self._check_usable()
            events = self.steps.step()
            self._keep_done(events)
            return events

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait until no other thread decodes; ``EngineError`` if this one does."""
        with self._turns:
            if self._is_stepping:
                raise EngineError("The engine cannot be stepped or closed by a callback of a step.")
            self._is_stepping = True
            try:
                yield
            finally:
                self._is_stepping = False

    def _defer(self, events: list[EngineEvent]) -> None:
        """Keep ``events`` for ``self.events()``."""
        for event in events:
            self._ready.setdefault(event.request, []).append(event)

    def _keep_done(self, events: list[EngineEvent]) -> None:
        """Keep the requests that have ended, and drop the oldest beyond ``MAX_DONE``."""
        self._done |= {event.request.id: event.request for event in events if event.request.done}
        for old in list(itertools.islice(self._done, max(len(self._done) - MAX_DONE, 0))):
            del self._done[old]

    # ------------------------------------------------------------ serving

    def serving(self, observe: Callable[[RequestOutput], None] | None = None) -> Service:
        """The engine for coroutines, to be used by ``async with``; see ``serving.Service``."""
        return Service(self, observe)

    def serve_in(self, thread: threading.Thread | None) -> None:
        """Reserve ``add``, ``step`` and ``close`` for ``thread``; ``None`` releases them.

        Other threads get ``EngineError``.
        """
        if thread is not None and self._server is not None:
            raise EngineError(
                "The engine already has a service: use this service, or close it first."
            )
        self._server = thread

    def _check_usable(self, is_closing: bool = False) -> None:
        if self._is_closed and not is_closing:
            raise EngineClosedError("The engine was closed: make another one.")
        if self._server is not None and threading.current_thread() is not self._server:
            raise EngineError("The thread of a service steps this engine: use the service.")

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Cancel all requests and release their memory. Results stay available."""
        self._check_usable(is_closing=True)
        with self._turn():
            for request in list(self.steps.requests.values()):
                request.ends_as = request.ends_as or CANCELLED
            self.steps.take_out()
            self._is_closed = True
            events = self.steps.taken_events()
            self._keep_done(events)
            self._defer(events)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("An engine cannot be copied or pickled: make another one for the model.")

    def __exit__(self, *exception: object) -> None:
        self.close()
