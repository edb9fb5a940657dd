"""Checks of the fields on a command line, made before torch is imported."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from hfgen.cli.report import CliError
from hfgen.cli.topics import option_name
from hfgen.fields import FIELDS, is_on, with_suggestions
from hfgen.kinds import LOGPROBS_MODES
from hfgen.sampler_order import fields_of

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


def one_of(names: tuple[str, ...], old: tuple[str, ...] = ()) -> Callable[[str, Any], None]:
    """The check of a field that takes one of some names; ``old`` ones are taken, and not offered."""

    def check(field: str, value: Any) -> None:
        if value not in (*names, *old):
            meant = with_suggestions([str(value)], names)
            raise ValueError(f"{field} takes one of {', '.join(names)}, but is {meant}")

    return check


def check_patterns(field: str, patterns: Any) -> None:
    """Raise ``ValueError`` for a regular expression that is none."""
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{field} {pattern!r} does not compile: {error}") from error


#: Field → what its table of kinds and ranges does not say.
CHECKS: dict[str, Callable[[str, Any], object]] = {
    "cache_implementation": one_of(CACHES, OLD_CACHES),
    "logprobs_mode": one_of(LOGPROBS_MODES),
    "sampler_order": lambda _, order: fields_of(order),
    "stop_regex": check_patterns,
}


def check_fields(fields: dict[str, Any]) -> None:
    """Raise ``CliError`` for a value of the wrong kind, or out of a range that holds beside the others."""
    try:
        for name, value in fields.items():
            row = FIELDS[name]
            row.check(name, value, row.needs is None or is_on(row.needs, fields.get(row.needs)))
            if value is not None and name in CHECKS:
                CHECKS[name](option_name(name), value)
    except ValueError as error:  # FieldError is one
        raise CliError(str(error)) from error
    check_answers(fields)


def check_answers(fields: dict[str, Any]) -> None:
    """Raise ``CliError`` for more answers than a call can have."""
    n, n_beams = fields.get("num_return_sequences") or 1, fields.get("num_beams") or 1
    if 1 < n_beams < n:
        raise CliError(
            f"--num-return-sequences {n} needs as many beams, but --num-beams is {n_beams}"
        )
    is_greedy = fields.get("do_sample") is False or fields.get("temperature") == 0
    if n > 1 and fields.get("num_beams") in (None, 1) and is_greedy:
        raise CliError(
            f"--num-return-sequences {n} needs sampling or beams: greedy decoding has one answer"
        )
