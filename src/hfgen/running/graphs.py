"""``use_cuda_graph``: a forward pass on the static cache is recorded once as a CUDA graph and replayed.

At batch 1 a GPU waits for the host, which launches each kernel of a forward; a graph is launched at once.
It runs the same kernels on the same addresses, so that its inputs are copied to where they were when it
was recorded, and nothing in it may depend on numbers that the host knows. See
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.utils import ModelOutput
from transformers.utils.generic import is_flash_attention_requested

from ..families import CACHE
from ..memory import fingerprint
from ..memory.caches.layers import layers_of
from ..memory.caches.static import visible_length
from ..memory.caches.static_layers import SlicedStaticLayer
from ..settings.logs import logger
from ..state.run import Run
from .row_states import generator_states, has_own_hooks, set_generator_states


def recorded_forward(run: Run) -> Recorded | None:
    """The forward of decoding steps as graphs; ``None``, with a warning, where they cannot be had."""
    model, config, device = run.model, run.config, run.ids.device.type
    cache = run.model_kwargs.get(CACHE)
    cache_layers = [] if run.is_encoder_decoder else layers_of(cache)
    obstacles = {
        f"a device of type {device!r} has no graphs": device not in RECORDERS,
        "that takes a decoder-only model with `cache_implementation='static'`, all of whose layers "
        "attend to all tokens": not _are_recordable(cache_layers),
        "attentions or hidden states are returned": config.return_dict_in_generate
        and (config.output_attentions or config.output_hidden_states),
        "the model is on several devices": len(set(getattr(model, "hf_device_map", {}).values()))
        > 1,
        "the model has hooks that a replay would leave out": has_own_hooks(model),
        "flash attention gets a mask that grows": is_flash_attention_requested(model.config),
        "autocast is on": torch.is_autocast_enabled(device),
        "several processes forward the model together": run.synced_gpus
        or getattr(run.call, "ranks", None) is not None,
    }
    why = next((why for why, is_so in obstacles.items() if is_so), None)
    if why is None:
        return Recorded(run)
    warn(why, run.model)
    return None


def warn(why: str, model: Any = None) -> None:
    """Warn that steps, those of ``model`` or all of a call, are not recorded, and why."""
    whose = "" if model is None else f" of {type(model).__name__}"
    logger.warning_once(
        f"`use_cuda_graph` is set, but decoding steps{whose} are not recorded: {why}."
    )


def _are_recordable(cache_layers: list[Any]) -> bool:
    """Whether all layers of a cache find where a token goes by a counter on the device."""
    return bool(cache_layers) and all(
        type(layer) is SlicedStaticLayer and layer._lease for layer in cache_layers
    )


class Recorded:
    """A model's forward for decoding steps; a graph for each number of rows and tokens, and visible length.

    The graphs stay with the buffers of the static cache, which the next call of the model may borrow.
    They count for the addresses and the state of the model with which they were recorded. What a forward
    returns is overwritten by the next one.
    """

    def __init__(self, run: Run) -> None:
        self.model, self.layers = run.model, list[Any]()
        visible = visible_length(run.model_kwargs[CACHE])
        assert visible is not None
        self.visible, visible.is_coarse, visible.is_recorded = visible, True, True
        self.refusal: str | None = None  # why steps are not recorded any more
        self.state: Hashable = None
        #: The graphs of this call, by visible length and number of tokens, with the form of their inputs.
        self.graphs: dict[tuple[int, int], tuple[Hashable, Graph]] = {}

    def __call__(self, **inputs: Any) -> ModelOutput:
        cache = inputs.get(CACHE)
        others = {name: value for name, value in inputs.items() if value is not cache}
        if (graph := self.graph(others, cache)) is None:
            return self.model(**inputs)
        kind, outputs = graph.replay(_tensors(others))
        self.visible.close()
        return kind(**outputs | {CACHE: cache})

    def graph(self, inputs: dict[str, Any], cache: Any) -> Graph | None:
        """The graph of a step with inputs of such a form; ``None`` if none can be recorded."""
        if self.refusal is not None:
            return None
        ids = inputs.get("input_ids")
        if ids is None or cache is None or not self.visible.is_open:
            self.refuse("its forward takes no ids, no cache, or no mask that is made before it")
            return None
        place, form = (int(self.visible.shown or 0), ids.shape[1]), _form(inputs)
        if (known := self.graphs.get(place)) is not None:
            if known[0] == form:
                return known[1]
            self.refuse("the shapes of inputs differ from step to step")
            return None
        if self.state is None:
            # All of a model that a graph depends on; weights and buffers count by their addresses.
            buffers = tuple(buffer.data_ptr() for buffer in self.model.buffers())
            self.state = fingerprint.state(self.model), buffers, torch.is_inference_mode_enabled()
            self.layers = layers_of(cache)
        if not _are_recordable(self.layers):
            self.refuse("the prefill has replaced the layers of the cache")
            return None
        # On the cache's memory, an earlier call may have recorded it.
        graphs = self.layers[0]._lease.buffers.graphs
        key = form, self.state, *map(_place, self.layers)
        if (graph := graphs.get(key) or self.record(inputs, cache)) is not None:
            self.graphs[place], graphs[key] = (form, graph), graph
        return graph

    def record(self, inputs: dict[str, Any], cache: Any) -> Graph | None:
        """Record a step on its own inputs, and reset the cache; ``None``, with a warning, if that fails."""
        inputs = tree_map_only(Tensor, torch.clone, inputs)
        length = self.visible.total - inputs["input_ids"].shape[1]
        device, graphs = self.layers[0].device, self.layers[0]._lease.buffers.graphs
        sibling = next((graph.recorder for graph in graphs.values()), None)

        def forward() -> Any:
            outputs = self.model(**{CACHE: cache}, **inputs)
            return type(outputs), {n: v for n, v in outputs.items() if v is not cache}

        def reset() -> None:
            for layer in self.layers:
                layer.cumulative_length.fill_(length)
                layer._note(length)

        before = generator_states(device)
        self.visible.is_recording = True
        try:
            recorder = RECORDERS[device.type](device, sibling)
            result = recorder.record(forward, reset)
        except Exception as error:  # a read of the device, say, which a graph cannot have
            self.refuse(f"{type(error).__name__}: {error}")
            return None
        finally:
            self.visible.is_recording = False
            reset()
        if not all(map(torch.equal, before, generator_states(device))):
            set_generator_states(device, before)
            self.refuse("the forward draws random numbers")
            return None
        return Graph(recorder, _tensors(inputs), result)

    def refuse(self, why: str) -> None:
        """Forward without graphs from now on."""
        self.refusal = why
        warn(why, self.model)


@dataclass(slots=True)
class Graph:
    """A recorded function: the tensors that it reads, in order, and its result."""

    recorder: Any
    inputs: list[Tensor]
    result: Any

    def replay(self, inputs: list[Tensor]) -> Any:
        """The result for ``inputs``; the next replay overwrites it."""
        for recorded_input, value in zip(self.inputs, inputs, strict=True):
            recorded_input.copy_(value)
        self.recorder.replay()
        return self.result


def _place(layer: SlicedStaticLayer) -> Hashable:
    """Where a layer of the cache lies, and what attention sees of it."""
    keys, values = layer._seen
    return (
        *(keys.data_ptr(), keys.shape, keys.stride(), keys.dtype),
        *(values.data_ptr(), values.shape, values.stride()),
        layer.cumulative_length.data_ptr(),
    )


def _tensors(inputs: dict[str, Any]) -> list[Tensor]:
    """The tensors among ``inputs``, and in dicts among them, as of masks by kind of layer."""
    return [value for value in tree_leaves(inputs) if isinstance(value, Tensor)]


def _form(inputs: dict[str, Any]) -> Hashable:
    """What inputs of one graph have in common: shapes and types, values of numbers, other objects' ids."""

    def form(value: Any) -> Hashable:
        if isinstance(value, Tensor):
            return value.shape, value.dtype
        return value if isinstance(value, bool | int | float | str | None) else id(value)

    return (*inputs, *map(form, tree_leaves(inputs)))


# ---------------------------------------------------------------- recorders

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
