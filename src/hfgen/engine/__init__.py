"""Continuous batching: many requests at once, each with the tokens of its own ``generate``.

May import ``mixin`` and what is below it. Read ``engine.py`` first, then ``steps.py`` and ``joined.py``.
``serving.py`` is an engine for coroutines; ``upstream.py`` has transformers' ``generate_batch``.
"""

from .engine import Engine as Engine
from .request import EngineEvent as EngineEvent
from .request import EngineRequest as EngineRequest
from .request import EngineStats as EngineStats
from .request import RequestMetrics as RequestMetrics
from .request import RequestOutput as RequestOutput
from .request import SequenceOutput as SequenceOutput
