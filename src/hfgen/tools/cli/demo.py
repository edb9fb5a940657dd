"""``hfgen demo``: what hfgen adds to ``generate``, with measured times beside transformers."""

from __future__ import annotations

import inspect
import json
import random
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import typer
from rich.markup import escape
from rich.table import Column

import hfgen

from . import measure
from .loading import Loaded, load, quiet
from .options import DEBUG
from .report import Answers, duration, out, spread, table

PROMPT = """\
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
"""
NEW_TOKENS = 32
ROUNDS = 4  # timed runs of each library, in turns, after a warm-up
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
PROPERTIES: dict[str, Any] = {
    "encoding": {"enum": ["utf-8", "latin-1", "ascii"]},
    "errors": {"enum": ["strict", "ignore", "replace"]},
    "mode": {"enum": ["r", "w", "a"]},
    "buffering": {"type": "integer", "minimum": -1, "maximum": 9},
}
SCHEMA: dict[str, Any] = {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES)}
SCHEMA["additionalProperties"] = False

#: Whether tokens are the same → how that is shown.
SAME = {True: "[green]same[/]", False: "[bold red]differs[/]"}

Run = tuple[Any, float]  # tokens of a call with one of the libraries, and the seconds that count


def demo(debug: bool = DEBUG) -> None:
    """See streaming, parameters per row, JSON and the engine, beside transformers; under a minute.

    Exit code 0: the same tokens as transformers everywhere; 1: they differ.
    """
    with quiet(debug):
        import torch
        import transformers

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
        is_equal &= show_races(loaded)
    if not is_equal:
        out.print("[bold red]Some tokens differ.[/]")
        raise typer.Exit(1)
    out.print("[bold green]Every token is the same.[/]")


def heading(text: str, call: str) -> None:
    out.print(f"\n[bold]{text}[/]\n[dim]{escape(call)}[/]")


def config_of(**fields: Any) -> Any:
    """A config of hfgen with ``fields`` that returns its results as an object."""
    return hfgen.GenerationConfig(return_dict_in_generate=True, **fields)


def show_stream(loaded: Loaded) -> None:
    """Complete ``PROMPT``, token by token."""
    heading("A stream", "for event in model.stream(**inputs, stop_strings='\\n\\n'): …")
    config = config_of(do_sample=False, max_new_tokens=NEW_TOKENS, stop_strings="\n\n")
    out.print(f"[dim]{escape(PROMPT)}[/]", end="")
    result = measure.generate(loaded, measure.encode(loaded, [PROMPT]), config, show=Answers())
    first, each = duration(result.first), duration(result.per_token)
    out.print(f"[dim]first token after {first}, then {each} each[/]")


def show_rows(loaded: Loaded) -> bool:
    """Generate ``ROWS`` in one batch and each alone; return whether the tokens are the same."""
    call = "model.generate(**inputs, generation_config=[first, second, third])"
    heading("Rows with their own parameters and seeds", call)
    defaults = {"max_new_tokens": NEW_TOKENS, "do_sample": True}
    configs = [config_of(**defaults | fields) for _, fields in ROWS]

    def texts(prompts: list[str], config: Any) -> list[str]:
        inputs = measure.encode(loaded, prompts) | loaded.mode_kwargs()
        return list(loaded.model.generate(**inputs, generation_config=config).texts)

    together = texts([prompt for prompt, _ in ROWS], configs)
    rows = table("parameters", "text", "alone")
    are_equal = []
    for (prompt, fields), config, text in zip(ROWS, configs, together, strict=True):
        are_equal.append(texts([prompt], config) == [text])
        parameters = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        text = escape((prompt + text).strip())
        rows.add_row(escape(parameters), text, SAME[are_equal[-1]], end_section=True)
    out.print(rows)
    return all(are_equal)


def show_json(loaded: Loaded) -> None:
    """An answer that a schema forces, checked against it."""
    heading("JSON by a schema", "model.generate(**inputs, grammar=hfgen.grammar.json(schema))")
    if find_spec("llguidance") is None:
        out.print("[dim]This needs: pip install 'hfgen\\[grammar]'[/]")
        return
    config = config_of(max_new_tokens=120, grammar=hfgen.grammar.json(SCHEMA, whitespace=False))
    answers = Answers()
    measure.generate(loaded, measure.encode(loaded, [QUESTION]), config, show=answers)
    answer = json.loads(answers.texts[0])
    fits = all(answer[n] in part.get("enum", range(-1, 10)) for n, part in PROPERTIES.items())
    out.print("[green]It fits the schema.[/]" if fits else "[bold red]It does not fit.[/]")


