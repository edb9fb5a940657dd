"""What controls cost per token of a long output: penalties, repeats, n-grams, stop strings.

``python -m benchmarks.controls`` writes ``controls.md``, ``controls.json`` and ``controls.png`` to
``benchmarks/results``. No model runs: processors and criteria are called as a decoding loop calls
them, one token after another, so that their own time is what is seen.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from transformers import LlamaConfig, LlamaForCausalLM

import hfgen
from benchmarks import output
from benchmarks.output import RESULTS, OutOption, ThreadsOption, set_threads
from benchmarks.plots import save, subplots
from benchmarks.side_by_side import described, frozen_garbage, machine, unmixed

#: Output lengths at which the time per token is taken.
LENGTHS = (100, 250, 500, 1000, 2000, 4000)

PROMPT_LENGTH = 16

#: A control is flat if the last length costs at most so many times the least of the others, or so
#: many microseconds more.
FLAT, SMALL = 1.5, 20.0

#: Name of a control -> what it asks of ``generate``.
CONTROLS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.1},
    "frequency penalty": {"frequency_penalty": 0.5},
    "presence penalty, window of 64": {"presence_penalty": 0.5, "penalty_window": 64},
    "DRY": {"dry_multiplier": 0.8, "dry_sequence_breakers": [1]},
    "no n-gram of 3 twice": {"no_repeat_ngram_size": 3},
}

#: Those that upstream has, too.
UPSTREAMS = ("repetition penalty", "no n-gram of 3 twice")


@dataclass(frozen=True, slots=True)
class Curve:
    """Microseconds per token at each of ``lengths``: medians over ``n`` tokens around it."""

    control: str
    source: str
    text: str
    rows: int
    lengths: tuple[int, ...]
    microseconds: tuple[float, ...]

    @property
    def is_flat(self) -> bool:
        least = min(self.microseconds)
        return self.growth <= FLAT or self.microseconds[-1] <= least + SMALL

    @property
    def growth(self) -> float:
        """The time at the last length, by the least of the others."""
        return self.microseconds[-1] / min(self.microseconds[:-1] or self.microseconds)


def build(vocab: int) -> Any:
    """A model that is never run: its processors are asked for."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        pad_token_id=0,
        eos_token_id=None,
    )
    return hfgen.mix_into(LlamaForCausalLM(config).eval())


# --- the texts ----------------------------------------------------------------------------------


def passages(vocab: int, rows: int, length: int) -> torch.Tensor:
    """Random tokens, and every 100 tokens a passage of 10 that was there before."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, vocab, (rows, length), generator=generator)
    for start in range(200, length - 10, 100):
        tokens[:, start : start + 10] = tokens[:, start - 150 : start - 140]
    return tokens


def loop(vocab: int, rows: int, length: int) -> torch.Tensor:
    """One sentence of 20 tokens again and again: where repeats are longest."""
    generator = torch.Generator().manual_seed(0)
    sentence = torch.randint(2, vocab, (rows, 20), generator=generator)
    return sentence.repeat(1, length // 20 + 1)[:, :length]


TEXTS: dict[str, Callable[[int, int, int], torch.Tensor]] = {"passages": passages, "loop": loop}


# --- the times ----------------------------------------------------------------------------------


def processors(model: Any, library: str, options: dict[str, Any]) -> Any:
    """The processors that ``options`` ask for, with ``library``'s own classes."""
    config = hfgen.GenerationConfig(**options)
    arguments = {"input_ids_seq_length": PROMPT_LENGTH, "device": "cpu"}
    if library == "hfgen":
        return model._get_logits_processor(config, **arguments)
    config = transformers.GenerationConfig(**options)
    with unmixed(model):
        return model._get_logits_processor(config, **arguments)


def measure(
    model: Any, control: str, library: str, text: str, rows: int, lengths: tuple[int, ...], n: int
) -> Curve:
    """One output of ``lengths[-1]`` tokens; ``n`` of them timed at each length."""
    vocab = model.config.vocab_size
    ids = TEXTS[text](vocab, rows, PROMPT_LENGTH + lengths[-1])
    scores = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1))
    functions = processors(model, library, CONTROLS[control])
    times: dict[int, list[float]] = {length: [] for length in lengths}
    windows = {
        place: length for length in lengths for place in range(max(length - n, 1), length + 1)
    }
    with torch.no_grad(), frozen_garbage():
        # What is stateless need not be called where it is not timed; the first call is a warm-up.
        places = range(1, lengths[-1] + 1) if library == "hfgen" else sorted(windows)
        for place in (1, *places):
            given = ids[:, : PROMPT_LENGTH + place]
            start = time.perf_counter()
            functions(given, scores)
            if place in windows:
                times[windows[place]].append(1e6 * (time.perf_counter() - start))
    medians = tuple(statistics.median(times[length]) for length in lengths)
    return Curve(control, library, text, rows, lengths, medians)


