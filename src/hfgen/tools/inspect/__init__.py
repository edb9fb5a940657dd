"""``hfgen.trace`` and ``hfgen inspect``: what happened in a call at each token, as data and as a page."""

from .records import Beam, Candidate, Draft, Prompt, Sequence, Stage, Step, Token, Trace
from .tracing import trace

__all__ = ["Beam", "Candidate", "Draft", "Prompt", "Sequence", "Stage", "Step", "Token", "Trace"]
__all__ += ["trace"]
