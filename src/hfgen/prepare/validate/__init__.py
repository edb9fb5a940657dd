"""Checks of arguments, with errors and warnings. Nothing here changes an argument.

Errors name the argument, what was given and what is allowed, and come before the first forward
pass. Where upstream fails later and less clearly, the class of its exception is kept.
"""

from .fields import (
    check_cache_implementation,
    check_config,
    check_fields,
    check_request,
    require_positions,
    validate_generated_length,
    validate_model_kwargs,
)
from .prompt import check_prompt
from .ranks import check_ranks

__all__ = [
    "check_cache_implementation",
    "check_config",
    "check_fields",
    "check_prompt",
    "check_ranks",
    "check_request",
    "require_positions",
    "validate_generated_length",
    "validate_model_kwargs",
]
