"""Checks of the arguments of ``generate`` and of the config's fields, before anything is prepared."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from ...decoding import constraints
from ...families import accepted_names
from ...logits.stopping.reasons import Cancellation
from ...memory import caches
from ...settings.fields import (
    FIELDS,
    is_on,
    require_eos,
    require_tokenizer,
    sampler_fields,
    with_suggestions,
)
from ...settings.grammar import described
from ...settings.kinds import ANY, LOGPROBS_MODES, OBJECT
from ...settings.logs import logger
from ...state.call import Call, Request


def _has(*methods: str) -> Callable[[Any], bool]:
    return lambda value: all(hasattr(value, method) for method in methods)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_assistant(value: Any) -> bool:
    # Whether a model generates is asked when the mode is known.
    is_drafter = _has("draft", "observe")(value) or hasattr(value, "get_candidates")
    return isinstance(value, nn.Module) or hasattr(value, "generate") or is_drafter


#: Arguments that are no tensors: the test of each, and what it has to do.
ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "generation_config": (
        lambda value: (
            isinstance(value, GenerationConfig)
            or (_is_list(value) and all(isinstance(one, GenerationConfig) for one in value))
        ),
        "be a GenerationConfig, or a list with one for each prompt (fields may be passed as keyword "
        "arguments)",
    ),
    "logits_processor": (_is_list, "be a list"),
    "stopping_criteria": (_is_list, "be a list"),
    "streamer": (_has("put", "end"), "have the methods put() and end()"),
    "prefix_allowed_tokens_fn": (callable, "be callable"),
    "assistant_model": (
        _is_assistant,
        "be a model that generates, a drafter with the methods draft() and observe(), or a "
        "CandidateGenerator",
    ),
    "custom_generate": (
        lambda value: callable(value) or isinstance(value, str),
        "be a callable or a repository's name or path",
    ),
    **dict.fromkeys(
        ("tokenizer", "assistant_tokenizer"),  # which have no class in common
        (
            lambda value: not isinstance(value, str),
            "be a tokenizer, as AutoTokenizer.from_pretrained() loads it",
        ),
    ),
    "cancel": (lambda value: isinstance(value, Cancellation), "be a hfgen.Cancellation"),
}

#: Arguments that are tensors with a row per prompt, if they are given.
TENSORS = (
    "inputs input_ids inputs_embeds attention_mask position_ids decoder_input_ids "
    "decoder_attention_mask negative_prompt_ids negative_prompt_attention_mask"
).split()


def check_request(request: Request) -> None:
    """Raise ``TypeError`` for an argument of ``generate`` that is of the wrong kind."""
    for name, (accepts, what) in ARGUMENTS.items():
        value = getattr(request, name, request.kwargs.get(name))
        if value is not None and not accepts(value):
            raise TypeError(f"`{name}` has to {what}, but is {described(value)}.")
    for name in ("logits_processor", "stopping_criteria"):
        for function in getattr(request, name) or ():
            if not callable(function):
                raise TypeError(f"`{name}` has to hold callables, but holds {described(function)}.")
    for name in TENSORS:
        if (tensor := getattr(request, name, request.kwargs.get(name))) is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            advice = "Use torch.tensor(...)."
            if hasattr(tensor, "input_ids") or isinstance(tensor, dict):
                advice = "Unpack it: generate(**inputs)."
            elif any(isinstance(text, str) for text in (tensor if _is_list(tensor) else [tensor])):
                advice = "Tokenize it: generate(**tokenizer(text, return_tensors='pt'))."
            raise TypeError(f"`{name}` has to be a tensor, but is {described(tensor)}. {advice}")
        if tensor.ndim == 0:
            raise IndexError(f"`{name}` has to be (batch, …), but is one number, {tensor}.")


def validate_model_kwargs(self: Any, model_kwargs: dict[str, Any]) -> None:
    """Raise ``ValueError`` for keyword arguments that the model does not take; typos end here."""
    if not model_kwargs:
        return
    known = accepted_names(self)
    passed = (name for name, value in model_kwargs.items() if value is not None)
    if unknown := [name for name in passed if name not in known]:
        named = with_suggestions(unknown, known | FIELDS.keys())
        raise ValueError(
            f"The following `model_kwargs` are not used by the model: {named}. Neither the generation config nor "
            f"the forward of {type(self).__name__} takes them."  # mlflow looks for the first words
        )


#: Own fields whose results are attributes of the output, which has to be one then. Upstream ignores
#: its own such fields, with a warning; an error says what to do before time is spent.
ON_OUTPUT = (
    "output_speculation output_metrics output_card logprobs logprob_token_ids prompt_logprobs "
    "logprobs_support"
).split()


def check_cache_implementation(name: Any) -> None:
    """Raise ``ValueError`` for a ``cache_implementation`` that there is none of."""
    if name is None or (
        isinstance(name, str) and (caches.is_upstreams(name) or name in caches.CACHES)
    ):
        return
    names = caches.names()
    nearest = difflib.get_close_matches(str(name), names, n=1)
    meant = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    raise ValueError(f"`cache_implementation` has to be one of {names}, but is {name!r}{meant}.")


#: Fields that do not take just anything.
CHECKED_FIELDS = [(name, row) for name, row in FIELDS.items() if row.kind not in (ANY, OBJECT)]


def check_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return plain values of the fields that are set otherwise: to ``8.0``, ``tensor(8)``, a schema.

    Raises ``FieldError`` or ``ValueError`` for a value that a field cannot have.
    """
    plain_values = {}
    for name, row in CHECKED_FIELDS:
        if (value := values.get(name)) is None:
            continue
        is_plain = type(value) in row.kind.plain_types and -(2**63) <= value < 2**63
        if is_plain and (row.range is None or row.range.accepts(value)):
            continue
        is_used = row.needs is None or is_on(row.needs, values.get(row.needs))
        if row.ignores is None or not row.kind.accepts(value) or not row.ignores(value):
            row.check(name, value, is_used)
        elif is_used and row.range is not None:
            logger.warning_once(
                f"`{name}` has to be {row.range.words}, but is {value}: it counts as off."
            )
        if not is_plain and (plain := row.kind.plain(value)) is not value:
            plain_values[name] = plain
    if values.get("cache_implementation") is not None:
        check_cache_implementation(values["cache_implementation"])
    if (order := values.get("sampler_order")) is not None:
        sampler_fields(order)
    if (mode := values.get("logprobs_mode")) is not None and mode not in LOGPROBS_MODES:
        meant = with_suggestions([str(mode)], LOGPROBS_MODES)
        raise ValueError(f"`logprobs_mode` has to be one of {[*LOGPROBS_MODES]}, but is {meant}.")
    return plain_values


