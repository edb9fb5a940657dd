"""What a strategy of one's own runs the model with; defined in ``hfgen.execution``."""

from .execution import last_logits, next_token

__all__ = ["last_logits", "next_token"]
