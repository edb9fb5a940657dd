"""Defects of transformers that hfgen does not have, each shown in ten lines of transformers and torch.

``python -m upstream`` runs them with the transformers that is installed and says which are still there,
the smallest mend first. They are written to be copied into an issue, with ``models.py`` before them.
"""

from . import drafting, generation
from .table import DEFECTS, Defect, State

__all__ = ["DEFECTS", "Defect", "State", "drafting", "generation"]
