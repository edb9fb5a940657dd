"""``hfgen demo``: what hfgen adds to ``generate``, with measured times beside transformers."""

from __future__ import annotations

import inspect
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import typer
from rich.markup import escape
from rich.table import Column

from . import measure
from .loading import Loaded, load, quiet
from .options import DebugOption
from .report import Answers, duration, out, table

PROMPT = """\
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
"""
NEW_TOKENS = 32
ROUNDS = (3, 20)  # least and most timed runs of each way, in turns, after a warm-up
SECONDS = 4.0  # after these, a comparison that has the least number of runs ends
LONG = 384  # tokens of the long prompt
REQUESTS, PADDED_ROWS = 20, 8

#: Prompts of one batch, each with its own arguments.
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("parser = argparse.", {"do_sample": False, "max_new_tokens": 6}),
    ("try:\n    import json\nexcept", {"temperature": 0.5, "seed": 2, "stop_strings": "\n\n"}),
    ("for name in", {"temperature": 0.3, "seed": 4, "stop_strings": "\n"}),
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


@dataclass(frozen=True, slots=True)
class Race:
    """The same work for both libraries: functions that return tokens, or these and the seconds taken."""

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
        is_equal &= show_races(loaded, races(loaded, hfgen))
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
    first, each = duration(result.first), duration(result.per_token)
    out.print(f"[dim]first token after {first}, then {each} each[/]")


def loaded_config(**fields: Any) -> Any:
    """A config of hfgen with ``fields`` that returns its results as an object."""
    import hfgen

    return hfgen.GenerationConfig(return_dict_in_generate=True, **fields)


def show_rows(loaded: Loaded) -> bool:
    """Generate ``ROWS`` in one batch and each alone; return whether the tokens are the same."""
    heading(
        "Rows with their own parameters and seeds",
        "model.generate(**inputs, generation_config=[first, second, third])",
    )
    defaults = {"max_new_tokens": NEW_TOKENS, "do_sample": True}
    configs = [loaded_config(**defaults | fields) for _, fields in ROWS]

    def texts(prompts: list[str], config: Any) -> list[str]:
        inputs = measure.encode(loaded, prompts) | loaded.mode_kwargs()
        return list(loaded.model.generate(**inputs, generation_config=config).texts)

    together = texts([prompt for prompt, _ in ROWS], configs)
    found = table("parameters", "text", "alone")
    are_equal = []
    for row, (prompt, fields) in enumerate(ROWS):
        are_equal.append(texts([prompt], configs[row])[0] == together[row])
        shown = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        text = escape((prompt + together[row]).strip())
        found.add_row(escape(shown), text, same(are_equal[-1]), end_section=True)
    out.print(found)
    return all(are_equal)


def same(is_equal: bool) -> str:
    """Whether tokens are the same, in colour."""
    return "[green]same[/]" if is_equal else "[bold red]differs[/]"


