"""``model.optimization``: what ``hfgen.optimize`` has changed in a model, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..compiled_layers import LayerGraph
from .kernels import OWN

#: What can become of tokens.
SAME = "the same: nothing is changed"
ROUNDED = "can change by rounding, where two tokens are as likely as each other to the last digits"


@dataclass(frozen=True, slots=True)
class Report:
    """Which kernel computes each linear layer, and what it costs. ``str()`` is a text of some lines.

    ``kernels``: by name of the layer; ``optimize(model, kernels=...)`` takes it. ``layers``: shape
    ``(out, in)`` and type of each. ``left_alone``: why the others keep their own forward method.
    ``tokens``: whether generated tokens can be others than before. ``extra_bytes``: packed copies, beside
    the weights. ``file_bytes``: weights that lie in files. ``read_bytes``: weights of all ``layers`` as a step reads them. ``seconds``: of ``optimize``.
    ``graph``: what decoder layers share with ``compile=True``; its ``failure`` says why they run as they
    are after all, if they do.
    """

    weights: str | None
    kernels: dict[str, str]
    layers: dict[str, str]
    left_alone: dict[str, str]
    tokens: str
    extra_bytes: int
    file_bytes: int
    read_bytes: int
    seconds: float
    graph: LayerGraph | None = None
    compiled_layers: tuple[str, ...] = ()

    @property
    def has_changed(self) -> bool:
        """Whether a layer is computed by another kernel, or compiled."""
        return bool(self.compiled_layers) or set(self.kernels.values()) - {OWN} != set()

    def __str__(self) -> str:
        pairs = Counter((self.layers[name], kernel) for name, kernel in self.kernels.items())
        lines = [f"{n} x {layer}: {kernel}" for (layer, kernel), n in pairs.items()]
        reasons = Counter(self.left_alone.values())
        lines += [f"{n} left alone: {reason}" for reason, n in reasons.items()]
        if self.graph is not None:
            lines.append(self._of_graph(self.graph))
        lines.append(f"tokens: {self.tokens}")
        in_files = f", {self.file_bytes / 2**20:,.1f} MiB in files" if self.file_bytes else ""
        lines.append(f"{self.extra_bytes / 2**20:,.1f} MiB more{in_files}, {self.seconds:.1f} s")
        return "\n".join(lines)

    def _of_graph(self, graph: LayerGraph) -> str:
        if not self.compiled_layers:
            return "no decoder layer can be compiled"
        n = len(self.compiled_layers)
        why = f": {graph.failure}" if graph.failure else ""
        return f"{graph.n_layers} of {n} decoder layers compiled so far{why}"
