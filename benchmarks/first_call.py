"""How long the first call of a compiled 30-layer model takes: with an empty cache of the compiler, and after that.

``python -m benchmarks.first_call`` writes ``first_call.{md,json}``. Each call is the first one of its process.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from typing import Annotated, Any

import typer

from benchmarks import output
from benchmarks.output import RESULTS, OutOption
from benchmarks.side_by_side import described, machine

#: Seconds: with an empty cache, and in a later process (performance target 15).
COLD_TARGET, WARM_TARGET = 15.0, 3.0

CHILD = """
import sys, time
import torch
import hfgen
from benchmarks.execution import as_checkpoint
from benchmarks.models import random_135m

subject = as_checkpoint(random_135m())
given = {"input_ids": subject.prompt, "max_new_tokens": 8, "eos_token_id": None, "do_sample": False}
subject.model.generate(**given)  # imports, and the machine's caches, are not the compiler's
is_compiled = sys.argv[1] == "compiled"
hfgen.optimize(subject.model, compile=is_compiled)
start = time.perf_counter()
subject.model.generate(**given)
print("seconds", time.perf_counter() - start)
"""


def first_call(kind: str, folder: str) -> float:
    """Seconds of the first call after ``hfgen.optimize``, in a process of its own; ``kind``: compiled or eager."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
    command = [sys.executable, "-c", CHILD, kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def report(cold: list[float], warm: list[float], eager: float, facts: dict[str, Any]) -> str:
    """The page."""
    lines = [
        "# The first call of a compiled model",
        "",
        "Random Llama of SmolLM-135M's shape, 30 layers, `hfgen.optimize(model, compile=True)`, prompts of 16 tokens, 8 new ones. "
        "Each call is the first of its process; its kernels are known.",
        "",
        "| compiler's cache | seconds | target |",
        "|---|--:|--:|",
    ]
    for name, seconds, target in (("empty", cold, COLD_TARGET), ("filled", warm, WARM_TARGET)):
        median = statistics.median(seconds)
        verdict = "met" if median <= target else "**missed**"
        spread = f"{median:.1f} ({min(seconds):.1f} to {max(seconds):.1f})"
        lines.append(f"| {name} | {spread} | {target:.0f}: {verdict} |")
    lines += [
        "",
        f"Uncompiled, the same call takes {eager:.2f} s.",
        "",
        f"{described(facts)}.",
    ]
    return "\n".join(lines) + "\n"


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Of each kind.")] = 3,
    out: OutOption = RESULTS,
) -> None:
    """Measure first calls, and write a table."""
    facts = machine()
    cold, warm = [], []
    with tempfile.TemporaryDirectory() as folder:
        eager = first_call("eager", folder)
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(first_call("compiled", folder))
            warm.append(first_call("compiled", folder))
    text = report(cold, warm, eager, facts)
    raw = {"machine": facts, "cold": cold, "warm": warm, "eager": eager}
    print(output.write(out, "first_call", text, raw))


if __name__ == "__main__":
    typer.run(main)
