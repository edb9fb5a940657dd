"""``hfgen demo``: shows the built-in model, and compares the same calls with transformers."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import typer
from rich.text import Text

from hfgen.cli import measure
from hfgen.cli.compare import compare_call, comparison_table
from hfgen.cli.loading import Loaded, load, quiet
from hfgen.cli.options import DebugOption, generation_config
from hfgen.cli.probabilities import LEGEND, Spelling, coloured
from hfgen.cli.report import Answers, duration, mebibytes, out

PROMPT = """\
def main():
    import getopt
    try:
        opts, args = getopt.getopt("""
NEW_TOKENS = 64
REPEAT = 5  # timed runs of each library in each mode, fewer on a slow machine
SECONDS = 40.0  # about what all these runs may take
SEED = 0
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_p": 0.95},
    "beam search (4)": {"do_sample": False, "num_beams": 4},
}

#: What is asked as JSON: arguments for a call, in words that the schema knows.
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
IN_WORDS = "arguments of open(): encoding, errors and mode: one of 3 each, buffering: -1 to 9"


def demo(debug: DebugOption = False) -> None:
    """Watch the built-in model complete a function, then hold hfgen against transformers.

    Exit code 0: same tokens in every mode; 1: they differ.
    """
    with quiet(debug):
        import torch
        import transformers

        import hfgen

        loaded = load("builtin", None, "auto", "cpu")
        threads = torch.get_num_threads()
        size = sum(parameter.numel() for parameter in loaded.model.parameters())
        out.print(
            f"[bold]hfgen {hfgen.__version__}[/] · transformers {transformers.__version__} · "
            f"torch {torch.__version__} · {threads} thread{'s' if threads > 1 else ''}\n"
            f"[dim]built-in model, {size / 1e6:.1f} million parameters, completing Python[/]\n"
        )
        inputs = measure.encode(loaded, [PROMPT])
        config = generation_config(MODES["greedy"], loaded.model, NEW_TOKENS)
        out.print(Text(PROMPT, style="dim"), end="", soft_wrap=True)
        result = measure.stream(loaded, inputs, config, show=Answers())
        out.print(
            f"\ntime to first token    {duration(result.first)}\n"
            f"time per output token  {duration(result.per_token)}\n"
            f"tokens per second      {result.per_second:,.0f}\n"
            f"peak memory            {mebibytes(measure.peak_memory())}\n"
        )
        seconds = 2 * len(MODES) * result.seconds  # of one run of each library in each mode
        repeat = max(1, min(REPEAT, int(SECONDS / seconds) - 1))
        with out.status("the same prompt through both libraries"):
            configs = [generation_config(each, loaded.model, NEW_TOKENS) for each in MODES.values()]
            results = [compare_call(loaded, inputs, each, SEED, repeat) for each in configs]
    out.print(comparison_table(MODES, results, "mode"))
    runs = f"{repeat} interleaved runs" if repeat > 1 else "a single run"
    out.print(f"[dim]one call, median of {runs}, ± half of the range; same weights, same seed[/]\n")
    differing = [mode for mode, each in zip(MODES, results, strict=True) if each.differences]
    if differing:
        out.print(f"[bold red]The tokens differ from transformers' in: {', '.join(differing)}.[/]")
        raise typer.Exit(1)
    out.print("[bold green]Every token is identical to transformers'.[/]\n")
    with quiet(debug):
        show_json(loaded)
        show_tokens(loaded)


def show_json(loaded: Loaded) -> None:
    """An answer that a schema forces, checked against it."""
    from hfgen import grammar

    if find_spec("llguidance") is None:
        out.print("[dim]JSON, forced by a schema, needs: pip install 'hfgen\\[grammar]'[/]\n")
        return
    given = {"max_new_tokens": 120, "grammar": grammar.json(SCHEMA, whitespace=False)}
    config = generation_config(given, loaded.model, NEW_TOKENS)
    out.print(f"[bold]JSON, forced by a schema[/]\n[dim]{IN_WORDS}[/]")
    answers = Answers()
    measure.stream(loaded, measure.encode(loaded, [QUESTION]), config, show=answers)
    answer = json.loads(answers.texts[0])
    if find_spec("jsonschema") is None:
        out.print(
            "[green]It can be parsed[/] [dim](jsonschema, if installed, checks the rest).[/]\n"
        )
        return
    from jsonschema import validate

    validate(answer, SCHEMA)
    out.print("[green]It can be parsed, and is what the schema says.[/]\n")


def show_tokens(loaded: Loaded) -> None:
    """A row of sampled tokens in the colours of their probability."""
    given = MODES["sampling"] | {"seed": SEED, "max_new_tokens": 24, "logprobs": 0}
    config = generation_config(given, loaded.model, NEW_TOKENS)
    config.return_dict_in_generate = True
    result = measure.generate(loaded, measure.encode(loaded, [PROMPT]), config)
    out.print(f"[bold]Sampled tokens, by how likely each was[/]\n[dim]seed={SEED}[/]")
    out.print(coloured(result.output.logprobs[0], Spelling(loaded.tokenizer)))
    out.print(f"[dim]{LEGEND}[/]")
