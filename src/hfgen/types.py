"""The types that a strategy of one's own is written with; defined elsewhere."""

from .call import Observer, Run, Step, Strategy
from .outputs import Speculation

__all__ = ["Observer", "Run", "Speculation", "Step", "Strategy"]
