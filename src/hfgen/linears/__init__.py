"""`hfgen.optimize`: linear layers by the kernels that are fastest here, chosen by a measurement."""

from .choice import optimize, optimized, restore
from .report import Choice, Report

__all__ = ["Choice", "Report", "optimize", "optimized", "restore"]
