"""Compiled decoder layers: one graph for all layers of a model, any number of rows, and any length.

``hfgen.optimize(model, compile=True)`` sets a ``CompiledLayer`` as ``forward`` of each decoder layer. A layer
gets room in its cache before it runs; the graph writes to it, and sees the cache of one layer only. Weights
are arguments of the graph, so that the next layer runs through the same one.
"""

from __future__ import annotations

import itertools
import threading
import types
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers.modeling_layers import GradientCheckpointingLayer

from ...families import CACHE
from ...memory.caches.dynamic import GrowingLayer
from ...memory.caches.static_layers import SlicedStaticLayer
from ...settings.logs import logger
from ...state.hooks import do_something
from ..views import HOOKS
from .layer_graphs import Checked, Graph, Step, checked, forward_layer, stand_ins
from .native import known_compiler

#: What ``torch.compile`` compiles with.
BACKEND = "inductor"
#: New tokens per row up to which a layer runs compiled: decoding, and drafts that are verified.
MOST_NEW = 32
#: Layers of caches that give room before they know what is written into it.
ROOMY = (GrowingLayer, SlicedStaticLayer)
#: Graphs of one model: by one or more rows, one or more new tokens, kind of mask, and kind of layer.
MOST_GRAPHS = 32
#: The number of a layer, which graphs do not depend on: it only says where in the cache a layer writes.
NUMBERS = r"L\['hfgen_layer'\].*\.layer_idx"
#: Older ones know no patterns like ``NUMBERS``: each layer would have a graph of its own.
OLDEST_TORCH = "2.8"
#: Hooks of all modules.
OF_ALL = (modules._global_forward_pre_hooks, modules._global_forward_hooks)

_names = itertools.count()
#: The compiler and its settings are those of all threads.
_compiling = threading.RLock()


class _Forward(threading.local):
    """What the layers of a thread's forward share: the columns of new tokens, a mask whose rows share no memory."""

    positions: tuple[Any, Any] = (None, None)
    mask: tuple[Any, Any] = (None, None)
    step: Step | None = None
    #: Whether the layers that have not run yet may run compiled, and with which cache and kind of hidden states.
    kind: Any = None

    def __init__(self) -> None:
        self.prepared: dict[CompiledLayer, bool] = {}


class _Known(threading.local):
    """What a layer knows of the call of a thread."""

    #: The cache of that call, and which of its calls it is.
    call: tuple[weakref.ref[Any], int | None] | None = None

    def __init__(self) -> None:
        self.hooks: list[dict[int, Any]] | None = None  # the hooks of the layer's parts
        #: The packed weights of its parts, which are inputs of the graph.
        self.packed: list[tuple[Any, Any]] | None = None
        #: By kinds of arguments: graphs whose guards held in this call.
        self.checked: dict[tuple[Any, ...], Checked] = {}


