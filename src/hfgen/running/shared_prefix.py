"""Forwarding texts that begin alike: the keys and values of a common prefix are computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .. import families
from ..families import CACHE, parameters
from ..memory.caches import layers
from ..memory.caches.dynamic import GrowingCache, upstream_kind
from .prefix import eligibility
from .prefix.radix import bytes_per_token
from .prefix.session import attention_layers, key_values, recording_cache
from .prompt_logits import Body
from .views import view_of_all


def may_share(model: Any, max_length: int) -> bool:
    """Whether texts of up to ``max_length`` tokens may continue the keys and values of a prefix.

    The model has to take positions, since shorter prefixes are padded on the left. What else rules it
    out also rules out a ``PrefixCache``.
    """
    if not model._supports_default_dynamic_cache() or model.is_remote_code():
        return False
    cache = GrowingCache(config=model.config.get_text_config(decoder=True))
    kinds = {upstream_kind(layer) for layer in cache.layers}
    return (
        bool(kinds)
        and kinds <= {*eligibility.CUTTABLE}
        and {CACHE, "position_ids"} <= parameters(model.forward)
        and not families.counts_positions_of_ids(model)
        and not families.selects_keys(model)
        and not eligibility.is_length_dependent(model, max_length)
        and eligibility.of_model(model) is None
    )


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Keys and values: the last ``lengths (rows,)`` columns of each row are tokens, others are padding."""

    cache: Any
    lengths: Tensor

    @property
    def bytes_per_token(self) -> int:
        return bytes_per_token(key_values(attention_layers(self.cache)))

    def expand(self, model: Any, rows: Sequence[int], lengths: Sequence[int], n: int) -> Prefixes:
        """A copy of the first ``lengths`` columns of ``rows``, to be continued by up to ``n`` tokens."""
        new_lengths, width = torch.tensor(lengths), max(lengths)
        cache, index = recording_cache(model, width + n), torch.tensor(rows)[:, None]
        columns = (torch.arange(width) - (width - new_lengths)[:, None]).clamp(min=0)
        copies, layers_ = attention_layers(cache), attention_layers(self.cache)
        for copy, layer in zip(copies, layers_, strict=True):
            at = index.to(layer.keys.device), columns.to(layer.keys.device)
            copy.update(*(s[at[0], :, at[1]].transpose(1, 2) for s in (layer.keys, layer.values)))
        return Prefixes(cache, new_lengths)

    def inputs(self, sizes: Tensor) -> dict[str, Tensor]:
        """Mask and positions for texts of ``sizes (rows,)`` tokens behind them; none without padding."""
        width, n = int(self.lengths.max()), int(sizes.max())
        if bool((self.lengths == width).all()):
            return {}
        columns, starts = torch.arange(width + n), (width - self.lengths)[:, None]
        last = int((self.lengths + sizes).max()) - 1  # the model may have no more positions
        positions = (columns[width:] - starts).clamp(max=last)
        return {"attention_mask": (columns >= starts).long(), "position_ids": positions}


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The results of a forward of texts: ``ids (rows, length)`` are padded on the right."""

    ids: Tensor
    #: Returns logits ``(n, vocab)`` of the positions ``rows (m,)``, ``columns (m,)``, some after another.
    logits: Callable[[Tensor, Tensor], Iterator[Tensor]]
    prefixes: Prefixes | None


@torch.no_grad()
def forward(
    model: Any,
    texts: Sequence[Sequence[int]],
    prefixes: Prefixes | None = None,
    keeps: bool = False,
) -> Forwarded:
    """Forward the ids of ``texts`` behind ``prefixes``; ``keeps``: keys and values, as prefixes of others."""
    sizes = torch.tensor([len(text) for text in texts])
    ids = pad_sequence([torch.tensor(text) for text in texts], True, 0).to(model.device)
    n = ids.shape[1]
    if prefixes is None and keeps:
        prefixes = Prefixes(recording_cache(model, n), torch.zeros_like(sizes))
    kwargs: dict[str, Any] = {"input_ids": ids, "use_cache": prefixes is not None}
    if prefixes is not None:
        kwargs |= {name: t.to(ids.device) for name, t in prefixes.inputs(sizes).items()}
        kwargs[CACHE] = prefixes.cache
    if model._supports_logits_to_keep():
        kwargs["logits_to_keep"] = 0
    model = view_of_all(model)
    if (body := Body.of_model(model)) is not None:
        body.view()(**kwargs, return_dict=True)
        if not body.covers(ids):
            body = None
            if prefixes is not None:
                layers.roll_back(prefixes.cache, n)
    logits: Any = None if body is not None else model(**kwargs, return_dict=True).logits
    if prefixes is not None:
        prefixes = Prefixes(prefixes.cache, prefixes.lengths + n)

    def logits_at(rows: Tensor, columns: Tensor) -> Iterator[Tensor]:
        return iter([logits[rows, columns]]) if body is None else body.logits_at(ids, rows, columns)

    return Forwarded(ids, logits_at, prefixes)
