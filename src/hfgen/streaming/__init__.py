"""``stream()`` and ``astream()``: a call as an iterator of what each row has gained."""

from .async_stream import AsyncStream
from .events import StreamEvent
from .stream import Stream

__all__ = ["AsyncStream", "Stream", "StreamEvent"]
