"""``hfgen compare`` and ``hfgen bench``, both libraries on the same weights; ``hfgen replay``, one against a card."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import product, zip_longest
from pathlib import Path
from typing import Any, ClassVar

import typer
from rich.markup import escape
from rich.table import Column, Table
from typer import Argument, Option

from . import measure, options
from .field_options import RESULTS, Fields, note_unknown_upstream
from .loading import Loaded, change, load, quiet, read_prompt, read_text
from .measure import LIBRARIES, named_errors
from .report import CliError, duration, err, out, print_json, refused, spread, table

NEW_TOKENS = 64
NEAR_TIE = 1e-4  # a top-2 gap of logits below which rounding alone can choose the token
MAX_BYTES = 2**27  # bytes of a file that is read as a card, at most


class CompareFields(Fields):
    """Fields without those whose results are not compared; ``--seed`` is torch's generator's."""

    left_out: ClassVar = RESULTS | {"seed"}


def compare(
    source: options.ModelOptions,
    fields: CompareFields,
    prompts: list[str] | None = Argument(None, help="Prompts; - or a pipe: of standard input."),
    batch: bool = Option(False, "--batch", help="All prompts in one call, padded to one length."),
    repeat: int = options.REPEAT,
    seed: int = Option(0, help="Seed of each call.", **options.SEED),
    as_json: bool = options.JSON,
) -> None:
    """Run transformers and hfgen side by side: tokens, first difference, times.

    Takes the options of generate. The times are medians of interleaved runs after one warm-up.
    Exit code 0: same tokens; 1: they differ.
    """
    texts = [read_prompt(prompt) for prompt in prompts or (None,)]
    groups = [texts] if batch else [[text] for text in texts]
    with source.configured(fields, NEW_TOKENS) as (loaded, config):
        note_unknown_upstream(fields)
        inputs = [measure.encode(loaded, group) for group in groups]
        results = [compare_call(loaded, each, config, seed, repeat) for each in inputs]
    if as_json:
        calls = [{"prompts": group} | call for group, call in zip(groups, results, strict=True)]
        settings = {"model": loaded.name, "options": fields.as_json(), "seed": seed}
        print_json({**settings, "calls": calls})
    else:
        names = [f"{len(texts)} prompts"] if batch and len(texts) > 1 else texts
        print_table(names, results, loaded.tokenizer)
    if any(result["differences"] for result in results):
        raise typer.Exit(1)


def compare_call(
    loaded: Loaded, inputs: dict[str, Any], config: Any, seed: int, repeat: int
) -> dict[str, Any]:
    """A warm-up and ``repeat`` timed calls of each library, in turns, as ``--json`` prints them."""
    runs = measure.race(loaded, lambda _: measure.generate(loaded, inputs, config, seed), repeat)
    pairs = list(zip(runs["transformers"], runs["hfgen"], strict=True))
    ratios = [ours.seconds / theirs.seconds for theirs, ours in pairs[1:]]
    differing = next((pair for pair in pairs if pair[0].padded != pair[1].padded), None)
    result: dict[str, Any] = {"identical": differing is None, "differences": []}
    for library, (first, *timed) in runs.items():
        result[library] = {
            "tokens": first.padded,
            "n_tokens": first.n_tokens,
            "seconds": median([run.seconds for run in timed]),
            "time_to_first_token": median([run.first for run in timed]),
        }
    times = result["hfgen"]["seconds"], result["transformers"]["seconds"]
    result |= {"ratio": times[0] / times[1] if ratios else None, "ratios": ratios}
    if differing is not None:
        recording = copy.deepcopy(config)
        recording.return_dict_in_generate = recording.output_logits = True
        with LIBRARIES["transformers"](loaded):
            output = measure.generate(loaded, inputs, recording, seed).output
        rows = enumerate(zip(differing[0].padded, differing[1].padded, strict=False))
        result["differences"] = [
            find_difference(row, *pair, output) for row, pair in rows if pair[0] != pair[1]
        ]
    return result


def median(values: list[Any]) -> Any:
    """The median; None for no values, and for those that were not taken."""
    return None if None in values or not values else statistics.median(values)


def find_difference(row: int, theirs: list[int], ours: list[int], output: Any) -> dict[str, Any]:
    """Where the rows differ first (None: ended); ``output`` is transformers', with its logits."""
    pairs = enumerate(zip_longest(theirs, ours))
    position, pair = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    tokens = dict(zip(LIBRARIES, pair, strict=True))
    gap = logit_gap(output, row, position)
    return {"row": row, "position": position, "tokens": tokens, "logit_gap": gap}


