"""``hfgen.optimize``: runs linear layers with faster kernels for this CPU. Processor, type and weights decide which."""

from .choice import optimize, optimized, restore
from .report import Report

__all__ = ["Report", "optimize", "optimized", "restore"]
