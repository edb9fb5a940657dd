"""Checks of the prompt: its shape, its ids, its length, and the cache that it continues."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from ... import families
from ...families import CACHE, parameters
from ...memory import caches
from ...memory.checks import check_cache
from ...settings.fields import FIELDS
from ...settings.kinds import tokens_in
from ...settings.logs import logger
from ...state.call import Call, Prompt

#: Fields that ask for log-probabilities.
LOGPROBS = ("logprobs", "logprob_token_ids", "logprobs_support", "prompt_logprobs")
#: Fields with token ids that the vocabulary has to have.
TOKEN_FIELDS = [(name, row) for name, row in FIELDS.items() if row.outside is not None]


class PromptError(ValueError, IndexError, RuntimeError):
    """A tensor that the model cannot take: upstream raises any of these from within a forward."""


def check_prompt(model: Any, call: Call, prompt: Prompt) -> None:
    """Raise for a prompt that the model cannot take, or a cache that does not fit it.

    ``ValueError``: nothing to forward, mask of another shape. ``PromptError``: other wrong tensors.
    ``IndexError``: ids outside of the vocabulary, prompt longer than the learned positions.
    """
    caches.check_config(model, call)
    model_kwargs, main, name = prompt.model_kwargs, prompt.main_input, prompt.main_input_name
    if prompt.batch_size == 0:
        raise _wrong_shape(str(name), main, "hold at least one row", ValueError)
    is_text, table = families.takes_only_text(model), families.token_embedding(model)
    is_read = model_kwargs.get("encoder_outputs") is None
    has_ids = name == "input_ids" and is_read
    try:
        if has_ids and (is_text or main.is_floating_point() or main.ndim != 2):
            _check_ids("input_ids", main, table)
        elif name == "inputs_embeds" and is_read:
            width = main.shape[-1] if table is None else table.embedding_dim
            if main.ndim != 3 or main.shape[2] != width:
                raise _wrong_shape("inputs_embeds", main, f"be (batch, length, {width})")
        if model_kwargs.get("attention_mask") is not None:
            _check_mask(model, call, prompt)
        if model.config.is_encoder_decoder and model_kwargs.get("decoder_input_ids") is not None:
            _check_decoder_ids(model, prompt)
        has_positions = model_kwargs.get("position_ids") is not None
        if is_text and has_positions and not model.config.is_encoder_decoder:
            _check_position_ids(model, call, prompt)
    except (ValueError, IndexError):
        if not families.has_foreign_inputs(model):
            raise
    _check_fields_with_tokens(model, call, prompt)
    if is_text:
        _check_negative_prompt(call, prompt, table)
    if model_kwargs.get(families.cache_argument(model)) is not None:
        check_cache(model, call, prompt)
    for config, field in itertools.product(call.configs, LOGPROBS):
        if getattr(config, field, None) is not None:
            _check_logprobs(model, call, prompt)
            break
    if name != "input_ids" or main.ndim != 2 or not is_read:
        return
    is_continued = families.given_cache(model_kwargs) is not None
    if main.shape[1] == 0 and (model.config.is_encoder_decoder or not is_continued):
        raise ValueError(
            f"`input_ids` has to hold at least one token per row, but has shape {tuple(main.shape)}. "
            f"Pass a prompt, or leave `input_ids` out to start from `bos_token_id` (which is "
            f"{call.config.bos_token_id})."
        )
    positions = getattr(model.config, "max_position_embeddings", None)
    if is_text and isinstance(positions, int) and main.shape[1] > positions:
        _check_length(model, main.shape[1], positions)


def _wrong_shape(
    name: str, tensor: torch.Tensor, what: str, error: type[Exception] = PromptError
) -> Exception:
    return error(f"`{name}` has to {what}, but has shape {tuple(tensor.shape)}.")


def _check_ids(name: str, ids: torch.Tensor, table: nn.Embedding | None) -> None:
    """Ids ``(batch, length)`` of the ``table``'s vocabulary; without one, anything may be meant."""
    if table is None:
        return
    if ids.ndim != 2:
        raise _wrong_shape(name, ids, "be (batch, length)")
    if ids.dtype not in (torch.long, torch.int):
        raise PromptError(
            f"`{name}` has to hold token ids, int64 or int32, but holds {ids.dtype}. Is it a mask?"
        )
    if ids.numel() == 0 or ids.device.type == "meta":
        return
    lowest, highest = torch.stack(ids.aminmax()).tolist()
    if lowest < 0 or highest >= table.num_embeddings:
        row, column = ((ids < 0) | (ids >= table.num_embeddings)).nonzero()[0].tolist()
        raise IndexError(
            f"`{name}[{row}, {column}]` is {int(ids[row, column])}, but the model's vocabulary has "
            f"the ids 0 to {table.num_embeddings - 1}. Is the tokenizer this model's?"
        )


