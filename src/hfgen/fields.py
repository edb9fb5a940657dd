"""The fields of a generation config, upstream's and hfgen's own: one row of ``FIELDS`` each."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor, WatermarkingConfig
from transformers.generation.configuration_utils import BaseWatermarkingConfig


class FieldError(TypeError, ValueError):
    """A value that a field cannot have; upstream raises the one class or the other."""


def with_suggestions(unknown: Iterable[str], known: Iterable[str]) -> str:
    """``unknown`` names, each with the known one that it may be a slip of."""
    known = list(known)
    nearest = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.8) for name in unknown}
    return ", ".join(
        f"`{name}` (did you mean `{found[0]}`?)" if found else f"`{name}`"
        for name, found in nearest.items()
    )


@dataclass(frozen=True, slots=True)
class Range:
    """Which values of the right kind a field takes, in words, and the test of them."""

    words: str
    accepts: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Kind(Range):
    """What type of value a field takes. ``None`` is not tested."""

    #: Makes plain numbers of what is accepted: of ``8.0``, ``numpy.int64(8)`` and ``tensor(8)``.
    plain: Callable[[Any], Any] = lambda value: value
    #: What it is on the command line; ``None`` if it cannot be written as text.
    option: str | None = "text or JSON"


def is_zero(value: Any) -> bool:
    """Whether ``value`` is the number zero (and not ``False``)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


def is_number(value: Any) -> bool:
    """Whether ``value`` is one number of any type that a float can hold; NaN is none."""
    try:
        return not isinstance(value, str | bytes) and not math.isnan(float(value))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False


def is_integer(value: Any) -> bool:
    """Whether ``value`` counts something: 8, 8.0, ``numpy.int64(8)`` and ``tensor(8)`` do."""
    return isinstance(value, int) or (is_number(value) and float(value).is_integer())


def _is_flag(value: Any) -> bool:
    return isinstance(value, int) or type(value).__name__ in ("bool", "bool_")


def _is_flag_or_layers(value: Any) -> bool:
    is_list = isinstance(value, list | tuple | set | range)
    return all(map(is_integer, value)) if is_list else _is_flag(value)


def _is_token(value: Any) -> bool:
    """Whether ``value`` is an id that fits into a tensor."""
    return not isinstance(value, bool) and is_integer(value) and abs(int(value)) < 2**63


def _is_token_list(value: Any) -> bool:
    if isinstance(value, torch.Tensor) and value.ndim != 1:
        return False
    is_collection = isinstance(value, Iterable) and not isinstance(value, str | bytes | dict)
    return is_collection and all(map(_is_token, value))


def _is_tokens(value: Any) -> bool:
    return _is_token(value) or _is_token_list(value)


def _plain_number(value: Any) -> int | float:
    return value if isinstance(value, int | float) else float(value)


def _plain_tokens(value: Any) -> int | list[int]:
    return int(value) if _is_token(value) else [int(token) for token in value]


def tokens_in(value: Any) -> Iterator[int]:
    """The token ids in a field: an id, a tensor, or collections of them; of biases, the sequences."""
    if isinstance(value, torch.Tensor):
        yield from value.flatten().tolist()
    elif isinstance(value, dict):
        for sequence in value:
            yield from sequence
    elif isinstance(value, list | tuple | set):
        for item in value:
            # A bias in a list is a pair of a sequence and a number.
            yield from tokens_in(item[0] if _is_bias(item) else item)
    else:
        yield int(value)


def _is_bias(item: Any) -> bool:
    return isinstance(item, list) and len(item) == 2 and isinstance(item[0], list | tuple)


def _is_strings(value: Any) -> bool:
    strings = [value] if isinstance(value, str) else value
    is_collection = isinstance(strings, list | tuple | set) and len(strings) > 0
    return is_collection and all(isinstance(string, str) and string for string in strings)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(is_number, value))


def _builds(make: Callable[[Any], Any]) -> Callable[[Any], bool]:
    """Whether upstream's class can be made of the value."""

    def accepts(value: Any) -> bool:
        try:
            make(value)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return False
        return True

    return accepts


def _is_positive_float(value: Any) -> bool:
    """Whether ``value`` is what upstream's penalties take: a float above 0, or 1, which is off."""
    return (isinstance(value, float) and value > 0) or value == 1


