"""The fields of the config: which values they may have, and what they need besides."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor
from transformers.generation.configuration_utils import (
    ALL_CACHE_IMPLEMENTATIONS,
    DEPRECATED_STATIC_CACHE_IMPLEMENTATIONS,
    GenerationConfig,
)


def is_zero(value: Any) -> bool:
    """Whether ``value`` is the number zero (and not ``False``)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


def is_integer(value: Any) -> bool:
    """Whether ``value`` counts something: 8, 8.0, ``numpy.int64(8)`` and ``tensor(8)`` do."""
    try:
        return not isinstance(value, str | bytes) and float(value).is_integer()
    except (TypeError, ValueError, RuntimeError):
        return False


def is_number(value: Any) -> bool:
    """Whether ``value`` is one number of any type."""
    try:
        return not isinstance(value, str | bytes) and float(value) == float(value)
    except (TypeError, ValueError, RuntimeError):
        return False


def is_positive_float(value: Any) -> bool:
    """Whether ``value`` is what upstream's penalties take: a float above 0, or 1, which is off."""
    return (isinstance(value, float) and value > 0) or (is_number(value) and value == 1)


def is_token_ids(value: Any) -> bool:
    """Whether ``value`` is a token id or several."""
    if isinstance(value, torch.Tensor):
        return True
    return is_number(value) or (
        isinstance(value, Iterable) and not isinstance(value, str) and all(map(is_number, value))
    )


def is_stop_strings(value: Any) -> bool:
    """Whether ``value`` is a non-empty string or a non-empty collection of them."""
    if isinstance(value, str):
        return bool(value)
    return (
        isinstance(value, list | tuple | set)
        and len(value) > 0
        and all(isinstance(string, str) and string for string in value)
    )


def with_suggestions(unknown: Iterable[str], known: Iterable[str]) -> str:
    """``unknown`` names, each with the nearest known one."""
    known = list(known)
    named = []
    for name in unknown:
        nearest = difflib.get_close_matches(name, known, n=1)
        named.append(f"`{name}` (did you mean `{nearest[0]}`?)" if nearest else f"`{name}`")
    return ", ".join(named)


@dataclass(frozen=True, slots=True)
class Rule:
    """What a config field may be. ``None`` always may: the field is then not set."""

    field: str
    holds: Callable[[Any], bool]
    allowed: str

    def check(self, value: Any, error: type[Exception]) -> None:
        if value is not None and not self.holds(value):
            raise error(f"`{self.field}` has to be {self.allowed}, but is {value!r}.")


INTEGERS = (
    "max_length max_new_tokens min_length min_new_tokens num_beams num_return_sequences "
    "prefill_chunk_size max_cache_len num_beam_groups prompt_lookup_num_tokens "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size max_matching_ngram_size "
    "num_assistant_tokens pad_token_id bos_token_id"
).split()
NUMBERS = (
    "max_time top_p min_p top_h typical_p epsilon_cutoff eta_cutoff length_penalty guidance_scale "
    "diversity_penalty"
).split()
FLAGS = (
    "do_sample use_cache return_dict_in_generate output_scores output_logits output_attentions "
    "output_hidden_states renormalize_logits remove_invalid_values token_healing drop_finished"
).split()

#: A value of another type raises ``TypeError``.
TYPES = (
    *(Rule(name, is_integer, "an integer") for name in INTEGERS),
    *(Rule(name, is_number, "a number") for name in NUMBERS),
    *(Rule(name, lambda value: not isinstance(value, str), "True or False") for name in FLAGS),
    Rule("eos_token_id", is_token_ids, "a token id or a list of them"),
    Rule("suppress_tokens", is_token_ids, "a list of token ids"),
    Rule("begin_suppress_tokens", is_token_ids, "a list of token ids"),
)

#: A value outside of the range raises ``ValueError``.
RANGES = (
    Rule("num_beams", lambda n: n >= 1, "at least 1"),
    Rule("num_return_sequences", lambda n: n >= 1, "at least 1"),
    Rule("prefill_chunk_size", lambda n: n >= 1, "at least 1"),
    Rule("min_new_tokens", lambda n: n >= 0, "at least 0"),
    Rule("stop_strings", is_stop_strings, "a non-empty string or a list of them"),
    Rule("prompt_lookup_num_tokens", lambda n: n >= 1, "at least 1"),
    Rule("max_matching_ngram_size", lambda n: n >= 0, "at least 1; 0 is the default, 2"),
    Rule("num_assistant_tokens", lambda n: n >= 1, "at least 1"),
    Rule("repetition_penalty", is_positive_float, "a float above 0; 1 is off"),
)

