"""``hfgen bench``: times and memory for several lengths and batch sizes, compared with transformers."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
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
    lengths = [
        numbers(option, text)
        for option, text in (
            ("--prompt-tokens", prompt_tokens),
            ("--new-tokens", new_tokens),
            ("--batch-sizes", batch_sizes),
        )
    ]
    if plot is not None:
        if find_spec("matplotlib") is None:
            raise CliError("--plot needs matplotlib: pip install matplotlib")
        files.check_output(plot, PLOTS, "--plot")
    with source.loaded() as loaded:
        if loaded.model.config.is_encoder_decoder:
            raise CliError("hfgen bench takes decoders, but the model is an encoder-decoder")
        limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
        most = max(lengths[0]) + max(lengths[1])
        if limit is not None and most > limit:
            raise CliError(f"the model has {limit} positions, but {most} tokens were asked for")
        cases = []
        for n_prompt, n_new, n_rows in itertools.product(*lengths):
            text = f"{n_rows} x {n_prompt} + {n_new} tokens"
            with err.status(text) if err.is_terminal else nullcontext():
                cases.append(run_case(loaded, n_prompt, n_new, n_rows, repeat))
    if as_json:
        print_json({"model": loaded.name, "repeat": repeat, "cases": cases})
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


def run_case(
    loaded: Loaded, prompt_tokens: int, new_tokens: int, batch_size: int, repeat: int
) -> dict[str, Any]:
    """Each library in turn: once to warm up, ``repeat`` times timed, once for its memory.

    The calls are plain ones: greedy, without a streamer or a processor. The result is what ``--json``
    prints; of each run, ``first`` are the seconds of a call of one new token, ``total`` those of a call of
    ``new_tokens``, and ``per_token`` those of each further token, by the difference.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    vocab = loaded.model.config.get_text_config().vocab_size
    ids = torch.randint(vocab, (batch_size, prompt_tokens), generator=generator)
    ids = ids.to(loaded.model.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    runs: dict[str, dict[str, Any]] = {
        library: {"first": [], "per_token": [], "total": []} for library in LIBRARIES
    }
    for turn, library in measure.in_turns(range(repeat + 2), loaded):
        if turn == repeat + 1:
            runs[library]["peak_bytes"] = peak_bytes(loaded, inputs, new_tokens)
            continue
        first = seconds(loaded, inputs, 1)
        total = seconds(loaded, inputs, new_tokens)
        if turn:
            runs[library]["first"].append(first)
            runs[library]["total"].append(total)
            if new_tokens > 1:
                runs[library]["per_token"].append((total - first) / (new_tokens - 1))
    for times in runs.values():
        times["tokens_per_second"] = [batch_size * new_tokens / total for total in times["total"]]
    pairs = zip(runs["transformers"]["total"], runs["hfgen"]["total"], strict=True)
    sizes = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "batch_size": batch_size}
    return {**sizes, **runs, "speedup": [theirs / ours for theirs, ours in pairs]}


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


def milliseconds(values: list[float]) -> list[float]:
    return [1000 * value for value in values]


def table_of(cases: Sequence[dict[str, Any]]) -> Table:
    """Two rows for each case, one for each library."""
    columns = ("first, ms", "token, ms", "tokens/s", "MiB", "speed-up")
    rows = table("prompt+new", "library", numbers=columns)
    for case in cases:
        label = "{batch_size} x {prompt_tokens}+{new_tokens}".format(**case)
        for library in LIBRARIES:
            runs, is_ours = case[library], library == "hfgen"
            rows.add_row(
                "" if is_ours else label,
                library,
                spread(milliseconds(runs["first"]), 1),
                spread(milliseconds(runs["per_token"]), 1),
                spread(runs["tokens_per_second"], 0),
                f"{runs['peak_bytes'] / 2**20:,.1f}",
                spread(case["speedup"], 2) if is_ours else "",
            )
    return rows


def draw(cases: Sequence[dict[str, Any]], path: Path) -> None:
    """Throughput and time to first token by batch size, a line for each library and pair of lengths."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    panels: list[Any] = list(figure.subplots(1, 2))
    lines: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for case in cases:
        lines.setdefault((case["prompt_tokens"], case["new_tokens"]), []).append(case)
    for (color, (lengths, line)), library in itertools.product(enumerate(lines.items()), LIBRARIES):
        speeds = [case[library]["tokens_per_second"] for case in line]
        firsts = [milliseconds(case[library]["first"]) for case in line]
        for panel, values in zip(panels, (speeds, firsts), strict=True):
            middle = [statistics.median(each) for each in values]
            panel.errorbar(
                [case["batch_size"] for case in line],
                middle,
                (
                    [m - min(each) for m, each in zip(middle, values, strict=True)],
                    [max(each) - m for m, each in zip(middle, values, strict=True)],
                ),
                fmt="-o" if library == "hfgen" else "--s",
                color=f"C{color}",
                label="{}, {} + {} tokens".format(library, *lengths),
            )
    sizes = sorted({case["batch_size"] for case in cases})
    for panel, title in zip(panels, ("tokens per second", "time to first token, ms"), strict=True):
        panel.set(xlabel="prompts in a call", ylabel=title, ylim=(0, None), xticks=sizes)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise CliError(f"cannot write to {str(path)!r}: {error}") from error
