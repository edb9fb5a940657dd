"""Speculation beside the package ``economize`` (``pip install economize``): the same model, texts and drafts.

``python -m benchmarks.economize`` prints the gain of each over hfgen's greedy decoding, in time of the
processor, at batch 1 and 8. The tokens of all are compared.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer

import hfgen
from benchmarks.edits import EDITS, beginnings

#: Tokens of a prompt, and new ones.
PROMPT, NEW = 64, 96

#: hfgen's arguments, and economize's settings: module, class, fields, and how many tokens a cycle takes.
WAYS: dict[str, tuple[dict[str, Any], tuple[str, str, dict[str, Any], int]]] = {
    "lookup": (
        {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3},
        ("lookup", "LookupConfig", {}, 11),
    ),
    "draft": ({}, ("draft_model", "DraftModelConfig", {}, 4)),
    "early exit": (
        {"assistant_early_exit": 2},
        ("early_exit", "EarlyExitConfig", {"exit_layer": 2, "head": "shared"}, 4),
    ),
}


def theirs(model: Any, settings: tuple[str, str, dict[str, Any], int], ids: torch.Tensor) -> Any:
    """Seconds of the processor, and the new tokens of each row, by economize."""
    import economize  # type: ignore[import-not-found]

    technique, kind, fields, cycle = settings
    module = __import__(f"economize.techniques.{technique}.config", fromlist=[kind])
    attached = economize.apply(model, getattr(module, kind)(**fields))
    try:
        options = economize.DecodeConfig(cycle_length=cycle)
        return timed(lambda: attached.decode_batch(list(ids), NEW, decoding=options))
    finally:
        attached.detach()


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        found = run()
        return time.process_time() - start, found
    finally:
        gc.enable()


def rows_of(found: Any) -> list[list[int]]:
    """The last ``NEW`` tokens of each row."""
    rows = found if isinstance(found, torch.Tensor) else [row.tokens for row in found]
    return [torch.as_tensor(row).tolist()[-NEW:] for row in rows]


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    optimize: Annotated[bool, typer.Option(help="hfgen.optimize both models first.")] = False,
) -> None:
    """Measure both libraries in turns, with one thread."""
    torch.set_num_threads(1)
    model, tokenizer = hfgen.builtin_model()
    draft, _ = hfgen.builtin_model(draft=True)
    for each in (model, draft) if optimize else ():
        hfgen.optimize(each)
    with tempfile.TemporaryDirectory() as folder:
        draft.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for batch in (1, 8):
            given = beginnings(EDITS[:batch], tokenizer, PROMPT)
            call = {**given, "max_new_tokens": NEW, "eos_token_id": None, "do_sample": False}
            runs: dict[str, Callable[[], tuple[float, Any]]] = {
                "greedy": lambda call=call: timed(lambda: model.generate(**call))
            }
            for name, (options, settings) in WAYS.items():
                if name == "draft":
                    options = {"assistant_model": draft}
                    settings = (*settings[:2], {"model": folder}, settings[3])
                mine = {**call, **options}
                runs[f"hfgen, {name}"] = lambda mine=mine: timed(lambda: model.generate(**mine))
                runs[f"economize, {name}"] = lambda ids=given["input_ids"], settings=settings: (
                    theirs(model, settings, ids)
                )
            seconds: dict[str, list[float]] = {name: [] for name in runs}
            expected: list[list[int]] = []
            for turn in range(rounds + 1):
                for name, run in runs.items():
                    took, found = run()
                    expected = expected or rows_of(found)
                    if rows_of(found) != expected:
                        raise AssertionError(f"{name} generated other tokens than greedy decoding")
                    if turn:
                        seconds[name].append(took)
            for name, found in seconds.items():
                pairs = zip(seconds["greedy"], found, strict=True)
                gain = statistics.median(a / b for a, b in pairs)
                typer.echo(f"batch {batch}: {name}: {gain:.2f}")


if __name__ == "__main__":
    typer.run(main)
