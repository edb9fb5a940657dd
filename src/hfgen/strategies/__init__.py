"""How the next tokens are chosen, one file per strategy.

``STRATEGIES`` names the class behind each method of the mixin. To add one, copy ``sample.py``.
"""

from collections.abc import Callable

from ..types import Run, Strategy
from .base import NextToken
from .beam import Beam
from .sample import Sample

STRATEGIES: dict[str, Callable[[Run], Strategy]] = {"_sample": Sample, "_beam_search": Beam}

__all__ = ["STRATEGIES", "Beam", "NextToken", "Sample"]
