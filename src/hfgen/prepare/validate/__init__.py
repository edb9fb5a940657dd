"""Checks of arguments, with errors and warnings. Nothing here changes an argument.

Errors name the argument, what was given and what is allowed, and come before the first forward
pass. Where upstream fails later and less clearly, the class of its exception is kept.
"""

from ...memory.checks import explaining_misfit
from .arguments import check_request, validate_model_kwargs
from .fields import (
    check_cache_implementation,
    check_companions,
    check_ends,
    check_fields,
    check_samplers,
    check_stops,
    require_positions,
    validate_generated_length,
)
from .prompt import check_prompt
from .ranks import check_ranks

__all__ = [
    "check_cache_implementation",
    "check_companions",
    "check_ends",
    "check_fields",
    "check_prompt",
    "check_ranks",
    "check_request",
    "check_samplers",
    "check_stops",
    "explaining_misfit",
    "require_positions",
    "validate_generated_length",
    "validate_model_kwargs",
]
