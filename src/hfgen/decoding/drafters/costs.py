"""Costs of forward passes of several tokens, by constants: no clock, so that a seed fixes a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...families import modules_of

#: The time of a forward of ``n`` tokens more than one in each row, in forwards of one: 1 + FIRST for the first of them,
#: and FIRST_ROW for each further row; NEXT for each after it in all rows, by the time of a forward of
#: one, which grows by ROW a row. Fitted to 1 to 21 tokens of 1 and 8 rows of the built-in model on a busy
#: two-core EPYC, on hfgen's own cache, 384 tokens in it.
FIRST, FIRST_ROW, NEXT, ROW = 0.35, 0.03, 0.037, 0.12
#: Rows beyond which the first token costs no more.
MANY_ROWS = 8

#: The parameters that take as long as what a layer does besides: fitted to the cost ratios of a draft of
#: 2 layers and 0.6M parameters for a model of 5 and 4.2M (0.38), and of 1 to 15 layers of a 135M model
#: (0.20 to 0.56). The built-in draft has 0.22 by it.
LAYER = 2e6


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of a call of ``rows``, in forwards of the target that take one token of each row."""

    rows: int = 1
    #: Of a drafted token.
    drafter: float = 0.0

    def forward(self, n: float) -> float:
        """Of a forward of ``n`` tokens more than one, in each row."""
        first = FIRST + FIRST_ROW * (min(self.rows, MANY_ROWS) - 1)
        more = NEXT * self.rows * max(n - 1, 0.0) / (1 + ROW * (self.rows - 1))
        return 1 + first * min(max(n, 0.0), 1.0) + more


def relative_cost(draft: Any, target: Any) -> float:
    """The time of a forward of the model ``draft``, in forwards of ``target``."""

    def size(model: Any) -> float:
        weights = (
            weight.numel() for part in modules_of(model) for weight in part.parameters(False)
        )
        count = model.num_parameters() if hasattr(model, "num_parameters") else sum(weights)
        config = model.config.get_text_config(decoder=True)
        return float(count + LAYER * int(getattr(config, "num_hidden_layers", 0)))

    return size(draft) / (size(target) or 1.0)
