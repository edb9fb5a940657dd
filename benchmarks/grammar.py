"""Grammars: what they cost per step on a large vocabulary, and what forced tokens gain.

``python -m benchmarks.grammar`` writes ``grammar.{md,json}``.

* Cost: the processor alone, on random scores as wide as a model of 152k tokens gives them. Rows draw any
  token that their grammar allows. The tokenizer is trained on the Python source that is installed.
* Gain: the built-in model writes JSON with long keys, with and without ``ForcedTokens``, taking turns.
"""

from __future__ import annotations

import random
import statistics
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import hfgen
from benchmarks import output
from benchmarks.output import RESULTS, OutOption, ThreadsOption, set_threads
from benchmarks.race import Result, Variant, race
from benchmarks.side_by_side import described, machine
from hfgen.logits.grammar.follower import Follower
from hfgen.logits.grammar.llguidance import LLGuidance, library_of
from hfgen.logits.grammar.processor import GrammarProcessor
from hfgen.settings.grammar import Grammar
from tests.parity.schemas import draw

#: Scores of a model, some of which belong to no token.
WIDTH = 151_936
#: Tokens of the tokenizer that is trained, and characters of text that it is trained on.
VOCAB, CHARACTERS = 151_643, 100_000_000

#: Milliseconds: of a mask, per row and step; of an ordinary schema, to compile.
MASK_TARGET, COMPILE_TARGET = 0.3, 50.0

ROWS = (1, 8)
PROMPTS = ("def read(path):\n", "import json\n\nprint(", "result = {", "class Order:\n    ")

