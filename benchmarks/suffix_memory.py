"""What do drafts from a ``SuffixMemory`` gain, beside prompt lookup and no drafts?

``python -m benchmarks.suffix_memory`` writes ``benchmarks/results/suffix_memory.{md,json}``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import transformers
import typer

import hfgen

from .edits import EDITS, editing
from .output import RESULTS, OutOption, ThreadsOption, set_threads, write
from .side_by_side import Spread, UnequalTokensError, described, frozen_garbage, machine

PROMPTS = (
    "def add(a, b):\n",
    "import os\n\n\ndef read_lines(path):\n    ",
    "class Parser:\n    def __init__(self, text):\n",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    ",
)
N_GENERATIONS, N_NEW = 4, 128
WAYS = ("no drafts", "prompt lookup", "SuffixMemory")

Calls = list[dict[str, Any]]


def rollouts(tokenizer: Any, first_seed: int, temperature: float = 1.0) -> Calls:
    """Sampled completions of each prompt."""
    sampling = {"do_sample": True, "temperature": temperature, "max_new_tokens": N_NEW}
    return [
        {**tokenizer(prompt, return_tensors="pt"), **sampling, "seed": first_seed + sample}
        for prompt in PROMPTS
        for sample in range(N_GENERATIONS)
    ]


def cases(tokenizer: Any) -> dict[str, tuple[Calls, Calls]]:
    """Case -> calls that came before, and those that are measured."""
    edits = [editing([edit], tokenizer) for edit in EDITS]
    return {
        "the same rollouts again": (rollouts(tokenizer, 0), rollouts(tokenizer, 0)),
        "rollouts with other seeds": (rollouts(tokenizer, 0), rollouts(tokenizer, 100)),
        "edits, for the first time": ([], edits),
        "edits, made once more": (edits, edits),
        "unrelated text": (edits, rollouts(tokenizer, 0, temperature=2.0)),
    }


@dataclass(slots=True)
class Numbers:
    """Of one way in one case: seconds of each round, and what its calls counted."""

    seconds: list[float] = field(default_factory=list)
    n_tokens: int = 0
    n_forwards: int = 0


def measure(model: Any, calls: tuple[Calls, Calls], n_rounds: int) -> dict[str, Numbers]:
    """The numbers of each way; the ways take turns, call by call, and have to choose the same tokens."""
    found = {way: Numbers() for way in WAYS}
    earlier, measured = calls
    for turn in range(n_rounds + 1):  # the first warms up
        memory = hfgen.SuffixMemory()
        drafts = dict[str, dict[str, Any]](
            zip(
                WAYS,
                ({}, {"prompt_lookup_num_tokens": 10}, {"assistant_model": memory}),
                strict=True,
            )
        )
        for call in earlier:
            model.generate(**call, assistant_model=memory)
        seconds = dict.fromkeys(WAYS, 0.0)
        for number, call in enumerate(measured):
            tokens = {}
            for way in WAYS if (turn + number) % 2 else reversed(WAYS):
                asked = {"return_dict_in_generate": True, "output_speculation": True}
                start = time.perf_counter()
                output = model.generate(**call, **drafts[way], **asked)
                seconds[way] += time.perf_counter() - start
                tokens[way] = output.sequences.tolist()
                n_new = output.sequences.numel() - call["input_ids"].numel()
                if turn == 1:
                    found[way].n_tokens += n_new
                    stats = output.speculation
                    found[way].n_forwards += n_new if stats is None else stats.forwards
            if any(ids != tokens["no drafts"] for ids in tokens.values()):
                raise UnequalTokensError(f"call {number}: drafts have changed tokens")
        if turn:
            for way, spent in seconds.items():
                found[way].seconds.append(spent)
    return found


def table(results: dict[str, dict[str, Numbers]]) -> list[str]:
    """Rows of Markdown; times are those without drafts over those of the way, round by round."""
    lines = [
        "| calls | tokens a forward: prompt lookup · memory | times as fast as without drafts: prompt lookup · "
        "memory (quartiles) |"
    ]
    lines.append("|---|--:|--:|")
    for case, found in results.items():
        plain = found["no drafts"].seconds
        rates, gains = [], []
        for way in WAYS[1:]:
            pairs = zip(plain, found[way].seconds, strict=True)
            gains.append(f"{Spread.of([a / b for a, b in pairs])}")
            rates.append(f"{found[way].n_tokens / found[way].n_forwards:.2f}")
        lines.append(f"| {case} | {' · '.join(rates)} | {' · '.join(gains)} |")
    return lines


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    threads: ThreadsOption = None,
    out: OutOption = RESULTS,
) -> None:
    """Measure one row at a time, with the built-in model."""
    set_threads(threads)
    transformers.logging.set_verbosity_error()
    model, tokenizer = hfgen.builtin_model()
    facts = machine()
    with frozen_garbage():
        results = {case: measure(model, calls, rounds) for case, calls in cases(tokenizer).items()}
    text = "\n".join(
        [
            "# Drafts that remember",
            "",
            *table(results),
            "",
            f"Built-in model, float32, one row at a time, {described(facts)}.",
            "",
        ]
    )
    raw = {
        case: {
            way: {"seconds": n.seconds, "n_tokens": n.n_tokens, "n_forwards": n.n_forwards}
            for way, n in found.items()
        }
        for case, found in results.items()
    }
    write(out, "suffix_memory", text, {"machine": facts, "results": raw})
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
