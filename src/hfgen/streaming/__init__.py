"""``stream()`` and ``astream()``: a call as an iterator of events.

May import ``prepare`` and what is below it. Read ``stream.py`` first. ``plain.py`` chooses the tokens of many calls
at once, for the engine and for sessions.
"""

from .events import StreamEvent
from .stream import AsyncStream, Stream

__all__ = ["AsyncStream", "Stream", "StreamEvent"]