ORDER = {
    "type": "object",
    "properties": {
        "order_identifier": {"type": "integer", "minimum": 1, "maximum": 99999},
        "customer_full_name": {"type": "string", "maxLength": 20},
        "is_paid_in_advance": {"type": "boolean"},
        "shipping_address": {
            "type": "object",
            "properties": {
                "street_and_number": {"type": "string", "maxLength": 16},
                "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country_code": {"enum": ["de", "fr", "us"]},
            },
            "required": ["street_and_number", "postal_code", "country_code"],
            "additionalProperties": False,
        },
        "delivery_preference": {"enum": ["standard", "express"]},
    },
    "required": [
        "order_identifier",
        "customer_full_name",
        "is_paid_in_advance",
        "shipping_address",
        "delivery_preference",
    ],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Cost:
    """What grammars cost on one number of rows: milliseconds of each step, for one row of it.

    All times are the processor's, of all threads, which other work on the machine disturbs less.
    """

    rows: int
    steps: list[float]
    again: list[float]  # the same once more, when all that it reads is in the processor's caches
    matchers: list[float]  # of ``steps``, the library's masks

    @property
    def per_row(self) -> float:
        return statistics.mean(self.steps)


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one tokenizer. ``reading``: seconds to make the library for it, once; ``compiling``: ms."""

    n_tokens: int
    reading: float
    compiling: list[float]
    costs: list[Cost]


def texts() -> Iterator[str]:
    """The source files of Python and of what is installed."""
    left = CHARACTERS
    paths = sysconfig.get_paths()
    for folder in (paths["stdlib"], paths["purelib"]):
        for path in sorted(Path(folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="ignore")
            yield text
            if (left := left - len(text)) < 0:
                return


def large_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of up to ``vocab`` tokens, trained on ``texts``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def grammars(n: int) -> list[Grammar]:
    """An order, and random schemas."""
    rng = random.Random(0)
    schemas = [ORDER, *(draw(rng) for _ in range(n - 1))]
    return [hfgen.grammar.json(schema, whitespace=False) for schema in schemas]


def measure_costs(tokenizer: Any, n_grammars: int, n_steps: int) -> Costs:
    start = time.process_time()
    library = LLGuidance(tokenizer)
    reading = time.process_time() - start
    asked, compiling = grammars(n_grammars), []
    for grammar in asked:
        start = time.process_time()
        library.matcher(grammar)
        compiling.append(1e3 * (time.process_time() - start))
    costs = [measure_cost(library, asked, rows, n_steps) for rows in ROWS]
    return Costs(library.n_tokens, reading, compiling, costs)


def measure_cost(library: Any, asked: list[Grammar], rows: int, n_steps: int) -> Cost:
    """``n_steps`` of ``rows``; a row that has ended makes way for another grammar's."""
    steps, again, matchers = [], [], []
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(rows, WIDTH, generator=generator)
    timed: list[float] = []
    fill = library.fill

    def timed_fill(*arguments: Any) -> None:
        start = time.process_time()
        fill(*arguments)
        timed.append(time.process_time() - start)

    library.fill = timed_fill
    for first in range(len(asked) - rows + 1):
        part = asked[first : first + rows]
        eos, starts = [frozenset([0])] * rows, [library.matcher(grammar) for grammar in part]
        processor = GrammarProcessor(library, Follower(starts, eos, [1] * rows, library.n_tokens))
        ids = torch.zeros(rows, 1, dtype=torch.long)
        has_ended = torch.zeros(rows, dtype=torch.bool)
        for _ in range(n_steps):
            for times in (steps, again):
                start = time.process_time()
                allowed = processor(ids, scores)
                times.append(1e3 * (time.process_time() - start) / rows)
            matchers.append(1e3 * timed[0] / rows)
            timed.clear()
            likely = (allowed > -torch.inf).float()
            tokens = torch.multinomial(likely, 1, generator=generator)
            has_ended = has_ended | (tokens == 0).squeeze(1)
            ids = torch.cat([ids, tokens], dim=1)
            if has_ended.any():
                break
    library.fill = fill
    return Cost(rows, steps, again, matchers)


def measure_gain(n_rounds: int) -> list[list[Result]]:
    """The built-in model on one prompt, and on all at once."""
    model, tokenizer = hfgen.builtin_model()
    grammar = hfgen.grammar.json(ORDER, whitespace=False)
    library_of(tokenizer)
    variants = [
        Variant("plain"),
        Variant("forced tokens", options={"assistant_model": hfgen.ForcedTokens()}),
        Variant("prompt lookup", options={"prompt_lookup_num_tokens": 8}),
    ]
    results = []
    for prompts in ([PROMPTS[0]], PROMPTS, PROMPTS * 2):
        inputs = tokenizer(list(prompts), return_tensors="pt", padding=True)
        given = {**inputs, "grammar": grammar, "tokenizer": tokenizer, "max_new_tokens": 160}
        results.append(race(model, [given], variants, n_rounds))
    return results


def report(costs: Costs, gains: list[list[Result]], facts: dict[str, Any]) -> str:
    """The page."""
    ordinary, slowest = statistics.median(costs.compiling), max(costs.compiling)
    best = [results[1].cpu_gain(results[0]).median for results in gains]
    lines = [
        "# Grammars",
        "",
        f"{described(facts)}, Python {facts['python']}.",
        "",
        *(
            f"* Mask, per row and step on {WIDTH:,} scores, {cost.rows} row(s): {cost.per_row:.3f} ms, "
            f"{statistics.mean(cost.again):.3f} ms with warm caches (at most {MASK_TARGET}): "
            f"{met(cost.per_row <= MASK_TARGET)}"
            for cost in costs.costs
        ),
        f"* Compiling a schema: {ordinary:.1f} ms, the slowest of {len(costs.compiling)} "
        f"{slowest:.1f} ms (ordinary ones below {COMPILE_TARGET:.0f}): "
        f"{met(ordinary < COMPILE_TARGET)}",
        f"* Forced tokens, JSON with long keys: {min(best):.2f} to {max(best):.2f} times as fast",
        "",
        "## Cost",
        "",
        f"The processor alone, a tokenizer of {costs.n_tokens:,} tokens; rows draw any token that "
        f"their schema allows. Times are the processor's, of all threads. *Again at once*: the same step once more; between others a row is sampled, and a model would run. *Library*: the masks of llguidance; the rest follows tokens and applies the "
        f"masks. To read the tokenizer takes {costs.reading:.1f} s, once.",
        "",
        "| rows | steps | ms per row and step | median | 99% | again at once | library |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for cost in costs.costs:
        ordered = sorted(cost.steps)
        lines.append(
            f"| {cost.rows} | {len(ordered)} | {cost.per_row:.3f} | {statistics.median(ordered):.3f} | "
            f"{ordered[int(0.99 * len(ordered))]:.3f} | {statistics.mean(cost.again):.3f} | "
            f"{statistics.mean(cost.matchers):.3f} |"
        )
    lines += [
        "",
        "## Gain",
        "",
        "The built-in model, greedy; all variants give the same tokens. *Speed*: of plain decoding under the "
        "same grammar, by processor time, the median of the turns (quartiles).",
        "",
        "| rows | drafts | tokens per forward | accepted | ms per call | speed |",
        "|--:|---|--:|--:|--:|--:|",
    ]
    for results in gains:
        for result in results:
            accepted = "" if result.acceptance is None else f"{result.acceptance:.0%}"
            lines.append(
                f"| {result.rows} | {result.variant} | {result.tokens_per_forward:.2f} | {accepted} | "
                f"{result.milliseconds:.0f} | {result.cpu_gain(results[0])} |"
            )
    return "\n".join(lines) + "\n"


def met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def write(costs: Costs, gains: list[list[Result]], facts: dict[str, Any], folder: Path) -> str:
    """Write the page and the raw data to ``folder``; returns the page."""
    text = report(costs, gains, facts)
    raw = {
        "machine": facts,
        "costs": asdict(costs),
        "gains": [[result.as_object() for result in results] for results in gains],
    }
    return output.write(folder, "grammar", text, raw, indent=None)


def main(
    schemas: Annotated[
        int, typer.Option(min=8, help="Schemas that are compiled and followed.")
    ] = 64,
    steps: Annotated[int, typer.Option(min=1, help="At most so many steps of each.")] = 60,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of the ways to decode.")] = 10,
    vocab: Annotated[int, typer.Option(min=300, help="Tokens of the tokenizer.")] = VOCAB,
    threads: ThreadsOption = None,
    out: OutOption = RESULTS,
) -> None:
    """Measure grammars."""
    set_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    facts = machine()
    costs = measure_costs(large_tokenizer(vocab), schemas, steps)
    print(write(costs, measure_gain(rounds), facts, out))


if __name__ == "__main__":
    typer.run(main)
