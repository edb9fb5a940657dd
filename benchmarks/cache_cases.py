"""The work that ``benchmarks.caches`` measures: who does it, on what, and what cannot be avoided.

A ``Work`` makes the arguments of a call for either library; ``measure`` lets them take turns. Its floor is
put together from forward passes that were timed by themselves: those that the work cannot do without.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.configuration_utils import get_head_shapes
from transformers.generation.configuration_utils import GenerationMode

import hfgen
from hfgen.families import CACHE
from hfgen.memory.caches.dynamic import GrowingCache
from hfgen.tools.evaluate.live_bytes import LiveBytes

from .models import Subject
from .side_by_side import LIBRARIES, Call, Comparison, UnequalTokensError, call

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured; lengths in tokens."""

    #: Pairs of timed calls, at most; and how many seconds they may take before two are enough.
    pairs: int
    seconds: float = 30.0
    contexts: tuple[int, ...] = (1024, 4096, 8192, 16384)
    batches: tuple[int, ...] = (1, 4)
    #: Prompts of beams and samples: the first is the target's.
    prompts: tuple[int, ...] = (1024,)
    new_tokens: int = 32
    beams: int = 4
    samples: int = 8
    #: Rows of a batch end after that many tokens.
    ends: tuple[int, ...] = tuple(8 + round(i * 248 / 15) for i in range(16))
    shared: int = 1024
    #: Forwards of each kind that a floor is made of.
    repeat: int = 5


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds of the forward passes that cannot be avoided."""

    first: float | None
    whole: float


@dataclass(frozen=True, slots=True)
class Work:
    """``rows`` sequences of ``length`` tokens that ``new_tokens`` are added to.

    ``arguments(library, turn)`` makes those of a call, outside of its time.
    """

    case: str
    length: int
    rows: int
    new_tokens: int
    arguments: Callable[[str, int], Arguments]
    floor: Callable[[], Floor]
    #: Whether it counts when the first token is there.
    has_first: bool = True
    #: Bytes that the library keeps besides, when the call has ended.
    kept: Callable[[Arguments], int] = lambda arguments: 0


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured of a ``Work``; times are in the comparisons."""

    model: str
    case: str
    length: int
    rows: int
    new_tokens: int
    whole: Comparison
    first: Comparison | None
    floor: Floor
    #: Of all tensors that were alive at once in a call, those of a given cache included.
    peak_bytes: dict[str, int] = field(default_factory=dict)
    kept_bytes: dict[str, int] = field(default_factory=dict)

    def parts(self) -> dict[str, tuple[Comparison, float]]:
        """What is compared, with the floor's seconds."""
        parts = {"whole call": (self.whole, self.floor.whole)}
        if self.first is not None and self.floor.first is not None:
            parts = {"first token": (self.first, self.floor.first), **parts}
        return parts


class Stopwatch(StoppingCriteria):
    """Notes when it is first asked, which is when the first token is there; ends nothing."""

    def __init__(self) -> None:
        self.read: tuple[float, float] | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.read is None:
            self.read = now()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def now() -> tuple[float, float]:
    """Seconds: of the wall, of the processor."""
    return time.perf_counter(), time.process_time()


