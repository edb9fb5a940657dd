"""``generate_many``: many prompts through one engine, in order or as they finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any, Literal

from ..decoding.strategies.base import InvalidScoresError
from ..logits.stopping import FinishReason
from .engine import Engine
from .errors import as_exception
from .request import EngineEvent, EngineRequest, RequestMetrics, RequestOutput, SequenceOutput

#: Arguments of ``generate_many`` that are the engine's.
ENGINE_OPTIONS = ("max_rows", "memory", "prefill_tokens", "policy", "prefix_cache")

#: Outputs that may wait for one before them, for each row of the engine. Beyond it no prompt is read.
HELD_PER_ROW = 32

OnError = Literal["return", "raise"]

_END = object()


def generate_many(
    model: Any,
    prompts: Iterable[Any],
    tokenizer: Any = None,
    *,
    in_order: bool = True,
    progress: bool | None = None,
    on_error: OnError = "return",
    **kwargs: Any,
) -> Iterator[RequestOutput]:
    """Generate for each of many prompts, as many at once as fit; an iterator of their outputs.

    Each output is that of ``model.generate`` for its prompt alone. ``output.id`` is the number of the
    prompt as text, from ``"0"``. Decoding goes on while the next output is asked for, and no prompt is
    read long before its turn, so ``prompts`` may be endless. Closing the iterator cancels what is left.

    Args:
        model: Any model; one without hfgen's mixin stays as it is.
        prompts: Each is a prompt, or a pair of a prompt and a dict of its own arguments, which come
            before ``kwargs``. A prompt is text, token ids, a list of chat messages, or a mapping of
            model inputs, as of ``Engine.add``.
        tokenizer: For prompts that are text, stop strings, and the text of outputs.
        in_order: Give outputs in the order of the prompts; else as they finish.
        progress: Show a bar on standard error: tokens per second, and the time left if ``prompts`` has
            a length.
        on_error: What becomes of a request that cannot be used, or that fails: ``"return"`` gives an
            output with ``error`` and the ``finish_reason`` ``"error"`` in its place, ``"raise"`` raises
            the error there, which ends all.
        kwargs: Those of ``generate``, ``priority`` and ``timeout`` for all prompts; and the engine's
            ``max_rows``, ``memory``, ``prefill_tokens``, ``policy`` and ``prefix_cache``.

    Raises:
        TypeError: ``prompts`` is a single text, or a mapping, in place of a list of prompts.
        ValueError: ``on_error`` is neither, or an option of the engine has a wrong value.
    """
    if isinstance(prompts, str | bytes | Mapping):
        raise TypeError(
            f"`prompts` has to be a list of prompts, but is one {type(prompts).__name__}: write [prompt]."
        )
    if on_error not in ("return", "raise"):
        raise ValueError(f"`on_error` has to be 'return' or 'raise', but is {on_error!r}.")
    options = {name: kwargs.pop(name) for name in ENGINE_OPTIONS if name in kwargs}
    engine = Engine(model, tokenizer, **options)
    counts = JobProgress(len(prompts) if isinstance(prompts, Sized) else None)

    def generate() -> Iterator[RequestOutput]:
        numbered = outputs(engine, prompts, kwargs, in_order=in_order, on_events=counts.add_events)
        with counts if progress else nullcontext(), closing(numbered):
            for number, output in numbered:
                counts.add_done()
                if output.error is not None and on_error == "raise":
                    raise output.error
                yield replace(output, id=str(number))

    return generate()


def outputs(
    engine: Engine,
    prompts: Iterable[Any],
    kwargs: Mapping[str, Any],
    *,
    in_order: bool,
    on_events: Callable[[list[EngineEvent]], None],
) -> Generator[tuple[int, RequestOutput], None, None]:
    """Yield the number of each prompt, from 0, and its output; closes the ``engine`` at the end.

    As many requests wait in the engine as it has rows. ``on_events`` gets the events of each step.
    """
    remaining_prompts = iter(prompts)
    max_rows = engine.scheduler.max_rows
    running: dict[int, EngineRequest] = {}
    finished: dict[int, RequestOutput] = {}
    n_read = n_yielded = 0
    is_over = False
    with engine:
        while running or not is_over:
            while not is_over and engine.n_waiting < max_rows:
                if in_order and n_read - n_yielded >= HELD_PER_ROW * max_rows:
                    break
                prompt = next(remaining_prompts, _END)
                if is_over := prompt is _END:
                    break
                pair = prompt if isinstance(prompt, tuple) and len(prompt) == 2 else (prompt, {})
                prompt, arguments = pair if isinstance(pair[1], Mapping) else (prompt, {})
                number, n_read = n_read, n_read + 1
                try:
                    running[number] = engine.add(prompt, **{**kwargs, **arguments})
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # a panic of Rust is no Exception; others go on
                    finished[number] = failed(as_exception(error), engine.tokenizer is not None)
                    break  # endless prompts that are all wrong have outputs, too
            if running:
                on_events(engine.step())
                for number in [n for n, request in running.items() if request.done]:
                    finished[number] = output = engine.result(running.pop(number))
                    if isinstance(failure := output.error, InvalidScoresError):
                        output.error = InvalidScoresError(failure.rows, failure.step, number)
            while finished:
                number = n_yielded if in_order else next(iter(finished))
                if number not in finished:
                    break
                n_yielded += 1
                yield number, finished.pop(number)


def failed(error: BaseException, has_text: bool = False) -> RequestOutput:
    """The output of a request that could not be added."""
    nothing = SequenceOutput([], "" if has_text else None, FinishReason("error"))
    return RequestOutput("", [], [nothing], RequestMetrics(), error)


class JobProgress:
    """A bar on standard error. Without a ``total`` it counts, and shows no time left."""

    def __init__(
        self, total: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total, self.clock = total, clock
        self.n_done = self.n_tokens = 0
        self.started = clock()
        self._bar: Any = None
        self._task: Any = None

    @property
    def seconds(self) -> float:
        """Since it was entered."""
        return self.clock() - self.started

    @property
    def tokens_per_second(self) -> float:
        return self.n_tokens / max(self.seconds, 1e-9)

    def add_tokens(self, n: int) -> None:
        self.n_tokens += n
        self._show()

    def add_events(self, events: list[EngineEvent]) -> None:
        self.add_tokens(sum(len(event.token_ids) for event in events))

    def add_done(self) -> None:
        self.n_done += 1
        self._show()

    def _show(self) -> None:
        if self._bar is not None:
            speed = f"{self.tokens_per_second:,.0f} tokens/s"
            self._bar.update(self._task, completed=self.n_done, speed=speed)

    def __enter__(self) -> JobProgress:
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[speed]}"),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.started = self.clock()
        self._task = self._bar.add_task("", total=self.total, speed="")
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()
        self._bar = None
