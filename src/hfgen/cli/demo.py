"""``hfgen demo``: what hfgen adds to ``generate``, with measured times beside transformers."""

from __future__ import annotations

import inspect
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import typer
from rich.markup import escape
from rich.table import Table

from hfgen.cli import measure
from hfgen.cli.loading import Loaded, load, quiet, upstream
from hfgen.cli.options import DebugOption
from hfgen.cli.report import Answers, duration, out, spread

PROMPT = "def remove(path):\n    try:\n        os.unlink(path)\n"
NEW_TOKENS = 32
ROUNDS = (3, 9)  # least and most timed runs of each way, in turns, after a warm-up
SECONDS = 6.0  # after these, a comparison that has the least number of runs ends
LONG = 384  # tokens of the long prompt
REQUESTS, PADDED_ROWS = 20, 8

#: Prompts of one batch, each with its own arguments.
ROWS: list[tuple[str, dict[str, Any]]] = [
    (PROMPT, {"do_sample": False, "stop_strings": "\n\n"}),
    ("import os\n", {"do_sample": True, "temperature": 0.6, "seed": 1, "max_new_tokens": 10}),
    ("for name in", {"do_sample": True, "temperature": 0.3, "seed": 4, "stop_strings": "\n"}),
]
QUESTION = """\
def write_text(path, text):
    with open(path, **OPTIONS) as file:
        file.write(text)

# the arguments of open()
OPTIONS = """
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "encoding": {"enum": ["utf-8", "latin-1", "ascii"]},
        "errors": {"enum": ["strict", "ignore", "replace"]},
        "mode": {"enum": ["r", "w", "a"]},
        "buffering": {"type": "integer", "minimum": -1, "maximum": 9},
    },
    "required": ["encoding", "errors", "mode", "buffering"],
    "additionalProperties": False,
}

Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class Race:
    """The same work done by transformers and by hfgen: a function for each that returns the tokens.

    A function may also return the seconds of its timed part.
    """

    name: str
    transformers: Callable[[], Any]
    hfgen: Callable[[], Any]


def demo(debug: DebugOption = False) -> None:
    """See streaming, parameters per row, JSON and the engine, beside transformers; under a minute.

    Exit code 0: the same tokens as transformers everywhere; 1: they differ.
    """
    with quiet(debug):
        import torch
        import transformers

        import hfgen

        loaded = load("builtin", None, "auto", "cpu")
        threads = torch.get_num_threads()
        out.print(
            f"[bold]hfgen {hfgen.__version__}[/] · transformers {transformers.__version__} · "
            f"torch {torch.__version__} · {threads} thread{'s' if threads > 1 else ''}\n"
            "[dim]The built-in model has 6.4 million parameters and completes Python.[/]"
        )
        show_stream(loaded)
        is_equal = show_rows(loaded)
        show_json(loaded)
        is_equal &= show_races(races(loaded, hfgen))
    if not is_equal:
        out.print("[bold red]Some tokens differ.[/]")
        raise typer.Exit(1)
    out.print("[bold green]Every token is the same.[/]")


def heading(text: str, call: str) -> None:
    """A title, and the call that does it."""
    out.print(f"\n[bold]{text}[/]\n[dim]{escape(call)}[/]")


def show_stream(loaded: Loaded) -> None:
    """Complete ``PROMPT``, token by token."""
    heading("A stream", "for event in model.stream(**inputs, stop_strings='\\n\\n'): …")
    inputs = measure.encode(loaded, [PROMPT])
    config = loaded_config(do_sample=False, max_new_tokens=NEW_TOKENS, stop_strings="\n\n")
    out.print(f"[dim]{escape(PROMPT)}[/]", end="")
    result = measure.stream(loaded, inputs, config, show=Answers())
    out.print(
        f"[dim]first token after {duration(result.first)}, then {duration(result.per_token)} each[/]"
    )


def loaded_config(**fields: Any) -> Any:
    """A config of hfgen with ``fields`` that returns its results as an object."""
    import hfgen

    return hfgen.GenerationConfig(return_dict_in_generate=True, **fields)


