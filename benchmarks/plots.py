"""What plots share: lines that lie on each other are drawn once, and legends stand below the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def apart(lines: Mapping[str, Sequence[float]], nearest: float) -> dict[str, list[float]]:
    """The lines that can be told apart, each under the names of all that lie on it.

    A line lies on another if none of its values differs from the other's by more than the share ``nearest`` of that.
    """
    drawn: dict[str, list[float]] = {}
    names: dict[str, list[str]] = {}
    for name, values in lines.items():
        for first, others in drawn.items():
            pairs = zip(values, others, strict=True)
            if all(abs(value - other) <= nearest * abs(other) for value, other in pairs):
                names[first].append(name)
                break
        else:
            drawn[name], names[name] = [*values], [name]
    return {", ".join(names[first]): values for first, values in drawn.items()}


def legend_below(panel: Any, columns: int = 2) -> None:
    """Put the legend of ``panel`` under the name of its horizontal axis."""
    from matplotlib.transforms import ScaledTranslation

    below = ScaledTranslation(0, -0.5, panel.figure.dpi_scale_trans)  # inches
    panel.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        bbox_transform=panel.transAxes + below,
        ncols=columns,
        fontsize=7,
        frameon=False,
    )


def subplots(*shape: int, **kwargs: Any) -> tuple[Any, Any]:
    """A figure and its panels, as of ``pyplot.subplots``, that needs no screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(*shape, **kwargs)


def save(figure: Any, path: Path, dpi: int) -> None:
    """Write ``figure`` to ``path``, with room for all of its texts, and close it."""
    from matplotlib import pyplot

    figure.savefig(path, dpi=dpi, bbox_inches="tight")
    pyplot.close(figure)
