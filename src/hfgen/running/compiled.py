"""A compiled forward: ``torch.compile`` makes one graph of all that a decoding step launches."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx.experimental import _config as fx_config

from ..memory.caches.static import visible_length

#: By number of dimensions of an input, those whose sizes differ between calls: rows, keys, and lengths.
DYNAMIC_DIMS = {4: (0, 3), 3: (0, 1), 2: (0, 1), 1: (0,)}
#: Names of forward's inputs that have a row per row.
IDS = ("decoder_input_ids", "input_ids", "inputs_embeds")


class Compiled:
    """A model's compiled forward, not compiled again for another batch or another filled length."""

    def __init__(self, model: Any, compile_config: Any, cache: Any) -> None:
        compiled = getattr(vars(model).get("_compiled_call"), "_torchdynamo_orig_callable", None)
        if getattr(compiled, "__self__", model) is not model:
            del model._compiled_call  # a copied model has that of the one that it is a copy of
        self.forward = model.get_compiled_call(compile_config)
        self.visible = visible_length(cache)
        if self.visible is not None:
            self.visible.is_coarse = True

    def __call__(self, **inputs: Any) -> Any:
        from torch._dynamo.utils import counters  # takes a second: not for those who do not compile

        for value in inputs.values():
            for tensor in value.values() if isinstance(value, dict) else (value,):
                if isinstance(tensor, torch.Tensor):
                    for dim in DYNAMIC_DIMS.get(tensor.ndim, ()):
                        if tensor.shape[dim] > 1:  # one row or one token is a graph of its own
                            torch._dynamo.maybe_mark_dynamic(tensor, dim)
        ids = next((inputs[n] for n in IDS if inputs.get(n) is not None), None)
        several_rows: Any = nullcontext()
        # A graph for several rows takes a single one, too. An older torch compiles again.
        if ids is not None and len(ids) > 1 and hasattr(fx_config, "backed_size_oblivious"):
            several_rows = fx_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
        n_graphs = counters["stats"]["unique_graphs"]
        with several_rows:
            outputs = self.forward(**inputs)
        if counters["stats"]["unique_graphs"] != n_graphs:
            gc.collect()  # the compiler leaves cycles behind, and the cache would wait in them
        if self.visible is not None:
            self.visible.close()
        return outputs
