"""Stage 1: the config values of the call, its decoding mode, and its maximum length.

The only module, with ``rows``, that writes to a generation config, and only to private copies.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import transformers

from .. import families
from ..decoding.modes import MODES
from ..memory import caches
from ..settings import vllm
from ..settings.fields import FIELDS, OWN_FIELDS, FieldError
from ..settings.kinds import is_zero
from ..settings.logs import logger
from ..state.call import Call, ModelKwargs, Prompt, Request
from . import rows, validate
from .generation_config import taking_own_values

#: Arguments of ``generate`` that come among its ``kwargs`` and are neither a field nor the model's.
NOT_THE_MODELS = ("prefix_cache", "trust_remote_code", "cancel", "interventions", "record")

#: Arguments that are hfgen's, unless a model's forward has one of the same name.
OWN_NAMES = {*OWN_FIELDS, *NOT_THE_MODELS, "stop"} - {"trust_remote_code"}

#: Fields that count tokens of a sequence.
COUNTS = [name for name, row in FIELDS.items() if row.within_sequence]

#: Fields that an assistant's own config may set, where nobody else does: they get no default.
WITHOUT_DEFAULTS = {name for name, row in FIELDS.items() if not row.has_default}


def resolve(model: Any, request: Request) -> tuple[Call, ModelKwargs]:
    """Return the call, and the kwargs that belong to the model and not to the config.

    Precedence: kwargs, then the passed config, then the model's, then the library's defaults.
    """
    if "stop" in request.kwargs:
        request = rows.with_stop_strings(request)
    caller_config = request.generation_config
    values = [caller_config, *request.kwargs.values()]
    if isinstance(caller_config, transformers.GenerationConfig):
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
    for each in [config] if params is None else params.configs:
        needed = [("num_beams", True), ("num_return_sequences", True)]
        needed += [("max_length", each.max_new_tokens is None)]
        needed += [("length_penalty", (each.num_beams or 1) > 1)]
        for name, is_needed in needed:
            # Not by the hook: a model's own generate makes a config by it, whose None is a default.
            if is_needed and getattr(each, name) is None:
                raise FieldError(f"`{name}` has to be {FIELDS[name].kind.words}, but is None.")
    if params is None:
        mode = MODES[config.get_generation_mode(request.assistant_model)]
    else:
        config.do_sample = any(params.values("do_sample"))
        mode = MODES[rows.common_mode(params, config.do_sample, request.assistant_model)]
    custom: Any = request.custom_generate
    method = mode.method_of(type(model)) if custom is None else custom
    has_defaults = request.has_default_lengths(model)
    call = Call(request, config, mode, mode_kwargs, *has_defaults, method, params)
    if call.strategy is None and (custom is not None or request.assistant_model is None):
        # Code of others reads what `WITHOUT_DEFAULTS` names; an override of assisted decoding may call hfgen's.
        config.update(
            **model.generation_config._get_default_generation_params(), defaults_only=True
        )
    return call, model_kwargs


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
    counts = () if call.strategy is None else COUNTS
    for name in counts:  # what no sequence can reach would cost time
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
    mode_kwargs = {name: value for name, value in mode_kwargs.items() if value is not None}
    if callable(custom_generate):
        named = inspect.signature(custom_generate).parameters.keys()
        usual = inspect.signature(transformers.GenerationMixin._sample).parameters.keys()
        mode_kwargs = {name: value for name, value in mode_kwargs.items() if name in named}
        mode_kwargs |= {name: kwargs.pop(name) for name in named - usual if name in kwargs}
    return mode_kwargs


def prepare_generation_config(
    self: Any, generation_config: transformers.GenerationConfig | None, **kwargs: Any
) -> tuple[transformers.GenerationConfig, dict[str, Any]]:
    """Return a private, complete config, and the kwargs that name no field of it."""
    config, model_defaults = copy.deepcopy(generation_config), self.generation_config
    if config is None:
        kind: Any = type(self.config)
        names_differ = families.OF_GENERATION.isdisjoint(vars(self.config))
        may_have_some = not names_differ or families.may_have_parameters(kind)
        if may_have_some and (in_model_config := self.config._get_generation_parameters()):
            raise ValueError(
                f"model.config holds generation parameters ({in_model_config}), which generate() "
                "does not read: set them on model.generation_config, or pass them to generate()."
            )
        config = transformers.GenerationConfig()
    known = dict(vars(model_defaults))
    for name, value in vars(config).items():
        if value is not None:
            known[name] = value
    plain_values, asked = validate.check_fields(known | kwargs), vars(config) | kwargs
    defaults = model_defaults._get_default_generation_params()
    defaults = {name: v for name, v in defaults.items() if name not in WITHOUT_DEFAULTS}
    has_own_values = False  # which upstream's validation refuses
    for values in (vars(model_defaults), vars(config), kwargs):
        cache_name = values.get("cache_implementation")
        has_own_values |= cache_name is not None and not caches.is_upstreams(cache_name)
        has_own_values |= bool(values.get("max_new_tokens") == 0)
    with taking_own_values(config) if has_own_values else nullcontext():
        config.update(**model_defaults.to_dict(), defaults_only=True, allow_custom_entries=True)
        config.update(**defaults, defaults_only=True)
        for name, default in OWN_FIELDS.items():
            value = known.get(name)
            setattr(config, name, default if value is None else value)
        model_kwargs = config.update(**kwargs)
    for name, value in plain_values.items():
        setattr(config, name, value)
    # Upstream ignores what only a checkpoint's file asks for.
    for name in () if config.return_dict_in_generate else validate.ON_OUTPUT:
        if asked.get(name) is None:
            setattr(config, name, OWN_FIELDS[name])
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
    trains_with_cache = getattr(self, "training", False) and config.use_cache
    if trains_with_cache and any(map(families.drops_cache, families.modules_of(self))):
        why = (
            "in training mode, layers that checkpoint activations drop the cache. Call model.eval()"
        )
        if model_kwargs.get(name := families.cache_argument(self)) is not None:
            raise ValueError(f"`{name}` cannot be read: {why} before generate().")
        logger.warning_once(f"`use_cache` is off: {why} to decode with one, which is faster.")
        config.use_cache = False
    for flag in ("output_attentions", "output_hidden_states"):  # the model's forward needs these
        if value := getattr(config, flag):
            model_kwargs[flag] = value
    return config, model_kwargs


def prepare_special_tokens(
    self: Any,
    generation_config: transformers.GenerationConfig,
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
    generation_config: transformers.GenerationConfig,
    has_default_max_length: bool,
    has_default_min_length: bool,
    model_input_name: str,
    input_ids_length: int,
    inputs_tensor: torch.Tensor,
) -> transformers.GenerationConfig:
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
