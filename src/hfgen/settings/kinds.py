"""Types and ranges of the fields of a generation config."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial, reduce
from importlib import import_module
from numbers import Integral, Number
from operator import le
from typing import Any

from .grammar import Grammar


@dataclass(frozen=True, slots=True)
class Range:
    """Which values of the right kind a field takes, in words, and the test of them."""

    words: str
    accepts: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Kind(Range):
    """The type of value that a field takes. ``None`` is not tested."""

    #: Makes plain numbers of what is accepted: of ``8.0``, ``numpy.int64(8)`` and ``tensor(8)``.
    plain: Callable[[Any], Any] = lambda value: value
    #: Its form on the command line; ``None`` if it cannot be written as text.
    option: str | None = "text or JSON"
    #: Whether a value may itself be a list; then a list has no value per row.
    may_be_list: bool = True
    #: Types of Python whose values below 2**63 are of this kind and plain, so that nothing is called.
    plain_types: tuple[type, ...] = ()


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


def check_integer(value: Any, name: str, least: float = -math.inf) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what is no integer from ``least`` on."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` has to be an integer, but is {value!r:.80}.")
    if int(value) < least:
        raise ValueError(f"`{name}` has to be at least {least}, but is {value}.")


def _is_flag(value: Any) -> bool:
    return isinstance(value, int) or (getattr(value, "ndim", 1) == 0 and "bool" in str(value.dtype))


def _is_token(value: Any) -> bool:
    """Whether ``value`` is an id that fits into a tensor."""
    return not isinstance(value, bool) and is_integer(value) and abs(int(value)) < 2**63


def _is_token_list(value: Any) -> bool:
    if getattr(value, "ndim", 1) != 1:  # of a tensor or an array
        return False
    is_collection = isinstance(value, Collection) and not isinstance(value, str | bytes | dict)
    return is_collection and all(map(_is_token, value))


def _is_tokens(value: Any) -> bool:
    return _is_token(value) or _is_token_list(value)


def _plain_tokens(value: Any) -> int | list[int]:
    # A tensor of one token is a token, too.
    return [int(token) for token in value] if _is_token_list(value) else int(value)


def tokens_in(value: Any) -> Iterator[int]:
    """The token ids in a field: an id, a tensor, or collections of them; of biases, the sequences."""
    if hasattr(value, "flatten"):  # a tensor or an array
        yield from value.flatten().tolist()
    elif isinstance(value, dict):
        for sequence in value:
            yield from sequence
    elif isinstance(value, Iterable):
        for item in value:  # a bias in a list is a pair of a sequence and a number
            is_pair = isinstance(item, list) and len(item) == 2
            yield from tokens_in(item[0] if is_pair and isinstance(item[0], list | tuple) else item)
    else:
        yield int(value)


def _is_text(value: Any) -> bool:
    """Whether ``value`` is a text that UTF-8 has bytes for: lone surrogates have none."""
    is_filled = isinstance(value, str) and value != ""
    return is_filled and not any("\ud800" <= c <= "\udfff" for c in value)


def _is_one_of(*values: Any) -> Callable[[Any], bool]:
    # Other types, as tensors, may not compare with these values.
    return lambda value: (isinstance(value, Number | str) or _is_flag(value)) and value in values


def _builds(make: Callable[[Any], Any]) -> Callable[[Any], bool]:
    """Whether upstream's class can be made of the value."""

    def accepts(value: Any) -> bool:
        if isinstance(value, str | int | float):  # without an import of transformers
            return False
        try:
            make(value)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return False
        return True

    return accepts


def _upstream(*names: str) -> Callable[[Any], Any]:
    """A class of transformers, or its method, imported at the first call: options need no torch."""
    return lambda value: reduce(getattr, names, import_module("transformers"))(value)  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """A row ends when its generated tokens end in a pattern, ``min_count`` times in a row.

    The pattern has ``min_pattern_size`` to ``max_pattern_size`` tokens. Names and meaning are those of
    vLLM's ``RepetitionDetectionParams``; a ``max_pattern_size`` of 0 is off.
    """

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        """Raise ``ValueError`` or ``TypeError`` for sizes that no pattern has."""
        for name, value in asdict(self).items():
            check_integer(value, name)
        if self.max_pattern_size == 0:
            return
        if not 0 <= self.min_pattern_size <= self.max_pattern_size:
            raise ValueError(
                f"`min_pattern_size` ({self.min_pattern_size}) has to be between 0 and "
                f"`max_pattern_size` ({self.max_pattern_size})."
            )
        check_integer(self.min_count, "min_count", 2)

    @classmethod
    def of(cls, value: Any) -> RepetitionDetection:
        """The settings of a dict, or of any object with the same attributes; raises as the class does."""
        if not isinstance(value, dict):
            value = {field.name: getattr(value, field.name) for field in fields(cls)}
        try:
            return cls(**value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"`repetition_detection`: {error}") from None


_flag = partial(Kind, option="true or false")
_integer = partial(Kind, plain=int, option="an integer", may_be_list=False, plain_types=(int,))
_number = partial(Kind, accepts=is_number, option="a number", may_be_list=False)