#: Checked when the call samples; greedy and beam search ignore these fields.
SAMPLING_RANGES = (
    Rule("temperature", is_positive_float, "a float above 0; 0 decodes greedily"),
    Rule("top_k", lambda n: is_integer(n) and n >= 0, "a positive integer; 0 or -1 is off"),
    Rule("top_p", lambda x: 0 <= x <= 1, "between 0 and 1; 1 is off"),
    Rule("min_p", lambda x: 0 <= x <= 1, "between 0 and 1"),
    Rule("top_h", lambda x: 0 < x <= 1, "above 0 and at most 1"),
    Rule("typical_p", lambda x: 0 < x <= 1, "above 0 and at most 1; 1 is off"),
    Rule("epsilon_cutoff", lambda x: 0 <= x < 1, "at least 0 and below 1; 0 is off"),
    Rule("eta_cutoff", lambda x: 0 <= x < 1, "at least 0 and below 1; 0 is off"),
)


def check_field_types(fields: dict[str, Any]) -> None:
    """Raise ``TypeError`` for the first of the config ``fields`` that has a wrong type."""
    for rule in TYPES:
        rule.check(fields.get(rule.field), TypeError)


def check_cache_implementation(name: Any) -> None:
    """Raise ``ValueError`` for a ``cache_implementation`` that there is none of."""
    if name is None or name in (*ALL_CACHE_IMPLEMENTATIONS, "paged"):
        return
    names = set(ALL_CACHE_IMPLEMENTATIONS) - set(DEPRECATED_STATIC_CACHE_IMPLEMENTATIONS)
    nearest = difflib.get_close_matches(str(name), sorted(names), n=1)
    raise ValueError(
        f"`cache_implementation` has to be one of {sorted(names)}, but is {name!r}"
        + (f" (did you mean {nearest[0]!r}?)." if nearest else ".")
    )


def check_config(config: GenerationConfig) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a field that cannot mean anything."""
    check_field_types(config.__dict__)
    for rule in RANGES + (SAMPLING_RANGES if config.do_sample else ()):
        rule.check(getattr(config, rule.field), ValueError)
    # These two know best what they accept; build them before anything is computed.
    if config.bad_words_ids is not None:
        NoBadWordsLogitsProcessor(config.bad_words_ids)
    if config.sequence_bias is not None:
        SequenceBiasLogitsProcessor(config.sequence_bias)


def require_tokenizer(tokenizer: Any, field: str, value: Any) -> None:
    """Raise ``ValueError`` if a config field that works on text has no tokenizer to do it with."""
    if tokenizer is None:
        raise ValueError(
            f"`{field}` (={value!r}) works on text: pass the model's tokenizer to `generate` as "
            "`tokenizer`."
        )


def require_eos(eos: Any, penalty: Any) -> None:
    """Raise ``ValueError`` if there is no EOS for ``exponential_decay_length_penalty`` to raise."""
    if eos is None:
        raise ValueError(
            f"`exponential_decay_length_penalty` (={penalty}) raises the score of the EOS token, "
            "but there is none: set `eos_token_id`."
        )


def check_companions(config: GenerationConfig, tokenizer: Any) -> None:
    """Raise ``ValueError`` for a field of the config that lacks what it works with.

    The stages that build from these fields check them too, but come after the encoder has run.
    ``heal_tokens`` alone says what healing needs: a model may override it and do without.
    """
    if config.stop_strings is not None:
        require_tokenizer(tokenizer, "stop_strings", config.stop_strings)
    if (penalty := config.exponential_decay_length_penalty) is not None:
        require_eos(config.eos_token_id, penalty)
    if getattr(config, "output_speculation", False) and not config.return_dict_in_generate:
        raise ValueError(
            "`output_speculation=True` puts statistics on the output object: set "
            "`return_dict_in_generate=True`, too."
        )
