"""Checks of arguments, with errors and warnings. Nothing here changes an argument.

Errors name the argument, what was given and what is allowed, and come before the first forward
pass. Where upstream fails later and less clearly, the class of its exception is kept.
"""

from .arguments import accepted_names, check_request, parameters, validate_model_kwargs
from .cache import explaining_misfit
from .fields import (
    check_cache_implementation,
    check_companions,
    check_ends,
    check_fields,
    check_samplers,
    check_stops,
    require_eos,
    require_positions,
    require_tokenizer,
    validate_generated_length,
)
from .prompt import check_prompt
from .ranks import check_ranks

__all__ = [
    "accepted_names",
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
    "parameters",
    "require_eos",
    "require_positions",
    "require_tokenizer",
    "validate_generated_length",
    "validate_model_kwargs",
]
