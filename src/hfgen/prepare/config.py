"""Stage 1: the config values of the call, its decoding mode, and its maximum length.

The only module, with ``rows``, that writes to a generation config, and only to private copies.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import torch
from transformers import GenerationConfig

from .. import families
from ..decoding.modes import MODES
from ..memory import caches
from ..settings import vllm
from ..settings.fields import FIELDS, OWN_FIELDS
from ..settings.kinds import is_zero
from ..settings.logs import logger
from ..state.call import Call, ModelKwargs, Prompt, Request
from . import rows, validate
from .generation_config import taking_own_values

#: Arguments of ``generate`` that come among its ``kwargs`` and are neither a field nor the model's.
NOT_THE_MODELS = ("prefix_cache", "trust_remote_code", "cancel", "interventions", "record")

#: Fields that count tokens of a sequence.
COUNTS = [name for name, row in FIELDS.items() if row.within_sequence]

#: Fields that an assistant's own config may set, where nobody else does: they get no default.
WITHOUT_DEFAULTS = {name for name, row in FIELDS.items() if not row.has_default}

#: Types of values that stay as they are.
PLAIN = {type(None), bool, int, float, str}
#: Fields in which otherwise equal calls differ, and the number below which no other field depends on them.
FREE = {"max_new_tokens": vllm.TO_LAST_POSITION, "seed": 2**63}

#: Merged configs by what they were made of, and the kwargs that are in them.
_known: dict[Any, tuple[GenerationConfig, Collection[str]]] = {}
MAX_KNOWN = 256


def resolve(model: Any, request: Request) -> tuple[Call, ModelKwargs]:
    """Return the call, and the kwargs that belong to the model and not to the config.

    Precedence: kwargs, then the passed config, then the model's, then the library's defaults.
    """
    if "stop" in request.kwargs:
        request = rows.with_stop_strings(request)
    caller_config = request.generation_config
    values = [caller_config, *request.kwargs.values()]
    if isinstance(caller_config, GenerationConfig):
        values += vars(caller_config).values()
    split = None
    for value in values:
        if isinstance(value, list | tuple):
            split = rows.split(request)
            break
    request = request if split is None else split[0][0]
    kwargs = dict(request.kwargs)
    for name in NOT_THE_MODELS:
        kwargs.pop(name, None)
    others = request.synced_gpus, request.assistant_model, request.streamer
    mode_kwargs = model._extract_generation_mode_kwargs(request.custom_generate, kwargs, *others)
    config, model_kwargs = model._prepare_generation_config(request.generation_config, **kwargs)
    params = None if split is None else rows.resolve(model, *split)
    if params is None:
        mode = MODES[config.get_generation_mode(request.assistant_model)]
    else:
        config.do_sample = any(params.values("do_sample"))
        mode = MODES[rows.common_mode(params, config.do_sample, request.assistant_model)]
    method: Any = request.custom_generate or mode.method_of(type(model))
    has_defaults = request.has_default_lengths(model)
    return Call(request, config, mode, mode_kwargs, *has_defaults, method, params), model_kwargs


def set_lengths(model: Any, call: Call, prompt: Prompt) -> None:
    """Set ``max_length`` and ``min_length`` of the call, now that the prompt's length is known."""
    call.prompt_length = length = prompt.ids.shape[1]
    fix = functools.partial(
        model._prepare_generated_length,
        model_input_name=prompt.main_input_name,
        inputs_tensor=prompt.main_input,
        input_ids_length=length,
    )
    config = fix(
        generation_config=call.config,
        has_default_max_length=call.has_default_max_length,
        has_default_min_length=call.has_default_min_length,
    )
    call.config, config._call = config, call  # the hook may have made another one
    if call.rows is not None:
        rows.set_lengths(model, call, call.rows, fix)
    for name in COUNTS:  # those that no sequence can reach would cost time
        if (count := getattr(config, name, None)) is not None:
            setattr(config, name, min(count, config.max_length))
    if model._supports_logits_to_keep() and "logits_to_keep" not in prompt.model_kwargs:
        prompt.model_kwargs["logits_to_keep"] = 1  # the logits of a whole prompt are huge
    model._validate_generated_length(call.config, length, call.has_default_max_length)


def extract_generation_mode_kwargs(
    self: Any,
    custom_generate: str | Callable | None,
    kwargs: dict[str, Any],
    synced_gpus: bool | None,
    assistant_model: Any,
    streamer: Any,
) -> dict[str, Any]:
    """Take the arguments of the decoding method out of ``kwargs``; a callable's signature names its own."""
    mode_kwargs = {
        "tokenizer": kwargs.pop("tokenizer", None),
        "assistant_tokenizer": kwargs.pop("assistant_tokenizer", None),
        "assistant_model": assistant_model,
        "streamer": streamer,
        "synced_gpus": families.is_sharded(self) if synced_gpus is None else synced_gpus,
    }
    for name, value in list(mode_kwargs.items()):
        if value is None:
            del mode_kwargs[name]
    if callable(custom_generate):
        named = inspect.signature(custom_generate).parameters.keys()
        usual = inspect.signature(type(self)._sample).parameters.keys()
        mode_kwargs = {name: value for name, value in mode_kwargs.items() if name in named}
        mode_kwargs |= {name: kwargs.pop(name) for name in named - usual if name in kwargs}
    return mode_kwargs


