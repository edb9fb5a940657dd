"""Continuous batching against padded batches, calls one after another, and upstream's ``generate_batch``.

``python -m benchmarks.engine`` writes ``benchmarks/results/engine.md``, ``.json`` and ``.png``. All ways decode
the same requests in one process, in turns: random prompts, no EOS, so that a request has the tokens that
it asks for. Only these are counted; what a padded batch decodes beyond them is its cost.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

import hfgen
from benchmarks import output
from benchmarks.edits import EDITS, editing
from benchmarks.models import SUBJECTS
from benchmarks.output import RESULTS, OutOption
from benchmarks.plots import save, subplots
from benchmarks.side_by_side import frozen_garbage, machine, read_bandwidth, speed_cells, unmixed
from hfgen.families import CACHE
from hfgen.memory.batch import Batch
from hfgen.memory.caches.dynamic import GrowingCache

#: What the engine is to be, in times the tokens per second of the others.
TARGETS = {"padded, sorted": 1.5, "upstream": 5.0}

#: Prompts that are forwarded together in the padded batches.
PADDED_ROWS = 16

Asked = list[tuple[list[int], int]]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to decode all requests: a function that returns the generated tokens of each."""

    name: str
    run: Callable[[Any, Asked], list[list[int]]]
    #: Ways that take too long get so many of the requests; the engine gets these alone, too.
    n_requests: int | None = None
    n_rounds: int | None = None


@dataclass(slots=True)
class Timed:
    """Seconds of each round of one way, and how many requests had the tokens of their own calls.

    ``engine``: seconds of the engine for the same requests, where those were not all.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    n_tokens: int = 0
    engine: float | None = None
    n_equal: int = 0
    facts: dict[str, float] = field(default_factory=dict)


def requests(vocab: int, n: int, seed: int = 0, prefix: int = 0) -> Asked:
    """Prompts of 8 to 512 tokens that ask for 8 to 256; with ``prefix``, all begin with as many tokens."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(5, vocab, (count,), generator=generator).tolist()

    shared = tokens(prefix)
    return [(shared + tokens(rng.randint(8, 512)), rng.randint(8, 256)) for _ in range(n)]


# --- ways ---------------------------------------------------------------------------------------


def engine(model: Any, asked: Asked, **options: Any) -> list[list[int]]:
    return decoded(hfgen.Engine(model, **options), asked)


def decoded(made: hfgen.Engine, asked: Asked) -> list[list[int]]:
    added = [made.add(prompt, max_new_tokens=n) for prompt, n in asked]
    for _ in made.events():
        pass
    outputs = [request.result() for request in added]
    if errors := [output.error for output in outputs if output.error is not None]:
        raise errors[0]
    return [output.token_ids for output in outputs]


def padded(model: Any, asked: Asked, is_sorted: bool) -> list[list[int]]:
    """Batches of ``PADDED_ROWS``, each as long as its longest row; sorted by the length of the prompts."""
    order = (
        sorted(range(len(asked)), key=lambda i: len(asked[i][0]))
        if is_sorted
        else range(len(asked))
    )
    found: dict[int, list[int]] = {}
    places = list(order)
    for start in range(0, len(places), PADDED_ROWS):
        part = places[start : start + PADDED_ROWS]
        rows = [torch.tensor(asked[i][0], device=model.device) for i in part]
        ids = pad_sequence(rows, batch_first=True, padding_side="left")
        mask = pad_sequence(
            [torch.ones_like(r) for r in rows], batch_first=True, padding_side="left"
        )
        longest = max(asked[i][1] for i in part)
        with_mask = {"attention_mask": mask, "pad_token_id": 0}
        output = model.generate(ids, max_new_tokens=longest, **with_mask)
        for place, row in zip(part, output[:, ids.shape[1] :].tolist(), strict=True):
            found[place] = row[: asked[place][1]]
    return [found[i] for i in range(len(asked))]


