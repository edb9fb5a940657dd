"""What stopping costs: the first use of stop strings on a large vocabulary, and every token after it.

``python -m benchmarks.stopping`` writes ``benchmarks/results/stopping.md`` and ``.json``. There is no model:
criteria and processors are called with ids at random, as a decode loop calls them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import transformers
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation import stopping_criteria as upstreams

from benchmarks import output
from benchmarks.output import RESULTS, OutOption, ThreadsOption, set_threads
from benchmarks.side_by_side import machine
from hfgen.logits.stopping import StopRegexCriteria, StopStringCriteria
from hfgen.logits.stopping.reasons import RepetitionCriteria, StopTokenCriteria
from hfgen.logits.thinking import ThinkingBudget
from hfgen.settings.kinds import RepetitionDetection
from hfgen.state.text import Detokenizer

#: Seconds that the first use of stop strings may take, on ``TARGET_VOCAB``.
TARGET, TARGET_VOCAB = 0.050, 151_936

#: Generated tokens at which the cost of one more is measured.
LENGTHS = (16, 500, 1000, 2000, 4000)

FEW = ["\n\n", "</answer>", "<|im_end|>"]
MANY = [f"{letter}top{n}" for letter in "abcdefgh" for n in range(2)]


@dataclass(frozen=True, slots=True)
class FirstUse:
    """Seconds from the strings to the first answer, with nothing cached; and of the second time."""

    name: str
    n_strings: int
    first: float
    second: float


@dataclass(frozen=True, slots=True)
class PerToken:
    """Microseconds per row of one call at each of ``LENGTHS``, the median."""

    name: str
    source: str
    rows: int
    microseconds: list[float]


def build(vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of ``vocab`` tokens: all bytes, and syllables with and without a space."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    syllables = [c + v + e for c in "bcdfghjklmnpqrstvwxz" for v in "aeiou" for e in ("", *"lnrst")]
    words = (
        s + first + second for first in syllables for second in ("", *syllables) for s in ("", "Ġ")
    )
    tokens += [token for token, _ in zip(words, range(vocab - len(tokens)), strict=False)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def ids_of(vocab: int, rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(0))


# --- first use ----------------------------------------------------------------------------------


LIBRARIES: dict[str, Callable[..., Any]] = {
    "transformers": transformers.StopStringCriteria,
    "hfgen": StopStringCriteria,
}


def first_uses(tokenizer: Any) -> Iterator[FirstUse]:
    """Of each library, for few strings and for many; ``AssertionError`` if they end other rows."""
    ids = ids_of(len(tokenizer), 8, 64)
    for strings in (FEW, MANY):
        answers = []
        for name, make in LIBRARIES.items():
            upstreams.STOP_STRING_EMBEDDING_CACHE.clear()
            seconds = []
            for _ in range(2):
                start = time.perf_counter()
                ends = make(tokenizer, strings)(ids, None)
                seconds.append(time.perf_counter() - start)
            answers.append(ends)
            yield FirstUse(name, len(strings), *seconds)
        assert torch.equal(*answers)


# --- every token --------------------------------------------------------------------------------


def steps(tokenizer: Any) -> dict[tuple[str, str], Callable[[torch.Tensor], Any]]:
    """What is done for each new token, by what it is and whose: given the ids so far."""
    theirs, ours = "transformers", "hfgen"
    scores = torch.zeros(8, len(tokenizer))
    budgets = {name: ThinkingBudget(n, [1], [3]) for name, n in (("not ", 10**6), ("", 0))}
    functions = {
        (f"{len(FEW)} stop strings", theirs): transformers.StopStringCriteria(tokenizer, FEW),
        (f"{len(FEW)} stop strings", ours): StopStringCriteria(tokenizer, FEW),
        (f"{len(MANY)} stop strings", theirs): transformers.StopStringCriteria(tokenizer, MANY),
        (f"{len(MANY)} stop strings", ours): StopStringCriteria(tokenizer, MANY),
        ("`stop_regex`", ours): StopRegexCriteria(tokenizer, r"\n\s*\d+\. [A-Z]{3}"),
        ("`stop_token_ids`", ours): StopTokenCriteria([5, 7, 9]),
        ("`repetition_detection`, up to 20", ours): RepetitionCriteria(
            RepetitionDetection(max_pattern_size=20, min_count=4)
        ),
    }
    calls = {name: lambda ids, f=f: f(ids, None) for name, f in functions.items()}
    for name, budget in budgets.items():
        calls[f"`thinking_token_budget`, {name}spent", ours] = lambda ids, budget=budget: budget(
            ids, scores[: len(ids)]
        )
    return calls


def measure(tokenizer: Any, rows: int, lengths: tuple[int, ...], n_calls: int) -> list[PerToken]:
    """Calls with the ids of a row that grows by a token each time, up to each of ``lengths``."""
    ids = ids_of(len(tokenizer), rows, max(lengths))
    ids[:, 0], ids[:, 1:] = 1, ids[:, 1:].clamp(min=10)  # a thinking section opens, and stays so
    results = []
    for (name, source), call in steps(tokenizer).items():
        medians = []
        for length in lengths:
            seconds = []
            for n in range(max(length - n_calls, 1), length + 1):
                start = time.perf_counter()
                call(ids[:, :n])
                seconds.append(time.perf_counter() - start)
            medians.append(1e6 * statistics.median(seconds) / rows)
        results.append(PerToken(name, source, rows, medians))
    return results


def measure_text(tokenizer: Any, lengths: tuple[int, ...], n_calls: int) -> PerToken:
    """The text of a row as it grows."""
    ids, detokenizer, seconds = ids_of(len(tokenizer), 1, max(lengths))[0].tolist(), None, []
    detokenizer = Detokenizer(tokenizer)
    for token in ids:
        start = time.perf_counter()
        detokenizer.push([token])
        seconds.append(time.perf_counter() - start)
    medians = [1e6 * statistics.median(seconds[max(n - n_calls, 0) : n]) for n in lengths]
    return PerToken("text as it grows", "hfgen", 1, medians)


# --- what is written ----------------------------------------------------------------------------


def first_table(uses: list[FirstUse]) -> str:
    lines = ["| strings | | first use | again |", "|--:|---|--:|--:|"]
    for use in uses:
        lines.append(
            f"| {use.n_strings} | {use.name} | {1e3 * use.first:,.1f} ms | {1e3 * use.second:,.1f} ms |"
        )
    return "\n".join(lines)


def token_table(results: list[PerToken], lengths: tuple[int, ...]) -> str:
    head = " | ".join(f"{length:,}" for length in lengths)
    lines = [f"| | | rows | {head} |", "|---|---|--:|" + "--:|" * len(lengths)]
    for result in results:
        numbers = " | ".join(f"{value:,.1f}" for value in result.microseconds)
        lines.append(f"| {result.name} | {result.source} | {result.rows} | {numbers} |")
    return "\n".join(lines)


def verdict(uses: list[FirstUse], vocab: int) -> str:
    """The target, and what was measured of it, if it was."""
    if vocab != TARGET_VOCAB:
        return ""
    worst = max(use.first for use in uses if use.name == "hfgen")
    is_met = "met" if worst <= TARGET else "**missed**"
    return f"* first use within {1e3 * TARGET:.0f} ms: {1e3 * worst:.1f} ms at most: {is_met}\n\n"


def report(
    uses: list[FirstUse],
    tokens: list[PerToken],
    facts: dict[str, Any],
    vocab: int,
    lengths: tuple[int, ...],
) -> str:
    return f"""# Stopping

