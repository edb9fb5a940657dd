"""Counts the memory of live tensors, operation by operation, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside the context, ``now`` counts the bytes of live storages that operations made.

    ``peak`` is their maximum. What a kernel allocates and frees within itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        inputs = {storage._cdata for storage in _storages((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in inputs and storage not in self._seen:
                self._seen.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, n_bytes: int) -> None:
        self.now += n_bytes
        self.peak = max(self.peak, self.now)


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    return (t.untyped_storage() for t in tree_leaves(values) if isinstance(t, torch.Tensor))


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """The most memory that tensors of ``call`` take at a time, besides what is there before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before
    with LiveBytes() as live:
        call()
    return live.peak