def _check_mask_of(name: str, ids: torch.Tensor, mask_name: str, mask: torch.Tensor | None) -> None:
    if mask is not None and (mask.ndim != 2 or len(mask) != len(ids)):
        raise _wrong_shape(mask_name, mask, f"have the shape of `{name}`, {tuple(ids.shape)}")


def _check_negative_prompt(call: Call, prompt: Prompt, table: nn.Embedding | None) -> None:
    ids: Any = call.request.negative_prompt_ids
    name = "negative_prompt_ids"
    if all(config.guidance_scale in (None, 1) for config in call.configs):
        return
    if ids is None:
        if (own := prompt.model_kwargs.get("input_ids")) is not None and own.shape[1] == 0:
            raise PromptError(
                "`guidance_scale` needs `negative_prompt_ids` or `input_ids` beside `inputs_embeds`: without, there "
                "is no token for the unconditional branch to begin with."
            )
        return
    _check_ids(name, ids, table)
    n_rows = prompt.batch_size * max(call.config.num_beams, call.config.num_return_sequences)
    if ids.numel() == 0 or n_rows % len(ids):
        what = f"hold one row, or one for each of {prompt.batch_size} prompts"
        raise _wrong_shape(name, ids, what)
    mask_name = "negative_prompt_attention_mask"
    _check_mask_of(name, ids, mask_name, getattr(call.request, mask_name))


def _check_decoder_ids(model: Any, prompt: Prompt) -> None:
    name, rows = "decoder_input_ids", prompt.batch_size
    ids, mask = prompt.model_kwargs[name], prompt.model_kwargs.get("decoder_attention_mask")
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    if (table := families.token_embedding(decoder)) is None:
        return
    _check_ids(name, ids, table)
    if len(ids) != rows or ids.shape[1] == 0:
        raise _wrong_shape(name, ids, f"hold {rows} rows of tokens, one per row of the input")
    _check_mask_of(name, ids, "decoder_attention_mask", mask)


def _check_position_ids(model: Any, call: Call, prompt: Prompt) -> None:
    """Positions ``(1 or batch, at least length)``; with a filled cache they may be fewer."""
    positions = prompt.model_kwargs["position_ids"]
    ids, table = prompt.main_input, families.position_table(model)
    is_flat = positions.ndim == 1 and table is not None  # looked up, one dimension will do
    is_short = positions.shape[-1:] < ids.shape[1:2]
    is_continued = families.given_cache(prompt.model_kwargs) is not None
    is_repeated = max(call.config.num_beams, call.config.num_return_sequences) > 1
    n_rows = (prompt.batch_size,) if is_repeated else (1, prompt.batch_size)
    fits = positions.ndim == 2 and positions.shape[0] in n_rows and positions.dtype != torch.bool
    if not (fits or is_flat) or (is_short and not is_continued):
        what = f"be (batch, length), {tuple(ids.shape[:2])} here"
        raise _wrong_shape("position_ids", positions, what)
    if table is None or positions.device.type == "meta" or positions.numel() == 0:
        return
    last, (lowest, highest) = families.n_positions(table) - 1, positions.aminmax()
    if positions.is_floating_point() or lowest < 0 or highest > last:
        raise PromptError(
            f"`position_ids` has to hold integers from 0 to {last}, but holds {positions.dtype} from "
            f"{lowest} to {highest}."
        )


def _check_fields_with_tokens(model: Any, call: Call, prompt: Prompt) -> None:
    model_kwargs = prompt.model_kwargs
    size, idle = families.head_width(model), set()
    if size is None:
        return
    is_encoder_decoder = model.config.is_encoder_decoder
    first = model_kwargs.get("decoder_input_ids") if is_encoder_decoder else prompt.main_input
    if first is not None and first.shape[1] != 1:  # without ids: the start token
        idle.add("forced_bos_token_id")
    if not is_encoder_decoder:
        idle.add("decoder_start_token_id")
    for config, (name, row) in itertools.product(call.configs, TOKEN_FIELDS):
        if (value := getattr(config, name, None)) is None or name in idle:
            continue
        # Upstream indexes with a forced BOS, and an index may count from the end.
        least = -size if name == "forced_bos_token_id" else 0
        outside = [token for token in tokens_in(value) if not least <= token < size]
        if outside and row.outside is not None:
            raise row.outside(
                f"`{name}` has the token {outside[0]}, but the model's vocabulary has the ids 0 to "
                f"{size - 1}."
            )
    for config in call.configs if (call.config.num_beams or 1) > 1 else ():
        ends = [getattr(config, name, None) for name in ("eos_token_id", "stop_token_ids")]
        n_ends = sum(1 for value in ends if value is not None for _ in tokens_in(value))
        if n_ends >= size:
            raise ValueError(
                f"`eos_token_id` and `stop_token_ids` have {n_ends} ids, and the vocabulary {size}: beams "
                "need a token that ends none."
            )
    for config, name in itertools.product(call.configs, ("logprobs", "prompt_logprobs")):
        if (count := getattr(config, name, None)) is not None and count > size:
            raise ValueError(
                f"`{name}`={count} asks for more tokens than the model's vocabulary has, which are "
                f"{size}; -1 asks for all."
            )
    start = call.config.decoder_start_token_id
    if is_encoder_decoder and isinstance(start, list) and len(start) != prompt.batch_size:
        raise ValueError(
            f"`decoder_start_token_id` has to be one id or {prompt.batch_size}, one per row, but has "
            f"{len(start)}."
        )


