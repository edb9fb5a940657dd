"""``stream()`` and ``astream()``: a call as an iterator of events.

May import ``prepare`` and what is below it. Read ``stream.py`` first.
"""

from .async_stream import AsyncStream
from .events import StreamEvent
from .stream import Stream

__all__ = ["AsyncStream", "Stream", "StreamEvent"]
