"""``hfgen replay``: decodes the call of a card again, and names the first thing that differs."""

from __future__ import annotations

from pathlib import Path

import typer
from typer import Argument, Option

from . import files, options
from .loading import load, make_exact, optimize, quiet
from .measure import encode, named_errors
from .report import CliError, out, print_json

#: Bytes of a file that is read as a card, at most.
MAX_BYTES = 2**27


def replay(
    card: Path = Argument(metavar="CARD.json", help="What str(output.card) wrote."),
    model: str = options.MODEL,
    prompt: list[str] | None = Option(
        None, help="A text of the call, where the card has no prompts; repeatable."
    ),
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
    try:
        expected = Card.read(files.read_text(card))
    except ValueError as error:
        raise CliError(str(error)) from error
    with quiet(debug):
        loaded = load(model, None, dtype, device)
        if expected.kernels.get("optimized") == "True":
            optimize(loaded)
        if expected.kernels.get("exact") == "True":
            make_exact(loaded)
        inputs = encode(loaded, prompt) if prompt else None
        with named_errors():
            decoded = decode_again(expected, loaded.model, loaded.tokenizer, inputs)
    differing, place = differences(expected, decoded), first_token(expected, decoded)
    if as_json:
        print_json({"same": place is None, "first_token": place, "differences": differing})
    else:
        is_same = place is None
        out.print("[bold green]The same bytes.[/]" if is_same else "[bold red]Other bytes.[/]")
        for line in [*differing, *filter(None, [place])]:
            out.print(line, markup=False, highlight=False)
        if place is not None and not differing:
            out.print(
                "Nothing that the card records differs, so the steps of this call were computed otherwise."
            )
    raise typer.Exit(0 if place is None else 1)
