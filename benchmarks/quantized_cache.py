"""The quantised cache: what it costs in quality, memory and speed.

``python -m benchmarks.quantized_cache`` writes ``quantized_cache.{md,json,png}``.

* Quality: the built-in model's perplexity on held-out text, the second half of each row, with one
  token per forward, after a prompt that is forwarded in one go or token by token.
* Memory and speed: one token more on a context of random states, the caches taking turns.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import transformers
import typer
from transformers import DynamicCache

import hfgen
from benchmarks import output
from benchmarks.models import SUBJECTS
from benchmarks.output import RESULTS, OutOption, ThreadsOption, set_threads
from benchmarks.plots import legend_below, save, subplots
from benchmarks.side_by_side import Spread, machine
from hfgen.memory.caches.dynamic import GrowingCache
from hfgen.memory.caches.quantized import QuantizedCache
from hfgen.settings.cache_settings import Settings
from hfgen.tools.evaluate.live_bytes import LiveBytes
from scripts import train_builtin_model as training

#: The caches that are timed; the first is what the others are compared with.
CACHES: dict[str, Callable[[Any], Any]] = {
    "upstream dynamic": lambda config: DynamicCache(config=config),
    "hfgen dynamic": lambda config: GrowingCache(config=config),
    "int8": lambda config: QuantizedCache(config, Settings(8)),
    "int4": lambda config: QuantizedCache(config, Settings(4)),
    "int2": lambda config: QuantizedCache(config, Settings(2)),
}

#: What quality is measured of.
SETTINGS: dict[str, Settings | None] = {
    "full precision": None,
    "int8": Settings(8),
    "int4": Settings(4),
    "int4, groups of 32": Settings(4, 32),
    "int4, 128 exact tokens": Settings(4, None, 128),
    "int2": Settings(2),
    "int2, groups of 32, 128 exact tokens (the paper's)": Settings(2, 32, 128),
}

#: Perplexity may rise by this share.
TARGETS = {"int8": 0.005, "int4": 0.03}
MEMORY_TARGET, SPEED_TARGET, TARGET_CONTEXT = 0.30, 0.7, 4096


# --- quality ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Quality:
    """Perplexities of one setting; ``bytes_per_token``: of the cache when a row is full."""

    name: str
    in_one_go: float
    token_by_token: float
    bytes_per_token: float


def held_out_rows(n_rows: int, length: int) -> torch.Tensor:
    """Rows ``(n_rows, length)`` of text that the built-in model was not trained on."""
    _, tokenizer = hfgen.builtin_model()
    texts = training.read_texts().held_out
    stream = training.to_stream(tokenizer, texts)
    rows = stream[: len(stream) // length * length].view(-1, length)
    return rows[:: max(1, len(rows) // n_rows)][:n_rows]


@torch.no_grad()
def perplexity(model: Any, cache: Any, rows: torch.Tensor, n_prompt: int) -> float:
    """Of the second half of ``rows``; ``n_prompt`` tokens come in one go, the others one by one."""
    half = rows.shape[1] // 2
    losses, start = [], 0
    while start < rows.shape[1] - 1:
        end = n_prompt if start == 0 else start + 1
        logits = model(rows[:, start:end], past_key_values=cache, use_cache=True).logits
        if start >= half:
            losses.append(F.cross_entropy(logits[:, -1], rows[:, end], reduction="none"))
        start = end
    return math.exp(torch.stack(losses).mean())


def measure_quality(n_rows: int, length: int) -> list[Quality]:
    model, _ = hfgen.builtin_model()
    rows = held_out_rows(n_rows, length)
    results = []
    for name, settings in SETTINGS.items():
        perplexities = []
        for n_prompt in (length // 2, 1):
            cache: Any = (
                DynamicCache(config=model.config)
                if settings is None
                else QuantizedCache(model.config, settings)
            )
            perplexities.append(perplexity(model, cache, rows, n_prompt))
        per_token = n_bytes(cache) / (rows.shape[0] * (length - 1))
        results.append(Quality(name, *perplexities, per_token))
    return results


# --- memory and speed ---------------------------------------------------------------------------


@dataclass(slots=True)
class Cost:
    """One cache at one context length. Bytes: of the cache; and at most, in a forward pass."""

    name: str
    n_bytes: int = 0
    peak: int = 0
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Costs:
    """The caches of one model at one context length."""

    model: str
    dtype: str
    context: int
    numbers: int  # keys and values, all layers
    costs: list[Cost]

    def speed(self, cost: Cost, other: Cost) -> Spread:
        """Of ``cost`` in units of ``other``, turn by turn."""
        pairs = zip(other.seconds, cost.seconds, strict=True)
        return Spread.of([theirs / ours for theirs, ours in pairs])


def n_bytes(cache: Any) -> int:
    """Bytes of keys and values that are kept; spare room is not counted."""
    if isinstance(cache, QuantizedCache):
        return cache.n_bytes
    return sum(
        states.numel() * states.element_size()
        for layer in cache.layers
        for states in (layer.keys, layer.values)
    )


def fill(cache: Any, config: Any, dtype: torch.dtype, length: int) -> None:
    """Put ``length`` tokens of random states into all layers."""
    heads = config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in range(config.num_hidden_layers):
            keys, values = torch.randn(2, 1, heads, length, size, generator=generator).to(dtype)
            cache.update(keys, values, layer)


def measure_costs(subject: str, dtype: torch.dtype, context: int, n_turns: int) -> Costs:
    model = SUBJECTS[subject]().model.to(dtype)
    token = torch.tensor([[7]])
    made = {name: make(model.config) for name, make in CACHES.items()}
    for cache in made.values():
        fill(cache, model.config, dtype, context)
    costs = {name: Cost(name) for name in made}
    numbers = 0
    with torch.no_grad():
        for name, cache in made.items():
            model(token, past_key_values=cache, use_cache=True)  # buffers have grown
            cost = costs[name]
            cost.n_bytes = n_bytes(cache)
            gc.collect()
            with LiveBytes() as live:
                model(token, past_key_values=cache, use_cache=True)
            cost.peak = cost.n_bytes + live.peak
            if isinstance(cache, QuantizedCache):  # made before
                cost.peak += sum(s.buffer.nbytes for s in cache.scratch if s.buffer is not None)
            numbers = numbers or cost.n_bytes // dtype.itemsize
        for turn in range(n_turns):
            order = list(made)
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                start = time.perf_counter()
                model(token, past_key_values=made[name], use_cache=True)
                costs[name].seconds.append(time.perf_counter() - start)
    dtype_name = str(dtype).removeprefix("torch.")
    return Costs(subject, dtype_name, context, numbers, list(costs.values()))


# --- what is written ----------------------------------------------------------------------------


def quality_table(results: list[Quality]) -> str:
    lines = [
        "| cache | bytes per token | perplexity, prompt in one go | perplexity, token by token |",
        "|---|--:|--:|--:|",
    ]
    full = results[0]
    for result in results:
        lines.append(
            f"| {result.name} | {result.bytes_per_token:.0f} "
            f"| {_risen(result.in_one_go, full.in_one_go)} "
            f"| {_risen(result.token_by_token, full.token_by_token)} |"
        )
    return "\n".join(lines)


def _risen(value: float, base: float) -> str:
    return f"{value:.3f}" + (f" ({value / base - 1:+.2%})" if value != base else "")


def cost_table(results: list[Costs]) -> str:
    lines = [
        "| model | context | cache | bytes per token | of float16 | of full precision | peak | ms per token "
        "| speed of upstream's dynamic (quartiles) | of hfgen's dynamic |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for result in results:
        upstream, ours = result.costs[:2]
        for cost in result.costs:
            lines.append(
                f"| {result.model}, {result.dtype} | {result.context:,} | {cost.name} "
                f"| {cost.n_bytes / result.context:,.0f} | {cost.n_bytes / 2 / result.numbers:.3f} "
                f"| {cost.n_bytes / upstream.n_bytes:.3f} | {cost.peak / 1e6:.1f} MB "
                f"| {1e3 * statistics.median(cost.seconds):.1f} | {result.speed(cost, upstream)} "
                f"| {result.speed(cost, ours).median:.3f} |"
            )
    return "\n".join(lines)


def verdicts(qualities: list[Quality], results: list[Costs]) -> Iterator[str]:
    """Each target, and what was measured."""
    full = qualities[0]
    for quality in qualities:
        if quality.name in TARGETS:
            rise = max(
                quality.in_one_go / full.in_one_go, quality.token_by_token / full.token_by_token
            )
            yield _verdict(
                f"{quality.name}, perplexity: {rise - 1:+.2%} (at most {TARGETS[quality.name]:+.1%})",
                rise - 1 <= TARGETS[quality.name],
            )
    for result in results:
        if result.context != TARGET_CONTEXT:
            continue
        cost = next(cost for cost in result.costs if cost.name == "int4")
        where = f"int4, {result.model}, {result.dtype}, {result.context:,} tokens"
        if result.dtype != "float32":
            share = cost.n_bytes / 2 / result.numbers
            yield _verdict(
                f"{where}, memory: {share:.3f} of float16 (at most {MEMORY_TARGET})",
                share <= MEMORY_TARGET,
            )
        upstream, ours = (result.speed(cost, other).median for other in result.costs[:2])
        yield _verdict(
            f"{where}: {upstream:.2f} of the speed of upstream's dynamic cache (at least "
            f"{SPEED_TARGET}; {ours:.2f} of hfgen's)",
            upstream >= SPEED_TARGET,
        )


def _verdict(text: str, is_met: bool) -> str:
    return f"* {text}: {'met' if is_met else '**missed**'}"


def report(
    qualities: list[Quality], results: list[Costs], facts: dict[str, Any], shape: tuple[int, int]
) -> str:
    n_rows, length = shape
    header = (
        f"{facts['processor']}, {facts['cores']} cores, {facts['threads']} thread(s), load "
        f"{facts['load']}. torch {facts['torch']}, transformers {facts['transformers']}, hfgen "
        f"{facts['hfgen']}, Python {facts['python']}."
    )
    return f"""# The quantised cache

