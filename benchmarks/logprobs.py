"""What log-probabilities cost: memory of a long prompt's, and milliseconds per generated token.

``python -m benchmarks.logprobs`` writes ``benchmarks/results/logprobs.md`` and ``.json``. The model is
a Llama of one narrow layer with a large vocabulary, so that nearly all memory and time is the head's.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import transformers
import typer
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

import hfgen
from benchmarks import output
from benchmarks.output import RESULTS, OutOption, ThreadsOption, set_threads
from benchmarks.side_by_side import described, machine

#: Bytes above the model that a prompt of ``TARGET_LENGTH`` tokens may take, on ``TARGET_VOCAB``.
TARGET, TARGET_LENGTH, TARGET_VOCAB = 700e6, 8000, 151_936

#: The likeliest tokens that are asked for.
K = 5


@dataclass(frozen=True, slots=True)
class Peak:
    """One way to score a prompt: bytes that were allocated at most, besides the model's."""

    name: str
    dtype: str
    length: int
    n_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PerToken:
    """Milliseconds per generated token, the median of the turns; ``kept``: bytes kept of each."""

    name: str
    rows: int
    milliseconds: float
    kept: float


def build(vocab: int, length: int, dtype: torch.dtype) -> Any:
    """A Llama with random weights and ``length`` positions."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=length,
        pad_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return hfgen.mix_into(LlamaForCausalLM(config).eval().to(dtype))


def prompt_of(vocab: int, length: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(5, vocab, (rows, length), generator=torch.Generator().manual_seed(0))


# --- memory of prompts --------------------------------------------------------------------------


def by_hfgen(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """``(length,)``: the log-probabilities of the prompt's tokens, 0 of the first."""
    output = model.generate(ids, max_new_tokens=1, prompt_logprobs=K, return_dict_in_generate=True)
    return output.prompt_logprobs.token_logprobs[0].nan_to_num(0.0)


