"""``hfgen bench``: times and memory for several lengths and batch sizes, compared with transformers."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from . import files, measure, options
from .loading import Loaded
from .measure import LIBRARIES
from .report import CliError, err, out, print_json, spread, table

PLOTS = (".png", ".pdf", ".svg")


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a case: ``batch_size`` prompts of one length, each with exactly ``new_tokens`` more."""

    prompt_tokens: int
    new_tokens: int
    batch_size: int


@dataclass(slots=True)
class Runs:
    """One library on one shape, a value for each timed run, in seconds; ``peak_bytes`` of one more.

    ``first``: of a call of one new token; ``per_token``: of each further one, by the difference.
    """

    first: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def throughputs(self, shape: Shape) -> list[float]:
        """New tokens of all rows per second."""
        return [shape.batch_size * shape.new_tokens / seconds for seconds in self.total]


@dataclass(frozen=True, slots=True)
class Case:
    """A shape under both libraries; run ``i`` of one stands beside run ``i`` of the other."""

    shape: Shape
    runs: dict[str, Runs]

    def speedups(self) -> list[float]:
        """Time of transformers by time of hfgen, of each pair of runs."""
        pairs = zip(self.runs["transformers"].total, self.runs["hfgen"].total, strict=True)
        return [theirs / ours for theirs, ours in pairs]


@options.with_shared_options
def bench(
    prompt_tokens: Annotated[
        str, typer.Option("--prompt-tokens", help="Prompt lengths, for example 16,256.")
    ] = "16,256",
    new_tokens: Annotated[
        str, typer.Option("--new-tokens", help="Output lengths, for example 8,64.")
    ] = "32",
    batch_sizes: Annotated[
        str, typer.Option("--batch-sizes", help="Batch sizes, for example 1,4.")
    ] = "1,4",
    repeat: options.RepeatOption = 3,
    as_json: options.JsonOption = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="OUT.png", help="Write a plot; needs matplotlib."),
    ] = None,
    *,
    source: options.ModelOptions,
) -> None:
    """Time to first token, time per output token, throughput and peak memory of greedy decoding.

    Both libraries run in this process, one directly after the other, in turns, with the same weights and
    prompts of random tokens.
    """
    named = {"--prompt-tokens": prompt_tokens, "--new-tokens": new_tokens}
    named["--batch-sizes"] = batch_sizes
    lengths = [numbers(option, text) for option, text in named.items()]
    if plot is not None and find_spec("matplotlib") is None:
        raise CliError("--plot needs matplotlib: pip install matplotlib")
    if plot is not None:
        files.check_output(plot, PLOTS, "--plot")
    shapes = [Shape(*sizes) for sizes in itertools.product(*lengths)]
    with source.loaded() as loaded:
        check(loaded, shapes)
        cases = []
        for shape in shapes:
            text = f"{shape.batch_size} x {shape.prompt_tokens} + {shape.new_tokens} tokens"
            with err.status(text) if err.is_terminal else nullcontext():
                cases.append(run_case(loaded, shape, repeat))
    if as_json:
        print_json({"model": loaded.name, "repeat": repeat, "cases": list(map(as_object, cases))})
    else:
        out.print(table_of(cases))
        out.print(
            f"[dim]median of {repeat} interleaved runs, ± half of their range; greedy decoding[/]"
        )
    if plot is not None:  # last, so that a table is there if it cannot be
        draw(cases, plot)


