"""Sessions: rows whose decoding is stepped, forked, rewound, fed and joined, with their cache.

Read ``session.py`` first. A ``Row`` is the call of one prompt, prepared as by ``generate``, with the tokens that it
has; ``states.py`` holds the caches, in batches whose rows are forwarded together.
"""

from .row import Continued
from .session import Session, SessionBusyError, SessionClosedError, SessionError

__all__ = ["Continued", "Session", "SessionBusyError", "SessionClosedError", "SessionError"]