def check_config(call: Call) -> None:
    """Raise ``ValueError``, before an encoder runs, for a field that lacks what it works with."""
    tokenizer = call.mode_kwargs.get("tokenizer")
    ignores_eos = False
    for config in call.configs:
        ignores_eos |= bool(getattr(config, "ignore_eos", False))
        if (penalty := config.exponential_decay_length_penalty) is not None:
            require_eos(config.eos_token_id, penalty)
        for name in () if config.return_dict_in_generate else ON_OUTPUT:
            value = getattr(config, name, None)
            if value is not None and value is not False:  # 0 is a number of log-probabilities
                raise ValueError(
                    f"`{name}`={value!r} returns its results on the output object: set "
                    "`return_dict_in_generate=True` as well."
                )
        for name in ("stop_strings", "bad_words", "stop_regex"):
            if (value := getattr(config, name, None)) is not None:
                require_tokenizer(tokenizer, name, value)
        patterns = getattr(config, "stop_regex", None)
        for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
            try:
                matches_nothing = re.compile(pattern).search("") is not None
            except re.error as error:
                raise ValueError(f"`stop_regex` {pattern!r} does not compile: {error}.") from None
            if matches_nothing:
                raise ValueError(
                    f"`stop_regex` {pattern!r} matches the empty text: every row would end at its first "
                    "token."
                )
        if getattr(config, "thinking_token_budget", None) is not None:
            _check_thinking(config, tokenizer)
        if tokenizer is None and getattr(config, "dry_multiplier", None):
            breakers = getattr(config, "dry_sequence_breakers", None)
            if breakers is None or any(isinstance(item, str) for item in breakers):
                strings = "are strings by default" if breakers is None else "has strings"
                raise ValueError(
                    f"`dry_sequence_breakers` {strings}: repetitions (`dry_multiplier`) end at them. Pass "
                    "the model's tokenizer to `generate` as `tokenizer`, or a list of token ids, which may "
                    "be empty."
                )
        if config.do_sample and (config.num_beams or 1) > 1:
            steered = "mirostat" if getattr(config, "mirostat", None) else "adaptive_target"
            if getattr(config, steered, None) is not None:
                raise ValueError(
                    f"`{steered}` is controlled by the token drawn at each step, but with `num_beams`="
                    f"{config.num_beams} there are several tokens. Set `num_beams=1`, or leave `{steered}` "
                    "out."
                )
    if ignores_eos:
        _check_ends(call)