def numbers(option: str, text: str) -> list[int]:
    """``"1,4"`` as numbers. Raises ``CliError``."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise CliError(f"{option} takes numbers from 1 on, as 1,4, but {text!r} was given")
    return [int(part) for part in parts]


def check(loaded: Loaded, shapes: Sequence[Shape]) -> None:
    """Raise ``CliError`` if the model has an encoder, or too few positions for one of ``shapes``."""
    if loaded.model.config.is_encoder_decoder:
        raise CliError("hfgen bench takes decoders, but the model is an encoder-decoder")
    limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    most = max(shape.prompt_tokens + shape.new_tokens for shape in shapes)
    if limit is not None and most > limit:
        raise CliError(f"the model has {limit} positions, but {most} tokens were asked for")


def run_case(loaded: Loaded, shape: Shape, repeat: int) -> Case:
    """Each library in turn: once to warm up, ``repeat`` times timed, once for its memory.

    The calls are plain ones: greedy, without a streamer or a processor.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    size = shape.batch_size, shape.prompt_tokens
    vocab = loaded.model.config.get_text_config().vocab_size
    ids = torch.randint(vocab, size, generator=generator).to(loaded.model.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    case = Case(shape, {name: Runs() for name in LIBRARIES})
    for turn, library in measure.in_turns(range(repeat + 2), loaded):
        runs = case.runs[library]
        if turn == repeat + 1:
            runs.peak_bytes = peak_bytes(loaded, inputs, shape.new_tokens)
            continue
        first = seconds(loaded, inputs, 1)
        total = seconds(loaded, inputs, shape.new_tokens)
        if turn:
            runs.first.append(first)
            runs.total.append(total)
            if shape.new_tokens > 1:
                runs.per_token.append((total - first) / (shape.new_tokens - 1))
    return case


def seconds(loaded: Loaded, inputs: dict[str, Any], new_tokens: int) -> float:
    """Time one call that generates exactly ``new_tokens`` per row."""
    lengths = {"max_new_tokens": new_tokens, "eos_token_id": None}
    start = time.perf_counter()
    with measure.named_errors():
        output = loaded.model.generate(**inputs, **lengths, do_sample=False, num_beams=1)
    measure.new_tokens(loaded, inputs, output)  # as numbers of the host: a GPU has to end for them
    return time.perf_counter() - start


def peak_bytes(loaded: Loaded, inputs: dict[str, Any], new_tokens: int) -> int:
    """The most memory that tensors of one call take at a time, besides weights and inputs."""
    import torch

    from ..evaluate.live_bytes import LiveBytes

    if loaded.model.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        seconds(loaded, inputs, new_tokens)
        return torch.cuda.max_memory_allocated() - before
    with LiveBytes() as live:
        seconds(loaded, inputs, new_tokens)
    return live.peak


def as_object(case: Case) -> dict[str, Any]:
    """A case for ``--json``: all runs, in seconds and bytes."""
    runs = {
        name: {**asdict(runs), "tokens_per_second": runs.throughputs(case.shape)}
        for name, runs in case.runs.items()
    }
    return {**asdict(case.shape), **runs, "speedup": case.speedups()}


def table_of(cases: Sequence[Case]) -> Table:
    """Two rows for each case, one for each library."""
    columns = ("first, ms", "token, ms", "tokens/s", "MiB", "speed-up")
    found = table("prompt+new", "library", numbers=columns)
    for case in cases:
        shape = case.shape
        label = f"{shape.batch_size} x {shape.prompt_tokens}+{shape.new_tokens}"
        for name, runs in case.runs.items():
            found.add_row(
                label,
                name,
                spread([1000 * value for value in runs.first], 1),
                spread([1000 * value for value in runs.per_token], 1),
                spread(runs.throughputs(shape), 0),
                f"{runs.peak_bytes / 2**20:,.1f}",
                spread(case.speedups(), 2) if name == "hfgen" else "",
            )
            label = ""
    return found


def draw(cases: Sequence[Case], path: Path) -> None:
    """Throughput and time to first token by batch size, a line for each library and pair of lengths."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    panels: list[Any] = list(figure.subplots(1, 2))
    pairs = dict.fromkeys((case.shape.prompt_tokens, case.shape.new_tokens) for case in cases)
    for (color, pair), name in itertools.product(enumerate(pairs), LIBRARIES):
        own = [c for c in cases if (c.shape.prompt_tokens, c.shape.new_tokens) == pair]
        x = [case.shape.batch_size for case in own]
        columns = [case.runs[name].throughputs(case.shape) for case in own]
        firsts = [[1000 * value for value in case.runs[name].first] for case in own]
        for panel, values in zip(panels, (columns, firsts), strict=True):
            middle = [statistics.median(each) for each in values]
            below = [m - min(each) for m, each in zip(middle, values, strict=True)]
            above = [max(each) - m for m, each in zip(middle, values, strict=True)]
            style = "-o" if name == "hfgen" else "--s"
            label = f"{name}, {pair[0]} + {pair[1]} tokens"
            panel.errorbar(x, middle, (below, above), fmt=style, color=f"C{color}", label=label)
    for panel, title in zip(panels, ("tokens per second", "time to first token, ms"), strict=True):
        sizes = sorted({case.shape.batch_size for case in cases})
        panel.set(xlabel="prompts in a call", ylabel=title, ylim=(0, None), xticks=sizes)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise CliError(f"cannot write to {str(path)!r}: {error}") from error
