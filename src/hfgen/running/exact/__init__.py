"""``hfgen.exact``: rows whose numbers do not depend on what is computed beside them. Read ``switch.py`` first."""

from .logprobs import token_logprobs
from .switch import InexactError, Report, exact, is_exact, restore, undo

__all__ = ["InexactError", "Report", "exact", "is_exact", "restore", "token_logprobs", "undo"]