def measure(
    subject: Subject,
    work: Work,
    n_pairs: int,
    seconds: float = math.inf,
    advance: Callable[[], None] = lambda: None,
) -> Result:
    """A pair of calls to count bytes and to warm up, and ``n_pairs`` to time.

    After ``seconds``, two of these are enough. Raises ``UnequalTokensError`` if the libraries do not generate the same tokens.
    """
    name = f"{work.case}, {work.length} tokens, {work.rows} rows"
    whole = Comparison(name, work.new_tokens)
    first = Comparison(f"{name}, first token", 1) if work.has_first else None
    peaks, kept = {}, {}
    begin = time.perf_counter()
    for turn in range(n_pairs + 1):
        if turn > 2 and time.perf_counter() - begin > seconds:
            break
        calls, starts = {}, {}
        for library in LIBRARIES if turn % 2 else reversed(LIBRARIES):
            gc.collect()
            with LiveBytes() if turn == 0 else torch.no_grad() as counted:
                arguments = work.arguments(library, turn)
                if turn == 0:
                    counted.peak = counted.now  # not of making them
                watch, start = Stopwatch(), now()
                if work.has_first:
                    arguments["stopping_criteria"] = StoppingCriteriaList([watch])
                calls[library] = call(library, subject.model, arguments, seed=0)
            if watch.read is not None:
                wall, cpu = (end - begin for begin, end in zip(start, watch.read, strict=True))
                starts[library] = Call(calls[library].tokens, wall, cpu)
            if turn == 0:
                peaks[library], kept[library] = counted.peak, work.kept(arguments)
            del arguments
        if not torch.equal(calls["upstream"].tokens, calls["hfgen"].tokens):
            raise UnequalTokensError(f"Of {subject.name}: {name}.")
        if turn:
            whole.add(calls)
            if first is not None:
                first.add(starts)
        advance()
    return Result(
        subject.name,
        work.case,
        work.length,
        work.rows,
        work.new_tokens,
        whole,
        first,
        work.floor(),
        peaks,
        kept,
    )


# --- pieces -------------------------------------------------------------------------------------


