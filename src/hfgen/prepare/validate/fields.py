"""Checks of the config's fields: values, requirements, and the resulting lengths."""

from __future__ import annotations

import difflib
import re
import warnings
from typing import Any

from transformers.generation.configuration_utils import GenerationConfig

from ... import families
from ...decoding import constraints
from ...memory.caches import table
from ...settings import sampler_order
from ...settings.fields import FIELDS, is_on, with_suggestions
from ...settings.kinds import LOGPROBS_MODES, is_zero
from ...settings.logs import logger
from ...settings.requirements import require_eos, require_tokenizer
from ...state.call import Call

#: Own fields whose results are attributes of the output, which has to be one then. Upstream ignores
#: its own such fields, with a warning; an error says what to do before time is spent.
ON_OUTPUT = (
    "output_speculation",
    "output_metrics",
    "logprobs",
    "logprob_token_ids",
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "logprobs_support",
)


def check_cache_implementation(name: Any) -> None:
    """Raise ``ValueError`` for a ``cache_implementation`` that there is none of."""
    if name is None or (
        isinstance(name, str) and (table.is_upstreams(name) or name in table.CACHES)
    ):
        return
    names = table.names()
    nearest = difflib.get_close_matches(str(name), names, n=1)
    meant = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    raise ValueError(f"`cache_implementation` has to be one of {names}, but is {name!r}{meant}.")


def check_fields(values: dict[str, Any]) -> None:
    """Raise ``FieldError`` or ``ValueError`` for the first of the config's fields that cannot hold.

    Warn of a value out of range that upstream takes for "off".
    """
    for name, row in FIELDS.items():
        is_used = row.needs is None or is_on(row.needs, values.get(row.needs))
        value = values.get(name)
        if value is not None and row.ignores and row.kind.accepts(value) and row.ignores(value):
            if is_used and row.range is not None:
                logger.warning_once(
                    f"`{name}` has to be {row.range.words}, but is {value}: it counts as off."
                )
            continue
        row.check(name, value, is_used)
    check_cache_implementation(values.get("cache_implementation"))
    if (order := values.get("sampler_order")) is not None:
        sampler_order.fields_of(order)
    _check_mode(values.get("logprobs_mode"))


def _check_mode(mode: Any) -> None:
    if mode is not None and mode not in LOGPROBS_MODES:
        meant = with_suggestions([str(mode)], LOGPROBS_MODES)
        raise ValueError(f"`logprobs_mode` has to be one of {[*LOGPROBS_MODES]}, but is {meant}.")


def require_positions(model: Any) -> int:
    """How many positions the model has; ``ValueError`` if their number is not limited."""
    if (n := families.max_positions(model)) is None:
        raise ValueError(
            "`max_tokens=None` ends a row at the model's positions, but the config of "
            f"{type(model).__name__} has no number of them: set `max_tokens`."
        )
    return n


def check_companions(config: GenerationConfig) -> None:
    """Raise ``ValueError``, before an encoder runs, for a field that lacks what it works with."""
    if (penalty := config.exponential_decay_length_penalty) is not None:
        require_eos(config.eos_token_id, penalty)
    for name in ON_OUTPUT:
        value = getattr(config, name, None)
        is_asked = value is not None and value is not False  # 0 is a number of log-probabilities
        if is_asked and not config.return_dict_in_generate:
            raise ValueError(
                f"`{name}`={value!r} returns its results on the output object: set "
                "`return_dict_in_generate=True` as well."
            )


#: Fields that end a row.
STOPS = (
    "max_new_tokens",
    "stop_strings",
    "stop_regex",
    "stop_token_ids",
    "max_time",
    "repetition_detection",
)


def check_stops(config: Any, tokenizer: Any) -> None:
    """Raise ``ValueError`` for stops without a tokenizer, and for patterns that cannot be searched for."""
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


def _check_thinking(config: Any, tokenizer: Any) -> None:
    names = ("thinking_start", "thinking_end", "thinking_message")
    markers = {name: getattr(config, name) for name in names}
    for name in names[:2]:
        if markers[name] is None:
            raise ValueError(f"`thinking_token_budget` needs the marker `{name}`, which is None.")
    for name, marker in markers.items():
        if isinstance(marker, str) and tokenizer is None:
            raise ValueError(
                f"`thinking_token_budget` needs the tokens of `{name}`={marker!r}: pass the model's "
                f"tokenizer to `generate` as `tokenizer`, or token ids as `{name}`."
            )
    if markers["thinking_start"] == markers["thinking_end"]:
        raise ValueError(
            "`thinking_start` and `thinking_end` have to differ, but both are "
            f"{markers['thinking_start']!r}."
        )


def check_ends(call: Call) -> None:
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


def check_samplers(config: Any, tokenizer: Any) -> None:
    """Raise ``ValueError`` for samplers that have no meaning, or nothing to work with."""
    if getattr(config, "dry_multiplier", None):
        _check_breakers(getattr(config, "dry_sequence_breakers", None), tokenizer)
    steered = {
        "mirostat": bool(getattr(config, "mirostat", None)),
        "adaptive_target": getattr(config, "adaptive_target", None) is not None,
    }
    for name, is_steered in steered.items():
        if is_steered and config.do_sample and (config.num_beams or 1) > 1:
            raise ValueError(
                f"`{name}` is controlled by the token drawn at each step, but with `num_beams`="
                f"{config.num_beams} there are several tokens. Set `num_beams=1`, or leave `{name}` out."
            )


def _check_breakers(breakers: Any, tokenizer: Any) -> None:
    if tokenizer is not None:
        return
    if breakers is None or any(isinstance(item, str) for item in breakers):
        which = "are strings by default" if breakers is None else "has strings"
        raise ValueError(
            f"`dry_sequence_breakers` {which}: repetitions (`dry_multiplier`) end at "
            "them. Pass the model's tokenizer to `generate` as `tokenizer`, or a list of token ids, "
            "which may be empty."
        )


def validate_generated_length(
    self: Any,
    generation_config: GenerationConfig,
    input_ids_length: int,
    has_default_max_length: bool,
) -> None:
    """Raise ``ValueError`` if the prompt fills ``max_length``; warn of lengths out of reach."""
    config, longest = generation_config, generation_config.max_length
    if is_zero(config.max_new_tokens):
        return
    if config.constraints is not None or config.force_words_ids is not None:
        constraints.check_room(config, longest - input_ids_length)
    if has_default_max_length and config.max_new_tokens is None:
        _warn(
            f"No length was asked for, so up to {longest} tokens are generated, the default "
            "`max_length`. Set `max_new_tokens`."
        )
    if input_ids_length >= longest:
        name = "decoder_input_ids" if self.config.is_encoder_decoder else "input_ids"
        raise ValueError(
            f"`{name}` has {input_ids_length} tokens and `max_length` is {longest}, so there is no "
            "room to generate. Raise `max_length`, or better, set `max_new_tokens`."
        )
    counts = (("min_length", 0), *((n, input_ids_length) for n in ("min_new_tokens", "min_tokens")))
    for field, before in counts:
        value = getattr(config, field, None)
        if value is not None and value + before > longest:
            default = " (its default)" if has_default_max_length else ""
            _warn(
                f"`{field}`={value} asks for {value + before} tokens in all, more than `max_length`="
                f"{longest}{default}: generation stops at `max_length`."
            )


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=3)