FLAG = _flag("True or False", _is_flag, bool, may_be_list=False, plain_types=(bool, int))
FLAG_OR_NEVER = _flag("True, False or 'never'", _is_one_of(True, False, "never"))
FLAG_OR_PROMPT = _flag(
    "True, False or 'prompt'", _is_one_of(True, False, "prompt"), may_be_list=False
)
FLAG_OR_LAYERS = _flag(
    "True or False, or a list of layers",
    lambda value: (
        all(map(is_integer, value))
        if isinstance(value, list | tuple | set | range)
        else _is_flag(value)
    ),
    lambda value: bool(value) if _is_flag(value) else value,
    plain_types=(bool, int),
)
INTEGER = _integer("an integer", is_integer)
SIZE = _integer(
    "an integer",
    lambda n: n is not True and "bool" not in str(getattr(n, "dtype", "")) and is_integer(n),
)
NUMBER = _number(
    "a number",
    plain=lambda value: value if isinstance(value, int | float) else float(value),
    plain_types=(int, float),
)
# Integers to a power grow without end.
FLOAT = _number("a number", plain=float, plain_types=(float,))
TOKEN = _integer("a token id", _is_token)
TOKENS = Kind("a token id or a list of them", _is_tokens, _plain_tokens, plain_types=(int,))
TOKEN_LIST = Kind("a list of token ids", _is_token_list, _plain_tokens)
STRINGS = Kind(
    "a non-empty string of Unicode or a list of them",
    lambda value: (
        _is_text(value)
        or (isinstance(value, list | tuple | set) and len(value) > 0 and all(map(_is_text, value)))
    ),
)
MARKER = Kind(
    "a non-empty string of Unicode or a non-empty list of token ids",
    lambda value: _is_text(value) or (_is_token_list(value) and len(value) > 0),
    lambda value: value if isinstance(value, str) else _plain_tokens(value),
)
REPETITION = Kind(
    "a dict with `max_pattern_size`, `min_pattern_size` and `min_count`",
    lambda value: isinstance(value, dict) or hasattr(value, "max_pattern_size"),
    RepetitionDetection.of,
)
PAIR = Kind(
    "a pair (start, factor)",
    lambda value: (
        isinstance(value, list | tuple) and len(value) == 2 and all(map(is_number, value))
    ),
)
WORDS = Kind("a list of lists of token ids", _builds(_upstream("NoBadWordsLogitsProcessor")))
BIASES = Kind(
    "a non-empty dictionary {(id, …): bias} or list [[[id, …], bias], …]",
    lambda value: (
        _builds(_upstream("SequenceBiasLogitsProcessor"))(value)
        and all(
            is_number(bias) for _, bias in (value.items() if isinstance(value, dict) else value)
        )
    ),
)
WATERMARK = Kind(
    "a WatermarkingConfig or its fields in a dict",
    lambda value: (
        any(base.__name__ == "BaseWatermarkingConfig" for base in type(value).__mro__)
        or _builds(_upstream("WatermarkingConfig", "from_dict"))(value)
    ),
)
DFLASH = Kind("'dflash'", _is_one_of("dflash"))
NAME = Kind("a name", lambda value: isinstance(value, str))
BREAKERS = Kind(
    "a list of strings, token ids and lists of token ids",
    lambda value: (
        isinstance(value, list | tuple)
        and all(_is_text(item) or (_is_tokens(item) and item not in ([], ())) for item in value)
    ),
)
NAMES = Kind(
    "a name or a list of names",
    lambda value: (
        isinstance(value, str)
        or (isinstance(value, list | tuple) and all(isinstance(name, str) for name in value))
    ),
)
ANY = Kind("text or JSON", lambda value: True)  # checked by the stage that reads it
OBJECT = Kind("an object", lambda value: True, option=None)
GRAMMAR = Kind(
    "made by hfgen.grammar.json(), regex(), lark(), choice() or json_object(), or a JSON schema (a dict or "
    "a pydantic class)",
    _builds(Grammar.of),
    Grammar.of,
    option=None,
    may_be_list=False,
)

#: Of which scores log-probabilities are: the model's, or as processors leave them; or these as they are.
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")

INT64 = Range("from 0 to 2**63 - 1", lambda n: 0 <= int(n) < 2**63)

#: More sequences than this fit into no memory.
MAX_ROWS = 2**24


def at_least(least: int) -> Range:
    return Range(f"at least {least}", partial(le, least))


FINITE = Range("finite", lambda value: math.isfinite(value))
SEQUENCES = Range(f"at least 1, and at most {MAX_ROWS:,}", lambda n: 1 <= n <= MAX_ROWS)
POSITIVE = Range("at least 0, and finite", lambda x: 0 <= x < math.inf)
UNIT = Range("between 0 and 1", lambda x: 0 <= x <= 1)
SHARE = Range("between 0 and 1; 0 is off", UNIT.accepts)
MASS = Range("between 0 and 1; 1 is off", UNIT.accepts)
TYPICAL = Range("above 0 and at most 1; 1 is off", lambda x: 0 < x <= 1)
COUNT = Range("a positive integer; 0 or -1 is off", lambda n: n >= -1)
CUTOFF = Range("at least 0 and below 1; 0 is off", lambda x: 0 <= x < 1)
# Upstream takes no other integers. Scores divided by less than 2**-64 overflow.
PENALTY = Range(
    "a float above 0 (2**-64 or more); 1 is off",
    lambda x: x == 1 or (isinstance(x, float) and 2.0**-64 <= x < math.inf),
)
TEMPERATURE = Range(
    "a float above 0; 0 decodes greedily",
    lambda x: is_zero(x) or x == 1 or (isinstance(x, float) and x > 0),
)
N_BEST = Range("at least 0, or -1 for the whole vocabulary", lambda n: n >= -1)
