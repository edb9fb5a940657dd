"""A forward that is compiled once for all batches and lengths, and the kernels of experts in decoding."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config as fx_config

from ..memory.caches.static import visible_length
from ..settings.logs import logger

#: What forward may take tokens as.
IDS = ("decoder_input_ids", "input_ids", "inputs_embeds")


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
        several_rows: Any = nullcontext()
        # A graph for several rows takes a single one, too. An older torch compiles again.
        if ids is not None and len(ids) > 1 and hasattr(fx_config, "backed_size_oblivious"):
            several_rows = fx_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
        with several_rows:
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
