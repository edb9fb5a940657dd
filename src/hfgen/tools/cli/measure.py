"""Calls of ``generate`` with their times, and both libraries in turns."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .field_options import with_options
from .loading import Loaded, upstream
from .report import CliError

T = TypeVar("T")

#: Library → the context in which a model generates with it.
LIBRARIES: dict[str, Callable[[Loaded], Any]] = {"transformers": upstream, "hfgen": nullcontext}


@dataclass(slots=True)
class Clock:
    """A streamer that notes when the first new token arrives."""

    started: float = field(default_factory=time.perf_counter)
    first: float | None = None  # seconds from the start to the first new token
    has_begun: bool = False

    def put(self, value: Any) -> None:
        """Take the prompt ``(rows, length)`` first, then the new tokens ``(rows,)`` of each step."""
        if self.has_begun:
            self.first = self.first or time.perf_counter() - self.started
        self.has_begun = True

    def end(self) -> None:
        """Nothing is left to note."""


@dataclass(frozen=True, slots=True)
class Generated:
    """The tokens of one call of ``generate``, and its times in seconds."""

    padded: list[list[int]]  # new tokens per row, all of one length
    rows: list[list[int]]  # the same, without the padding behind their ends
    seconds: float  # the whole call
    first: float | None  # to the first new token; None for beams that are not streamed
    output: Any  # what `generate` returned
    reasons: Sequence[str] = ()  # why each row ended, if the output is an object of hfgen's

    @property
    def n_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(map(len, self.rows))

    @property
    def per_token(self) -> float | None:
        """Mean time between two tokens of a row after the first; None for fewer than two."""
        steps = max(map(len, self.rows))
        if steps < 2:
            return None
        if self.first is None:
            return self.seconds / steps
        return (self.seconds - self.first) / (steps - 1)

    @property
    def per_second(self) -> float:
        """New tokens of all rows per second of the whole call."""
        return self.n_tokens / self.seconds


def encode(loaded: Loaded, prompts: list[str]) -> dict[str, Any]:
    """Inputs ``(prompts, longest)``, padded on the left; ``CliError`` for a prompt without tokens."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = [torch.tensor(loaded.tokenizer(prompt).input_ids) for prompt in prompts]
    for prompt, row in zip(prompts, ids, strict=True):
        if not len(row):
            raise CliError(f"the prompt {prompt!r} has no tokens: give some text")
    pad, device = loaded.tokenizer.pad_token_id or 0, loaded.model.device
    padded = pad_sequence(ids, True, pad, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in ids], True, padding_side="left")
    return {"input_ids": padded.to(device), "attention_mask": mask.to(device)}


def generate(
    loaded: Loaded, inputs: dict[str, Any], config: Any, seed: int | None = None
) -> Generated:
    """Generate once with torch's generator at ``seed``, and time it; errors become ``CliError``."""
    import torch

    defaults = loaded.model.generation_config
    n_beams = config.num_beams or defaults.num_beams or 1
    is_streamed = n_beams == 1 and not config.force_words_ids
    kwargs = {**inputs, **loaded.mode_kwargs(), "generation_config": config}
    if seed is not None:
        torch.manual_seed(seed)
    with named_errors():
        clock = Clock()
        output = loaded.model.generate(**kwargs, **({"streamer": clock} if is_streamed else {}))
    padded = new_tokens(loaded, inputs, output)
    seconds = time.perf_counter() - clock.started
    reasons = getattr(output, "finish_reasons", None) or [None] * len(padded)
    eos, pad = (
        getattr(defaults if getattr(config, name) is None else config, name)
        for name in ("eos_token_id", "pad_token_id")
    )
    eos = eos if isinstance(eos, list) else [eos]
    rows = [without_padding(row, why, eos, pad) for row, why in zip(padded, reasons, strict=True)]
    named = [reason for reason in reasons if reason is not None]
    return Generated(padded, rows, seconds, clock.first, output, named)


def without_padding(row: list[int], reason: Any, eos: list[Any], pad: int | None) -> list[int]:
    """``row`` up to its end. ``reason``: why it ended; None with transformers, which does not say."""
    if reason is None or reason == "eos":
        ends = [getattr(reason, "stop", None)] if reason is not None else eos
        return row[: next((i for i, token in enumerate(row, 1) if token in ends), None)]
    if reason == "length":
        return row
    n_pads = next((n for n, token in enumerate(reversed(row)) if token != pad), len(row))
    return row[: len(row) - n_pads]


def stream(
    loaded: Loaded, inputs: dict[str, Any], config: Any, show: Callable[[Any], None]
) -> Generated:
    """``generate``, and ``show`` each ``StreamEvent`` as it comes."""
    kwargs = {**inputs, **loaded.mode_kwargs(), "generation_config": config}
    first, rows = None, defaultdict[int, list[int]](list)
    reasons: dict[int, str] = {}
    started = time.perf_counter()
    with named_errors(), loaded.model.stream(**kwargs) as events:
        for event in events:
            first = first or time.perf_counter() - started
            rows[event.row] += event.token_ids
            reasons[event.row] = event.finish_reason or ""
            show(event)
    padded = new_tokens(loaded, inputs, events.result)
    seconds, order = time.perf_counter() - started, sorted(rows)
    tokens, why = [rows[row] for row in order], [reasons[row] for row in order]
    return Generated(padded, tokens, seconds, first, events.result, why)


def race(loaded: Loaded, call: Callable[[str], T], repeat: int) -> dict[str, list[T]]:
    """The results of ``call(library)`` with each library: of a warm-up first, then of ``repeat`` turns.

    The order alternates, so that neither library always runs on warm caches. Errors name the library.
    """
    results: dict[str, list[T]] = {library: [] for library in LIBRARIES}
    for turn in range(repeat + 1):
        for library in list(LIBRARIES)[:: 1 if turn % 2 == 0 else -1]:
            with LIBRARIES[library](loaded):
                try:
                    results[library].append(call(library))
                except CliError as error:
                    raise CliError(f"{library}: {error}") from error
    return results


@contextmanager
def named_errors() -> Iterator[None]:
    """Turn errors inside the context into ``CliError``."""
    try:
        yield
    except BrokenPipeError:  # the reader of the streamed text has closed the pipe
        raise
    except Exception as error:
        message = with_options(str(error)) or type(error).__name__
        raise CliError(f"generate() failed: {message}") from error


def new_tokens(loaded: Loaded, inputs: dict[str, Any], output: Any) -> list[list[int]]:
    """The tokens of each row after the prompt, padding included."""
    sequences = getattr(output, "sequences", output)
    length = 1 if loaded.model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    tokens: list[list[int]] = sequences[:, length:].tolist()
    return tokens


def peak_memory() -> int | None:
    """Largest memory of the process so far, in bytes: of the GPU where one is used."""
    import torch

    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
