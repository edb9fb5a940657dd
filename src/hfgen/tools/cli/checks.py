"""Checks of single fields on a command line, made before torch is imported."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
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
    "hybrid",
    "hybrid_chunked",
    "offloaded_hybrid",
    "offloaded_hybrid_chunked",
    "paged",
    "sliding_window",
)

#: What ``--num-assistant-tokens-schedule`` takes.
SCHEDULES = ("adaptive", "constant", "heuristic", "heuristic_transient")

#: What ``--compile-config`` takes, with the types of the values; torch's names of ``mode``.
COMPILE = {"fullgraph": bool, "dynamic": bool, "backend": str, "mode": str, "options": dict}
TYPES = {bool: "true or false", str: "text", dict: "a JSON object"}
COMPILE_MODES = (
    "default",
    "reduce-overhead",
    "max-autotune",
    "max-autotune-no-cudagraphs",
)

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

#: Kinds whose check imports transformers: made after the others.
SLOW = (WORDS, BIASES, WATERMARK)


def takes(option: str, words: str, value: Any) -> ValueError:
    """The error of an option that takes something else than ``value``."""
    return ValueError(f"{option} takes {words}, but {value!r} was given")


def one_of(names: tuple[str, ...], old: tuple[str, ...] = ()) -> Check:
    """The check of a field that takes one of some names; ``old`` ones are taken, and not offered."""

    def check(option: str, value: Any) -> None:
        if value not in (*names, *old):
            meant = with_suggestions([str(value)], names)
            raise ValueError(f"{option} takes one of {', '.join(names)}, but is {meant}")

    return check


def object_of(keys: tuple[str, ...] | dict[str, type] = ()) -> Check:
    """The check of a field that takes a JSON object with some of ``keys``; without these, with any."""

    def check(option: str, value: Any) -> None:
        words = f"a JSON object with some of {', '.join(keys)}" if keys else "a JSON object"
        if not isinstance(value, dict):
            raise takes(option, words, value)
        if keys and (unknown := [key for key in value if key not in keys]):
            raise ValueError(f"{option} takes {words}, but not {with_suggestions(unknown, keys)}")

    return check


def check_compile_config(option: str, value: Any) -> None:
    """Raise ``ValueError`` for what transformers' ``CompileConfig`` cannot be made of."""
    object_of(COMPILE)(option, value)
    for key, found in value.items():
        may_be_none = found is None and key in ("dynamic", "options")
        if not may_be_none and not isinstance(found, COMPILE[key]):
            raise takes(f"{key} of {option}", TYPES[COMPILE[key]], found)
    one_of(COMPILE_MODES)(f"mode of {option}", value.get("mode", "default"))


def check_layers(option: str, value: Any) -> None:
    """Raise ``ValueError`` for layers that no model has, of ``--dola-layers``."""
    is_list = isinstance(value, list) and bool(value) and all(type(n) is int for n in value)
    if value not in ("low", "high") and not (is_list and min(value) >= 0):
        raise takes(option, "low, high, or a list of layers from 0, as [0, 2]", value)


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


def is_word(value: Any) -> bool:
    """Whether ``value`` is a non-empty list of token ids."""
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(TOKEN.accepts(token) and token >= 0 for token in value)


def check_words(option: str, value: Any) -> None:
    """Raise ``ValueError`` for what is no list of lists of token ids."""
    if not (isinstance(value, list) and value and all(map(is_word, value))):
        raise takes(option, "a list of lists of token ids, as [[5], [6, 7]]", value)


def check_forced(option: str, value: Any) -> None:
    """Raise ``ValueError`` for what ``--force-words-ids`` cannot take: lists of words, too."""
    words: list[Any] = []
    for each in value if isinstance(value, list) else ():
        words += each if isinstance(each, list) and not is_word(each) and each else [each]
    if not (words and all(map(is_word, words))):
        raise takes(option, "a list of lists of token ids, as [[5], [6, 7]]", value)


def check_biases(option: str, value: Any) -> None:
    """Raise ``ValueError`` for what is no list of pairs of token ids and a bias."""
    is_list = isinstance(value, list) and bool(value)
    if not is_list or not all(
        isinstance(pair, list) and len(pair) == 2 and is_word(pair[0]) and is_number(pair[1])
        for pair in value
    ):
        raise takes(option, "a list of ids and biases, as [[[5, 6], -2.5]]", value)


#: Field → what its table of kinds and ranges does not say.
CHECKS: dict[str, Check] = {
    "bad_words_ids": check_words,
    "cache_config": object_of(),
    "cache_implementation": one_of(CACHES, OLD_CACHES),
    "compile_config": check_compile_config,
    "dola_layers": check_layers,
    "force_words_ids": check_forced,
    "logprobs_mode": one_of(LOGPROBS_MODES),
    "num_assistant_tokens_schedule": one_of(SCHEDULES),
    "repetition_detection": lambda option, value: (
        object_of()(option, value),
        RepetitionDetection.of(value),
    ),
    "sampler_order": lambda _, order: fields_of(order),
    "sequence_bias": check_biases,
    "stop_regex": check_patterns,
    "watermarking_config": object_of(WATERMARK_KEYS),
}


def check_fields(fields: dict[str, Any]) -> None:
    """Raise ``CliError`` for a value of the wrong kind, or out of a range that holds beside the others."""
    given = [(name, value) for name, value in fields.items() if value is not None]
    for name, value in sorted(given, key=lambda item: FIELDS[item[0]].kind in SLOW):
        try:
            check_field(name, value, fields)
        except (TypeError, ValueError) as error:
            named = str(error).replace(f"`{name}`", option_name(name))
            raise CliError(named.rstrip(".")) from error


def check_field(name: str, value: Any, fields: dict[str, Any]) -> None:
    """Raise ``ValueError`` or ``TypeError`` for a value that the field ``name`` cannot have."""
    row, check = FIELDS[name], CHECKS.get(name)
    if name in LIMITS:
        row = replace(row, range=LIMITS[name], needs=None)
    if check is not None and row.kind in SLOW:
        check(option_name(name), value)
    row.check(name, value, row.needs is None or is_on(row.needs, fields.get(row.needs)))
    if check is not None and row.kind not in SLOW:
        check(option_name(name), value)
    if type(value) is int and abs(value) >= 2**63:
        raise ValueError(f"`{name}` has to fit into 64 bits, but is {value}")
    # An EOS of -1 is no token: a common way to have none.
    is_tokens = row.kind in (TOKEN, TOKENS, TOKEN_LIST) and name != "eos_token_id"
    if is_tokens and min(tokens_in(value), default=0) < 0:
        raise ValueError(f"`{name}` takes token ids from 0, but is {value!r}")
