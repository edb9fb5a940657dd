"""``hfgen replay``: decodes the call of a card again, and names the first thing that differs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import files
from .loading import load, make_exact, optimize, quiet
from .measure import encode, named_errors
from .options import DebugOption, DtypeOption, JsonOption, model_option
from .report import CliError, out, print_json

#: Bytes of a file that is read as a card, at most.
MAX_BYTES = 2**27


def replay(
    card: Annotated[Path, typer.Argument(metavar="CARD.json", help="What str(output.card) wrote.")],
    model: Annotated[
        str, model_option("The model of the call: a folder, a hub id, or builtin.")
    ] = "builtin",
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="A text of the call, where the card has no prompts; repeatable."),
    ] = None,
    dtype: DtypeOption = "auto",
    device: Annotated[str | None, typer.Option(help="A torch device.")] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
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
            found = decode_again(expected, loaded.model, loaded.tokenizer, inputs)
    differing, place = differences(expected, found), first_token(expected, found)
    if as_json:
        print_json({"same": place is None, "first_token": place, "differences": differing})
    else:
        out.print(
            "[bold green]The same bytes.[/]" if place is None else "[bold red]Other bytes.[/]"
        )
        for line in [*differing, *filter(None, [place])]:
            out.print(line, markup=False, highlight=False)
        if place is not None and not differing:
            out.print(
                "Nothing that the card records differs, so the steps of this call were computed otherwise."
            )
    raise typer.Exit(0 if place is None else 1)
