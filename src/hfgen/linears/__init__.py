"""``hfgen.optimize``: runs linear layers with the fastest kernels for this CPU, chosen by measurement."""

from .choice import optimize, optimized, restore
from .report import Choice, Report

__all__ = ["Choice", "Report", "optimize", "optimized", "restore"]
