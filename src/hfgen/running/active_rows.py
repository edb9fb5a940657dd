"""``drop_finished=True``: finished rows leave the batch while others continue.

Only the forwards get narrower. Ids, processors, criteria and draws are still those of all rows. It is
not the default, since with fewer rows a kernel's logits can differ in the last digits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
from transformers.utils import ModelOutput

from .. import families
from ..memory.batch import Batch, map_outputs
from ..memory.caches import is_upstreams, layers
from ..state.run import Run
from .row_states import has_list_of_rows, have_changed, is_row_wise, module_tensors

#: Rows leave when the batch can become smaller by that share; each time, the cache is copied.
WORTHWHILE = 1 / 8


class ActiveRows:
    """Which rows are forwarded. ``index (active,)``, ascending; ``None`` while all are."""

    def __init__(self, run: Run) -> None:
        self.may_leave = True
        self.n_rows = self.n_active = len(run.ids)
        self.states = module_tensors(run.model)
        self.index: Tensor | None = None

    def ids(self, run: Run) -> Tensor:
        """The rows of ``run.ids`` that are forwarded."""
        return run.ids if self.index is None else run.ids[self.index]

    def widen(self, run: Run, model_outputs: ModelOutput) -> None:
        """Give a forward's outputs all rows, in place: zeros for those that have left."""
        if self.index is None:
            return
        index, n_rows = self.index, self.n_rows

        def widen(states: Tensor, dim: int) -> Tensor:
            if states.shape[dim] != len(index):
                return states
            shape = [*states.shape[:dim], n_rows, *states.shape[dim + 1 :]]
            return states.new_zeros(shape).index_copy_(dim, index.to(states.device), states)

        map_outputs(model_outputs, widen, families.rows_of_states(run.model))

    def keep(self, run: Run, is_open: Tensor, n_open: int) -> None:
        """Take all rows but the ``n_open`` ones of ``is_open (rows,)`` out of the batch."""
        if not self.may_leave or n_open == 0 or n_open > self.n_active * (1 - WORTHWHILE):
            return
        cache = families.given_cache(run.model_kwargs)
        if self.index is None and not self.can_leave(run, cache):
            self.may_leave = False
            return
        index = is_open.nonzero().flatten()
        chosen = index if self.index is None else torch.searchsorted(self.index, index)
        batch = Batch(self.ids(run), run.model_kwargs)
        batch.take(chosen)
        run.model_kwargs = batch.model_kwargs
        run.rows_have_left = True
        self.index, self.n_active = index, n_open

    def can_leave(self, run: Run, cache: Any) -> bool:
        """Whether rows are only in tensors, and in a cache from which they can be taken."""
        model, model_kwargs = run.model, run.model_kwargs
        plain = (Tensor, ModelOutput, bool, int, float, str, type(None))
        others = {*model_kwargs} - {*MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL}
        values = [model_kwargs[name] for name in others]
        if not all(value is cache or isinstance(value, plain) for value in values):
            return False
        if hasattr(model, "_reorder_cache") or has_list_of_rows(model_kwargs, self.n_rows):
            return False
        if not is_row_wise(model) or have_changed(model, self.states):
            return False
        if not isinstance(cache, Cache):
            return cache is None
        # A registered kind of cache has declared what its layers support.
        is_registered = not is_upstreams(run.config.cache_implementation)
        return layers.count(cache) in (None, self.n_rows) and (
            is_registered or not (layers.is_static(cache) or layers.is_foreign(cache))
        )

    def local(self, rows: Tensor) -> Tensor:
        """Map ``rows (rows,)``, numbers among all rows, to numbers among the active ones."""
        if self.index is None:
            return rows
        return torch.searchsorted(self.index, rows[self.index].to(self.index.dtype))
