"""What exact mode costs: a step and a prompt, with and without it, the same kernels.

``python -m benchmarks.exact`` writes ``exact.{md,json}``. The two models take turns; a ratio is the median of the
turns' ratios. Rows of a batch have different lengths, padded on the left, so that each is computed by itself.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import torch
import typer
from transformers import StoppingCriteria

import hfgen
from benchmarks import output
from benchmarks.execution import as_checkpoint
from benchmarks.models import random_135m
from benchmarks.output import RESULTS, OutOption, ThreadsOption, set_threads
from benchmarks.side_by_side import Spread, described, machine, read_bandwidth

#: At most this much slower (performance target 17).
TARGET = 1.3
N_STEPS = 16
#: Rows, and tokens of their prompts. The last one takes minutes: it is measured once, in bfloat16.
SHAPES = [(1, 128), (1, 2048), (8, 128), (8, 2048)]


def as_loaded(model: Any) -> Any:
    return model


def in_bfloat16(model: Any) -> Any:
    return model.bfloat16()


def optimized(model: Any) -> Any:
    return hfgen.optimize(model, kernels="fp32")


def in_int8(model: Any) -> Any:
    return hfgen.optimize(model, weights="int8")


#: Name → the model without exact mode, and the one that is made exact.
PAIRS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bfloat16": (in_bfloat16, in_bfloat16),
    "float32": (as_loaded, as_loaded),
    "float32, both optimised": (optimized, optimized),
    "int8, beside float32 as loaded": (as_loaded, in_int8),
}


@dataclass
class Cost:
    """Seconds of each turn. ``steps`` and ``prompts``: without exact mode, and with it.

    ``floor``: seconds in which the exact model's weights can be read once.
    """

    pair: str
    rows: int
    prompt: int
    floor: float
    steps: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    prompts: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    @staticmethod
    def ratio(seconds: tuple[list[float], list[float]]) -> Spread:
        """How much longer exact mode takes, turn by turn."""
        return Spread.of([exact / plain for plain, exact in zip(*seconds, strict=True)])


def batch(rows: int, length: int, vocab: int) -> dict[str, torch.Tensor]:
    """Random prompts of ``length`` down to half of it."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, vocab, (rows, length), generator=generator)
    padding = torch.arange(rows)[:, None] * length // (2 * rows)
    return {"input_ids": ids, "attention_mask": (torch.arange(length) >= padding).long()}


class Clock(StoppingCriteria):
    """Notes when each step has ended."""

    is_row_wise = True

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def timed(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Seconds of the prompt, and of a step."""
    clock = Clock()
    model.generate(
        **inputs,
        do_sample=False,
        ignore_eos=True,
        pad_token_id=0,
        max_new_tokens=1 + N_STEPS,
        stopping_criteria=[clock],
    )
    start, first, *_, last = clock.times
    return first - start, (last - first) / N_STEPS


def bytes_of(model: Any) -> int:
    """Bytes of weights that a step reads: tied ones once, packed ones as they are packed."""
    if (report := getattr(model, "optimization", None)) is not None:
        return int(report.read_bytes)
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def measure(pair: str, turns: int) -> list[Cost]:
    """The costs of a pair in all ``SHAPES``."""
    base = as_checkpoint(random_135m()).model
    plain, other = (prepare(copy.deepcopy(base)) for prepare in PAIRS[pair])
    models = plain, hfgen.exact(other)
    costs = []
    for rows, length in SHAPES if pair == "bfloat16" else SHAPES[:-1]:
        inputs = batch(rows, length, base.config.vocab_size)
        cost = Cost(pair, rows, length, bytes_of(models[1]) / read_bandwidth())
        for turn in range(turns if (rows, length) != SHAPES[-1] else 1):
            for at in (0, 1) if turn % 2 else (1, 0):
                prompt, step = timed(models[at], inputs)
                cost.prompts[at].append(prompt)
                cost.steps[at].append(step)
        costs.append(cost)
    return costs


def report(costs: list[Cost], facts: dict[str, Any]) -> str:
    """The page."""
    lines = [
        "# What exact mode costs",
        "",
        f"Random Llama of 135M parameters, greedy; times of exact mode over those without it (target: at most {TARGET}). "
        "The floor: reading the weights once. Rows of a batch have half of the prompt to all of it.",
        "",
        "| | rows | prompt | ms a step, without · exact · floor | ratio (quartiles) | of the prompt |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for cost in costs:
        plain, exact = (1e3 * Spread.of(seconds).median for seconds in cost.steps)
        of_step, of_prompt = cost.ratio(cost.steps), cost.ratio(cost.prompts)
        bold = "**" if of_step.median > TARGET else ""
        lines.append(
            f"| {cost.pair} | {cost.rows} | {cost.prompt:,} | {plain:.1f} · {exact:.1f} · {1e3 * cost.floor:.1f} | "
            f"{bold}{of_step.median:.2f}{bold} ({of_step.low:.2f} to {of_step.high:.2f}) | {of_prompt.median:.2f} |"
        )
    lines += [
        "",
        f"{described(facts)}.",
    ]
    return "\n".join(lines) + "\n"


def main(
    turns: Annotated[int, typer.Option(min=1, help="Of each pair and shape.")] = 5,
    threads: ThreadsOption = None,
    out: OutOption = RESULTS,
) -> None:
    """Measure exact mode beside the same model without it, and write a table."""
    set_threads(threads)
    facts = machine()
    costs = []
    for pair in PAIRS:
        costs += measure(pair, turns)
        print(report(costs, facts), file=sys.stderr, flush=True)  # all pairs take up to an hour
    raw = {"machine": facts, "costs": [asdict(cost) for cost in costs]}
    print(output.write(out, "exact", report(costs, facts), raw))


if __name__ == "__main__":
    typer.run(main)