def show_races(loaded: Loaded) -> bool:
    """Run both libraries on the same work and print their times; return whether all tokens are the same."""
    how = f"Medians of {ROUNDS} runs. Speedup: transformers / hfgen, ± half of its range."
    heading("Beside transformers: same weights, same work, in turns", how)
    columns = (*measure.LIBRARIES, "speedup", "tokens")
    times = table(Column("what", no_wrap=True), numbers=columns)
    are_equal = []
    for name, call in calls(loaded).items():
        with out.status(name):
            runs = measure.race(loaded, call, ROUNDS)
        pairs = list(zip(*runs.values(), strict=True))  # of transformers and hfgen
        are_equal.append(all(theirs[0] == ours[0] for theirs, ours in pairs))
        seconds = [(theirs[1], ours[1]) for theirs, ours in pairs[1:]]
        medians = (duration(statistics.median(values)) for values in zip(*seconds, strict=True))
        ratios = spread([slow / fast for slow, fast in seconds], 2)
        times.add_row(name, *medians, ratios, SAME[are_equal[-1]])
    out.print(times)
    out.print(
        f"[dim]Samples and beams have a prompt of {LONG} tokens. The second turn has it and 16 more: "
        "the time to the first token, in transformers without a cache, in hfgen with a PrefixCache. "
        "The requests have 8 to 160 tokens and ask for 4 to 48. With transformers they come in "
        f"batches of {PADDED_ROWS} prompts of similar length, padded; with hfgen, an Engine takes them "
        "one by one. A short call is no faster: most of it is the model's "
        "forward, which is the same.[/]"
    )
    return all(are_equal)


def calls(loaded: Loaded) -> dict[str, Callable[[str], Run]]:
    """Name → a call with one of the libraries."""
    import torch

    from ..prompts import padded

    model = loaded.model
    model.generation_config.eos_token_id = None  # each request has the tokens that it asks for
    source = loaded.tokenizer(inspect.getsource(inspect)[:9000]).input_ids
    short = measure.encode(loaded, [PROMPT])["input_ids"]
    long, turn = torch.tensor([source[:LONG]]), torch.tensor([source[: LONG + 16]])
    rng = random.Random(0)
    starts = range(0, 32 * REQUESTS, 32)
    requests = [(source[n : n + rng.randint(8, 160)], rng.randint(4, 48)) for n in starts]
    requests.sort(key=lambda request: len(request[0]))

    def generate(ids: Any, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        return model.generate(ids, attention_mask=torch.ones_like(ids), **kwargs).tolist()

    def second_turn(library: str) -> Run:
        if library == "transformers":
            return timed(lambda: generate(turn, max_new_tokens=1))
        prefixes = hfgen.PrefixCache()
        generate(long, max_new_tokens=1, prefix_cache=prefixes)  # the first turn
        return timed(lambda: generate(turn, max_new_tokens=1, prefix_cache=prefixes))

    def answers(library: str) -> Any:
        if library == "hfgen":
            pairs = [(prompt, {"max_new_tokens": n}) for prompt, n in requests]
            outputs = hfgen.generate_many(model, pairs, do_sample=False)
            return [output.token_ids for output in outputs]
        rows = []
        for start in range(0, REQUESTS, PADDED_ROWS):
            part = requests[start : start + PADDED_ROWS]
            inputs = padded([torch.tensor(prompt) for prompt, _ in part], model)
            output = model.generate(**inputs, max_new_tokens=max(n for _, n in part))
            new = output[:, inputs["input_ids"].shape[1] :].tolist()
            rows += [row[:n] for row, (_, n) in zip(new, part, strict=True)]
        return rows

    samples = {"max_new_tokens": 16, "do_sample": True, "num_return_sequences": 8}
    beams = {"max_new_tokens": 16, "num_beams": 4}
    return {
        "8 samples": lambda _: timed(lambda: generate(long, **samples)),
        "4 beams": lambda _: timed(lambda: generate(long, **beams)),
        "second turn": second_turn,
        f"{REQUESTS} requests": lambda library: timed(lambda: answers(library)),
        "a short greedy call": lambda _: timed(lambda: generate(short, max_new_tokens=NEW_TOKENS)),
    }


def timed(call: Callable[[], Any]) -> Run:
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started
