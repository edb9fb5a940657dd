"""Continuous batching: many requests at once, each with the tokens of its own ``generate``.

May import ``mixin`` and what is below it. Read ``engine.py`` first, then ``steps.py`` and ``joined.py``.
``serving.py`` is an engine for coroutines; ``upstream.py`` has transformers' ``generate_batch``.
"""

from .engine import Engine
from .request import (
    EngineEvent,
    EngineRequest,
    EngineStats,
    RequestMetrics,
    RequestOutput,
    SequenceOutput,
)

__all__ = [
    "Engine",
    "EngineEvent",
    "EngineRequest",
    "EngineStats",
    "RequestMetrics",
    "RequestOutput",
    "SequenceOutput",
]
