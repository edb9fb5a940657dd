"""What it costs to draw a token from a large vocabulary: samplers and choice, hfgen beside upstream.

``python -m benchmarks.sampling`` writes ``benchmarks/results/sampling.md`` and ``.json``. No model runs: samplers are
called as a decoding loop calls them, and a token is drawn from what they leave, the same by both libraries.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer

from benchmarks import output
from benchmarks.controls import build, processors
from benchmarks.output import RESULTS, OutOption, ThreadsOption, set_threads
from benchmarks.side_by_side import Spread, frozen_garbage, machine
from hfgen.decoding.strategies.base import InvalidScores
from hfgen.state import seeds

#: Name of a case -> what it asks of ``generate``.
CASES: dict[str, dict[str, Any]] = {
    "temperature, top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_k": 0, "top_p": 0.9},
    "min-p 0.05": {"top_k": 0, "min_p": 0.05},
    "nothing": {"top_k": 0},
}
#: Times faster than upstream that the first case has to be, with 8 rows: torch's draws, and those of a seed.
TARGET, SEEDED_TARGET = 3.0, 15.0
ROWS = (1, 8)


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds of one draw of all rows, round by round."""

    case: str
    rows: int
    upstream: list[float]
    hfgen: list[float]
    seeded: list[float]  # hfgen with `seed=`
    uniforms: list[
        float
    ]  # one number per token: what leaves torch's generator as upstream leaves it

    def times_faster(self, milliseconds: list[float]) -> Spread:
        pairs = zip(self.upstream, milliseconds, strict=True)
        return Spread.of([theirs / ours for theirs, ours in pairs])


def draw_logits(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Logits of which the n-th best falls with 1.5 log n, as those of text do, with noise; in random places."""
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.arange(1, vocab + 1, dtype=torch.float32)
    logits = -1.5 * ranks.log() + 0.3 * torch.randn(rows, vocab, generator=generator)
    places = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(rows)])
    return logits.gather(1, places)


def ways(model: Any, case: str, rows: int) -> dict[str, Callable[[torch.Tensor], Any]]:
    """What is measured: each takes logits ``(rows, vocab)``."""
    options = {"do_sample": True, **CASES[case]}
    theirs, ours = processors(model, "upstream", options), processors(model, "hfgen", options)
    ids = torch.zeros(rows, 20, dtype=torch.long)
    choice = seeds.RowChoice(seeds.keys_of([7], rows, "cpu"), None, 16)
    invalid = InvalidScores()

    def upstream(logits: torch.Tensor) -> Any:
        scores = theirs(ids, logits)
        return scores, torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1)

    def hfgens(logits: torch.Tensor) -> Any:
        scores = ours(ids, logits)
        return scores, invalid.draw(scores, 1, 0)

    def seeded(logits: torch.Tensor) -> Any:
        return choice.choose(ours(ids, logits), 20)[0]

    def uniforms(logits: torch.Tensor) -> Any:
        return [torch.empty(logits.shape[1], dtype=torch.float64).uniform_() for _ in logits]

    return {"upstream": upstream, "hfgen": hfgens, "seeded": seeded, "uniforms": uniforms}


def measure(model: Any, case: str, rows: int, n_rounds: int) -> Result:
    """A warm-up and ``n_rounds``, the ways by turns; ``AssertionError`` if the libraries' draws differ."""
    vocab, functions = model.config.vocab_size, ways(model, case, rows)
    given = [draw_logits(rows, vocab, seed) for seed in range(4)]
    times: dict[str, list[float]] = {name: [] for name in functions}
    with torch.no_grad(), frozen_garbage():
        for turn in range(n_rounds + 1):
            found = {}
            order = list(functions) if turn % 2 else list(functions)[::-1]
            for name in order:
                torch.manual_seed(turn)
                start = time.perf_counter()
                found[name] = functions[name](given[turn % len(given)])
                seconds = time.perf_counter() - start
                if turn:
                    times[name].append(1e3 * seconds)
            for theirs, ours in zip(found["upstream"], found["hfgen"], strict=True):
                assert torch.equal(theirs, ours), f"{case}: the libraries differ"
    return Result(case, rows, **times)


# --- what is written ----------------------------------------------------------------------------


def table(results: list[Result]) -> str:
    lines = [
        "| samplers | rows | upstream, ms | hfgen, ms | times faster | with `seed`, ms | times faster | uniforms, ms |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in results:
        columns = (
            Spread.of(r.upstream),
            Spread.of(r.hfgen),
            r.times_faster(r.hfgen),
            Spread.of(r.seeded),
            r.times_faster(r.seeded),
            Spread.of(r.uniforms),
        )
        cells = " | ".join(f"{c.median:.2f} ({c.low:.2f} to {c.high:.2f})" for c in columns)
        lines.append(f"| {r.case} | {r.rows} | {cells} |")
    return "\n".join(lines)


def verdict(results: list[Result]) -> str:
    """Whether the first case, with the most rows, has reached its targets."""
    first = max((r for r in results if r.case == next(iter(CASES))), key=lambda r: r.rows)
    words = []
    for name, milliseconds, target in (
        ("torch's draws", first.hfgen, TARGET),
        ("draws of a seed", first.seeded, SEEDED_TARGET),
    ):
        found = first.times_faster(milliseconds).median
        is_met = "met" if found >= target else "**missed**"
        words.append(f"{name} {found:.1f} times faster (target {target:.0f}: {is_met})")
    return f"{first.case}, {first.rows} rows: {', '.join(words)}."


def write(results: list[Result], facts: dict[str, Any], vocab: int, folder: Path) -> str:
    """Write report and raw data to ``folder``; returns the report."""
    text = f"""# Sampling from a large vocabulary

{facts["processor"]}, {facts["cores"]} cores, {facts["threads"]} thread(s), load {facts["load"]}. torch {facts["torch"]}, transformers {facts["transformers"]}, hfgen {facts["hfgen"]}, Python {facts["python"]}.

Samplers and the draw of one token for each row, from a vocabulary of {vocab:,}; medians, and quartiles, of {len(results[0].hfgen)} rounds in which the ways take turns. Scores and tokens are upstream's in each round. Uniforms: one number in float64 for each token of each row, which is what leaves torch's generator as upstream leaves it.

{verdict(results)}

{table(results)}
"""
    raw = {"machine": facts, "vocab": vocab, "results": [*map(asdict, results)]}
    return output.write(folder, "sampling", text, raw)


def main(
    vocab: Annotated[int, typer.Option(min=100, help="Tokens of the vocabulary.")] = 151_936,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Default: 1 and 8.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of each case.")] = 30,
    threads: ThreadsOption = None,
    out: OutOption = RESULTS,
) -> None:
    """Measure what a draw costs, by samplers and rows."""
    set_threads(threads)
    transformers.logging.set_verbosity_error()
    model, results = build(vocab), []
    for case in CASES:
        for count in rows or ROWS:
            results.append(measure(model, case, count, rounds))
            print(table(results).splitlines()[-1], flush=True)
    print(write(results, machine(), vocab, out))


if __name__ == "__main__":
    typer.run(main)