def show_rows(loaded: Loaded) -> bool:
    """Generate ``ROWS`` in one batch and each alone; return whether the tokens are the same."""
    heading(
        "Rows with their own parameters and seeds",
        "model.generate(**inputs, generation_config=[config, config, config])",
    )
    configs = [loaded_config(**{"max_new_tokens": NEW_TOKENS} | fields) for _, fields in ROWS]
    prompts = [prompt for prompt, _ in ROWS]
    together = loaded.model.generate(
        **measure.encode(loaded, prompts), tokenizer=loaded.tokenizer, generation_config=configs
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("parameters", "text", "alone"):
        table.add_column(column)
    are_equal = []
    for row, (prompt, fields) in enumerate(ROWS):
        alone = loaded.model.generate(
            **measure.encode(loaded, [prompt]),
            tokenizer=loaded.tokenizer,
            generation_config=configs[row],
        )
        are_equal.append(alone.texts[0] == together.texts[row])
        shown = ", ".join(f"{n}={v!r}" for n, v in fields.items() if n != "do_sample")
        text = escape((prompt + together.texts[row]).strip())
        table.add_row(escape(shown), text, same(are_equal[-1]), end_section=True)
    out.print(table)
    return all(are_equal)


def same(is_equal: bool) -> str:
    """Whether tokens are the same, in colour."""
    return "[green]same[/]" if is_equal else "[bold red]differs[/]"


def show_json(loaded: Loaded) -> None:
    """An answer that a schema forces, checked against it."""
    from hfgen import grammar

    heading("JSON by a schema", "model.generate(**inputs, grammar=hfgen.grammar.json(schema))")
    if find_spec("llguidance") is None:
        out.print("[dim]This needs: pip install 'hfgen\\[grammar]'[/]")
        return
    config = loaded_config(max_new_tokens=120, grammar=grammar.json(SCHEMA, whitespace=False))
    answers = Answers()
    measure.stream(loaded, measure.encode(loaded, [QUESTION]), config, show=answers)
    answer = json.loads(answers.texts[0])
    if find_spec("jsonschema") is None:
        out.print("[green]It can be parsed.[/] [dim]jsonschema, if installed, checks the rest.[/]")
        return
    from jsonschema import validate

    validate(answer, SCHEMA)
    out.print("[green]It fits the schema.[/]")


def races(loaded: Loaded, hfgen: Any) -> list[Race]:
    """The work that both libraries do."""
    import torch

    model = loaded.model
    model.generation_config.eos_token_id = None  # each request has the tokens that it asks for
    source = loaded.tokenizer(inspect.getsource(inspect)[:9000]).input_ids
    short, long = measure.encode(loaded, [PROMPT])["input_ids"], torch.tensor([source[:LONG]])
    n_long = NEW_TOKENS // 2
    rng = random.Random(0)
    requests = [
        (source[start : start + rng.randint(8, 160)], rng.randint(4, 48))
        for start in range(0, 32 * REQUESTS, 32)
    ]

    def call(ids: Any, **kwargs: Any) -> Tokens:
        torch.manual_seed(0)
        mask = torch.ones_like(ids)
        tokens: Tokens = model.generate(ids, attention_mask=mask, **kwargs).tolist()
        return tokens

    def theirs(way: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Any]:
        def run() -> Any:
            with upstream(loaded):
                return way(*args, **kwargs)

        return run

    def both(name: str, ids: Any, **kwargs: Any) -> Race:
        return Race(name, theirs(call, ids, **kwargs), partial(call, ids, **kwargs))

    second_turn = torch.cat([long, torch.tensor([source[LONG : LONG + 16]])], dim=1)

    def with_prefixes() -> tuple[Tokens, float]:
        prefixes = hfgen.PrefixCache()
        call(long, max_new_tokens=1, prefix_cache=prefixes)  # the first turn
        started = time.perf_counter()
        tokens = call(second_turn, max_new_tokens=1, prefix_cache=prefixes)
        return tokens, time.perf_counter() - started

    def engine() -> Tokens:
        outputs = hfgen.generate_many(
            model, [(prompt, {"max_new_tokens": n}) for prompt, n in requests], do_sample=False
        )
        return [output.token_ids for output in outputs]

    def one_by_one() -> Tokens:
        return [
            call(torch.tensor([prompt]), max_new_tokens=n)[0][len(prompt) :]
            for prompt, n in requests
        ]

    def padded() -> Tokens:
        found: dict[int, list[int]] = {}
        order = sorted(range(len(requests)), key=lambda i: len(requests[i][0]))
        for start in range(0, len(order), PADDED_ROWS):
            part = order[start : start + PADDED_ROWS]
            texts = [{"input_ids": requests[i][0]} for i in part]
            inputs = loaded.tokenizer.pad(texts, padding_side="left", return_tensors="pt")
            output = model.generate(**inputs, max_new_tokens=max(requests[i][1] for i in part))
            for i, row in zip(part, output[:, inputs["input_ids"].shape[1] :], strict=True):
                found[i] = row[: requests[i][1]].tolist()
        return [found[i] for i in range(len(requests))]

    return [
        both("a short greedy call", short, max_new_tokens=NEW_TOKENS),
        both("4 beams, long prompt", long, max_new_tokens=n_long, num_beams=4),
        both(
            "8 samples, long prompt",
            long,
            max_new_tokens=n_long,
            do_sample=True,
            num_return_sequences=8,
        ),
        Race(
            "chat, turn 2: first token",
            theirs(call, second_turn, max_new_tokens=1),
            with_prefixes,
        ),
        Race(f"{REQUESTS} requests, padded batches", theirs(padded), engine),
        Race(f"{REQUESTS} requests, one by one", theirs(one_by_one), engine),
    ]


def show_races(found: list[Race]) -> bool:
    """Run all races and print their times; return whether all tokens are the same."""
    heading(
        "Beside transformers: same weights, same work, in turns",
        f"Medians of {ROUNDS[0]} to {ROUNDS[1]} runs. Speedup: transformers / hfgen, ± half of the "
        "range.",
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("what", no_wrap=True)
    for column in ("transformers", "hfgen", "speedup", "tokens"):
        table.add_column(column, justify="right", no_wrap=True)
    are_equal = []
    for each in found:
        with out.status(each.name):
            theirs, ours, is_equal = run(each)
        are_equal.append(is_equal)
        ratios = [slow / fast for slow, fast in zip(theirs, ours, strict=True)]
        medians = (duration(statistics.median(seconds)) for seconds in (theirs, ours))
        table.add_row(each.name, *medians, spread(ratios, 2), same(is_equal))
    out.print(table)
    out.print(
        f"[dim]The long prompt has {LONG} tokens. The second turn adds 16 tokens to it; hfgen uses "
        "a PrefixCache, transformers gets no cache. The requests have 8 to 160 tokens and ask "
        f"for 4 to 48. Padded batches have {PADDED_ROWS} rows, sorted by the length "
        "of the prompt; with hfgen, the engine takes the requests as they come.[/]"
    )
    return all(are_equal)


def run(race: Race) -> tuple[list[float], list[float], bool]:
    """Seconds of transformers' and hfgen's timed runs, and whether the tokens are the same."""
    ways = (race.transformers, race.hfgen)
    seconds: tuple[list[float], list[float]] = ([], [])
    is_equal, begun = True, time.perf_counter()
    for turn in range(ROUNDS[1] + 1):
        if turn > ROUNDS[0] and time.perf_counter() - begun > SECONDS:
            break
        tokens: list[Any] = [None, None]
        for i in (0, 1) if turn % 2 else (1, 0):  # neither always runs first
            started = time.perf_counter()
            tokens[i] = ways[i]()
            taken = time.perf_counter() - started
            if isinstance(tokens[i], tuple):
                tokens[i], taken = tokens[i]
            if turn:  # the first is the warm-up
                seconds[i].append(taken)
        is_equal &= tokens[0] == tokens[1]
    return *seconds, is_equal
