"""``use_cuda_graph``: a forward pass on the static cache is recorded once as a CUDA graph and replayed.

At batch 1 a GPU waits for the host, which launches each kernel of a forward. A CUDA graph
(https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs) is launched at once. It runs the same
kernels on the same addresses, so that its inputs are copied to where they were when it was recorded, and
nothing in it may depend on numbers that the host knows. Only the forward is recorded: what chooses a token
draws from torch's generators and from seeds as it does without graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.utils import ModelOutput
from transformers.utils.generic import is_flash_attention_requested

from .. import fingerprint
from ..caches.layers import layers_of
from ..caches.static import visible_length
from ..caches.static_layers import SlicedStaticLayer
from ..call import Run
from ..logs import logger
from .row_states import has_own_hooks

#: Runs of a step before it is recorded: libraries choose kernels and allocate workspaces in the first.
WARM_UPS = 3


class Recorder(Protocol):
    """Records what a function asks of a device, and asks it again."""

    def record(self, function: Callable[[], Any], reset: Callable[[], None]) -> Any:
        """Warm up, then record ``function``; returns what it returns, tensors that replays write to.

        ``reset`` undoes what a run of it has done to its inputs. It is called before each, and not recorded.
        """

    def replay(self) -> None:
        """Run the same kernels on the same addresses."""


class CudaRecorder:
    """A ``torch.cuda.CUDAGraph``. Torch registers the device's generator with it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.graph = device, torch.cuda.CUDAGraph()

    def record(self, function: Callable[[], Any], reset: Callable[[], None]) -> Any:
        with torch.cuda.device(self.device):
            current, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    reset()
                    function()
                reset()
            current.wait_stream(side)
            # Other threads may go on allocating.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                return function()

    def replay(self) -> None:
        with torch.cuda.device(self.device):
            self.graph.replay()


#: What records the steps of a device, by its type.
RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}


@dataclass(slots=True)
class Graph:
    """A recorded step: the tensors that it reads, in order, and what it returns but for the cache."""

    recorder: Recorder
    inputs: list[Tensor]
    kind: type[ModelOutput]
    outputs: dict[str, Any]

    def replay(self, inputs: list[Tensor], cache: Any) -> ModelOutput:
        """The outputs for ``inputs``; the next replay overwrites them."""
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.recorder.replay()
        return self.kind(**self.outputs | {"past_key_values": cache})


class Recorded:
    """A model's forward for decoding steps; one graph for each number of rows and visible length.

    The graphs stay with the buffers of the static cache, which the next call of the model may borrow.
    They count for the addresses and the state of the model with which they were recorded.
    """

    def __init__(self, run: Run) -> None:
        self.model, self.layers = run.model, list[Any]()
        visible = visible_length(run.model_kwargs["past_key_values"])
        assert visible is not None
        self.visible, visible.is_coarse = visible, True
        #: Why steps are not recorded any more.
        self.refusal: str | None = None
        self.state: Hashable = None
        #: The graphs of this call, by visible length, with the form of their inputs.
        self.graphs: dict[int, tuple[Hashable, Graph]] = {}

    def __call__(self, **inputs: Any) -> ModelOutput:
        cache = inputs.get("past_key_values")
        others = {name: value for name, value in inputs.items() if value is not cache}
        if (graph := self.graph(others, cache)) is None:
            return self.model(**inputs)
        outputs = graph.replay(_tensors(others), cache)
        self.visible.close()
        return outputs

    def graph(self, inputs: dict[str, Any], cache: Any) -> Graph | None:
        """The graph of a step with inputs of such a form; ``None`` if none can be recorded."""
        is_token = inputs.get("input_ids") is not None and inputs["input_ids"].shape[1] == 1
        if cache is None or self.refusal is not None or not (is_token and self.visible.is_open):
            return None
        shown, form = int(self.visible.shown or 0), _form(inputs)
        if (known := self.graphs.get(shown)) is not None:
            if known[0] == form:
                return known[1]
            self.refuse("the shapes of inputs differ from step to step")
            return None
        if self.state is None:
            self.state, self.layers = _state(self.model), layers_of(cache)
        if not _are_recordable(self.layers):
            self.refuse("the prefill has replaced the layers of the cache")
            return None
        kept = self.layers[0]._lease.buffers.graphs
        key = (form, self.state, *map(_place, self.layers))
        graph = kept.get(key) or self.record(inputs, cache)
        if graph is not None:
            kept[key], self.graphs[shown] = graph, (form, graph)
        return graph

    def record(self, inputs: dict[str, Any], cache: Any) -> Graph | None:
        """Record a step on inputs of its own. Afterwards the cache is what it was before."""
        inputs, length = {n: _cloned(v) for n, v in inputs.items()}, self.visible.total - 1
        device = self.layers[0].device
        recorder = RECORDERS[device.type](device)

        def forward() -> ModelOutput:
            return self.model(past_key_values=cache, **inputs)

        def reset() -> None:
            for layer in self.layers:
                layer.cumulative_length.fill_(length)
                layer._note(length)

        self.visible.is_recording = True
        try:
            outputs = recorder.record(forward, reset)
        except Exception as error:  # a read of the device, say, which a graph cannot have
            self.refuse(f"{type(error).__name__}: {error}")
            return None
        finally:
            self.visible.is_recording = False
            reset()
        kept = {name: value for name, value in outputs.items() if value is not cache}
        return Graph(recorder, _tensors(inputs), type(outputs), kept)

    def refuse(self, why: str) -> None:
        """Forward without graphs from now on."""
        self.refusal = why
        _warn(why)