def logit_gap(output: Any, row: int, position: int) -> float | None:
    """Difference of the two largest logits of ``row`` at new token ``position``."""
    if position >= len(output.logits):
        return None
    if getattr(output, "beam_indices", None) is not None:
        row = int(output.beam_indices[row, position])  # the beam that the row was in at that step
    if row < 0:
        return None
    best, second = output.logits[position][row].float().topk(2).values.tolist()
    return best - second


def described(difference: dict[str, Any], tokenizer: Any) -> str:
    words = ", ".join(
        f"{library} has {'ended' if token is None else f'{tokenizer.decode([token])!r} ({token})'}"
        for library, token in difference["tokens"].items()
    )
    if (gap := difference["logit_gap"]) is None:
        return f"{words}; no logits there"
    tie = ", a near tie that rounding can decide" if gap < NEAR_TIE else ""
    return f"{words}; top-2 logit gap {gap:.2e}{tie}"


def print_table(names: list[str], results: list[dict[str, Any]], tokenizer: Any) -> None:
    """Both libraries side by side, a row per call: medians, ± half of the range; then differences."""
    heading = Column("prompt", overflow="ellipsis", no_wrap=True, max_width=20)
    rows = table(heading, numbers=("tokens", "same tokens", *LIBRARIES, "ratio"))
    for name, result in zip(names, results, strict=True):
        rows.add_row(
            escape(repr(name)[1:-1]),
            str(result["transformers"]["n_tokens"]),
            "[green]yes[/]" if result["identical"] else "[bold red]no[/]",
            *(duration(result[library]["seconds"]) for library in LIBRARIES),
            spread(result["ratios"], 2),
        )
    out.print(rows)
    for name, result in zip(names, results, strict=True):
        for difference in result["differences"]:
            place = f"row {difference['row']}, new token {difference['position'] + 1}"
            words = escape(described(difference, tokenizer))
            out.print(f"{escape(repr(name))}, [red]{place}:[/] {words}", soft_wrap=True)


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
        for sizes in product(n_prompts, n_new, n_rows):
            text = "{2} x {0} + {1} tokens".format(*sizes)
            with err.status(text) if err.is_terminal else nullcontext():
                cases.append(run_case(loaded, *sizes, repeat))
    if as_json:
        print_json({"model": loaded.name, "repeat": repeat, "cases": cases})
    else:
        how = f"median of {repeat} interleaved runs, ± half of their range; greedy decoding"
        out.print(table_of(cases), f"[dim]{how}[/]", sep="\n")


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
    with named_errors():
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


def replay(
    card: Path = Argument(metavar="CARD.json", help="What str(output.card) wrote."),
    model: str = options.MODEL,
    prompt: list[str] | None = Option(None, help="A text, if the card has no prompts; repeatable."),
    dtype: options.Dtype = options.DTYPE,
    device: str | None = Option(None, help="A torch device."),
    as_json: bool = options.JSON,
    debug: bool = options.DEBUG,
) -> None:
    """Decode a call again from its card: the same bytes, or the first thing that differs.

    It compares versions, machine, model, kernels, weights, tokenizer and the result of each layer, then the tokens.
    Exit code 0: the same bytes; 1: others. The card names no model: the one of --model is loaded.
    """
    from ...decoding.card import Card, differences, first_token
    from ...decoding.card import replay as decode_again

    if card.is_file() and card.stat().st_size > MAX_BYTES:
        raise CliError(f"{str(card)!r} has more than {MAX_BYTES:,} bytes, which no card has")
    with refused(ValueError):
        expected = Card.read(read_text(card))
    with quiet(debug):
        kinds = (expected.kernels.get(name) == "True" for name in ("optimized", "exact"))
        loaded = change(load(model, None, dtype, device), *kinds)
        inputs = measure.encode(loaded, prompt) if prompt else None
        with named_errors():
            decoded = decode_again(expected, loaded.model, loaded.tokenizer, inputs)
    differing, place = differences(expected, decoded), first_token(expected, decoded)
    if as_json:
        print_json({"same": place is None, "first_token": place, "differences": differing})
    else:
        out.print("[bold red]Other bytes.[/]" if place else "[bold green]The same bytes.[/]")
        for line in [*differing, *filter(None, [place])]:
            out.print(line, markup=False, highlight=False)
        if place is not None and not differing:
            why = "the steps of this call were computed otherwise"
            out.print(f"Nothing that the card records differs, so {why}.")
    raise typer.Exit(0 if place is None else 1)
