"""Checks of single fields on a command line, made before torch is imported."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ...settings.fields import FIELDS, is_on, with_suggestions
from ...settings.kinds import (
    BIASES,
    LOGPROBS_MODES,
    SHARE,
    TOKEN,
    TOKEN_LIST,
    TOKENS,
    WATERMARK,
    WORDS,
    Range,
    at_least,
    is_number,
    tokens_in,
)
from ...settings.repetition import RepetitionDetection
from ...settings.sampler_order import fields_of
from .report import CliError
from .topics import option_name

Check = Callable[[str, Any], object]

#: What ``--cache-implementation`` takes; the last ones are old names that checkpoints have.
CACHES = ("dynamic", "offloaded", "offloaded_static", "quantized", "static")
OLD_CACHES = (
    *("hybrid", "hybrid_chunked", "offloaded_hybrid", "offloaded_hybrid_chunked"),
    *("paged", "sliding_window"),
)

#: What ``--num-assistant-tokens-schedule`` takes.
SCHEDULES = ("adaptive", "constant", "heuristic", "heuristic_transient")

#: What ``--compile-config`` takes, with the types of the values; torch's names of ``mode``.
COMPILE = {"fullgraph": bool, "dynamic": bool, "backend": str, "mode": str, "options": dict}
TYPES = {bool: "true or false", str: "text", dict: "a JSON object"}
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

WATERMARK_KEYS = ("greenlist_ratio", "bias", "hashing_key", "seeding_scheme", "context_width")

#: Ranges of values that ``generate`` takes as transformers does, although they mean nothing.
LIMITS: dict[str, Range] = {
    "max_time": Range("above 0", lambda seconds: seconds > 0),
    "max_length": at_least(1),
    "min_length": at_least(0),
    "max_cache_len": at_least(1),
    "no_repeat_ngram_size": at_least(0),
    "encoder_no_repeat_ngram_size": at_least(0),
    "num_beam_groups": at_least(1),
    "penalty_alpha": SHARE,
    "assistant_confidence_threshold": SHARE,
    "assistant_early_exit": at_least(1),
    "assistant_lookbehind": at_least(1),
    "target_lookbehind": at_least(1),
}

#: Kinds that only transformers can check: ``CHECKS`` has what is known of them without it.
SLOW = (WORDS, BIASES, WATERMARK)

ID_LISTS = "a list of lists of token ids, as [[5], [6, 7]]"


def takes(words: str, accepts: Callable[[Any], bool]) -> Check:
    """The check of a field that takes the values that ``accepts`` does, in ``words``."""

    def check(option: str, value: Any) -> None:
        if not accepts(value):
            raise ValueError(f"{option} takes {words}, but {value!r} was given")

    return check


def one_of(names: tuple[str, ...], old: tuple[str, ...] = ()) -> Check:
    """The check of a field that takes one of some names; ``old`` ones are taken, and not offered."""

    def check(option: str, value: Any) -> None:
        if value not in (*names, *old):
            meant = with_suggestions([str(value)], names)
            raise ValueError(f"{option} takes one of {', '.join(names)}, but is {meant}")

    return check


def object_of(keys: tuple[str, ...] | dict[str, type] = ()) -> Check:
    """The check of a field that takes a JSON object with some of ``keys``; without these, with any."""
    words = f"a JSON object with some of {', '.join(keys)}" if keys else "a JSON object"
    is_object = takes(words, lambda value: isinstance(value, dict))

    def check(option: str, value: Any) -> None:
        is_object(option, value)
        if keys and (unknown := [key for key in value if key not in keys]):
            raise ValueError(f"{option} takes {words}, but not {with_suggestions(unknown, keys)}")

    return check


def check_compile_config(option: str, value: Any) -> None:
    """Raise ``ValueError`` for what transformers' ``CompileConfig`` cannot be made of."""
    object_of(COMPILE)(option, value)
    for key, part in value.items():
        kind, may_be_none = COMPILE[key], key in ("dynamic", "options")
        if not isinstance(part, kind) and not (part is None and may_be_none):
            raise ValueError(f"{key} of {option} takes {TYPES[kind]}, but {part!r} was given")
    one_of(COMPILE_MODES)(f"mode of {option}", value.get("mode", "default"))


