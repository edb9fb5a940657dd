"""Log-probabilities in the terminal: a table of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

#: Alternatives that one line of the table has room for.
SHOWN = 10


class Spelling:
    """Tokens as one line of text: white space and control codes are escaped."""

    def __init__(self, tokenizer: Any) -> None:
        from ...state.text import Pieces

        self.pieces = Pieces(tokenizer)

    def __getitem__(self, token_id: int) -> str:
        text = repr(self.pieces[token_id].decode("utf-8", "replace"))[1:-1]
        return text.replace(" ", "␣")


def value(logprob: float, is_logit: bool) -> str:
    """A probability in per cent, of its logarithm; a logit as it is."""
    if is_logit:
        return f"{logprob:.3f}"
    percent = 100 * math.exp(logprob)
    return f"{percent:.1f}%" if percent >= 0.05 or percent == 0 else "<0.1%"


def logprobs_table(tokens: Sequence[Any], spelling: Spelling, is_logit: bool = False) -> Table:
    """A row for each ``TokenLogprob``: the token, its probability and rank, and what else was likely."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", justify="right", style="dim")
    table.add_column("token", no_wrap=True)
    table.add_column("logit" if is_logit else "probability", justify="right", no_wrap=True)
    table.add_column("rank", justify="right", no_wrap=True)
    has_others = any(token.top or token.asked for token in tokens if token is not None)
    if has_others:
        table.add_column("likeliest, and asked for", style="dim")
    for number, token in enumerate(tokens, start=1):
        if token is None:
            continue
        others = list(dict.fromkeys(token.top[:SHOWN] + token.asked))
        said = (f"{spelling[i]}\u00a0{value(logprob, is_logit)}" for i, logprob in others)
        cells = [spelling[token.token_id], value(token.logprob, is_logit), f"{token.rank:,}"]
        row = [str(number), *cells, *(["  ".join(said)] if has_others else [])]
        table.add_row(*(Text(cell) for cell in row))
    return table