{facts["processor"]}, {facts["cores"]} cores, {facts["threads"]} thread(s), load {facts["load"]}. torch {facts["torch"]}, transformers {facts["transformers"]}, hfgen {facts["hfgen"]}, Python {facts["python"]}.

A byte-level tokenizer with {vocab:,} tokens, ids at random, no model.

## First use of stop strings

From the strings to the first answer, for 8 rows. transformers tabulates the vocabulary; it keeps the table for the next call, but finds it again only if `get_vocab()` has the same order. hfgen finds the bytes of a token when it first comes, so that ids at random, nearly all of them new, are its worst case.

{verdict(uses, vocab)}{first_table(uses)}

## Per token

Microseconds per row of one call, after so many generated tokens; a median.

{token_table(tokens, lengths)}
"""


def main(
    vocab: Annotated[int, typer.Option(min=1000, help="Tokens of the vocabulary.")] = TARGET_VOCAB,
    longest: Annotated[int, typer.Option(min=16, help="Generated tokens at most.")] = max(LENGTHS),
    calls: Annotated[int, typer.Option(min=1, help="Timed calls at each length.")] = 100,
    threads: ThreadsOption = None,
    out: OutOption = RESULTS,
) -> None:
    """Measure what stop strings and their like cost."""
    set_threads(threads)
    facts, tokenizer = machine(), build(vocab)
    uses = list(first_uses(tokenizer))
    print(first_table(uses), flush=True)
    lengths = tuple(length for length in LENGTHS if length <= longest)
    tokens = [r for rows in (1, 8) for r in measure(tokenizer, rows, lengths, calls)]
    tokens.append(measure_text(tokenizer, lengths, calls))
    text = report(uses, tokens, facts, len(tokenizer), lengths)
    raw = {"machine": facts, "vocab": len(tokenizer), "lengths": lengths}
    raw |= {"first_use": [*map(asdict, uses)], "per_token": [*map(asdict, tokens)]}
    print(output.write(out, "stopping", text, raw))


if __name__ == "__main__":
    typer.run(main)
