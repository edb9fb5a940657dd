"""Recorders: they record the kernels that a function launches, and launch them again together (CUDA graphs).

https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Runs of a function before it is recorded: libraries choose kernels and allocate workspaces in the first.
WARM_UPS = 3

#: Torch allows one capture at a time in a process.
_CAPTURING = threading.Lock()


class CudaRecorder:
    """A ``torch.cuda.CUDAGraph``: kernels that a function has launched, to be launched again together.

    ``sibling``: the recorder of another graph that is freed together with this one and never runs beside it.
    They share memory and streams. No others do: what cuBLAS has allocated for a stream goes with the first
    graph that was captured on it (pytorch/pytorch#193402). Torch registers the device's generator.
    """

    def __init__(self, device: torch.device, sibling: CudaRecorder | None = None) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.graph = torch.cuda.CUDAGraph()
            # Of this device: torch's own stream for captures is of the first one that captured.
            self.streams = torch.cuda.Stream(), torch.cuda.Stream()
            self.pool = torch.cuda.graph_pool_handle()
        if sibling is not None:
            self.streams, self.pool = sibling.streams, sibling.pool

    def record(self, function: Callable[[], Any], reset: Callable[[], None]) -> Any:
        """Warm up, then record ``function``; return its result, tensors that replays write to.

        ``reset`` restores the inputs of ``function``. It is called before each run, and not recorded.
        Raises what ``function`` raises, and ``RuntimeError`` if it reads the device.
        """
        with _CAPTURING, torch.cuda.device(self.device):
            current, (warm_up, capture) = torch.cuda.current_stream(), self.streams
            warm_up.wait_stream(current)
            # Also where a capture fails to end: torch does not go back to the stream before it then.
            with torch.cuda.stream(warm_up):
                for _ in range(WARM_UPS - 1):
                    reset()
                    function()
                reset()
                # A capture that fails can leave torch's allocator and generator in the state of one.
                with NoReads(self.device.type):
                    function()
                reset()
                capture.wait_stream(warm_up)
                # Other threads may go on allocating.
                with torch.cuda.graph(self.graph, self.pool, capture, "thread_local"):
                    result = function()
            current.wait_stream(warm_up)
            current.wait_stream(capture)
            return result

    def replay(self) -> None:
        """Launch the same kernels on the same addresses."""
        with torch.cuda.device(self.device):
            self.graph.replay()


#: The recorder of a device, by its type: called with the device and a sibling.
RECORDERS: dict[str, Callable[[torch.device, Any], Any]] = {"cuda": CudaRecorder}

#: Operations whose result, or its shape, the host has to know.
READS = frozenset(
    "_local_scalar_dense _unique _unique2 bincount equal is_nonzero masked_select nonzero "
    "unique_consecutive unique_dim".split()
)


class NoReads(TorchDispatchMode):
    """Raise ``RuntimeError`` where this thread would wait for a device of ``kind``, or copy to or from it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        is_copy = name == "copy_" and args[0].device.type != args[1].device.type
        if name == "_to_copy" and (target := kwargs.get("device")) is not None:
            is_copy = torch.device(target).type != args[0].device.type
        if is_copy or reads(name, args, kwargs):
            leaves = tree_leaves((args, kwargs))
            devices = [leaf.device if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            if any(isinstance(d, torch.device) and d.type == self.kind for d in devices):
                raise RuntimeError(
                    f"{name} waits for the device, or copies between it and the host"
                )
        return func(*args, **kwargs)


def reads(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the host waits for the result of this operation, or for its shape."""
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        is_fill = name != "index" and args[2].numel() == 1  # torch then fills by the mask
        return bool(masks) and not is_fill
    return name in READS
