"""Recorded steps on a CPU: operations are noted one by one, and repeated on the same addresses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hfgen.running import graphs
from tests.simulated_accelerator import Operation, Recorder


class HostRecorder(Recorder):
    """A ``Recorder`` of what a function asks of the CPU; a read of a tensor's values raises."""

    def record(self, function: Any, reset: Any) -> Any:
        reset()
        with graphs.NoReads("cpu"):
            function()
        reset()
        with _Noting(self):
            return super().record(function, reset)


class _Noting(TorchDispatchMode):
    """While its recorder is the active one, operations are appended to it."""

    def __init__(self, recorder: HostRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs := kwargs or {}))
        if Recorder.active is self.recorder:
            self.recorder.operations.append(Operation(func, args, kwargs, result))
        return result


class Reads(nn.Module):
    """A layer norm that reads the device: no recorder permits that."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, states: Tensor) -> Tensor:
        assert bool(states.isfinite().all())
        return self.norm(states)


@contextmanager
def recording_on_the_cpu() -> Iterator[None]:
    """Within, calls with ``use_cuda_graph=True`` record their steps on a CPU, too."""
    before = dict(graphs.RECORDERS)
    graphs.RECORDERS["cpu"] = HostRecorder
    try:
        yield
    finally:
        graphs.RECORDERS.clear()
        graphs.RECORDERS.update(before)
