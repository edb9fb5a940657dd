"""The recorder of CUDA, line by line, with stand-ins for what a GPU does; and what it refuses to record."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from hfgen.running import graphs
from hfgen.running.graphs import WARM_UPS, CudaRecorder, NoReads
from tests.simulated_accelerator import DEVICE, Accelerator, to_device


class Stream:
    def __init__(self) -> None:
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


class Gpu:
    """What the recorder asks of a GPU, in order, each with the stream that is the current one."""

    def __init__(self) -> None:
        self.current = self.callers = Stream()
        self.seen: list[tuple[str, Stream]] = []
        self.graphs: list[Any] = []
        #: What the end of a capture raises.
        self.error: Exception | None = None

    def note(self, what: str) -> None:
        self.seen.append((what, self.current))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Stand-ins for all but ``torch.cuda.graph`` itself, which is torch's."""
    gpu = Gpu()

    class Graph:
        def __init__(self) -> None:
            gpu.graphs.append(self)

        def capture_begin(self, pool: Any, **kwargs: Any) -> None:
            self.pool, self.mode = pool, kwargs["capture_error_mode"]
            gpu.note("begin")

        def capture_end(self) -> None:
            gpu.note("end")
            if gpu.error is not None:
                raise gpu.error

        def replay(self) -> None:
            gpu.note("replay")

    class Selected:
        """``torch.cuda.stream``, whose exit is not called by ``torch.cuda.graph`` if a capture fails to end."""

        def __init__(self, stream: Stream) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            self.before, gpu.current = gpu.current, self.stream

        def __exit__(self, *error: Any) -> None:
            gpu.current = self.before

    cuda = torch.cuda
    monkeypatch.setattr(cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(cuda, "Stream", Stream)
    monkeypatch.setattr(cuda, "stream", Selected)
    monkeypatch.setattr(cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(cuda, "current_stream", lambda: gpu.current)
    monkeypatch.setattr(cuda, "graph_pool_handle", object)
    monkeypatch.setattr(cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    return gpu


def recorder(sibling: CudaRecorder | None = None) -> CudaRecorder:
    return CudaRecorder(torch.device("cpu"), sibling)


def test_a_function_is_warmed_up_on_one_stream_and_recorded_on_another(gpu: Gpu) -> None:
    own = recorder()
    result = own.record(lambda: gpu.note("run") or "result", lambda: gpu.note("reset"))
    assert result == "result"
    names = [name for name, _ in gpu.seen]
    assert names == [*["reset", "run"] * WARM_UPS, "reset", "begin", "run", "end"]
    streams = [stream for _, stream in gpu.seen]
    side, captures = own.streams
    assert set(streams[:-3]) == {side}
    assert set(streams[-3:]) == {captures}
    assert len({side, captures, gpu.callers}) == 3
    # What was asked for before is there, and what comes next waits for it.
    assert gpu.callers in side.waited_for
    assert side in captures.waited_for
    assert captures in gpu.callers.waited_for
    assert gpu.current is gpu.callers
    assert gpu.graphs[0].mode == "thread_local"
    own.replay()
    assert gpu.seen[-1] == ("replay", gpu.callers)


def test_siblings_share_memory_and_a_stream_and_no_others_do(gpu: Gpu) -> None:
    one = recorder()
    two, other = recorder(one), recorder()
    for each in (one, two, other):
        each.record(lambda: None, lambda: None)
    first, second, third = gpu.graphs
    assert first.pool is second.pool
    assert third.pool is not first.pool
    assert one.streams is two.streams
    assert not {*one.streams} & {*other.streams}


def test_a_capture_that_fails_leaves_the_callers_stream(gpu: Gpu) -> None:
    gpu.error = RuntimeError("operation not permitted when stream is capturing")
    with pytest.raises(RuntimeError, match="not permitted"):
        recorder().record(lambda: None, lambda: None)
    assert gpu.current is gpu.callers
    gpu.error = None
    recorder().record(lambda: None, lambda: None)  # and the next may capture


def test_a_function_that_reads_is_not_captured(gpu: Gpu) -> None:
    with pytest.raises(RuntimeError, match="waits for the device"):
        recorder().record(lambda: torch.ones(2).sum().item(), lambda: None)
    assert "begin" not in [name for name, _ in gpu.seen]
    assert gpu.current is gpu.callers


def test_the_recorder_of_cuda_takes_a_device_and_a_sibling() -> None:
    assert graphs.RECORDERS["cuda"] is CudaRecorder


# ---------------------------------------------------------------- what would wait


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x[0] > 0),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: torch.zeros(3).copy_(x),
        lambda x: x.copy_(torch.zeros(3)),
        lambda x: torch.zeros(3).to(DEVICE),
        lambda x: (x > 0).nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: x.repeat_interleave(x.long().clamp(min=0)),
    ],
)
def test_reads_and_copies_raise(read: Callable[[Tensor], Any]) -> None:
    x = to_device(torch.tensor([1.0, -2.0, 3.0]))
    with (
        Accelerator(),
        NoReads(DEVICE.type),
        pytest.raises(RuntimeError, match="waits for the device"),
    ):
        read(x)


@pytest.mark.parametrize(
    "kernel",
    [
        lambda x: x + 1,
        lambda x: x.masked_fill_(x > 0, 0.0),
        lambda x: x.to(torch.float64),
        lambda x: torch.arange(3, device=DEVICE),
        lambda x: x.index_select(0, torch.zeros(2, dtype=torch.long, device=DEVICE)),
        lambda x: torch.ones(2).sum().item(),  # of the host
    ],
)
def test_nothing_else_does(kernel: Callable[[Tensor], Any]) -> None:
    with Accelerator(), NoReads(DEVICE.type):
        kernel(to_device(torch.tensor([1.0, -2.0, 3.0])))