FLAG = Kind("True or False", _is_flag, option="true or false")
FLAG_OR_NEVER = Kind(
    "True, False or 'never'",
    lambda value: isinstance(value, int | float | str) and value in (True, False, "never"),
    option="true or false",
)
FLAG_OR_LAYERS = Kind("True or False, or a list of layers", _is_flag_or_layers, option=FLAG.option)
INTEGER = Kind("an integer", is_integer, int, "an integer")
SIZE = Kind("an integer", lambda n: n is not True and is_integer(n), int, "an integer")
NUMBER = Kind("a number", is_number, _plain_number, "a number")
FLOAT = Kind("a number", is_number, float, "a number")  # integers to a power grow without end
TOKEN = Kind("a token id", _is_token, int, "an integer")
TOKENS = Kind("a token id or a list of them", _is_tokens, _plain_tokens)
TOKEN_LIST = Kind("a list of token ids", _is_token_list, _plain_tokens)
STRINGS = Kind("a non-empty string or a list of them", _is_strings)
PAIR = Kind("a pair (start, factor)", _is_pair)
WORDS = Kind("a list of lists of token ids", _builds(NoBadWordsLogitsProcessor))
BIASES = Kind(
    "a non-empty dictionary {(id, …): bias} or list [[[id, …], bias], …]",
    _builds(SequenceBiasLogitsProcessor),
)
WATERMARK = Kind(
    "a WatermarkingConfig or its fields in a dict",
    lambda value: (
        isinstance(value, BaseWatermarkingConfig) or _builds(WatermarkingConfig.from_dict)(value)
    ),
)
DFLASH = Kind("'dflash'", lambda value: isinstance(value, str) and value == "dflash")
NAME = Kind("a name", lambda value: isinstance(value, str))
ANY = Kind("text or JSON", lambda value: True)  # checked by the stage that reads it
OBJECT = Kind("an object", lambda value: True, option=None)

#: More sequences than this fit into no memory.
MAX_ROWS = 2**24


def _at_least(least: int) -> Range:
    return Range(f"at least {least}", lambda value: value >= least)


