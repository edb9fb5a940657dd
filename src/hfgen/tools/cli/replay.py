"""``hfgen replay``: decodes the call of a card again, and names the first thing that differs."""

from __future__ import annotations

from pathlib import Path

import typer
from typer import Argument, Option

from . import files, options
from .loading import change, load, quiet
from .measure import encode, named_errors
from .report import CliError, out, print_json, refused

MAX_BYTES = 2**27  # bytes of a file that is read as a card, at most


def replay(
    card: Path = Argument(metavar="CARD.json", help="What str(output.card) wrote."),
    model: str = options.MODEL,
    prompt: list[str] | None = Option(None, help="A text, if the card has no prompts; repeatable."),
    dtype: str = options.DTYPE,
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
        expected = Card.read(files.read_text(card))
    with quiet(debug):
        kinds = (expected.kernels.get(name) == "True" for name in ("optimized", "exact"))
        loaded = change(load(model, None, dtype, device), *kinds)
        inputs = encode(loaded, prompt) if prompt else None
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