def prepare_generation_config(
    self: Any, generation_config: GenerationConfig | None, **kwargs: Any
) -> tuple[GenerationConfig, dict[str, Any]]:
    """Return a private, complete config, and the kwargs that name no field of it."""
    model_defaults = self.generation_config
    if generation_config is None and (values := families.generation_parameters(self.config)):
        raise ValueError(
            f"model.config holds generation parameters ({values}), which generate() does not read: "
            "set them on model.generation_config, or pass them to generate()."
        )
    config, model_kwargs = _merged_config(model_defaults, generation_config, kwargs)
    if config.do_sample and is_zero(config.temperature):
        config.do_sample, config.temperature = False, 1.0
    if config.top_k == -1:
        config.top_k = 0
    if config.ignore_eos and (eos := config.eos_token_id) is not None:
        config.eos_token_id = None
        if config.pad_token_id is None:
            config.pad_token_id = eos[0] if isinstance(eos, list) else eos
    if config.max_new_tokens == vllm.TO_LAST_POSITION:
        if (n_positions := families.max_positions(self)) is None:
            raise ValueError(
                "`max_tokens=None` ends a row at the model's positions, but the config of "
                f"{type(self).__name__} has no number of them: set `max_tokens`."
            )
        config.max_new_tokens, config.max_length = None, n_positions
    settings, of_checkpoint = config.cache_config, model_defaults.cache_config
    if isinstance(of_checkpoint, dict) and isinstance(settings, dict) and "path" in settings:
        # Only the caller says where files go.
        is_callers = kwargs.get("cache_config") is not None
        if not is_callers and (path := settings["path"]) == of_checkpoint.get("path"):
            config.cache_config = {k: v for k, v in settings.items() if k != "path"}
            logger.warning_once(
                f"`path`={path!r} in the `cache_config` of the model's generation config is not used. To "
                "keep the cache there, pass `cache_config` to generate()."
            )
    if config.cache_implementation == "hybrid":  # of old checkpoints; the dynamic one does as well
        config.cache_implementation = None
    if generation_config is not None and (overridden := set(kwargs) - set(model_kwargs)):
        logger.warning_once(
            f"Passing `generation_config` together with {sorted(overridden)} is deprecated: the arguments "
            "win over the object. Pass one object, or only arguments."
        )
    for flag in ("output_attentions", "output_hidden_states"):  # the model's forward needs these
        if value := getattr(config, flag):
            model_kwargs[flag] = value
    return config, model_kwargs


def _merged_config(
    defaults: GenerationConfig, given: GenerationConfig | None, kwargs: dict[str, Any]
) -> tuple[GenerationConfig, dict[str, Any]]:
    """A new config of all three, checked, and the kwargs that name no field of it; of equal values a copy."""
    plain, free, others = dict(kwargs), {}, dict(kwargs)
    for name, value in kwargs.items():
        kinds = map(type, value if type(value) is list else (value,))
        if not PLAIN.issuperset(kinds):
            del plain[name]
        elif type(value) is int and 0 < value < FREE.get(name, 0):
            free[name], plain[name] = value, 1
    try:
        values = json.dumps([vars(defaults), given and vars(given), plain])  # 1 is not 1.0 or true
    except (TypeError, ValueError):  # other values may change unseen
        return _merge(defaults, given, kwargs)
    key = type(defaults), type(given), frozenset(kwargs.keys() - plain.keys()), values
    if key in _known:
        known, taken = _known[key]
        config = copy.copy(known)
        for name, value in vars(known).items():
            if type(value) not in PLAIN:
                setattr(config, name, copy.deepcopy(value))
        vars(config).update(free)
        for name in taken:
            del others[name]
        return config, others
    config, others = _merge(defaults, given, kwargs)
    taken = kwargs.keys() - others.keys()
    if taken <= plain.keys() and caches.is_upstreams(config.cache_implementation):
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        _known[key] = copy.deepcopy(config), taken
    return config, others


def _merge(
    defaults: GenerationConfig, given: GenerationConfig | None, kwargs: dict[str, Any]
) -> tuple[GenerationConfig, dict[str, Any]]:
    config = GenerationConfig() if given is None else copy.deepcopy(given)
    known = dict(vars(defaults))
    for name, value in vars(config).items():
        if value is not None:
            known[name] = value
    plain_values = validate.check_fields(known | kwargs)
    library = defaults._get_default_generation_params()
    for name in WITHOUT_DEFAULTS & library.keys():
        del library[name]
    has_own_values = False  # which upstream's validation refuses
    for values in (vars(defaults), vars(config), kwargs):
        cache_name = values.get("cache_implementation")
        has_own_values |= cache_name is not None and not caches.is_upstreams(cache_name)
        has_own_values |= bool(values.get("max_new_tokens") == 0)
    with taking_own_values(config) if has_own_values else nullcontext():
        config.update(**defaults.to_dict(), defaults_only=True, allow_custom_entries=True)
        config.update(**library, defaults_only=True)
        for name, default in OWN_FIELDS.items():
            value = known.get(name)
            setattr(config, name, default if value is None else value)
        others = config.update(**kwargs)
    for name, value in plain_values.items():
        setattr(config, name, value)
    return config, others


