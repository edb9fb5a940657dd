"""How the next tokens are chosen, one file per strategy.

``STRATEGIES`` names the class behind each method of the mixin. To add one, copy ``sample.py``.
"""

from collections.abc import Callable

from ..types import Run, Strategy
from .base import NextToken
from .beam import Beam
from .constrained_beam import ConstrainedBeam
from .contrastive import Contrastive
from .dola import Dola
from .group_beam import GroupBeam
from .sample import Sample

STRATEGIES: dict[str, Callable[[Run], Strategy]] = {
    "_sample": Sample,
    "_beam_search": Beam,
    "_contrastive_search": Contrastive,
    "_dola_decoding": Dola,
    "_group_beam_search": GroupBeam,
    "_constrained_beam_search": ConstrainedBeam,
}

__all__ = [
    "STRATEGIES",
    "Beam",
    "ConstrainedBeam",
    "Contrastive",
    "Dola",
    "GroupBeam",
    "NextToken",
    "Sample",
]