{header}

Defaults: groups of 64, the newest 32 tokens (up to 95) in full precision.

{chr(10).join(verdicts(qualities, results))}

## Quality

The built-in model, float32, {n_rows} rows of {length:,} tokens of held-out Python source; perplexity of the second half of each row, where every token is a forward pass of its own. *In one go*: the first half is one forward pass, which attends to itself in full precision. *Token by token*: so is the first half. Bytes are those of the full row, with the exact tokens.

{quality_table(qualities)}

## Memory and speed

One token more on a context of random states, caches taking turns, {len(results[0].costs[0].seconds)} turns; speed is the median of the turns' ratios, above 1 is faster. *Peak*: the cache and all tensors alive in a forward pass, besides the weights. Upstream's dynamic cache concatenates, and hfgen's grows in place (its spare room is not counted). The floor of a quantised step is the step of hfgen's dynamic cache, whose attention reads the same full-precision tensor, and the unpacking that makes it.

{cost_table(results)}
"""


def as_object(
    qualities: list[Quality], results: list[Costs], facts: dict[str, Any]
) -> dict[str, Any]:
    return {
        "machine": facts,
        "quality": [asdict(quality) for quality in qualities],
        "costs": [asdict(result) for result in results],
    }


def plot(qualities: list[Quality], results: list[Costs], path: Path) -> None:
    """Bytes against perplexity; milliseconds per token against context."""
    figure, (left, right) = subplots(ncols=2, figsize=(11, 4.8), layout="constrained")
    full = qualities[0]
    for quality in qualities:
        share = quality.bytes_per_token / full.bytes_per_token
        rise = 100 * (quality.token_by_token / full.token_by_token - 1)
        left.plot(share, rise, "o", label=quality.name.split(" (")[0])
    left.set_xlim(0, 1.05)
    left.set_xlabel("bytes, of the float32 cache")
    left.set_ylabel("perplexity, % above full precision")
    left.set_title("Built-in model, held-out text", fontsize=10)
    first = results[0]
    chosen = [r for r in results if (r.model, r.dtype) == (first.model, first.dtype)]
    for index, cost in enumerate(first.costs):
        medians = [1e3 * statistics.median(result.costs[index].seconds) for result in chosen]
        right.plot([result.context for result in chosen], medians, "o-", label=cost.name)
    right.set_xscale("log", base=2)
    right.set_xticks([result.context for result in chosen], [f"{r.context:,}" for r in chosen])
    right.set_xlabel("tokens in the cache")
    right.set_ylabel("ms per token")
    right.set_title(f"{first.model}, {first.dtype}", fontsize=10)
    for panel in (left, right):
        legend_below(panel)
        panel.grid(color="0.9")
        panel.set_axisbelow(True)
    save(figure, path, dpi=150)


def write(
    qualities: list[Quality],
    results: list[Costs],
    facts: dict[str, Any],
    shape: tuple[int, int],
    folder: Path,
) -> str:
    """Write report, raw data and plot to ``folder``; returns the report."""
    text, raw = report(qualities, results, facts, shape), as_object(qualities, results, facts)
    return output.write(
        folder, "quantized_cache", text, raw, lambda path: plot(qualities, results, path)
    )


#: Model, dtype and context of what is timed.
CASES = [
    *[("small", torch.float32, context) for context in (1024, 4096, 16384)],
    *[("small", torch.bfloat16, context) for context in (1024, 4096, 16384)],
    *[("135m", torch.float32, context) for context in (1024, 4096)],
    ("135m", torch.bfloat16, 4096),
]


def main(
    rows: Annotated[int, typer.Option(min=1, help="Rows of held-out text.")] = 16,
    length: Annotated[int, typer.Option(min=4, max=1024, help="Tokens per row.")] = 1024,
    turns: Annotated[int, typer.Option(min=1, help="Turns of the caches.")] = 30,
    threads: ThreadsOption = None,
    out: OutOption = RESULTS,
) -> None:
    """Measure the quantised cache."""
    set_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    facts = machine()
    qualities = measure_quality(rows, length)
    print(quality_table(qualities), flush=True)
    results = []
    for case in CASES:
        results.append(measure_costs(*case, turns))
        print(cost_table(results[-1:]), flush=True)
    print(write(qualities, results, facts, (rows, length), out))


if __name__ == "__main__":
    typer.run(main)