#: Fields that end a row.
STOPS = (
    "max_new_tokens stop_strings stop_regex stop_token_ids max_time repetition_detection"
).split()


def _check_thinking(config: Any, tokenizer: Any) -> None:
    for name in ("thinking_start", "thinking_end", "thinking_message"):
        marker = getattr(config, name)
        if marker is None and name != "thinking_message":
            raise ValueError(f"`thinking_token_budget` needs the marker `{name}`, which is None.")
        if isinstance(marker, str) and tokenizer is None:
            raise ValueError(
                f"`thinking_token_budget` needs the tokens of `{name}`={marker!r}: pass the model's "
                f"tokenizer to `generate` as `tokenizer`, or token ids as `{name}`."
            )
    if (start := config.thinking_start) == config.thinking_end:
        raise ValueError(
            f"`thinking_start` and `thinking_end` have to differ, but both are {start!r}."
        )


def _check_ends(call: Call) -> None:
    """Raise ``ValueError`` for a row that ignores its EOS, and that nothing else was asked to end."""
    if call.request.stopping_criteria or call.request.kwargs.get("cancel") is not None:
        return
    rows = call.rows
    defaults = [call.has_default_max_length] if rows is None else [d for d, _ in rows.has_defaults]
    for config, has_default in zip(call.configs, defaults, strict=True):
        is_endless = getattr(config, "ignore_eos", False) and has_default
        if is_endless and all(getattr(config, name, None) is None for name in STOPS):
            raise ValueError(
                "`ignore_eos=True` leaves nothing to end a row: set `max_new_tokens`, or one of "
                f"{', '.join(f'`{name}`' for name in STOPS[1:])}."
            )


def validate_generated_length(
    self: Any,
    generation_config: GenerationConfig,
    input_ids_length: int,
    has_default_max_length: bool,
) -> None:
    """Raise ``ValueError`` if the prompt fills ``max_length``; warn of lengths out of reach."""
    config, longest = generation_config, generation_config.max_length
    if config.max_new_tokens == 0:
        return
    if config.constraints is not None or config.force_words_ids is not None:
        constraints.check_room(config, longest - input_ids_length)
    if has_default_max_length and config.max_new_tokens is None:
        warnings.warn(
            f"No length was asked for, so up to {longest} tokens are generated, the default "
            "`max_length`. Set `max_new_tokens`.",
            stacklevel=2,
        )
    if input_ids_length >= longest:
        name = "decoder_input_ids" if self.config.is_encoder_decoder else "input_ids"
        raise ValueError(
            f"`{name}` has {input_ids_length} tokens and `max_length` is {longest}, so there is no "
            "room to generate. Raise `max_length`, or better, set `max_new_tokens`."
        )
    for field in ("min_length", "min_new_tokens", "min_tokens"):
        if (value := getattr(config, field, None)) is None:
            continue
        length = value if field == "min_length" else value + input_ids_length
        if length > longest:
            default = " (its default)" if has_default_max_length else ""
            warnings.warn(
                f"`{field}`={value} asks for {length} tokens in all, more than `max_length`={longest}{default}: "
                "generation stops at `max_length`.",
                stacklevel=2,
            )
