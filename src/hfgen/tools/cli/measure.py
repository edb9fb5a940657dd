"""Calls of ``generate`` with their times, and both libraries in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from .loading import Loaded, upstream
from .report import CliError, refused

T = TypeVar("T")

named_errors = partial(refused, Exception, before="generate() failed: ")  # errors of a call

#: Library → the context in which a model generates with it.
LIBRARIES: dict[str, Callable[[Loaded], Any]] = {"transformers": upstream, "hfgen": nullcontext}


class Clock:
    """Notes the times of a call: its start, the prompt, and the new tokens of each step. A streamer."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def put(self, value: Any = None) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing comes after the last token."""


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
    """Inputs ``(prompts, longest)``, padded; ``CliError`` for a prompt without tokens."""
    from .. import prompts as texts

    with refused(ValueError):
        return texts.encode(prompts, loaded.tokenizer, loaded.model)


def generate(
    loaded: Loaded,
    inputs: dict[str, Any],
    config: Any,
    seed: int | None = None,
    show: Callable[[Any], None] | None = None,
) -> Generated:
    """Generate once at ``seed``, timed; ``show`` gets each ``StreamEvent`` of a stream. Errors become ``CliError``."""
    defaults = loaded.model.generation_config
    is_timed = (config.num_beams or defaults.num_beams or 1) == 1 and not config.force_words_ids
    kwargs = {**inputs, **loaded.mode_kwargs(), "generation_config": config}
    if seed is not None:
        import torch

        torch.manual_seed(seed)
    clock = Clock()
    with named_errors():
        if show is None:
            output = loaded.model.generate(**kwargs, **({"streamer": clock} if is_timed else {}))
        else:
            clock.put()
            with loaded.model.stream(**kwargs, return_dict_in_generate=True) as events:
                for event in events:
                    clock.put()
                    show(event)
            output = events.result
    padded = new_tokens(loaded, inputs, output)
    seconds = time.perf_counter() - clock.times[0]
    first = clock.times[2] - clock.times[0] if len(clock.times) > 2 else None
    reasons = getattr(output, "finish_reasons", None) or [None] * len(padded)
    eos, pad = (
        getattr(defaults if getattr(config, name) is None else config, name)
        for name in ("eos_token_id", "pad_token_id")
    )
    eos = eos if isinstance(eos, list) else [eos]
    rows = [without_padding(row, why, eos, pad) for row, why in zip(padded, reasons, strict=True)]
    named = [reason for reason in reasons if reason is not None]
    return Generated(padded, rows, seconds, first, output, named)


def without_padding(row: list[int], reason: Any, eos: list[Any], pad: int | None) -> list[int]:
    """``row`` up to its end. ``reason``: why it ended; None with transformers, which does not say."""
    if reason is None or reason == "eos":
        ends = [getattr(reason, "stop", None)] if reason is not None else eos
        return row[: next((i for i, token in enumerate(row, 1) if token in ends), None)]
    if reason == "length":
        return row
    n_pads = next((n for n, token in enumerate(reversed(row)) if token != pad), len(row))
    return row[: len(row) - n_pads]


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


def new_tokens(loaded: Loaded, inputs: dict[str, Any], output: Any) -> list[list[int]]:
    """The tokens of each row after the prompt, padding included."""
    sequences = getattr(output, "sequences", output)
    length = 1 if loaded.model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    return sequences[:, length:].tolist()


def peak_memory() -> int | None:
    """Largest memory of the process so far, in bytes: of the GPU where one is used."""
    import torch

    from ...decoding.outputs import peak_bytes

    is_cuda = torch.cuda.is_available() and torch.cuda.max_memory_allocated() > 0
    return peak_bytes(torch.device("cuda" if is_cuda else "cpu"))
