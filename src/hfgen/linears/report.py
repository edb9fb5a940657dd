"""``model.optimization``: what ``hfgen.optimize`` has changed in a model, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..execution.compiled_layers import LayerGraph
from .forward import ROWS
from .measure import CHANGED, OWN, Times

#: What can become of tokens.
SAME = "the same: nothing is changed"
ROUNDED = "can change by rounding, where two tokens are as likely as each other to the last digits"


@dataclass(frozen=True, slots=True)
class Choice:
    """One shape of linear layers ``(out, in)``, and what computes them.

    ``times``: microseconds by kernel (``own``: the layer's own) and number of rows; empty if not known.
    ``n_left``: of ``n_modules``, those whose weights the kernel does not take.
    """

    shape: tuple[int, int]
    dtype: str
    n_modules: int
    kernel: str | None = None
    rows: tuple[int, ...] = ()
    reason: str = ""
    times: Times = field(default_factory=dict)
    n_left: int = 0
    extra_bytes: int = 0

    def microseconds(self, rows: int) -> float:
        """Of all layers of the shape, at one of the numbers of rows that were measured."""
        own = self.times[OWN][rows]
        if self.kernel is None or rows not in self.rows:
            return self.n_modules * own
        n_changed = self.n_modules - self.n_left
        return n_changed * self.times[self.kernel][rows] + self.n_left * own

    def __str__(self) -> str:
        layers = f"{self.n_modules} x {self.shape[0]} x {self.shape[1]} {self.dtype}"
        if self.kernel is None:
            return f"{layers}: unchanged, {self.reason}"
        own, its = self.times[OWN], self.times[self.kernel]
        gains = ", ".join(f"{_rows(n)} {own[n] / its[n]:.2f}" for n in self.rows)
        left = f"; {self.n_left} unchanged, {self.reason}" if self.n_left else ""
        return f"{layers}: {self.kernel}, times as fast at rows: {gains}{left}"


@dataclass(frozen=True, slots=True)
class Report:
    """What was chosen, by shape; what was left alone, with the reason; what it cost.

    ``extra_bytes``: packed copies of weights, beside the weights. ``seconds``: of ``optimize``.
    ``tokens``: whether generated tokens can be others than before. ``str()`` is a text of some lines.
    ``graph``: what decoder layers share with ``compile=True``; its ``failure`` says why they run as they
    are after all, if they do.
    """

    weights: str | None
    choices: tuple[Choice, ...]
    left_alone: dict[str, str]  # module → reason
    tokens: str
    extra_bytes: int
    seconds: float
    steps: Times = field(default_factory=dict)  # of the whole model, as ``whole.measure_steps``
    graph: LayerGraph | None = None
    compiled_layers: tuple[str, ...] = ()

    def products(self) -> dict[int, float]:
        """Microseconds of all linear layers together by the number of rows; empty if any is not known.

        Of those that were looked at: layers left alone are not among them.
        """
        if not self.choices or not all(choice.times for choice in self.choices):
            return {}
        numbers = self.choices[0].times[OWN]
        return {n: sum(choice.microseconds(n) for choice in self.choices) for n in numbers}

    @property
    def has_changed(self) -> bool:
        """Whether a layer is computed by another kernel, or compiled."""
        return bool(self.compiled_layers) or any(choice.kernel for choice in self.choices)

    def __str__(self) -> str:
        lines = [str(choice) for choice in self.choices]
        reasons: dict[str, int] = {}
        for reason in self.left_alone.values():
            reasons[reason] = reasons.get(reason, 0) + 1
        lines += [f"{count} left alone: {reason}" for reason, count in reasons.items()]
        if self.steps:
            own, changed = self.steps[OWN], self.steps[CHANGED]
            gains = ", ".join(f"{_rows(n)} {own[n] / changed[n]:.2f}" for n in changed)
            lines.append(f"a whole step, times as fast at rows: {gains}")
        if self.graph is not None:
            lines.append(self._of_graph(self.graph))
        lines.append(f"tokens: {self.tokens}")
        lines.append(f"{self.extra_bytes / 2**20:,.1f} MiB more, {self.seconds:.1f} s")
        return "\n".join(lines)

    def _of_graph(self, graph: LayerGraph) -> str:
        if not self.compiled_layers:
            return "no decoder layer can be compiled"
        n = len(self.compiled_layers)
        why = f": {graph.failure}" if graph.failure else ""
        return f"{graph.n_layers} of {n} decoder layers compiled so far{why}"


def _rows(n: int) -> str:
    return "prefill" if n == ROWS[-1] else str(n)