def recorded_forward(run: Run) -> Recorded | None:
    """The forward of decoding steps as graphs; ``None``, with a warning, where they cannot be had."""
    if (why := _obstacle(run)) is not None:
        _warn(why)
        return None
    return Recorded(run)


def _obstacle(run: Run) -> str | None:
    """Why the steps of a run cannot be recorded, as far as it is known beforehand."""
    model, config, device = run.model, run.config, run.ids.device.type
    cache = run.model_kwargs.get("past_key_values")
    own = [] if run.is_encoder_decoder else layers_of(cache)
    obstacles = {
        f"a device of type {device!r} has no graphs": device not in RECORDERS,
        "that takes a decoder-only model with `cache_implementation='static'`, all of whose layers "
        "attend to all tokens": not _are_recordable(own),
        "attentions or hidden states are returned": config.return_dict_in_generate
        and (config.output_attentions or config.output_hidden_states),
        "the model is on several devices": len(set(getattr(model, "hf_device_map", {}).values()))
        > 1,
        "the model has hooks that a replay would leave out": has_own_hooks(model),
        "flash attention gets a mask that grows": is_flash_attention_requested(model.config),
        "autocast is on": torch.is_autocast_enabled(device),
    }
    return next((why for why, is_so in obstacles.items() if is_so), None)


def _are_recordable(own: list[Any]) -> bool:
    """Whether all layers of a cache find where a token goes by a counter on the device."""
    return bool(own) and all(type(each) is SlicedStaticLayer and each._lease for each in own)


def _warn(why: str) -> None:
    logger.warning_once(f"`use_cuda_graph` is set, but decoding steps are not recorded: {why}.")


def _state(model: Any) -> Hashable:
    """All of a model that a graph depends on; weights and buffers count by their addresses."""
    buffers = tuple(buffer.data_ptr() for buffer in model.buffers())
    return fingerprint.state(model), buffers, torch.is_inference_mode_enabled()


def _place(layer: SlicedStaticLayer) -> Hashable:
    """Where a layer of the cache lies, and what attention sees of it."""
    keys, values = layer._seen
    return (
        *(keys.data_ptr(), keys.shape, keys.stride(), keys.dtype),
        *(values.data_ptr(), values.shape, values.stride()),
        layer.cumulative_length.data_ptr(),
    )


def _leaves(inputs: dict[str, Any]) -> Iterator[tuple[Hashable, Any]]:
    """Names and values of inputs; those of a dict, as of masks by kind of layer, one by one."""
    for name, value in inputs.items():
        if isinstance(value, dict):
            yield from (((name, part), value[part]) for part in value)
        else:
            yield name, value


def _tensors(inputs: dict[str, Any]) -> list[Tensor]:
    return [value for _, value in _leaves(inputs) if isinstance(value, Tensor)]


def _form(inputs: dict[str, Any]) -> Hashable:
    """What is the same of inputs that one graph can take; other objects than numbers count as such."""
    return tuple(
        (name, (value.shape, value.dtype) if isinstance(value, Tensor) else _plain(value))
        for name, value in _leaves(inputs)
    )


def _plain(value: Any) -> Hashable:
    return value if isinstance(value, bool | int | float | str | None) else id(value)


def _cloned(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _cloned(part) for name, part in value.items()}
    return value.clone() if isinstance(value, Tensor) else value
