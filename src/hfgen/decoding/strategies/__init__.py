"""Strategies: how the next tokens are chosen, one file each, named in ``modes.MODES``. To add one, copy ``sample.py``."""

from .base import NextToken
from .beam import Beam
from .constrained_beam import ConstrainedBeam
from .contrastive import Contrastive
from .dola import Dola
from .group_beam import GroupBeam
from .sample import Sample

__all__ = ["Beam", "ConstrainedBeam", "Contrastive", "Dola", "GroupBeam", "NextToken", "Sample"]
