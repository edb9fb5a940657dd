"""Several processes with gloo, for tests: a function runs in each, and its results come back.

The processes are forked from one that has imported what they need, so that starting them takes no
seconds. One that hangs is killed, and its stack is in the error.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

#: Seconds until a process is taken to hang.
LIMIT = 120.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.rank_cases", "tests.rank_groups"])


def run(
    function: Callable[..., Any],
    *arguments: Any,
    n: int = 2,
    limit: float = LIMIT,
    killed: int | None = None,
) -> list:
    """What ``function(rank, *arguments)`` returns in each of ``n`` processes, by rank.

    ``killed``: the rank that ends itself by a signal, whose result is ``None``. Raises ``AssertionError``
    with the traceback of the process if another fails, and if one hangs.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            _context.Process(target=_work, args=(rank, n, folder, limit, function, arguments))
            for rank in range(n)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + limit + 10
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0.1))
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        ranks = [rank for rank in range(n) if rank != killed]
        problems = [
            f"rank {rank}:\n{text}"
            for rank in ranks
            if (text := _read(folder / f"error {rank}")) or not (folder / f"result {rank}").exists()
        ]
        assert not problems, "\n".join(problems)
        loaded = {rank: torch.load(folder / f"result {rank}", weights_only=False) for rank in ranks}
        return [loaded.get(rank) for rank in range(n)]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _work(
    rank: int, n: int, folder: Path, limit: float, function: Callable[..., Any], arguments: Any
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n)}
    with (folder / f"error {rank}").open("w", encoding="utf-8") as errors:
        faulthandler.dump_traceback_later(limit, exit=True, file=errors)
        try:
            store = f"file://{folder}/store"
            wait = timedelta(seconds=limit)
            dist.init_process_group("gloo", store, wait, rank=rank, world_size=n)
            torch.save(function(rank, *arguments), folder / f"result {rank}")
        except BaseException:
            traceback.print_exc(file=errors)
            errors.flush()
            os._exit(1)  # the others find its connections closed
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