FINITE = Range("finite", lambda value: math.isfinite(value))
SEQUENCES = Range(f"at least 1, and at most {MAX_ROWS:,}", lambda n: 1 <= n <= MAX_ROWS)
CUTOFF = Range("at least 0 and below 1; 0 is off", lambda x: 0 <= x < 1)
PENALTY = Range("a float above 0; 1 is off", lambda x: _is_positive_float(x) and x < math.inf)


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a generation config. It may always be ``None``, which is: not set."""

    kind: Kind
    range: Range | None = None
    #: The field that has to be on for this one to do anything: ``range`` holds only then.
    needs: str | None = None
    #: What is raised for token ids outside of the vocabulary; ``None`` if they do no harm.
    outside: type[Exception] | None = None
    #: Counts tokens of a sequence: as many as there are do as well as any more.
    within_sequence: bool = False
    #: Upstream's default holds where nobody sets the field; else an assistant's own config comes first.
    has_default: bool = True
    #: Of hfgen's own fields only: upstream has a table of defaults.
    default: Any = None

    def check(self, name: str, value: Any, is_used: bool = True) -> None:
        """Raise ``FieldError`` for a value of another kind, ``ValueError`` for one out of range."""
        if value is None:
            return
        if not self.kind.accepts(value):
            raise FieldError(f"`{name}` has to be {self.kind.words}, but is {_short(value)}.")
        if is_used and self.range is not None and not self.range.accepts(value):
            raise ValueError(f"`{name}` has to be {self.range.words}, but is {_short(value)}.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


#: Those that others need come first, hfgen's own last.
FIELDS: dict[str, Field] = {
    # Mode
    "do_sample": Field(FLAG),
    "num_beams": Field(INTEGER, SEQUENCES),
    "use_mtp": Field(FLAG),
    "num_return_sequences": Field(INTEGER, SEQUENCES),
    # Length
    "max_length": Field(INTEGER),
    "max_new_tokens": Field(INTEGER, _at_least(0)),
    "min_length": Field(INTEGER),
    "min_new_tokens": Field(INTEGER, _at_least(0)),
    "early_stopping": Field(FLAG_OR_NEVER, needs="num_beams"),
    "max_time": Field(NUMBER),
    "stop_strings": Field(STRINGS),
    # Cache
    "use_cache": Field(FLAG),
    "cache_implementation": Field(ANY),
    "cache_config": Field(ANY),
    "max_cache_len": Field(INTEGER),
    "prefill_chunk_size": Field(SIZE, Range("at least 1", lambda n: 1 <= n < 2**63)),
    # Sampling
    "temperature": Field(
        NUMBER,
        Range("a float above 0; 0 decodes greedily", lambda x: is_zero(x) or _is_positive_float(x)),
        "do_sample",
    ),
    "top_k": Field(
        SIZE, Range("a positive integer; 0 or -1 is off", lambda n: n >= -1), "do_sample"
    ),
    "top_p": Field(NUMBER, Range("between 0 and 1; 1 is off", lambda x: 0 <= x <= 1), "do_sample"),
    "min_p": Field(NUMBER, Range("between 0 and 1", lambda x: 0 <= x <= 1), "do_sample"),
    "top_h": Field(NUMBER, Range("above 0 and at most 1", lambda x: 0 < x <= 1), "do_sample"),
    "typical_p": Field(
        NUMBER, Range("above 0 and at most 1; 1 is off", lambda x: 0 < x <= 1), "do_sample"
    ),
    "epsilon_cutoff": Field(NUMBER, CUTOFF, "do_sample"),
    "eta_cutoff": Field(NUMBER, CUTOFF, "do_sample"),
    # Scores
    "repetition_penalty": Field(NUMBER, PENALTY),
    "encoder_repetition_penalty": Field(NUMBER, PENALTY),
    # Scores of two tokens and more, divided by a power above, are zeros in float32.
    "length_penalty": Field(
        FLOAT, Range("between -128 and 128", lambda x: -128 <= x <= 128), "num_beams"
    ),
    "no_repeat_ngram_size": Field(SIZE),
    "encoder_no_repeat_ngram_size": Field(INTEGER),
    "bad_words_ids": Field(WORDS, outside=ValueError),
    "sequence_bias": Field(BIASES, outside=ValueError),
    "renormalize_logits": Field(FLAG),
    "remove_invalid_values": Field(FLAG),
    "forced_bos_token_id": Field(
        TOKENS,
        Range("one id at least", lambda value: any(True for _ in tokens_in(value))),
        outside=IndexError,
    ),
    "forced_eos_token_id": Field(
        TOKENS,
        Range("ids from 0", lambda value: min(tokens_in(value), default=-1) >= 0),
        outside=IndexError,
    ),
    "exponential_decay_length_penalty": Field(PAIR),
    "suppress_tokens": Field(TOKEN_LIST),
    "begin_suppress_tokens": Field(TOKEN_LIST),
    "token_healing": Field(FLAG),
    "guidance_scale": Field(NUMBER, FINITE),
    "watermarking_config": Field(WATERMARK),
    # Output
    "output_attentions": Field(FLAG_OR_LAYERS),
    "output_hidden_states": Field(FLAG_OR_LAYERS),
    "output_scores": Field(FLAG),
    "output_logits": Field(FLAG),
    "return_dict_in_generate": Field(FLAG),
    # Special tokens
    "pad_token_id": Field(TOKEN),
    "bos_token_id": Field(TOKENS),
    "eos_token_id": Field(TOKENS),
    "decoder_start_token_id": Field(TOKENS, outside=IndexError),
    # Drafting
    "is_assistant": Field(FLAG),
    "num_assistant_tokens": Field(INTEGER, _at_least(1), within_sequence=True, has_default=False),
    "num_assistant_tokens_schedule": Field(NAME, has_default=False),
    "assistant_confidence_threshold": Field(NUMBER, has_default=False),
    "prompt_lookup_num_tokens": Field(INTEGER, _at_least(1), within_sequence=True),
    "max_matching_ngram_size": Field(
        INTEGER, Range("at least 1; 0 is the default, 2", lambda n: n >= 0), within_sequence=True
    ),
    "assistant_early_exit": Field(INTEGER),
    "assistant_lookbehind": Field(INTEGER),
    "target_lookbehind": Field(INTEGER),
    "assistant_ensemble_weight": Field(
        NUMBER, Range("above 0 and below 1; None is off", lambda x: 0 < x < 1)
    ),
    "speculation_type": Field(DFLASH),
    # Compilation
    "compile_config": Field(ANY),
    "disable_compile": Field(FLAG),
    # Modes that upstream has moved to repositories
    "low_memory": Field(FLAG),
    "penalty_alpha": Field(NUMBER),
    "dola_layers": Field(ANY),
    "diversity_penalty": Field(NUMBER, FINITE),
    "num_beam_groups": Field(INTEGER),
    "constraints": Field(OBJECT),
    "force_words_ids": Field(ANY),
    "continuous_batching_config": Field(OBJECT),
    "transformers_version": Field(OBJECT),
    # hfgen's own
    "output_speculation": Field(FLAG, default=False),
    "drop_finished": Field(FLAG, default=False),
}

#: hfgen's own fields, and their defaults.
OWN_FIELDS = {name: row.default for name, row in FIELDS.items() if row.default is not None}


def is_on(name: str, value: Any) -> bool:
    """Whether the field ``name`` has a value that others need: it samples, it has several beams."""
    return value is not None and bool(value > 1 if name == "num_beams" else value)
