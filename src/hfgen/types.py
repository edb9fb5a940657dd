"""The types that a strategy of one's own is written with; they are defined in ``hfgen.call``."""

from .call import Observer, Run, Speculation, Step, Strategy

__all__ = ["Observer", "Run", "Speculation", "Step", "Strategy"]
