"""Types for writing your own strategy; they are defined in other modules."""

from .call import Observer, Run, Step, Strategy
from .outputs import Speculation

__all__ = ["Observer", "Run", "Speculation", "Step", "Strategy"]
