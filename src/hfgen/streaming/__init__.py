"""``stream()`` and ``astream()``: a call as an iterator of events."""

from .async_stream import AsyncStream
from .events import StreamEvent
from .stream import Stream

__all__ = ["AsyncStream", "Stream", "StreamEvent"]
