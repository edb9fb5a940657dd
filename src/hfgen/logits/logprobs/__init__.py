"""Log-probabilities of tokens: ``logprobs``, ``logprob_token_ids``, ``prompt_logprobs``."""

from .recorder import Recorder
from .result import Logprobs, TokenLogprob, asks_for_any, reads

__all__ = ["Logprobs", "Recorder", "TokenLogprob", "asks_for_any", "reads"]