class LayerGraph:
    """The compiled function, which the layers of one model share, and whether it can be used."""

    def __init__(self) -> None:
        self.failure: str | None = None  # why nothing more is compiled; None while all could be
        #: How many layers run compiled in some calls; those of which no call decoded yet do not.
        self.n_layers = 0
        self.is_broken = False
        self.layers: weakref.WeakSet[CompiledLayer] = weakref.WeakSet()
        self._function: Any = None
        self._forward = _Forward()

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerGraph, ()

    def __call__(
        self, layer: CompiledLayer, hidden: Tensor, place: Any, kwargs: dict[str, Any], kind: Any
    ) -> Any:
        n_new, device, shared = hidden.shape[1], hidden.device, self._forward
        keys, values, start = place.reserve(n_new)
        if (mask := kwargs.get("attention_mask")) is not None:
            if shared.mask[0] is not mask:
                shared.mask = mask, mask.contiguous()
            kwargs["attention_mask"] = shared.mask[1]
        if shared.positions[0] != (start, n_new, device):
            numbers = torch.arange(start, start + n_new, device=device)
            shared.positions = (start, n_new, device), numbers
        arguments = {
            "hidden": hidden,
            "keys": keys,
            "values": values,
            "positions": shared.positions[1],
            "kwargs": kwargs,
        }
        try:
            if (known := layer.known.checked.get(kind)) is not None:
                step = shared.step
                if step is None or not step.is_of(known.graph, arguments):
                    shared.step = step = Step(known.graph, arguments)
                if step.holds and step.kind == known.kind:
                    return known(step, arguments)
            view = view_without_hooks(layer.module)
            with _compiling:
                result, known = checked(self._function, view, arguments)
            if known is not None:
                layer.known.checked[kind] = known
            return result
        except Exception as error:  # of the compiler: an error of the layer comes again
            result = forward_layer(layer.module, **arguments)
            self.is_broken = True
            self.fail(error)
            return result

    def prepare_step(self, layer: CompiledLayer, hidden: Tensor, cache: Any) -> bool:
        """``prepare_step`` of the layer and of all behind it, if that was not done when an earlier one ran.

        Between products, which read more weights than the processor's caches hold, the code and the objects for
        it would come from memory for each layer. Where layers have hooks, what is found may change before they run.
        """
        forward, is_inference = self._forward, torch.is_inference_mode_enabled()
        kind = weakref.ref(cache), hidden.shape, hidden.dtype, hidden.device, is_inference
        if layer not in forward.prepared or forward.kind != kind:
            forward.kind = kind
            behind = [each for each in self.layers if each.index >= layer.index]
            if any(do_something([vars(each.module)[name] for name in HOOKS]) for each in behind):
                behind = [layer]
            forward.prepared = {each: each.prepare_step(hidden, cache) for each in behind}
        is_prepared = forward.prepared.pop(layer)
        if is_prepared and not layer.has_same_weights(cache):
            forward.prepared.clear()
            is_prepared = layer.prepare_step(hidden, cache)
        return is_prepared

    def prepare(self, layer: nn.Module, arguments: dict[str, Any]) -> bool:
        """Compile a graph for arguments like these, if no other layer has; return whether that works.

        Stand-ins are forwarded, whose sizes are the same in every process, so that the compiler's own
        cache knows the graph. It is told which sizes and numbers differ between layers and calls, and
        guesses none. Graphs do not check sizes a second time: guards have.
        """
        try:
            if torch.__version__ < OLDEST_TORCH:
                raise RuntimeError(
                    f"torch {OLDEST_TORCH} or newer is needed, not {torch.__version__}"
                )
            from torch._inductor import config as inductor

            if self._function is None:  # its name is its own: each model has a count of graphs
                name = f"layer_{next(_names)}"
                code = forward_layer.__code__.replace(co_name=name)
                function = types.FunctionType(code, forward_layer.__globals__, name)
                backend = partial(Graph, torch._dynamo.lookup_backend(BACKEND))
                self._function = torch.compile(function, fullgraph=True, backend=backend)
            dynamo: Any = torch._dynamo.config
            compiler: Any = torch.compiler.config
            with (
                compiler.patch(dynamic_sources=NUMBERS),
                dynamo.patch(automatic_dynamic_shapes=False, recompile_limit=MOST_GRAPHS),
                inductor.patch(size_asserts=False),
                known_compiler(),
                torch.no_grad(),
            ):
                view = view_without_hooks(layer)
                states = [(vars(part), dict(vars(part))) for part in view.modules()]
                self._function(view, **stand_ins(**arguments))
            for now, before in states:  # later steps run the graph alone, which sets nothing
                if any(before.get(name, before) is not value for name, value in now.items()):
                    raise RuntimeError("a part of the layer sets attributes of itself")
        except Exception as error:
            self.fail(error)
        return self.failure is None

    def fail(self, error: Exception) -> None:
        """Compile nothing more, and warn: layers run as they are where there is no graph yet."""
        cause = getattr(error, "inner_exception", error)
        first = " ".join(str(cause).split("\n\n")[0].split())
        self.failure = f"{type(cause).__name__}: {first}"[:300]
        logger.warning(f"Decoder layers run uncompiled: {self.failure}")
        self.n_layers *= not self.is_broken


