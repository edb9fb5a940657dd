"""Continuous batching: many requests at once, each with the tokens of its own ``generate``."""

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
