"""Tests whether rows of a model may share a batch: whether it hides padding, by a forward pass, since no config tells."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .. import families
from ..memory.batch import Batch
from ..memory.caches.layers import layers_of
from .executor import next_token
from .prefix import eligibility
from .row_states import have_changed, module_tensors
from .views import view_of_all

#: How many columns of padding are tried.
N_COLUMNS = 4

#: Logits may differ by this share of their range, or by a few roundings, or as they do for two rows.
TOLERANCE, ROUNDINGS, TIMES_OF_TWO_ROWS = 1e-5, 4, 8


class MayJoin:
    """Whether rows of a ``model`` may be in one batch. What is not known is tried out when it matters."""

    def __init__(self, model: Any) -> None:
        self.model = model
        #: Whether rows may have padding before them, by ``False``, and between their tokens, by ``True``.
        self.hides: dict[bool, bool] = {}

    def __call__(self, batch: Batch, other: Batch, longest: int, *, between: bool = False) -> bool:
        """Whether the rows of two batches, which end with ``longest`` tokens at most, may be in one.

        ``between``: rows get padding between their tokens.
        """
        if eligibility.is_length_dependent(self.model, longest):
            return False  # other rows would change how positions are rotated
        if batch.ids.shape[1] == other.ids.shape[1] and not between:
            return True
        return self._hides(batch, False) and (not between or self._hides(batch, True))

    def _hides(self, batch: Batch, between: bool) -> bool:
        if between not in self.hides:
            with suppress(ValueError):
                self.hides[between] = hides_padding(self.model, batch, between=between)
        return self.hides.get(between, False)


@torch.no_grad()
def hides_padding(model: Any, batch: Batch, *, between: bool = False) -> bool:
    """Whether a row gets the same logits with padding before it, or ``between`` its tokens, as without.

    It does not where positions are counted by the length of the cache (BART), or states are elsewhere.
    ``batch``: rows that have begun, which stay as they are. Costs a copy of a row, and some forwards of one
    token. Raises ``ValueError`` if rows cannot join: see ``Batch.append``.
    """
    if families.selects_keys(model):  # not so until there are more keys than are selected
        return False
    positions = "decoder_position_ids"
    if positions in families.parameters(model.forward) and positions not in batch.model_kwargs:
        return False  # the length of the cache counts; in bfloat16 that may look like rounding
    cache = families.given_cache(batch.model_kwargs)
    # Layers of states do not say whether they are initialised.
    holds_rows = any(getattr(layer, "is_initialized", True) for layer in layers_of(cache))
    if isinstance(cache, Cache) and not holds_rows:
        return False  # the model ignores its cache (OpenAI GPT), and reads the padding at each step
    row = copy.deepcopy(batch, {id(model): model})
    row.model = model = view_of_all(model)
    if len(row) > 1:
        row.take(torch.tensor([0]))
    # Of equal tokens, attention gives the mean at any distance.
    row.ids[:, -1] = _unlike(model, row.ids)
    longer, twice = (copy.deepcopy(row, {id(model): model}) for _ in range(2))
    twice.append(row)
    before = module_tensors(model)
    for _ in range(N_COLUMNS):
        _decode(longer)
    if have_changed(model, before):
        return False  # a module remembers rows
    if between:
        _hide_newest(longer, row)
    else:
        longer.append(row)
    padded, beside, alone = (_decode(rows)[-1] for rows in (longer, twice, row))
    is_finite = alone.isfinite()
    if not torch.equal(is_finite, padded.isfinite()):
        return False  # a mask of float64's smallest numbers overflows (ProphetNet)
    scale = float(alone[is_finite].max() - alone[is_finite].min())
    noise = float((beside - alone)[is_finite].abs().max())
    share = max(TOLERANCE, ROUNDINGS * torch.finfo(model.dtype).eps)
    allowed = max(TIMES_OF_TWO_ROWS * noise, share * scale)
    return bool((padded - alone)[is_finite].abs().max() <= allowed)


def _unlike(model: Any, ids: Tensor) -> int:
    """A token that is not among ``ids``, and has no position or features of its own."""
    embedding, others = families.token_embedding(model), {*ids.flatten().tolist()}
    if embedding is None:
        return int(ids[0, -2:][0])
    others |= {families.position_pad(model), *families.placeholder_tokens(model)}
    n = embedding.num_embeddings
    return next((token for token in range(n // 2, n) if token not in others), int(ids[0, -2:][0]))


def _hide_newest(longer: Batch, row: Batch) -> None:
    """Make what ``longer`` has more than ``row`` a gap in the cache before the newest token of ``row``."""
    length, kwargs = row.ids.shape[1], longer.model_kwargs
    longer.ids[:, -1] = row.ids[:, -1]
    mask = kwargs.get("attention_mask")
    mask = torch.ones_like(longer.ids) if mask is None else mask.clone()
    mask[:, length - 1 : -1] = 0
    kwargs["attention_mask"] = mask
    if (positions := kwargs.get("position_ids")) is not None:
        kwargs["position_ids"] = positions - (longer.ids.shape[1] - length)


def _decode(batch: Batch) -> Tensor:
    """The logits ``(rows, vocab)`` of the next token; the likeliest one is added."""
    model = batch.model
    outputs = next_token(batch, model.__call__)
    logits: Tensor = outputs.logits[:, -1].float()
    batch.model_kwargs = model._update_model_kwargs_for_generation(
        outputs, batch.model_kwargs, is_encoder_decoder=model.config.is_encoder_decoder
    )
    newest = logits.argmax(dim=-1, keepdim=True).to(batch.ids.device)
    batch.ids = torch.cat([batch.ids, newest], dim=1)
    return logits