def one_by_one(model: Any, asked: Asked) -> list[list[int]]:
    return [
        model.generate(torch.tensor([prompt], device=model.device), max_new_tokens=n)[
            0, len(prompt) :
        ].tolist()
        for prompt, n in asked
    ]


def upstreams(model: Any, asked: Asked) -> list[list[int]]:
    """Upstream's continuous batching; it takes a number of tokens for each request of a manager.

    It writes an EOS of -1 to the model's generation config, which is taken out again.
    """
    eos = model.generation_config.eos_token_id
    with unmixed(model):
        manager = model.init_continuous_batching()
        manager.start()
        try:
            for i, (prompt, n) in enumerate(asked):
                manager.add_request(prompt, request_id=str(i), max_new_tokens=n)
            found: dict[str, list[int]] = {}
            while len(found) < len(asked):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error:
                        raise RuntimeError(result.error)
                    found[result.request_id] = list(result.generated_tokens)
        finally:
            manager.stop(block=True)
            model.generation_config.eos_token_id = eos
    return [found[str(i)] for i in range(len(asked))]


# --- joins and leaves ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moved:
    """Milliseconds for one row to join and to leave a batch of ``rows`` and ``length`` tokens."""

    rows: int
    length: int
    join: float
    leave: float


def batch_of(model: Any, rows: int, length: int) -> Batch:
    """A batch with random states in the shape of the model's."""
    config = model.config
    heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    cache: DynamicCache = GrowingCache(config=config, max_length=length + 64)
    for layer in range(config.num_hidden_layers):
        states = torch.randn(rows, heads, length, size)
        cache.update(states, states.clone(), layer)
    ids = torch.ones(rows, length + 1, dtype=torch.long)
    kwargs = {"attention_mask": torch.ones_like(ids), CACHE: cache, "use_cache": True}
    return Batch(ids, kwargs)


@torch.no_grad()
def moves(model: Any, n_pairs: int) -> list[Moved]:
    """The median over ``n_pairs`` rows that join and then leave."""
    found = []
    for length in (128, 1024):
        for rows in (1, 4, 16, 64):
            batch, row = batch_of(model, rows, length), batch_of(model, 1, length)
            joins, leaves = [], []
            for _ in range(n_pairs + 2):
                start = time.perf_counter()
                batch.append(row)
                joined = time.perf_counter()
                batch.leave(0)
                leaves.append(time.perf_counter() - joined)
                joins.append(joined - start)
            medians = (1e3 * statistics.median(times[2:]) for times in (joins, leaves))
            found.append(Moved(rows, length, *medians))
    return found


# --- measuring ----------------------------------------------------------------------------------


def ways(rows: int, is_large: bool) -> list[Way]:
    few = 8 if is_large else None
    return [
        Way("engine", lambda model, asked: engine(model, asked, max_rows=rows)),
        Way("padded, unsorted", lambda model, asked: padded(model, asked, False)),
        Way("padded, sorted", lambda model, asked: padded(model, asked, True)),
        Way("one by one", one_by_one, n_requests=few, n_rounds=1),
        Way("upstream's generate_batch", upstreams, n_requests=few, n_rounds=1),
    ]


def measure(model: Any, asked: Asked, each: list[Way], n_rounds: int) -> list[Timed]:
    """Each way in turn, a warm-up of some requests before the first round."""
    timed = {way.name: Timed(way.name) for way in each}
    truth = one_by_one(model, asked[:8])
    with frozen_garbage():
        for turn in range(n_rounds):
            for way in each if turn % 2 == 0 else each[::-1]:
                if way.n_rounds is not None and turn >= way.n_rounds:
                    continue
                if turn == 0 and way.n_requests is None:
                    way.run(model, [(prompt[:16], 4) for prompt, _ in asked[:4]])
                part = asked[: way.n_requests]
                found = timed[way.name]
                start = time.perf_counter()
                tokens = way.run(model, part)
                found.seconds.append(time.perf_counter() - start)
                found.n_tokens = sum(n for _, n in part)
                if way.n_requests is not None:
                    start = time.perf_counter()
                    each[0].run(model, part)
                    found.engine = time.perf_counter() - start
                found.n_equal = sum(
                    own == other for own, other in zip(tokens[: len(truth)], truth, strict=False)
                )
                typer.echo(
                    f"{way.name}: {found.seconds[-1]:.1f} s of {len(part)} requests", err=True
                )
    return list(timed.values())