def random_ids(subject: Subject, rows: int, length: int, seed: int = 1) -> torch.Tensor:
    """``(rows, length)``, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, subject.model.config.vocab_size, (rows, length), generator=generator)


def prompted(ids: torch.Tensor, new_tokens: int, **options: Any) -> Arguments:
    """Arguments of a call that ends after ``new_tokens``."""
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": new_tokens,
        "do_sample": False,
        "eos_token_id": None,
        **options,
    }


def make_room(subject: Subject, length: int) -> None:
    """Let the model take ``length`` tokens, more than it was made for if need be."""
    config = subject.model.config
    config.max_position_embeddings = max(config.max_position_embeddings, length)


def fill(cache: Any, config: Any, context: int, rows: int) -> Any:
    """The cache after a prompt of ``context`` tokens, of which random states are made."""
    heads, size = get_head_shapes(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in range(config.num_hidden_layers):
            shape = (rows, heads, context, size)
            keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
            cache.update(keys, values, layer)
    return cache


def held_bytes(cache: Any) -> int:
    """Bytes of the storages behind keys and values."""
    states = [states for layer in cache.layers for states in (layer.keys, layer.values)]
    return sum({s.untyped_storage()._cdata: s.untyped_storage().nbytes() for s in states}.values())


@torch.no_grad()
def forward_seconds(subject: Subject, rows: int, n: int, past: int, repeat: int) -> float:
    """Median time in which ``n`` tokens more of ``rows`` sequences are forwarded after ``past``.

    The cache grows in place; each pass but the first, which is not timed, finds room in it.
    """
    make_room(subject, past + (repeat + 1) * n)
    ids, seconds = random_ids(subject, rows, n), []
    cache = GrowingCache(config=subject.model.config, max_length=past + (repeat + 1) * n)
    if past:
        fill(cache, subject.model.config, past, rows)
    for _ in range(repeat + 1):
        if n > 1 and cache.get_seq_length() > past:
            cache.crop(past - cache.get_seq_length())
        start = time.perf_counter()
        subject.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


# --- the work -----------------------------------------------------------------------------------


def decoding(subject: Subject, size: Size) -> list[Work]:
    """One token after the other behind a context whose keys and values are random."""
    return [
        _decoding(subject, context, rows, size)
        for context in size.contexts
        for rows in size.batches
    ]


def _decoding(subject: Subject, context: int, rows: int, size: Size) -> Work:
    config, n = subject.model.config, size.new_tokens + 1
    make_room(subject, context + n + 1)
    ids = random_ids(subject, rows, context + 1)

    def arguments(library: str, turn: int) -> Arguments:
        empty = (
            GrowingCache(config=config, max_length=context + n)
            if library == "hfgen"
            else DynamicCache(config=config)
        )
        return prompted(ids, n, **{CACHE: fill(empty, config, context, rows)})

    def floor() -> Floor:
        return Floor(None, n * forward_seconds(subject, rows, 1, context, size.repeat))

    return Work(
        "decoding",
        context,
        rows,
        n,
        arguments,
        floor,
        has_first=False,
        kept=lambda arguments: held_bytes(arguments[CACHE]),
    )


def beams(subject: Subject, size: Size) -> list[Work]:
    return [
        _expanded("beams", subject, length, size.beams, size, {"num_beams": size.beams})
        for length in size.prompts
    ]


def samples(subject: Subject, size: Size) -> list[Work]:
    options = {"num_return_sequences": size.samples, "do_sample": True, "top_k": 50}
    return [
        _expanded("samples", subject, length, size.samples, size, options)
        for length in size.prompts
    ]


def _expanded(
    case: str, subject: Subject, length: int, rows: int, size: Size, options: Arguments
) -> Work:
    """``rows`` sequences that go on from one prompt."""
    make_room(subject, length + size.new_tokens)
    ids = random_ids(subject, 1, length)

    def floor() -> Floor:
        prompt = forward_seconds(subject, 1, length, 0, 1)
        step = forward_seconds(subject, rows, 1, length, size.repeat)
        return Floor(prompt, prompt + (size.new_tokens - 1) * step)

    return Work(
        case,
        length,
        rows,
        size.new_tokens,
        lambda library, turn: prompted(ids, size.new_tokens, **options),
        floor,
    )


class EndAt(LogitsProcessor):
    """Ends each row, and no other way, after as many tokens as its first one says.

    ``lengths (vocab,)``. By its first token a row is known in any batch.
    """

    def __init__(self, lengths: torch.Tensor, prompt_length: int, eos: int) -> None:
        self.lengths, self.prompt_length, self.eos = lengths, prompt_length, eos

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        n_now = input_ids.shape[1] - self.prompt_length + 1  # with the token that is chosen
        is_end = self.lengths[input_ids[:, 0]] == n_now
        scores = scores.clone()
        scores[:, self.eos] = torch.where(is_end, scores.new_tensor(1e4), -torch.inf)
        return scores


def finished(subject: Subject, size: Size, prompt_length: int = 64) -> list[Work]:
    """A batch whose rows end one after the other."""
    rows, longest, eos = len(size.ends), max(size.ends), 2
    make_room(subject, prompt_length + longest)
    ids = random_ids(subject, rows, prompt_length)
    ids[:, 0] = torch.arange(5, 5 + rows)
    lengths = torch.zeros(subject.model.config.vocab_size, dtype=torch.long)
    lengths[ids[:, 0]] = torch.tensor(size.ends)

    def arguments(library: str, turn: int) -> Arguments:
        processor = EndAt(lengths, prompt_length, eos)
        given = prompted(ids, longest, eos_token_id=eos, pad_token_id=0)
        given["logits_processor"] = LogitsProcessorList([processor])
        return given | ({"drop_finished": True} if library == "hfgen" else {})

    def floor() -> Floor:
        prompt = forward_seconds(subject, rows, prompt_length, 0, 1)
        past = prompt_length + longest // 2
        at = {
            n: forward_seconds(subject, n, 1, past, size.repeat)
            for n in sorted({1, 2, 4, 8, rows} & {*range(1, rows + 1)})
        }
        alive = [sum(end > step for end in size.ends) for step in range(1, longest)]
        return Floor(None, prompt + sum(_between(at, n) for n in alive))

    return [
        Work("finished", prompt_length, rows, longest, arguments, floor, has_first=False),
    ]


def _between(at: dict[int, float], n: int) -> float:
    """The value at ``n``, on a line between the measured ones beside it."""
    below = max(key for key in at if key <= n)
    above = min(key for key in at if key >= n)
    share = (n - below) / (above - below) if above > below else 0.0
    return at[below] + share * (at[above] - at[below])


def chat(subject: Subject, size: Size, n_said: int = 32) -> list[Work]:
    """The second turn of a chat, whose first one a ``PrefixCache`` has seen.

    Each turn of the measurement says something else, so that no more than the first is known.
    """
    make_room(subject, size.shared + 2 * n_said + size.new_tokens)
    prefixes = hfgen.PrefixCache(max_bytes=2**32)
    ids = random_ids(subject, 1, size.shared)
    told = subject.model.generate(**prompted(ids, n_said), prefix_cache=prefixes)
    n_new = 1 + n_said  # what was generated last was not forwarded

    def arguments(library: str, turn: int) -> Arguments:
        said = random_ids(subject, 1, n_said, seed=2 + turn)
        options = {"prefix_cache": prefixes} if library == "hfgen" else {}
        return prompted(torch.cat([told, said], dim=1), size.new_tokens, **options)

    def floor() -> Floor:
        known = told.shape[1] - 1
        first = forward_seconds(subject, 1, n_new, known, size.repeat)
        step = forward_seconds(subject, 1, 1, known + n_new, size.repeat)
        return Floor(first, first + (size.new_tokens - 1) * step)

    def kept(arguments: Arguments) -> int:
        return prefixes.stats.bytes if "prefix_cache" in arguments else 0

    length = told.shape[1] + n_said
    return [Work("chat", length, 1, size.new_tokens, arguments, floor, kept=kept)]


#: Name of a case -> its work on a model.
CASES: dict[str, Callable[[Subject, Size], list[Work]]] = {
    "decoding": decoding,
    "beams": beams,
    "samples": samples,
    "finished": finished,
    "chat": chat,
}


# --- memory -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Memory:
    """The most bytes in memory, cache included, while one token more is decoded: by cache."""

    model: str
    context: int
    peaks: dict[str, int]


#: Name of a cache -> what asks for it; the first is upstream's. The last is also told a folder.
KINDS: dict[str, Arguments | None] = {
    "upstream dynamic": None,
    "hfgen dynamic": {},
    "static": {"cache_implementation": "static"},
    "int8": {"cache_implementation": "quantized", "cache_config": {"bits": 8}},
    "int4": {"cache_implementation": "quantized", "cache_config": {"bits": 4}},
    "int2": {"cache_implementation": "quantized", "cache_config": {"bits": 2}},
    "in files": {"cache_implementation": "offloaded"},
}


def new_cache(subject: Subject, kind: str, length: int, folder: str) -> Any:
    """An empty cache of a kind, for one sequence of up to ``length`` tokens."""
    options = KINDS[kind]
    if options is None:
        return DynamicCache(config=subject.model.config)
    if kind == "in files":
        options = options | {"cache_config": {"path": folder}}
    config = hfgen.GenerationConfig(num_beams=1, num_return_sequences=1, use_cache=True, **options)
    kwargs: Arguments = {}
    mode = GenerationMode.GREEDY_SEARCH
    subject.model._prepare_cache_for_generation(config, kwargs, mode, 1, length)
    return kwargs[CACHE]


@torch.no_grad()
def measure_memory(
    subject: Subject, contexts: Sequence[int], folder: str, advance: Callable[[], None]
) -> list[Memory]:
    """Of each kind of cache; tensors in mapped files do not count."""
    results = []
    for context in contexts:
        make_room(subject, context + 2)
        peaks = {}
        for kind in KINDS:
            gc.collect()
            with LiveBytes() as live:
                cache = new_cache(subject, kind, context + 2, folder)
                fill(cache, subject.model.config, context, 1)
                for _ in range(2):  # buffers grow with the first
                    live.peak = live.now
                    ids = random_ids(subject, 1, 1)
                    subject.model(ids, past_key_values=cache, use_cache=True)
            peaks[kind] = live.peak
            del cache
            advance()
        hfgen.free_caches(subject.model)
        results.append(Memory(subject.name, context, peaks))
    return results
