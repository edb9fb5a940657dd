"""When the forward pass is compiled, and which kernels decoding uses."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config as fx_config
from transformers import DynamicCache, GenerationConfig
from transformers.utils.generic import is_flash_attention_requested

from ..memory.caches.layers import decoder_cache
from ..memory.caches.static import visible_length
from ..settings.logs import logger
from ..state.call import ModelKwargs

#: What forward may take tokens as.
IDS = ("decoder_input_ids", "input_ids", "inputs_embeds")


def fastest_forward(model: Any, config: GenerationConfig, model_kwargs: ModelKwargs) -> Callable:
    """The model's forward, compiled where cache and device allow it."""
    if model._valid_auto_compile_criteria(model_kwargs, config):
        cache = model_kwargs.get("past_key_values")
        compiled = getattr(vars(model).get("_compiled_call"), "_torchdynamo_orig_callable", None)
        if getattr(compiled, "__self__", model) is not model:
            del model._compiled_call  # a copied model has that of the one that it is a copy of
        return Compiled(model.get_compiled_call(config.compile_config), cache)
    return model.__call__


def valid_auto_compile_criteria(
    self: Any, model_kwargs: ModelKwargs, generation_config: GenerationConfig
) -> bool:
    """Whether to compile forward: the cache has a fixed shape, and nothing is offloaded.

    Accelerators compile by default, a CPU if there is a ``compile_config``.
    """
    compile_config = generation_config.compile_config
    if generation_config.disable_compile:
        return False
    cache = model_kwargs.get("past_key_values", model_kwargs.get("cache_params"))
    quantizer = getattr(self, "hf_quantizer", None)
    places = set(getattr(self, "hf_device_map", {}).values())
    is_for_device = self.device.type in ("cuda", "xpu", "neuron", "tpu") or (
        compile_config is not None
        and (self.device.type == "cpu" or compile_config._compile_all_devices)
    )
    can_compile = bool(
        cache is not None
        and cache.is_compileable
        # A dynamic cache with linear attention alone has fixed shapes too, but was not asked for.
        and type(decoder_cache(cache)) is not DynamicCache
        and is_for_device
        and (quantizer is None or quantizer.is_compileable)
        and "disk" not in places
        and (len(places) < 2 or "cpu" not in places)
    )
    if compile_config is not None and not can_compile:
        logger.warning_once(
            "`compile_config` is set, but the forward pass is not compiled: this needs a static cache, no "
            "offloading, and an accelerator or a CPU."
        )
    if can_compile:
        os.environ["TOKENIZERS_PARALLELISM"] = "0"  # its threads do not survive the forks
        is_flash = is_flash_attention_requested(self.config)
        if is_flash and compile_config is not None and compile_config.fullgraph:
            logger.warning_once(
                "`compile_config.fullgraph` is set to False: flash attention breaks the graph."
            )
            compile_config.fullgraph = False
    return can_compile


@contextmanager
def optimize_model_for_decode(self: Any) -> Iterator[None]:
    """Let experts on accelerators use ``batched_mm``, which is faster for few tokens."""
    implementations = self.get_experts_implementation()
    if self.device.type == "cpu" or "grouped_mm" not in implementations.values():
        yield
        return
    logger.info_once("Decoding with the `batched_mm` experts instead of `grouped_mm`.")
    faster = {"grouped_mm": "batched_mm"}
    self.set_experts_implementation({k: faster.get(v, v) for k, v in implementations.items()})
    try:
        yield
    finally:
        self.set_experts_implementation(implementations)


class Compiled:
    """A compiled forward that is not compiled again for another batch or another filled length."""

    def __init__(self, forward: Callable, cache: Any) -> None:
        self.forward = forward
        self.visible = visible_length(cache)
        if self.visible is not None:
            self.visible.is_coarse = True

    def __call__(self, **inputs: Any) -> Any:
        from torch._dynamo.utils import counters  # takes a second: not for those who do not compile

        for value in inputs.values():
            for tensor in value.values() if isinstance(value, dict) else (value,):
                if isinstance(tensor, Tensor):
                    _mark_sizes(tensor)
        ids = next((inputs[n] for n in IDS if inputs.get(n) is not None), None)
        n_graphs = counters["stats"]["unique_graphs"]
        with nullcontext() if ids is None or len(ids) == 1 else _one_is_not_special():
            outputs = self.forward(**inputs)
        if counters["stats"]["unique_graphs"] != n_graphs:
            gc.collect()  # the compiler leaves cycles behind, and the cache would wait in them
        if self.visible is not None:
            self.visible.close()
        return outputs


def _mark_sizes(tensor: Tensor) -> None:
    """Tell the compiler which sizes of an input differ between calls: rows, keys, and lengths."""
    for dim in {4: (0, 3), 3: (0, 1), 2: (0, 1), 1: (0,)}.get(tensor.ndim, ()):
        if tensor.shape[dim] > 1:  # one row or one token is a graph of its own
            torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _one_is_not_special() -> AbstractContextManager[Any]:
    """Let a graph that was compiled for several rows take a single one."""
    if not hasattr(
        fx_config, "backed_size_oblivious"
    ):  # an older torch: a single row compiles again
        return nullcontext()
    return fx_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