def with_prefix(model: Any, rows: int, n: int, n_rounds: int) -> dict[str, float]:
    """Seconds with and without a prefix cache, where prompts share 256 tokens and 16 are generated."""
    asked = [(prompt, 16) for prompt, _ in requests(model.config.vocab_size, n, 1, prefix=256)]
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    tokens = {}
    for _ in range(n_rounds):
        for name in seconds:
            options = {"prefix_cache": hfgen.PrefixCache()} if name == "with" else {}
            start = time.perf_counter()
            tokens[name] = engine(model, asked, max_rows=rows, **options)
            seconds[name].append(time.perf_counter() - start)
    assert tokens["with"] == tokens["without"]
    return {name: statistics.median(times) for name, times in seconds.items()}


def drafting(model: Any, tokenizer: Any, n_rounds: int, n_texts: int = 8) -> dict[str, float]:
    """Seconds to edit different functions: in a batch and in the engine, plain and with prompt lookup.

    In a batch, drafted rows keep step. In the engine they share forwards, and each accepts what it accepts.
    """
    together = editing(EDITS[:n_texts], tokenizer)
    each = [editing([edit], tokenizer) for edit in EDITS[:n_texts]]
    lookup = {"prompt_lookup_num_tokens": 20}

    def batch(**options: Any) -> list[list[int]]:
        output = model.generate(**together, **options, eos_token_id=tokenizer.eos_token_id)
        return output[:, together["input_ids"].shape[1] :].tolist()

    def one_each(**options: Any) -> list[list[int]]:
        made = hfgen.Engine(model)
        added = []
        for arguments in each:
            rest = {name: value for name, value in arguments.items() if name != "input_ids"}
            eos = tokenizer.eos_token_id
            added.append(made.add(arguments["input_ids"], **rest, **options, eos_token_id=eos))
        return [request.result().token_ids for request in added]

    cases: dict[str, Callable[[], list[list[int]]]] = {
        "batch": batch,
        "batch, prompt lookup": lambda: batch(**lookup),
        "engine": one_each,
        "engine, prompt lookup": lambda: one_each(**lookup),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(n_rounds):
        found = []
        for name, run in cases.items():
            start = time.perf_counter()
            rows = run()
            seconds[name].append(time.perf_counter() - start)
            eos = tokenizer.eos_token_id
            found.append([row[: row.index(eos)] if eos in row else row for row in rows])
        assert all(rows == found[0] for rows in found)
    return {name: statistics.median(times) for name, times in seconds.items()}


def floor(model: Any, asked: Asked, rows: int) -> float:
    """Seconds to read the weights once for each step of full batches; operations come on top."""
    n_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    n_steps = sum(n for _, n in asked) / rows
    return n_steps * n_bytes / read_bandwidth()


# --- what is written ----------------------------------------------------------------------------


def table(timed: list[Timed]) -> str:
    ours = statistics.median(timed[0].seconds)
    lines = [
        "| | seconds | tokens per second | engine is faster by | own calls' tokens |",
        "|---|--:|--:|--:|--:|",
    ]
    for each in timed:
        ratio = statistics.median(each.seconds) / (each.engine or ours)
        cells = speed_cells(each.seconds, each.n_tokens)
        lines.append(f"| {each.name} | {cells} | {ratio:.2f} | {each.n_equal} of 8 |")
    return "\n".join(lines)


def plot(timed: list[Timed], title: str, path: Path) -> None:

    figure, axis = subplots(figsize=(7, 2.6))
    names = [each.name for each in timed][::-1]
    speeds = [each.n_tokens / statistics.median(each.seconds) for each in timed][::-1]
    bars = axis.barh(names, speeds, color=["#9aa5b1"] * (len(names) - 1) + ["#1f6feb"])
    axis.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], padding=3, fontsize=9)
    axis.set_xlim(0, 1.15 * max(speeds))
    axis.set_xlabel("tokens per second")
    axis.set_title(title, fontsize=10)
    figure.tight_layout()
    save(figure, path, dpi=120)


