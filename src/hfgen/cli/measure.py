"""One generation, with its times and its memory."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any

from hfgen.cli.loading import Loaded
from hfgen.cli.report import CliError


@dataclass(slots=True)
class Clock:
    """A streamer that notes when tokens arrive and passes them on to ``then``."""

    then: Any = None
    started: float = field(default_factory=time.perf_counter)
    first: float | None = None  # seconds from the start to the first new token
    tokens: list[int] = field(default_factory=list)  # of all rows, as they came
    _prompt_seen: bool = False
    _ended: bool = False

    def put(self, value: Any) -> None:
        """Take the prompt ``(rows, length)`` first, then the new tokens ``(rows,)`` of each step."""
        if self._prompt_seen:
            if self.first is None:
                self.first = time.perf_counter() - self.started
            self.tokens.extend(value.flatten().tolist())
        self._prompt_seen = True
        if self.then is not None:
            self.then.put(value)

    def end(self) -> None:
        """Pass the end on, once, and not at all for a call that failed before it began."""
        if self.then is not None and self._prompt_seen and not self._ended:
            self.then.end()
        self._ended = True


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of one call of ``generate``, in seconds."""

    seconds: float  # the whole call
    first: float | None  # to the first new token; None of beams that nobody streams
    steps: int  # new tokens of the longest row
    tokens: int  # new tokens of all rows

    @property
    def per_token(self) -> float | None:
        """Mean time between two tokens of a row after the first; None for fewer than two."""
        if self.steps < 2:
            return None
        if self.first is None:
            return self.seconds / self.steps
        return (self.seconds - self.first) / (self.steps - 1)

    @property
    def per_second(self) -> float:
        """New tokens of all rows per second of the whole call."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Generated:
    """What one call gave: new tokens per row, padding included, and its times."""

    rows: list[list[int]]
    timings: Timings
    output: Any  # what `generate` returned


def encode(loaded: Loaded, prompts: list[str]) -> dict[str, Any]:
    """Model inputs ``(prompts, longest)`` on the model's device, padded on the left.

    Raises ``CliError`` for a prompt without tokens.
    """
    import torch

    tokenizer = loaded.tokenizer
    ids = [tokenizer(prompt).input_ids for prompt in prompts]
    for prompt, row in zip(prompts, ids, strict=True):
        if not row:
            raise CliError(f"the prompt {prompt!r} has no tokens: give some text")
    longest = max(map(len, ids))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    padded = [[pad] * (longest - len(row)) + row for row in ids]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in ids]
    device = loaded.model.device
    return {
        "input_ids": torch.tensor(padded, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }


def generate(
    loaded: Loaded,
    inputs: dict[str, Any],
    config: Any,
    seed: int | None = None,
    streamer: Any = None,
) -> Generated:
    """Generate once and time it; ``seed`` sets torch's random generator before.

    ``streamer`` sees the tokens as they come. Raises ``CliError`` with the reason when ``generate``
    raises.
    """
    import torch

    if seed is not None:
        torch.manual_seed(seed)
    clock = Clock(streamer)
    beams = config.num_beams or loaded.model.generation_config.num_beams or 1
    if streamer is not None and (config.num_return_sequences or 1) > 1:
        raise CliError("only one sequence can be streamed: leave --num-return-sequences out")
    stream = {} if streamer is None and beams > 1 else {"streamer": clock}
    try:
        output = loaded.model.generate(
            **inputs, generation_config=config, **loaded.mode_kwargs(), **stream
        )
    except BrokenPipeError:  # whoever read the streamed text has enough
        raise
    except Exception as error:
        raise CliError(f"generate() failed: {error or type(error).__name__}") from error
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    length = 1 if loaded.model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    rows = sequences[:, length:].tolist()
    seconds = time.perf_counter() - clock.started
    counts = [len(until_end(row, config, loaded)) for row in rows]
    return Generated(rows, Timings(seconds, clock.first, max(counts), sum(counts)), output)


def until_end(row: list[int], config: Any, loaded: Loaded) -> list[int]:
    """``row`` up to and including its first end-of-sequence token."""
    ends = config.eos_token_id
    if ends is None:
        ends = loaded.model.generation_config.eos_token_id
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
    return row[:stop]


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
