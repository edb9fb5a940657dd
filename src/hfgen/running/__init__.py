"""Running the model. No other package calls it."""

from .executor import Executor, call, last_logits, next_token, prefill
from .padding import hides_padding
from .step_inputs import resized

__all__ = [
    "Executor",
    "call",
    "hides_padding",
    "last_logits",
    "next_token",
    "prefill",
    "resized",
]