def _drop_path_of_checkpoint(config: GenerationConfig, model_settings: dict[str, Any]) -> None:
    """Drop ``path`` of the checkpoint's own ``cache_config``: only the caller says where files go."""
    settings = config.cache_config
    if not isinstance(settings, dict) or "path" not in settings:
        return
    if (path := settings["path"]) == model_settings.get("path"):
        config.cache_config = {k: v for k, v in settings.items() if k != "path"}
        logger.warning_once(
            f"`path`={path!r} in the `cache_config` of the model's generation config is not used. To "
            "keep the cache there, pass `cache_config` to generate()."
        )


def prepare_special_tokens(
    self: Any,
    generation_config: GenerationConfig,
    kwargs_has_attention_mask: bool | None = None,
    device: torch.device | str | None = None,
    batch_size: int | None = None,
) -> None:
    """Write the special tokens to the config as tensors, under private names that models read.

    ``_bos_token_tensor``, ``_pad_token_tensor``: scalars; ``_eos_token_tensor (n_eos,)``;
    ``_decoder_start_token_tensor``: a scalar or ``(batch,)``. A missing pad token becomes the first
    EOS token. Raises ``ValueError`` if an encoder-decoder model has no start token.
    """
    config, target = generation_config, self.device if device is None else device
    special_tokens = []
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        token = getattr(config, name)
        if isinstance(token, torch.Tensor):
            token = token.to(target)
        elif token is not None:
            token = torch.tensor(token, device=target, dtype=torch.long)
        special_tokens.append(token)
    bos, eos, pad, start = special_tokens
    if self.config.is_encoder_decoder and start is None and (start := bos) is None:
        raise ValueError(
            "An encoder-decoder model needs `decoder_start_token_id` or `bos_token_id` to start "
            "decoding from; both are None. Set one on model.generation_config."
        )
    # One sequence has no padding, and a given mask says where it is: then a guess does no harm.
    is_guessing = kwargs_has_attention_mask is False and (batch_size is None or batch_size > 1)
    if eos is not None:
        eos = torch.atleast_1d(eos)
        if pad is None:
            if is_guessing:
                logger.warning(
                    "A batch came with neither an `attention_mask` nor a `pad_token_id`: padding is "
                    "read as text. Pass the tokenizer's `attention_mask`."
                )
            pad = eos[0]
        if is_guessing and torch.isin(eos, pad).any():
            logger.warning_once(
                "A batch came without `attention_mask`, and none can be inferred since the pad "
                "token is an EOS token: padding is read as text. Pass the tokenizer's "
                "`attention_mask`."
            )
        if torch.is_floating_point(eos) or (eos < 0).any():
            logger.warning(
                f"`eos_token_id` should be non-negative integers, but is {eos}: no token will match "
                "it, and generation runs to its maximum length."
            )
    config._bos_token_tensor, config._eos_token_tensor = bos, eos
    config._pad_token_tensor, config._decoder_start_token_tensor = pad, start


def prepare_generated_length(
    self: Any,
    generation_config: GenerationConfig,
    has_default_max_length: bool,
    has_default_min_length: bool,
    model_input_name: str,
    input_ids_length: int,
    inputs_tensor: torch.Tensor,
) -> GenerationConfig:
    """Turn every way to say how long into ``max_length`` and ``min_length``, prompt included.

    ``max_new_tokens`` and ``min_new_tokens`` win. The default of 20 means 20 new tokens. The length
    of embeddings, which have no ids, comes off.
    """
    config = generation_config
    has_embeds = model_input_name == "inputs_embeds" and not self.config.is_encoder_decoder
    embeds_length = inputs_tensor.shape[1] if has_embeds else 0
    embeds_length = 0 if embeds_length == input_ids_length else embeds_length
    for side, has_default in (("max", has_default_max_length), ("min", has_default_min_length)):
        n_new = getattr(config, f"{side}_new_tokens")
        set_length = getattr(config, f"{side}_length")
        length = set_length if n_new is None else int(n_new) + input_ids_length
        if n_new is not None:
            if set_length is not None and not has_default:
                logger.warning(
                    f"Both `{side}_new_tokens`={n_new} and `{side}_length`={set_length} are set; "
                    f"`{side}_new_tokens` wins."
                )
        elif side == "max" and has_default:
            # Upstream keeps the default within the model's positions only where it extends it.
            length += input_ids_length
            length = min(length, getattr(self.config, "max_position_embeddings", None) or length)
        elif embeds_length:
            length = max(set_length - embeds_length, 0)
        setattr(config, f"{side}_length", length)
    return config