def main(
    subject: Annotated[str, typer.Option(help="small or 135m.")] = "small",
    n_requests: Annotated[int, typer.Option(min=8)] = 64,
    rows: Annotated[int, typer.Option(min=1, help="Rows that the engine decodes at once.")] = 32,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    out: OutOption = RESULTS,
) -> None:
    """Measure, and write a table, the numbers and a plot."""
    model = SUBJECTS[subject]().model
    model.generation_config.eos_token_id = None
    asked = requests(model.config.vocab_size, n_requests)
    n_tokens = sum(n for _, n in asked)
    is_large = subject != "small"
    timed = measure(model, asked, ways(rows, is_large), rounds)
    made = hfgen.Engine(model, max_rows=rows)
    decoded(made, asked if not is_large else asked[:16])
    stats = made.stats
    prefix = with_prefix(model, rows, 16 if is_large else n_requests, 1 if is_large else rounds)
    moved = moves(model, 5)
    least = floor(model, asked, rows)
    drafted = {} if is_large else drafting(model, hfgen.builtin_model()[1], rounds)
    facts = machine()
    lines = [
        f"## {subject}: {n_requests} requests, {n_tokens:,} tokens, {rows} rows",
        "",
        table(timed),
        "",
        "Seconds are medians of rounds, with quartiles; the last two ways have one round. With the large model they "
        "get 8 of the requests, and are compared with the engine's time for these.",
        "",
        f"* Padding: {stats.padding:.0%} of the cells of the cache, over all decoding forwards.",
        f"* Floor: {least:.1f} s to read the weights once for each step of {rows} full rows.",
        f"* A shared beginning of 256 tokens, 16 new ones: {prefix['without']:.1f} s without a prefix cache, "
        f"{prefix['with']:.1f} s with one ({prefix['without'] / prefix['with']:.2f} times as fast).",
        "",
        "| rows | tokens | a row joins (ms) | a row leaves (ms) |",
        "|--:|--:|--:|--:|",
        *(f"| {m.rows} | {m.length} | {m.join:.2f} | {m.leave:.2f} |" for m in moved),
        "",
        *(
            ["Eight different functions to edit (`benchmarks/edits.py`), seconds:", ""]
            if drafted
            else []
        ),
        *(f"* {name}: {seconds:.2f}" for name, seconds in drafted.items()),
        "",
        f"{facts['processor']}, {facts['threads']} threads, torch {facts['torch']}, transformers "
        f"{facts['transformers']}; load {facts['load']}.",
    ]
    text = "\n".join(lines) + "\n"
    typer.echo(text)
    results = {
        "machine": facts,
        "timed": [asdict(each) for each in timed],
        "padding": stats.padding,
        "prefix": prefix,
        "drafting": drafted,
        "moves": [asdict(each) for each in moved],
        "floor": least,
        "n_tokens": n_tokens,
        "text": text,
    }
    output.write_section(out, "engine", "Continuous batching", subject, results, SUBJECTS)
    if not is_large:
        plot(
            timed,
            "64 requests, prompts of 8 to 512, outputs of 8 to 256",
            out / "engine.png",
        )


if __name__ == "__main__":
    typer.run(main)
