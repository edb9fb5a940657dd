"""``hfgen bench``: times and memory for several lengths and batch sizes, compared with transformers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from rich.table import Table
from typer import Option

from . import measure, options
from .loading import Loaded
from .measure import LIBRARIES
from .report import CliError, err, out, print_json, spread, table


def bench(
    source: options.ModelOptions,
    prompt_tokens: str = Option("16,256", help="Prompt lengths, for example 16,256."),
    new_tokens: str = Option("32", help="Output lengths, for example 8,64."),
    batch_sizes: str = Option("1,4", help="Batch sizes, for example 1,4."),
    repeat: int = options.REPEAT,
    as_json: bool = options.JSON,
) -> None:
    """Time to first token, time per output token, throughput and peak memory of greedy decoding.

    Both libraries run in this process, one directly after the other, in turns, with the same weights and
    prompts of random tokens.
    """
    n_prompts = numbers("--prompt-tokens", prompt_tokens)
    n_new = numbers("--new-tokens", new_tokens)
    n_rows = numbers("--batch-sizes", batch_sizes)
    with source.loaded() as loaded:
        from ...families import max_positions

        if loaded.model.config.is_encoder_decoder:
            raise CliError("hfgen bench takes decoders, but the model is an encoder-decoder")
        limit = max_positions(loaded.model)
        longest = max(n_prompts) + max(n_new)
        if limit is not None and longest > limit:
            raise CliError(f"the model has {limit} positions, but {longest} tokens were asked for")
        cases = []
        for sizes in itertools.product(n_prompts, n_new, n_rows):
            text = "{2} x {0} + {1} tokens".format(*sizes)
            with err.status(text) if err.is_terminal else nullcontext():
                cases.append(run_case(loaded, *sizes, repeat))
    if as_json:
        print_json({"model": loaded.name, "repeat": repeat, "cases": cases})
    else:
        out.print(table_of(cases))
        medians = f"median of {repeat} interleaved runs, ± half of their range"
        out.print(f"[dim]{medians}; greedy decoding[/]")


def numbers(option: str, text: str) -> list[int]:
    """``"1,4"`` as numbers. Raises ``CliError``."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise CliError(f"{option} takes numbers from 1 on, as 1,4, but {text!r} was given")
    return [int(part) for part in parts]


def run_case(
    loaded: Loaded, prompt_tokens: int, new_tokens: int, batch_size: int, repeat: int
) -> dict[str, Any]:
    """Times and memory of both libraries, as ``--json`` prints them; lists have a value for each run.

    ``first`` are the seconds of a call of one new token, ``total`` those of a call of ``new_tokens``, and
    ``per_token`` those of each further token, by the difference.
    """
    import torch

    from ..evaluate.live_bytes import peak_bytes

    generator, shape = torch.Generator().manual_seed(0), (batch_size, prompt_tokens)
    vocab = loaded.model.config.get_text_config().vocab_size
    ids = torch.randint(vocab, shape, generator=generator).to(loaded.model.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def run(library: str) -> tuple[float, float]:
        return seconds(loaded, inputs, 1), seconds(loaded, inputs, new_tokens)

    def memory(library: str) -> int:
        return peak_bytes(lambda: seconds(loaded, inputs, new_tokens), loaded.model.device)

    runs, peaks = measure.race(loaded, run, repeat), measure.race(loaded, memory, 0)
    case: dict[str, Any] = {}
    for library, (_, *timed) in runs.items():
        later = timed if new_tokens > 1 else []
        case[library] = {
            "first": [first for first, _ in timed],
            "per_token": [(total - first) / (new_tokens - 1) for first, total in later],
            "total": [total for _, total in timed],
            "peak_bytes": peaks[library][0],
            "tokens_per_second": [batch_size * new_tokens / total for _, total in timed],
        }
    pairs = zip(case["transformers"]["total"], case["hfgen"]["total"], strict=True)
    sizes = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "batch_size": batch_size}
    return {**sizes, **case, "speedup": [theirs / ours for theirs, ours in pairs]}


def seconds(loaded: Loaded, inputs: dict[str, Any], new_tokens: int) -> float:
    """Time one plain call that generates exactly ``new_tokens`` per row: greedy, without a streamer."""
    lengths = {"max_new_tokens": new_tokens, "eos_token_id": None}
    start = time.perf_counter()
    with measure.named_errors():
        output = loaded.model.generate(**inputs, **lengths, do_sample=False, num_beams=1)
    measure.new_tokens(loaded, inputs, output)  # as numbers of the host: a GPU has to end for them
    return time.perf_counter() - start


def table_of(cases: Sequence[dict[str, Any]]) -> Table:
    """Two rows for each case, one for each library."""
    columns = ("first, ms", "token, ms", "tokens/s", "MiB", "speed-up")
    rows = table("prompt+new", "library", numbers=columns)
    for case in cases:
        label = "{batch_size} x {prompt_tokens}+{new_tokens}".format(**case)
        for library in LIBRARIES:
            times, is_ours = case[library], library == "hfgen"
            rows.add_row(
                "" if is_ours else label,
                library,
                *(spread([1000 * t for t in times[name]], 1) for name in ("first", "per_token")),
                spread(times["tokens_per_second"], 0),
                f"{times['peak_bytes'] / 2**20:,.1f}",
                spread(case["speedup"], 2) if is_ours else "",
            )
    return rows