class CompiledLayer:
    """Set as ``forward`` of a decoder layer, which stays as it is in everything else.

    The layer's own forward runs for prompts and wherever ``prepare_step`` finds that a graph cannot, and where a part
    of the layer has a hook. (Transformers leaves some, which do nothing unless outputs are collected.)
    """

    def __init__(self, module: nn.Module, index: int, graph: LayerGraph) -> None:
        self.module, self.index, self.graph = module, index, graph
        graph.layers.add(self)
        self._ready: set[tuple[Any, ...]] = set()  # for which kinds of arguments a graph is there
        self.known = _Known()

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledLayer, (self.module, self.index, self.graph)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledLayer:
        # A module that is being copied is in the memo; a copy of this object alone stays with it.
        module = memo.get(id(self.module), self.module)
        graph = memo.setdefault(id(self.graph), LayerGraph())
        return CompiledLayer(module, self.index, graph)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (torch.compiler.is_compiling() or self.graph.is_broken):
            if self._takes(args, kwargs) and self.graph.prepare_step(self, args[0], kwargs[CACHE]):
                place = kwargs[CACHE].layers[self.index]
                if kind := self._kind(args[0], place, kwargs):
                    del kwargs[CACHE]
                    return self.graph(self, args[0], place, kwargs, kind)
            self._forget()  # a prompt: parts may have been replaced
        return type(self.module).forward(self.module, *args, **kwargs)

    def _takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a graph may take arguments like these."""
        if len(args) != 1 or torch.is_grad_enabled() or self.module.training:
            return False
        is_tensor = type(args[0]) is Tensor and args[0].dim() == 3
        is_mask = isinstance(kwargs.get("attention_mask"), Tensor | None)  # or flex attention's
        return is_tensor and is_mask and kwargs.get(CACHE) is not None

    def prepare_step(self, hidden: Tensor, cache: Any) -> bool:
        """Give the layer's part of the cache room for new tokens; return whether the layer may run compiled."""
        layers = getattr(cache, "layers", ())
        if hidden.shape[1] > MOST_NEW or self.index >= len(layers):
            return False
        place = layers[self.index]
        if type(place) not in ROOMY:
            kind = type(place).__name__
            logger.warning_once(f"Decoder layers with a {kind} in the cache run uncompiled.")
            return False
        if not place.is_initialized:
            return False
        if isinstance(place, SlicedStaticLayer) and place._visible.is_recording:
            return False
        if place.keys.dtype is not hidden.dtype or torch.is_autocast_enabled(hidden.device.type):
            return False
        if _get_current_dispatch_mode() is not None:  # it sees each operator, and none of a graph
            return False
        known, number = self.known, vars(cache).get("call_number")
        if known.call is None or known.call[0]() is not cache or known.call[1] != number:
            self._forget()
            known.call = weakref.ref(cache), number
        if known.packed is None:
            forwards = [vars(part).get("forward") for part in self.module.modules()]
            packs: list[Any] = [each for each in forwards if hasattr(each, "view")]
            known.packed = [(forward, forward.packed()) for forward in packs]
        else:
            newest = [(forward, forward.packed()) for forward, _ in known.packed]
            if any(new is not old for (_, new), (_, old) in zip(newest, known.packed, strict=True)):
                self._forget()
                self._ready.clear()
                known.packed = newest
        if len(place.keys) != len(hidden) or self._is_watched():
            return False
        if isinstance(place, GrowingLayer):
            place.prepare(hidden.shape[1])
        return True

    def _forget(self) -> None:
        """Look at hooks, weights and guards again."""
        self.known.hooks = self.known.packed = None
        self.known.checked.clear()

    def _is_watched(self) -> bool:
        """Whether a hook of a part of the layer has something to do."""
        known = self.known
        if known.hooks is None:
            parts = [part for part in self.module.modules() if part is not self.module]
            known.hooks = [*OF_ALL, *(vars(part)[name] for part in parts for name in HOOKS)]
        return do_something(known.hooks)

    def has_same_weights(self, cache: Any) -> bool:
        """Whether weights and the cache's layer are those of ``prepare_step``, but for edits through ``.data``."""
        return type(cache.layers[self.index]) in ROOMY and all(
            packed is None or packed.holds(forward.module._parameters.get("weight"))
            for forward, packed in self.known.packed or ()
        )

    def _kind(self, hidden: Tensor, place: Any, kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """The kind of these arguments, for which a graph is there or is compiled; None if it cannot be."""
        mask = kwargs.get("attention_mask")
        mask_kind = None if mask is None else mask.dtype
        is_inference = torch.is_inference_mode_enabled()
        rows, n_new = hidden.shape[:2]
        key = (rows == 1, n_new == 1, hidden.dtype, mask_kind, is_inference)
        if key in self._ready:
            return key
        others = {name: value for name, value in kwargs.items() if name != CACHE}
        arguments = {"hidden": hidden, "keys": place.keys, "values": place.values, "kwargs": others}
        with _compiling:
            if self.graph.failure is not None or not self.graph.prepare(self.module, arguments):
                return None
        self.graph.n_layers += not self._ready
        self._ready.add(key)
        return key


def find_layers(model: nn.Module) -> dict[str, int]:
    """The decoder layers of a model that may be compiled, by name, and their places in the cache."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return {}  # they have two caches
    places: dict[str, int] = {}
    for name, module in model.named_modules():
        if not isinstance(module, GradientCheckpointingLayer) or "forward" in vars(module):
            continue
        numbers = {vars(part).get("layer_idx") for part in module.modules()} - {None}
        if len(numbers) == 1 and type(number := numbers.pop()) is int:
            places[name] = number
    return places


def view_without_hooks(module: nn.Module) -> nn.Module:
    """A view that shares all of a module but its hooks; parts are alike in all layers."""
    forward: Any = vars(module).get("forward")
    if hasattr(forward, "view"):  # a kernel of its own computes it
        return forward.view()
    view: nn.Module = object.__new__(type(module))
    state = vars(view)
    state.update(vars(module))
    for name in HOOKS:
        state[name] = {}
    state["_modules"] = {
        name: part if part is None else view_without_hooks(part)
        for name, part in module._modules.items()
    }
    return view
