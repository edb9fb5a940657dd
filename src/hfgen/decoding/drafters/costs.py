"""Costs of forward passes of several tokens, by constants and by the bytes that a model reads: no clock."""

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

#: Bytes of packed weights that a microsecond reads, and those that it multiplies with one more token: as
#: kernels of all widths do on a core of an EPYC with AVX512 (``benchmarks.execution``).
READ, MULTIPLIED = 2e4, 2.2e5
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

    ``drafter``: of a drafted token. ``n_bytes``: of the packed weights of a model that is optimised, or
    0; ``layers``: how many layers it has.
    """

    rows: int = 1
    drafter: float = 0.0
    n_bytes: int = 0
    layers: int = 0

    def forward(self, n: float) -> float:
        """Of a forward of ``n`` tokens more than one, in each row."""
        if n <= 0:
            return 1.0
        if self.n_bytes:
            return self._time(n) / self._time(0)
        first = FIRST + FIRST_ROW * (min(self.rows, MANY_ROWS) - 1)
        more = NEXT * self.rows * max(n - 1, 0.0) / (1 + ROW * (self.rows - 1))
        return 1 + first * min(n, 1.0) + more

    def _time(self, n: float) -> float:
        """Microseconds of the same in an optimised model."""
        others = LAYER_TIME + ROW_TIME * (self.rows - 1)
        others += (FIRST_TIME + FIRST_ROW_TIME * (self.rows - 1)) * min(n, 1.0)
        others += TOKEN_TIME * self.rows * n
        products = self.n_bytes * (1 / READ + self.rows * (1 + n) / MULTIPLIED)
        return products + self.layers * others


def costs_of(target: Any, rows: int, drafter: float, decides_draws: bool) -> Costs:
    """``drafter``: of a drafted token, in forwards of ``target``.

    ``decides_draws``: whether draws of torch's generator depend on draft lengths, which are then the same
    with and without `hfgen.optimize`.
    """
    report = None if decides_draws else getattr(target, "optimization", None)
    if report is None:
        return Costs(rows, drafter)
    return Costs(rows, drafter, report.read_bytes, n_layers(target))


def relative_cost(draft: Any, target: Any) -> float:
    """The time of a forward of the model ``draft``, in forwards of ``target``."""

    def size(model: Any) -> float:
        weights = (
            weight.numel() for part in modules_of(model) for weight in part.parameters(False)
        )
        count = model.num_parameters() if hasattr(model, "num_parameters") else sum(weights)
        return float(count + LAYER * n_layers(model))

    return size(draft) / (size(target) or 1.0)


def n_layers(model: Any) -> int:
    """Layers of the decoder, by its config."""
    return int(getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0))
