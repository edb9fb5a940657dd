"""The arguments of a forward pass, and how they change from step to step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.generation.utils import ALL_CACHE_NAMES, MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
from transformers.masking_utils import create_masks_for_generate
from transformers.utils import ModelOutput

from .. import families
from ..families import CACHE, parameters
from ..memory.batch import Batch
from ..memory.caches.growing import n_writes
from ..settings.logs import logger
from ..state.call import ModelKwargs
from ..state.run import Run

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")

#: Inputs of images, videos and sound that are not encoded yet.
MEDIA = frozenset(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL) - {"mm_encoder_outputs"}

#: What forward never gets, and what it does not get behind the prefill.
NEVER_PASSED = frozenset({"labels"})
DROPPED = NEVER_PASSED | set(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)


def resized(run: Run | Batch, n_new: int) -> ModelKwargs:
    """A copy of the model kwargs for ids that are ``n_new`` longer, or shorter if that is negative."""
    model_kwargs = dict(run.model_kwargs)
    if n_new == 0:
        return model_kwargs
    fillers, grows = _fillers(run.is_encoder_decoder), n_new > 0
    for name, fill in fillers.items():
        if (tensor := model_kwargs.get(name)) is not None:
            model_kwargs[name] = grow(tensor, n_new, fill) if grows else tensor[..., :n_new]
    if any(name.endswith("_mask") and model_kwargs.get(name) is not None for name in fillers):
        for name in ("cross_attention_mask", "image_attention_mask"):  # (rows, length, …)
            tensor = model_kwargs.get(name)
            if tensor is not None and tensor.shape[1]:
                more = tensor[:, -1:].expand(-1, max(n_new, 0), *tensor.shape[2:])
                # Idefics keeps the last column alone, by which later ones are made.
                n_left = max(tensor.shape[1] + n_new, 1)
                model_kwargs[name] = torch.cat([tensor, more], dim=1)[:, :n_left]
    return model_kwargs


def prepare_inputs_for_generation(
    self: Any,
    input_ids: Tensor,
    next_sequence_length: int | None = None,
    cache: Cache | None = None,
    attention_mask: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    is_first_iteration: bool | None = False,
    **kwargs: Any,
) -> dict[str, Any]:
    """The arguments of the next forward.

    ``input_ids (rows, length)`` and all that has a column per token are cut to the last
    ``next_sequence_length``. Embeddings take the place of ids in the first forward only. For a
    compilable cache the mask becomes four-dimensional. Other kwargs are passed on.
    """
    families.rename_cache(kwargs, stacklevel=3)
    named = kwargs.pop(CACHE, None)  # another name than the parameter's, or a former one
    if not families.IS_5_24 and not isinstance(cache, Cache | None):
        kwargs["cache"], cache = cache, named  # an argument of the model's own
    cache = named if cache is None else cache
    is_encoder_decoder = self.config.is_encoder_decoder
    prefix = "decoder_" if is_encoder_decoder else ""
    ids_name, positions_name = prefix + "input_ids", prefix + "position_ids"

    is_embedded = inputs_embeds is not None and is_first_iteration and not is_encoder_decoder
    tensor: Any = inputs_embeds if is_embedded else input_ids
    # Clones, so that strides are the same at every step whatever the ids are a view of.
    tensor = tensor[:, -(next_sequence_length or 0) :]
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    inputs = {ids_name: None, "inputs_embeds": tensor} if is_embedded else {ids_name: tensor}
    batch_size, length = tensor.shape[:2]

    if cache is not None:
        inputs[CACHE] = cache
    for name in (positions_name, *TOKEN_TYPES):
        if (value := kwargs.pop(name, None)) is not None:
            if value.shape[-1] != length:
                value = value[..., -length:].clone(memory_format=torch.contiguous_format)
            inputs[name] = value

    encoder_mask = attention_mask if is_encoder_decoder else None
    mask = kwargs.pop("decoder_attention_mask", None) if is_encoder_decoder else attention_mask
    if (
        isinstance(cache, Cache)
        and cache.is_compileable
        and not (families.IS_5_24 and all(cache.is_linear))
        and (mask is None or mask.ndim == 2)
    ):
        create_masks = getattr(self, "create_masks_for_generate", create_masks_for_generate)
        mask = create_masks(
            config=self.config,
            # Only shape, dtype and device of the embeddings are read.
            inputs_embeds=input_ids.new_empty((batch_size, length, 0), dtype=self.dtype),
            attention_mask=mask,
            **{CACHE: cache},
            position_ids=inputs.get(positions_name),
            # Read by the models that have their own create_masks_for_generate.
            block_sequence_ids=inputs.get("block_sequence_ids"),
            token_type_ids=inputs.get("token_type_ids"),
            mm_token_type_ids=inputs.get("mm_token_type_ids"),
            is_first_iteration=is_first_iteration,
        )
        if isinstance(mask, dict):
            mask = {
                kind: m.contiguous() if isinstance(m, Tensor) else m for kind, m in mask.items()
            }
        elif isinstance(mask, Tensor):
            mask = mask.contiguous()
    if mask is not None:
        inputs[prefix + "attention_mask"] = mask
    if encoder_mask is not None:
        inputs["attention_mask"] = encoder_mask

    has_cached_media = not is_first_iteration and kwargs.get("use_cache", True)
    for name, value in kwargs.items():
        if name not in inputs and name not in (DROPPED if has_cached_media else NEVER_PASSED):
            inputs[name] = value

    if self.is_remote_code() and "cache_position" in parameters(self.forward):
        logger.warning_once(
            f"{type(self).__name__} is remote code whose forward takes `cache_position`, which "
            "transformers no longer has. It is passed for now; ask the author to remove it."
        )
        past = 0 if cache is None else cache.get_seq_length()
        inputs["cache_position"] = torch.arange(length, device=input_ids.device) + past

    # Ids may live on the CPU while the model is elsewhere; what is forwarded follows the model.
    fed = inputs.get("inputs_embeds", inputs[ids_name])
    if fed is not None and fed.device != (device := self.device) and device.type != "meta":
        inputs = families.moved(inputs, device)
    return inputs


_signature = inspect.signature(prepare_inputs_for_generation)
_parameters = _signature.parameters.values()
prepare_inputs_for_generation.__signature__ = _signature.replace(  # type: ignore[attr-defined]
    parameters=[p.replace(name=CACHE) if p.name == "cache" else p for p in _parameters]
)


def update_model_kwargs_for_generation(
    self: Any,
    outputs: ModelOutput,
    model_kwargs: ModelKwargs,
    is_encoder_decoder: bool = False,
    num_new_tokens: int = 1,
) -> ModelKwargs:
    """Take the cache from ``outputs``; add ``num_new_tokens`` to mask, positions and token types."""
    # Since transformers 5.24, models with caches of other names take those themselves.
    for name in (CACHE,) if families.IS_5_24 else ALL_CACHE_NAMES:
        if name in outputs:
            # XLNet and Reformer return their caches under names that they do not take them by.
            is_renamed = name in ("past_buckets_states", "mems")
            model_kwargs[CACHE if is_renamed else name] = getattr(outputs, name)
            break

    for name, fill in _fillers(is_encoder_decoder).items():
        if (tensor := model_kwargs.get(name)) is None:
            continue
        if name == "token_type_ids" and num_new_tokens != 1:
            model_kwargs[name] = torch.cat([tensor, tensor[:, -num_new_tokens:]], dim=-1)
        else:
            model_kwargs[name] = grow(tensor, num_new_tokens, fill)
    return model_kwargs


# ---------------------------------------------------------------- columns that grow

#: Spare columns of a new buffer, at least; a buffer doubles when it is full.
SPARE_COLUMNS = 128

#: ``fill(tensor, n)``: the ``n`` columns after ``tensor``, the same at once or one after the other.
Fill = Callable[[Tensor, int], Tensor]

_BUFFER = "_hfgen_buffer"


def grow(tensor: Tensor, count: int, fill: Fill) -> Tensor:
    """``tensor`` with ``count`` more columns in its last dimension."""
    length = tensor.shape[-1] + count
    buffer, version = getattr(tensor, _BUFFER, (None, None))
    if buffer is None or buffer.shape[-1] < length or version != n_writes(tensor):
        spare = count + max(SPARE_COLUMNS, tensor.shape[-1])
        buffer = torch.cat([tensor, fill(tensor, spare)], dim=-1)
    view = buffer[..., :length]
    setattr(view, _BUFFER, (buffer, n_writes(view)))
    return view


def count_on(tensor: Tensor, count: int) -> Tensor:
    """Consecutive numbers after the last column, for positions."""
    steps = torch.arange(1, count + 1, dtype=tensor.dtype, device=tensor.device)
    return tensor[..., -1:] + steps


@functools.cache
def _fillers(is_encoder_decoder: bool) -> dict[str, Fill]:
    """The arguments with a column per token, and how each goes on after the last one."""
    prefix = "decoder_" if is_encoder_decoder else ""
    return {
        prefix + "attention_mask": lambda mask, n: mask.new_ones((len(mask), n)),
        prefix + "position_ids": count_on,
        "token_type_ids": lambda types, n: types[..., -1:].expand(*types.shape[:-1], n),
        # What is generated is text.
        "mm_token_type_ids": lambda types, n: types.new_zeros((len(types), n)),
    }