def check_patterns(option: str, patterns: Any) -> None:
    """Raise ``ValueError`` for a regular expression that is none, or that matches the empty text."""
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # such as "Possible nested set"
                matches_nothing = re.compile(pattern).search("") is not None
        except re.error as error:
            raise ValueError(f"{option} {pattern!r} does not compile: {error}") from error
        if matches_nothing:
            raise ValueError(f"{option} {pattern!r} matches the empty text: every text ends there")


def check_repetition(option: str, value: Any) -> None:
    """Raise ``ValueError`` for what no ``RepetitionDetection`` can be made of."""
    object_of()(option, value)
    RepetitionDetection.of(value)


def is_list_of(accepts: Callable[[Any], bool], value: Any) -> bool:
    """Whether ``value`` is a non-empty list, and ``accepts`` takes each of its items."""
    return isinstance(value, list) and bool(value) and all(map(accepts, value))


def is_word(value: Any) -> bool:
    """Whether ``value`` is a non-empty list of token ids."""
    return is_list_of(lambda token: TOKEN.accepts(token) and token >= 0, value)


def are_layers(value: Any) -> bool:
    """Whether ``value`` says which layers DoLa contrasts."""
    return value in ("low", "high") or is_list_of(lambda n: type(n) is int and n >= 0, value)


def is_bias(pair: Any) -> bool:
    """Whether ``pair`` is a list of a word and its bias."""
    return isinstance(pair, list) and len(pair) == 2 and is_word(pair[0]) and is_number(pair[1])


#: Field → what its table of kinds and ranges does not say.
CHECKS: dict[str, Check] = {
    "bad_words_ids": takes(ID_LISTS, partial(is_list_of, is_word)),
    "cache_config": object_of(),
    "cache_implementation": one_of(CACHES, OLD_CACHES),
    "compile_config": check_compile_config,
    "dola_layers": takes("low, high, or a list of layers from 0, as [0, 2]", are_layers),
    "force_words_ids": takes(  # each item is a word, or a list of words of which one has to occur
        ID_LISTS,
        partial(is_list_of, lambda item: is_word(item) or is_list_of(is_word, item)),
    ),
    "logprobs_mode": one_of(LOGPROBS_MODES),
    "num_assistant_tokens_schedule": one_of(SCHEDULES),
    "repetition_detection": check_repetition,
    "sampler_order": lambda _, order: fields_of(order),
    "sequence_bias": takes(
        "a list of ids and biases, as [[[5, 6], -2.5]]", partial(is_list_of, is_bias)
    ),
    "stop_regex": check_patterns,
    "watermarking_config": object_of(WATERMARK_KEYS),
}


def check_fields(fields: dict[str, Any]) -> None:
    """Raise ``CliError`` for a value of the wrong kind, or out of a range that holds beside the others."""
    for name, value in fields.items():
        if value is None:
            continue
        row = FIELDS[name]
        if name in LIMITS:
            row = replace(row, range=LIMITS[name], needs=None)
        try:
            if row.kind not in SLOW:
                is_used = row.needs is None or is_on(row.needs, fields.get(row.needs))
                row.check(name, value, is_used)
            if name in CHECKS:
                CHECKS[name](option_name(name), value)
            if type(value) is int and abs(value) >= 2**63:
                raise ValueError(f"`{name}` has to fit into 64 bits, but is {value}")
            # An EOS of -1 is no token: a common way to have none.
            is_tokens = row.kind in (TOKEN, TOKENS, TOKEN_LIST) and name != "eos_token_id"
            if is_tokens and min(tokens_in(value), default=0) < 0:
                raise ValueError(f"`{name}` takes token ids from 0, but is {value!r}")
        except (TypeError, ValueError) as error:
            message = str(error).replace(f"`{name}`", option_name(name))
            raise CliError(message.rstrip(".")) from error
