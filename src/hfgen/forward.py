"""Functions with which your own strategy runs the model; defined in ``hfgen.execution``."""

from .execution import last_logits, next_token

__all__ = ["last_logits", "next_token"]
