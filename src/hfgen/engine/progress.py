"""The progress bar of a job: finished requests, tokens per second, remaining time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class JobProgress:
    """A bar on standard error. Without a ``total`` it counts, and shows no time left."""

    def __init__(
        self, total: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total, self.clock = total, clock
        self.n_done = self.n_tokens = 0
        self.started = clock()
        self._bar: Any = None
        self._task: Any = None

    @property
    def seconds(self) -> float:
        """Since it was entered."""
        return self.clock() - self.started

    @property
    def tokens_per_second(self) -> float:
        return self.n_tokens / max(self.seconds, 1e-9)

    def add_tokens(self, n: int) -> None:
        """So many more tokens have been generated."""
        self.n_tokens += n
        self._show()

    def add_done(self) -> None:
        """One more is done, or has failed."""
        self.n_done += 1
        self._show()

    def _show(self) -> None:
        if self._bar is not None:
            speed = f"{self.tokens_per_second:,.0f} tokens/s"
            self._bar.update(self._task, completed=self.n_done, speed=speed)

    def __enter__(self) -> JobProgress:
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[speed]}"),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.started = self.clock()
        self._task = self._bar.add_task("", total=self.total, speed="")
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()
        self._bar = None
