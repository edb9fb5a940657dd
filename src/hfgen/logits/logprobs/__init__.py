"""Log-probabilities of tokens: ``logprobs``, ``logprob_token_ids``, ``prompt_logprobs``."""

from .recorder import Recorder
from .result import Logprobs, TokenLogprob
from .settings import MODES, LogprobRequest, Settings, asks_for_any, reads

__all__ = [
    "MODES",
    "LogprobRequest",
    "Logprobs",
    "Recorder",
    "Settings",
    "TokenLogprob",
    "asks_for_any",
    "reads",
]