def cases() -> Iterator[tuple[str, str]]:
    """Controls, each with the libraries that have it."""
    for control in CONTROLS:
        yield control, "hfgen"
        if control in UPSTREAMS:
            yield control, "upstream"


# --- what is written ----------------------------------------------------------------------------


def table(curves: list[Curve]) -> str:
    lengths = curves[0].lengths
    lines = [
        f"| control | library | text | rows | {' | '.join(f'{n:,}' for n in lengths)} | growth |",
        f"|---|---|---|--:|{'--:|' * len(lengths)}--:|",
    ]
    for c in curves:
        times = " | ".join(f"{t:.0f}" for t in c.microseconds)
        lines.append(
            f"| {c.control} | {c.source} | {c.text} | {c.rows} | {times} | {c.growth:.2f} |"
        )
    return "\n".join(lines)


def verdict(curves: list[Curve]) -> str:
    ours = [curve for curve in curves if curve.source == "hfgen"]
    steep = [
        f"{c.control} ({c.text}, {c.rows} rows): {c.growth:.2f}" for c in ours if not c.is_flat
    ]
    bound = f"at most {FLAT} times the least of the others, or {SMALL:.0f} microseconds more"
    if not steep:
        return f"All of hfgen's are flat: the last length costs {bound}."
    return f"**Not flat** (the last length costs {bound}): {'; '.join(steep)}."


def report(curves: list[Curve], facts: dict[str, Any], vocab: int) -> str:
    return f"""# Controls over long outputs

{described(facts)}, Python {facts["python"]}.

Microseconds per token of all rows, of the processors alone, by the length of the output; a vocabulary of {vocab:,}. Growth: the last length by the least of the others. *Passages*: random tokens, and every 100 tokens a passage of 10 that was there before. *Loop*: one sentence of 20 tokens again and again.

{verdict(curves)}

{table(curves)}
"""


def plot(curves: list[Curve], path: Path) -> None:
    """The time per token by the length of the output, one panel per text and number of rows."""
    panels = sorted({(curve.text, curve.rows) for curve in curves}, reverse=True)
    figure, axes = subplots(
        ncols=len(panels), figsize=(1 + 3.6 * len(panels), 4.4), squeeze=False, layout="constrained"
    )
    colors = {name: f"C{index}" for index, name in enumerate(CONTROLS)}
    for axis, (text, rows) in zip(axes[0], panels, strict=True):
        for curve in curves:
            if (curve.text, curve.rows) == (text, rows):
                axis.plot(
                    curve.lengths,
                    curve.microseconds,
                    "o-" if curve.source == "hfgen" else "x--",
                    color=colors[curve.control],
                    markersize=4,
                    label=f"{curve.control}, {curve.source}",
                )
        axis.set_title(f"{text}, {rows} row{'s' if rows > 1 else ''}", fontsize=10)
        axis.set_xlabel("tokens generated so far")
        axis.set_yscale("log")  # upstream's penalty of 8 rows would leave the others on one line
        axis.grid(color="0.9")
    axes[0][0].set_ylabel("microseconds per token, all rows")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    save(figure, path, dpi=150)


def write(curves: list[Curve], facts: dict[str, Any], vocab: int, folder: Path) -> str:
    """Write report, raw data and plot to ``folder``; returns the report."""
    text = report(curves, facts, vocab)
    raw = {"machine": facts, "vocab": vocab, "curves": [*map(asdict, curves)]}
    return output.write(folder, "controls", text, raw, lambda path: plot(curves, path))


def main(
    vocab: Annotated[int, typer.Option(min=100, help="Tokens of the vocabulary.")] = 151_936,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Default: 1 and 8.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Timed at each length.")] = 40,
    length: Annotated[int, typer.Option(min=200, help="Of the longest output.")] = LENGTHS[-1],
    threads: ThreadsOption = None,
    out: OutOption = RESULTS,
) -> None:
    """Measure what controls cost per token, by the length of the output; exit code 1 if one is not flat."""
    set_threads(threads)
    transformers.logging.set_verbosity_error()
    model, lengths = build(vocab), (*(n for n in LENGTHS if n < length), length)
    curves = []
    for count in rows or (1, 8):
        for text in TEXTS:
            for control, library in cases():
                curves.append(measure(model, control, library, text, count, lengths, tokens))
                print(table(curves).splitlines()[-1], flush=True)
    report_text = write(curves, machine(), vocab, out)
    print(report_text)
    if any(curve.source == "hfgen" and not curve.is_flat for curve in curves):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
