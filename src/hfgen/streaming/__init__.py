"""``stream()`` and ``astream()``: a call as an iterator of events.

May import ``prepare`` and what is below it. Read ``stream.py`` first.
"""

from .events import StreamEvent
from .stream import AsyncStream, Stream

__all__ = ["AsyncStream", "Stream", "StreamEvent"]