def show_json(loaded: Loaded) -> None:
    """An answer that a schema forces, checked against it."""
    from ...settings import grammar

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
    rng = random.Random(0)
    requests = [
        (source[start : start + rng.randint(8, 160)], rng.randint(4, 48))
        for start in range(0, 32 * REQUESTS, 32)
    ]

    def call(ids: Any, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        return model.generate(ids, attention_mask=torch.ones_like(ids), **kwargs).tolist()

    def both(name: str, *args: Any, **kwargs: Any) -> Race:
        work = partial(call, *args, **kwargs)
        return Race(name, work, work)

    second_turn = torch.cat([long, torch.tensor([source[LONG : LONG + 16]])], dim=1)

    def with_prefixes() -> tuple[Any, float]:
        prefixes = hfgen.PrefixCache()
        call(long, max_new_tokens=1, prefix_cache=prefixes)  # the first turn
        started = time.perf_counter()
        tokens = call(second_turn, max_new_tokens=1, prefix_cache=prefixes)
        return tokens, time.perf_counter() - started

    def engine() -> Any:
        pairs = [(prompt, {"max_new_tokens": n}) for prompt, n in requests]
        return [output.token_ids for output in hfgen.generate_many(model, pairs, do_sample=False)]

    def one_by_one() -> Any:
        return [call(torch.tensor([p]), max_new_tokens=n)[0][len(p) :] for p, n in requests]

    def padded() -> Any:
        found: list[Any] = [None] * REQUESTS
        order = sorted(range(REQUESTS), key=lambda i: len(requests[i][0]))
        for start in range(0, REQUESTS, PADDED_ROWS):
            part = order[start : start + PADDED_ROWS]
            texts = [{"input_ids": requests[i][0]} for i in part]
            inputs = loaded.tokenizer.pad(texts, padding_side="left", return_tensors="pt")
            output = model.generate(**inputs, max_new_tokens=max(requests[i][1] for i in part))
            for i, row in zip(part, output[:, inputs["input_ids"].shape[1] :], strict=True):
                found[i] = row[: requests[i][1]].tolist()
        return found

    return [
        both("8 samples", long, max_new_tokens=16, do_sample=True, num_return_sequences=8),
        both("4 beams", long, max_new_tokens=16, num_beams=4),
        Race("second turn", partial(call, second_turn, max_new_tokens=1), with_prefixes),
        Race(f"{REQUESTS} requests, in batches", padded, engine),
        Race(f"{REQUESTS} requests, one by one", one_by_one, engine),
        both("a short greedy call", short, max_new_tokens=NEW_TOKENS),
    ]


def show_races(loaded: Loaded, found: list[Race]) -> bool:
    """Run all races and print their times; return whether all tokens are the same."""
    heading(
        "Beside transformers: same weights, same work, in turns",
        f"Medians of {ROUNDS[0]} to {ROUNDS[1]} runs. Speedup: transformers / hfgen, and the middle half.",
    )
    columns = ("transformers", "hfgen", "speedup", "tokens")
    times = table(Column("what", no_wrap=True), numbers=columns)
    are_equal = []
    for each in found:
        with out.status(each.name):
            theirs, ours, is_equal = run(each, loaded)
        are_equal.append(is_equal)
        medians = (duration(statistics.median(seconds)) for seconds in (theirs, ours))
        times.add_row(each.name, *medians, speedup(theirs, ours), same(is_equal))
    out.print(times)
    out.print(
        f"[dim]Samples and beams have a prompt of {LONG} tokens. The second turn has it and 16 more: "
        "the time to the first token, in transformers without a cache, in hfgen with a PrefixCache. "
        "The requests have 8 to 160 tokens and ask for 4 to 48. With transformers they come in "
        f"batches of {PADDED_ROWS}, sorted by the length of the prompt and padded, or one by one; "
        "with hfgen, an Engine takes them as they come. A short call is no faster: most of it is "
        "the model's forward, which is the same.[/]"
    )
    return all(are_equal)


def speedup(theirs: list[float], ours: list[float]) -> str:
    """The median of the ratios of runs that followed one another, and their quartiles."""
    ratios = [slow / fast for slow, fast in zip(theirs, ours, strict=True)]
    if len(ratios) == 1:
        return f"{ratios[0]:.2f}"
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def run(race: Race, loaded: Loaded) -> tuple[list[float], list[float], bool]:
    """Seconds of transformers' and hfgen's timed runs, and whether the tokens are the same."""

    def turns() -> Iterator[int]:
        begun = time.perf_counter()
        for turn in range(ROUNDS[1] + 1):
            if turn <= ROUNDS[0] or time.perf_counter() - begun <= SECONDS:
                yield turn

    seconds: dict[str, list[float]] = {library: [] for library in measure.LIBRARIES}
    tokens: list[Any] = []
    for turn, library in measure.in_turns(turns(), loaded):
        started = time.perf_counter()
        result = getattr(race, library)()
        taken = time.perf_counter() - started
        if isinstance(result, tuple):
            result, taken = result
        tokens.append(result)
        if turn:  # the first is the warm-up
            seconds[library].append(taken)
    are_equal = all(
        first == second for first, second in zip(tokens[::2], tokens[1::2], strict=True)
    )
    return seconds["transformers"], seconds["hfgen"], are_equal
