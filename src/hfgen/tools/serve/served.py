"""``Served``: the model of a server, the engine that decodes with it, and threads that prepare requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...engine.serving import Service
from .limits import Limits

N_WORKERS = 4  # requests of a kind that are prepared at once


@dataclass(frozen=True)
class Served:
    """The model of the server, the engine that decodes with it, and arguments by which all requests draft."""

    name: str
    model: Any
    processor: Any
    service: Service
    drafts: Mapping[str, Any]
    limits: Limits
    #: Steering vectors by name and module, which requests ask for.
    steering: Mapping[str, Any] = field(default_factory=dict)
    #: Threads for templates, tokenizers and grammars, and for media, which may come slowly.
    pool: Executor = field(default_factory=partial(ThreadPoolExecutor, N_WORKERS))
    media_pool: Executor = field(default_factory=partial(ThreadPoolExecutor, N_WORKERS))

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", self.processor)

    @property
    def defaults(self) -> dict[str, Any]:
        """The model's own generation config, as far as it says something."""
        config = vars(self.model.generation_config)
        return {name: value for name, value in config.items() if value is not None}

    def check_name(self, body: dict[str, Any]) -> None:
        """Raise ``ValueError`` if ``body`` is for another model."""
        if (name := body.get("model")) not in (None, self.name):
            raise ValueError(f"`model` has to be {self.name!r}, but is {name!r}.")

    async def prepared(self, prepare: Callable[..., Any], *args: Any, is_slow: bool = False) -> Any:
        """Run ``prepare`` in a worker thread and return its result; ``ValueError`` if it takes too long."""
        pool = self.media_pool if is_slow else self.pool
        running = asyncio.get_running_loop().run_in_executor(pool, prepare, *args)
        seconds = self.limits.prepare_seconds
        try:
            return await asyncio.wait_for(running, seconds)
        except asyncio.TimeoutError:
            limit = f"{seconds:g} seconds (--prepare-seconds)"
            raise ValueError(f"The request took more than {limit} to prepare.") from None
