"""Costs of forward passes of several tokens: constants, or ``hfgen.optimize``'s report, but never a clock."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

#: The time of a forward of ``n`` tokens more than one in each row, in forwards of one: 1 + FIRST for the first of them,
#: and FIRST_ROW for each further row; NEXT for each after it in all rows, by the time of a forward of
#: one, which grows by ROW a row. Fitted to 1 to 21 tokens of 1 and 8 rows of the built-in model on a busy
#: two-core EPYC, on hfgen's own cache, 384 tokens in it.
FIRST, FIRST_ROW, NEXT, ROW = 0.35, 0.03, 0.037, 0.12
#: Rows beyond which the first token costs no more.
MANY_ROWS = 8

#: Microseconds that a layer takes besides its products, for one row; and for each further one.
LAYER_TIME, ROW_TIME = 550.0, 45.0
#: The same for the first token after one in each row, for which keys and values are repeated: in one
#: row, and in each further one; and for each such token. Fitted as above, optimised.
FIRST_TIME, FIRST_ROW_TIME, TOKEN_TIME = 110.0, 55.0, 6.0

#: The parameters that take as long as what a layer does besides: fitted to the cost ratios of a draft of
#: 2 layers and 0.6M parameters for a model of 5 and 4.2M (0.38), and of 1 to 15 layers of a 135M model
#: (0.20 to 0.56). The built-in draft has 0.22 by it.
LAYER = 2e6


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of a call of ``rows``, in forwards of the target that take one token of each row.

    ``drafter``: of a drafted token. ``products``: microseconds of all linear layers of the target by
    the number of tokens, ascending, as measured when the model was prepared, or nothing; ``layers``:
    how many layers it has.
    """

    rows: int = 1
    drafter: float = 0.0
    products: tuple[tuple[int, float], ...] = ()
    layers: int = 0

    def forward(self, n: float) -> float:
        """Of a forward of ``n`` tokens more than one, in each row."""
        if n <= 0:
            return 1.0
        if self.products:
            return self._time(n) / self._time(0)
        first = FIRST + FIRST_ROW * (min(self.rows, MANY_ROWS) - 1)
        more = NEXT * self.rows * max(n - 1, 0.0) / (1 + ROW * (self.rows - 1))
        return 1 + first * min(n, 1.0) + more

    def _time(self, n: float) -> float:
        """Microseconds of the same, as far as they are known."""
        others = LAYER_TIME + ROW_TIME * (self.rows - 1)
        others += (FIRST_TIME + FIRST_ROW_TIME * (self.rows - 1)) * min(n, 1.0)
        others += TOKEN_TIME * self.rows * n
        return self._products(self.rows * (1 + n)) + self.layers * others

    def _products(self, n_tokens: float) -> float:
        """Microseconds of the linear layers: on the line through the two nearest numbers of tokens."""
        at = bisect_left(self.products, n_tokens, key=lambda point: point[0])
        at = min(max(at, 1), len(self.products) - 1)
        (low, before), (high, after) = self.products[at - 1], self.products[at]
        return before + (after - before) * (n_tokens - low) / (high - low)


def costs_of(target: Any, rows: int, drafter: float, may_be_measured: bool) -> Costs:
    """``drafter``: of a drafted token, in forwards of ``target``.

    ``may_be_measured``: whether draft lengths may follow from what `hfgen.optimize` measured. They may
    where they decide about time and rounding alone.
    """
    report = vars(target).get("optimization") if may_be_measured else None
    if report is None:
        return Costs(rows, drafter)
    return Costs(rows, drafter, tuple(report.products().items()), n_layers(target))


def relative_cost(draft: Any, target: Any) -> float:
    """The time of a forward of the model ``draft``, in forwards of ``target``."""

    def size(model: Any) -> float:
        return float(model.num_parameters() + LAYER * n_layers(model))

    return size(draft) / size(target)


def n_layers(model: Any) -> int:
    """Layers of the decoder, by its config."""
    return int(getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0))
