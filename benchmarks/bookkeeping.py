"""What a step costs besides the model: mask, positions, cache update, processors, choice, stop.

``python -m benchmarks.bookkeeping`` prints a table. The forward is replaced by one that makes the mask and
updates the cache as a Llama does, computes nothing, and always returns the same logits.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from .models import SUBJECTS, Subject
from .side_by_side import machine

#: Milliseconds per token that a step may cost on a CPU besides the model.
TARGET = 0.3

#: What is asked of ``generate``, by name.
CALLS: dict[str, dict[str, Any]] = {
    "greedy, dynamic cache": {},
    "greedy, static cache": {"cache_implementation": "static", "disable_compile": True},
    "sampling, dynamic cache": {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9},
}

SHORT, LONG = 8, 72


@contextmanager
def without_computing(subject: Subject) -> Iterator[None]:
    """Within, the forward of the subject's model is the one of this page."""
    model = subject.model
    config = model.config
    heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    logits = torch.randn(1, 1, config.vocab_size, generator=torch.Generator().manual_seed(0))

    def forward(
        input_ids: torch.Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: Any = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        rows, n_new = input_ids.shape
        create_causal_mask(
            config=config,
            inputs_embeds=logits.expand(rows, n_new, -1),
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        states = logits.new_zeros((rows, heads, n_new, size))
        for index in range(config.num_hidden_layers):
            past_key_values.update(states, states, index)
        return CausalLMOutputWithPast(
            logits=logits.expand(rows, -1, -1), past_key_values=past_key_values
        )

    model.forward = forward
    try:
        yield
    finally:
        del model.forward


def measure(subject: Subject, n_turns: int) -> dict[str, float]:
    """Milliseconds per token of each of ``CALLS``, medians; calls take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in CALLS}
    with without_computing(subject):
        for turn in range(n_turns + 1):
            for name, options in CALLS.items():
                long, short = (_seconds(subject, n, options) for n in (LONG, SHORT))
                if turn:
                    seconds[name].append((long - short) / (LONG - SHORT))
    return {name: 1e3 * statistics.median(taken) for name, taken in seconds.items()}


def _seconds(subject: Subject, n_new: int, options: dict[str, Any]) -> float:
    start = time.perf_counter()
    subject.model.generate(
        **subject.alone(), max_new_tokens=n_new, eos_token_id=None, **{"do_sample": False} | options
    )
    return time.perf_counter() - start


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(SUBJECTS)}.")] = "small",
    turns: Annotated[int, typer.Option(min=1)] = 30,
) -> None:
    """Print milliseconds per token besides the model, on one thread."""
    torch.set_num_threads(1)
    found = measure(SUBJECTS[model](), turns)
    table = Table("call", "ms per token", "target")
    for name, took in found.items():
        table.add_row(name, f"{took:.3f}", f"{TARGET}")
    console = Console()
    console.print(table)
    console.print(machine())


if __name__ == "__main__":
    typer.run(main)
