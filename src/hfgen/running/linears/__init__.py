"""``hfgen.optimize``: runs linear layers with faster kernels for this CPU. Processor, type and weights decide which."""

from .choice import Report, optimize, optimized, restore

__all__ = ["Report", "optimize", "optimized", "restore"]
