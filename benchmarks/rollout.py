"""Rollouts of TRL's GRPO trainer: its ``generate`` and paged paths beside ``hfgen.trl.rollout``, by turns.

``python -m benchmarks.rollout`` writes ``benchmarks/results/rollout.{md,json}``. It needs TRL. Each way generates for
the same prompts in one process; the time is that of a step's generation, tokenizing included.
"""

from __future__ import annotations

import copy
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Annotated, Any

import transformers
import typer

import hfgen
from benchmarks.models import SUBJECTS
from benchmarks.output import RESULTS, OutOption, ThreadsOption, set_threads, write
from benchmarks.side_by_side import Spread, frozen_garbage, machine, read_bandwidth, unmixed

PROMPTS = (
    "def add(a, b):\n",
    "import os\n\n\ndef read_lines(path):\n    ",
    "class Parser:\n    def __init__(self, text):\n",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    ",
)
N_GENERATIONS = 4

#: Case -> new tokens at most, and whether the end of a line ends a completion.
CASES = {"64 tokens each": (64, False), "256 tokens each": (256, False), "a line each": (256, True)}
WAYS = ("TRL, generate", "TRL, paged", "hfgen.trl", "hfgen.trl, exact")


def trainer_of(way: str, model: Any, tokenizer: Any, n_new: int, is_line: bool) -> Any:
    """A GRPO trainer that generates in one of ``WAYS``."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from hfgen.trl import rollout

    texts = map(tokenizer.decode, range(len(tokenizer)))
    ends = [token for token, text in enumerate(texts) if "\n" in text] if is_line else None
    config = GRPOConfig(
        tempfile.mkdtemp(),
        num_generations=N_GENERATIONS,
        per_device_train_batch_size=len(PROMPTS) * N_GENERATIONS,
        max_completion_length=n_new,
        use_transformers_continuous_batching=way == "TRL, paged",
        generation_kwargs={"eos_token_id": ends},
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    rollout_func = rollout(exact="exact" in way) if "hfgen" in way else None
    return GRPOTrainer(
        model,
        lambda completions, **_: [0.0] * len(completions),
        config,
        Dataset.from_dict({"prompt": list(PROMPTS)}),
        processing_class=tokenizer,
        rollout_func=rollout_func,
    )


def step_of(trainer: Any, way: str) -> Callable[[], tuple[int, int]]:
    """A function that generates for a step and returns the new tokens of all rows, and of the longest."""
    prompts = [prompt for prompt in PROMPTS for _ in range(N_GENERATIONS)]
    ends = trainer.generation_kwargs["eos_token_id"] or ()

    def step() -> tuple[int, int]:
        trainer.state.global_step += 1
        if "hfgen" in way:
            completions = trainer.rollout_func(prompts, trainer)["completion_ids"]
        else:
            with unmixed(trainer.model):
                ids, images, fields = trainer._tokenize_prompts(prompts)
                completions = trainer._generate_single_turn(ids, images, fields, N_GENERATIONS)[0]
        # TRL cuts at the tokenizer's end alone, and leaves padding behind others.
        lengths = [
            next((n for n, token in enumerate(ids, 1) if token in ends), len(ids))
            for ids in completions
        ]
        return sum(lengths), max(lengths)

    return step


def measure(
    model: Any, tokenizer: Any, case: str, n_rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Of each way in each round: milliseconds a token, those of the floor, and the mean length of a completion."""
    steps, found = {}, {}
    for way in WAYS:
        own = copy.deepcopy(model).requires_grad_(True)
        steps[way] = step_of(trainer_of(way, own, tokenizer, *CASES[case]), way)
        found[way] = {"ms": [], "floor": [], "length": []}
    n_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    bandwidth = read_bandwidth()
    with frozen_garbage():
        for turn in range(n_rounds + 1):  # the first warms up
            for way in WAYS if turn % 2 else reversed(WAYS):
                gc.collect()
                start = time.perf_counter()
                n_tokens, longest = steps[way]()
                seconds = time.perf_counter() - start
                if turn:
                    found[way]["ms"].append(1e3 * seconds / n_tokens)
                    found[way]["floor"].append(1e3 * longest * n_bytes / bandwidth / n_tokens)
                    found[way]["length"].append(n_tokens / len(PROMPTS) / N_GENERATIONS)
    return found


def table(results: dict[str, dict[str, dict[str, list[float]]]]) -> list[str]:
    """Rows of Markdown: each case and way, and how many times as long as ``hfgen.trl``, round by round."""
    lines = [
        "| completions | way | tokens, mean | ms a token · floor | times as long as hfgen.trl (quartiles) |"
    ]
    lines.append("|---|---|--:|--:|--:|")
    for case, found in results.items():
        for way, numbers in found.items():
            ratios = [t / o for t, o in zip(numbers["ms"], found["hfgen.trl"]["ms"], strict=True)]
            length, ms, floor = (
                statistics.median(numbers[name]) for name in ("length", "ms", "floor")
            )
            lines.append(
                f"| {case} | {way} | {length:.0f} | {ms:.2f} · {floor:.2f} | {Spread.of(ratios)} |"
            )
    return lines


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(SUBJECTS)}.")] = "small",
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    threads: ThreadsOption = None,
    out: OutOption = RESULTS,
) -> None:
    """Measure the generation of a step of GRPO: 4 prompts, 4 completions each."""
    if find_spec("trl") is None:
        typer.echo("TRL is not installed: pip install 'hfgen[clients]'", err=True)
        raise typer.Exit(2)
    if model not in SUBJECTS:
        raise typer.BadParameter(f"has to be one of {', '.join(SUBJECTS)}, but is {model!r}")
    set_threads(threads)
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    transformers.logging.set_verbosity_error()
    subject, (_, tokenizer), facts = SUBJECTS[model](), hfgen.builtin_model(), machine()
    results = {case: measure(subject.model, tokenizer, case, rounds) for case in CASES}
    text = "\n".join(
        [
            "# Rollouts of TRL's GRPO trainer",
            "",
            *table(results),
            "",
            f"{subject.title}, {subject.n_parameters / 1e6:.0f}M parameters, float32. 4 prompts, 4 completions each. The "
            "floor is the time in which the weights are read once for each token of the longest completion.",
            "",
            f"{facts['processor']}, {facts['threads']} threads, torch {facts['torch']}, transformers "
            f"{facts['transformers']}, TRL {version('trl')}; load {facts['load']}.",
            "",
        ]
    )
    write(out, "rollout", text, {"machine": facts | {"trl": version("trl")}, "results": results})
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
