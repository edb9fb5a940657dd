"""``hfgen.optimize``: faster kernels of linear layers for this CPU, and one graph for all decoder layers.

Read ``choice.py`` first: processor, type and weights decide which kernel a layer gets. ``forward.py`` runs it while
its weight is unchanged, and ``compiled_layers.py`` a whole layer (``layer_graphs.py``, ``lowering.py``).
"""

from .choice import Report, optimize, optimized, restore

__all__ = ["Report", "optimize", "optimized", "restore"]