def _check_logprobs(model: Any, call: Call, prompt: Prompt) -> None:
    """Raise for log-probabilities that nobody would return, or of a prompt that is not forwarded."""
    logprob_fields = {f for f in LOGPROBS for c in call.configs if getattr(c, f, None) is not None}
    if families.makes_its_own_output(model):
        raise ValueError(
            f"`{min(logprob_fields)}` is an attribute of hfgen's output, but {type(model).__name__}.generate() "
            "returns one of its own. Leave it out."
        )
    if "prompt_logprobs" not in logprob_fields:
        return
    cache = families.given_cache(prompt.model_kwargs)
    try:
        is_filled = cache is not None and int(cache.get_seq_length()) > 0
    except (AttributeError, ValueError):  # of a kind that does not count tokens
        is_filled = True
    if prompt.main_input_name == "inputs_embeds" and not model.config.is_encoder_decoder:
        reason = "the prompt came as `inputs_embeds`. Pass `input_ids`"
    elif is_filled:
        reason = f"`{CACHE}` holds tokens already, whose logits are not kept. Leave it out"
    elif call.mode_kwargs.get("synced_gpus"):
        reason = "with `synced_gpus` all devices have to forward as often. Leave one of them out"
    else:
        return
    raise ValueError(f"`prompt_logprobs` need a prompt of tokens that is forwarded; {reason}.")


def _check_mask(model: Any, call: Call, prompt: Prompt) -> None:
    mask, main = prompt.model_kwargs["attention_mask"], prompt.main_input
    name = prompt.main_input_name
    if name not in ("input_ids", "inputs_embeds"):
        return
    if getattr(prompt.model_kwargs.get("encoder_outputs"), "attention_mask", None) is not None:
        return  # an encoder with a mask of its own adds to the tokens: UDOP, the parts of an image
    if mask.ndim < 2 or (mask.ndim > 2 and name != "inputs_embeds"):
        raise _wrong_shape("attention_mask", mask, "be (batch, length)")
    if mask.ndim != 2 or main.ndim < 2:
        return
    expected, shape = tuple(main.shape[:2]), tuple(mask.shape)
    if families.given_cache(prompt.model_kwargs) is None:
        fits = shape == expected
    else:  # the mask also covers what is in the cache
        fits = shape[0] == expected[0] and shape[1] >= expected[1]
    if mask.device.type == "meta":
        return
    if not fits and not _is_idle(model, call.config, prompt, mask):
        what = f"have the shape of `{name}`, {expected}"
        raise _wrong_shape("attention_mask", mask, what, ValueError)
    if mask.numel() == 0:
        return
    lowest, highest = mask.aminmax()
    is_counted = not model.config.is_encoder_decoder and (lowest < 0 or highest > 1)
    if lowest != lowest or (is_counted and families.position_table(model) is not None):
        raise PromptError(
            "`attention_mask` has to hold ones and zeros, since positions are counted by it, but "
            f"holds {lowest} to {highest}."
        )


def _is_idle(model: Any, config: Any, prompt: Prompt, mask: torch.Tensor) -> bool:
    """Whether ``mask`` is all ones, so that it is dropped, and positions that are counted by it fit."""
    if not (mask == 1).all():
        return False
    counts = not model.config.is_encoder_decoder and "position_ids" in parameters(model.forward)
    if not counts or prompt.model_kwargs.get("position_ids") is not None:
        return True
    rows, length = prompt.main_input.shape[:2]
    is_one_row = len(mask) == 1 and max(config.num_beams, config.num_return_sequences) == 1
    return (len(mask) == rows or is_one_row) and (mask.shape[1] == 1 or mask.shape[1] >= length)


def _check_length(model: Any, length: int, positions: int) -> None:
    """Raise for more tokens than there are learned positions; warn beyond those of rotary ones."""
    message = (
        f"`input_ids` has {length} tokens per row, but {type(model).__name__} has {positions} "
        "positions (`config.max_position_embeddings`). Shorten the prompt"
    )
    table = families.position_table(model)
    if table is not None and families.n_positions(table) < length:
        raise IndexError(f"{message}.")
    if "default" in (getattr(module, "rope_type", 0) for module in families.modules_of(model)):
        logger.warning_once(
            f"{message}, or set rotary scaling: quality drops beyond the positions of the training."
        )