@torch.no_grad()
def at_once(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The same of all logits, which are normalised in place, some after another."""
    logits = model(ids, use_cache=False).logits[0].float()
    for part in logits.split(64):
        part.sub_(part.logsumexp(dim=-1, keepdim=True))
        part.topk(K)
    found = logits[:-1].gather(1, ids[0, 1:, None]).squeeze(1)
    return torch.nn.functional.pad(found, (1, 0))


#: What is compared; the first is hfgen's.
WAYS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    f"`prompt_logprobs={K}`": by_hfgen,
    "all logits at once": at_once,
}


def measure_peak(name: str, model: Any, ids: torch.Tensor) -> tuple[Peak, torch.Tensor]:
    """The peak of one way, above what there was before; and what it found."""
    gc.collect()
    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        found = WAYS[name](model, ids)
    seconds = time.perf_counter() - start
    events: Any = profiler.profiler
    changes = [e for e in events.kineto_results.events() if e.name() == "[memory]"]
    sizes = (event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns()))
    peak = max(itertools.accumulate(sizes))
    dtype = str(model.dtype).removeprefix("torch.")
    return Peak(name, dtype, ids.shape[1], peak, seconds), found


def measure_peaks(vocab: int, length: int, dtype: torch.dtype) -> Iterator[Peak]:
    """Each way once, after a short prompt; ``AssertionError`` if they disagree."""
    model, ids = build(vocab, length + 1, dtype), prompt_of(vocab, length)
    results = []
    for name in WAYS:
        WAYS[name](model, ids[:, :64])
        peak, found = measure_peak(name, model, ids)
        results.append(found)
        yield peak
    torch.testing.assert_close(
        results[0], results[1], atol=1e-5 if dtype.itemsize == 4 else 0.1, rtol=0
    )


# --- time per token -----------------------------------------------------------------------------


def measure_tokens(vocab: int, rows: int, n_new: int, n_turns: int) -> list[PerToken]:
    """Greedy decoding with and without log-probabilities, and with all logits kept; in turns."""
    model = build(vocab, 64 + n_new, torch.float32)
    ids = prompt_of(vocab, 8, rows)
    asked: dict[str, dict[str, Any]] = {
        "nothing": {},
        "`logprobs=0`": {"logprobs": 0},
        f"`logprobs={K}`": {"logprobs": K},
        "`output_logits=True`": {"output_logits": True},
    }
    seconds: dict[str, list[float]] = {name: [] for name in asked}
    kept = dict.fromkeys(asked, 0.0)
    for turn in range(n_turns + 1):
        for name, options in asked.items():
            start = time.perf_counter()
            output = model.generate(
                ids, max_new_tokens=n_new, return_dict_in_generate=True, **options
            )
            if turn:  # the first is a warm-up
                seconds[name].append((time.perf_counter() - start) / n_new)
            kept[name] = n_kept(output) / (rows * n_new)
    return [
        PerToken(name, rows, 1e3 * statistics.median(seconds[name]), kept[name]) for name in asked
    ]


def n_kept(output: Any) -> int:
    """Bytes of what an output has of scores."""
    tensors = [*(output.get("logits") or ())]
    if (found := getattr(output, "logprobs", None)) is not None:
        tensors += [found.token_logprobs, found.ranks, found.top_token_ids, found.top_logprobs]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# --- what is written ----------------------------------------------------------------------------


def peak_table(peaks: list[Peak]) -> str:
    lines = ["| tokens | dtype | | allocated, at most | seconds |", "|--:|---|---|--:|--:|"]
    for peak in peaks:
        lines.append(
            f"| {peak.length:,} | {peak.dtype} | {peak.name} | {peak.n_bytes / 1e6:,.0f} MB "
            f"| {peak.seconds:.1f} |"
        )
    return "\n".join(lines)


def token_table(results: list[PerToken]) -> str:
    lines = ["| rows | asked for | ms per step | bytes kept per token |", "|--:|---|--:|--:|"]
    for result in results:
        lines.append(
            f"| {result.rows} | {result.name} | {result.milliseconds:.2f} | {result.kept:,.0f} |"
        )
    return "\n".join(lines)


def verdict(peaks: list[Peak], vocab: int) -> str:
    """The target, and what was measured of it, if it was."""
    measured = [p for p in peaks if p.name == next(iter(WAYS)) and p.length == TARGET_LENGTH]
    if not measured or vocab != TARGET_VOCAB:
        return ""
    worst = max(peak.n_bytes for peak in measured)
    is_met = "met" if worst < TARGET else "**missed**"
    return (
        f"* {TARGET_LENGTH:,} tokens, above the model: {worst / 1e6:,.0f} MB at most (less than "
        f"{TARGET / 1e6:.0f} MB): {is_met}\n\n"
    )


def report(peaks: list[Peak], tokens: list[PerToken], facts: dict[str, Any], vocab: int) -> str:
    return f"""# Log-probabilities

{described(facts)}, Python {facts["python"]}.

A Llama of one layer of 64 features, random weights, a vocabulary of {vocab:,}.

## Of a prompt

Bytes above the model, those that a kernel takes for itself included (torch's profiler), and one more token generated. *All logits at once*: one forward's, normalised in place.

{verdict(peaks, vocab)}{peak_table(peaks)}

## Of generated tokens

Greedy, float32, calls taking turns; a median. Of `output_logits`, log-probabilities would still have to be computed.

{token_table(tokens)}
"""


def main(
    vocab: Annotated[int, typer.Option(min=100, help="Tokens of the vocabulary.")] = TARGET_VOCAB,
    length: Annotated[int, typer.Option(min=65, help="Tokens of the prompt.")] = TARGET_LENGTH,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per timed call.")] = 16,
    turns: Annotated[int, typer.Option(min=1, help="Turns of the timed calls.")] = 7,
    threads: ThreadsOption = None,
    out: OutOption = RESULTS,
) -> None:
    """Measure what log-probabilities cost."""
    set_threads(threads)
    transformers.logging.set_verbosity_error()
    facts = machine()
    dtypes = (torch.float32, torch.bfloat16)
    peaks = [peak for dtype in dtypes for peak in measure_peaks(vocab, length, dtype)]
    print(peak_table(peaks), flush=True)
    tokens = [r for rows in (1, 8) for r in measure_tokens(vocab, rows, new_tokens, turns)]
    text = report(peaks, tokens, facts, vocab)
    raw = {"machine": facts, "vocab": vocab}
    raw |= {"peaks": [*map(asdict, peaks)], "tokens": [*map(asdict, tokens)]}
    print(output.write(out, "logprobs", text, raw))


if __name__ == "__main__":
    typer.run(main)
