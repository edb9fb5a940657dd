"""Checks of arguments, with errors and warnings. Nothing here changes an argument.

Errors name the argument, what was given and what is allowed, and come before the first forward
pass. Where upstream fails later and less clearly, the class of its exception is kept.
"""

from .fields import ON_OUTPUT as ON_OUTPUT
from .fields import check_cache_implementation as check_cache_implementation
from .fields import check_config as check_config
from .fields import check_fields as check_fields
from .fields import check_request as check_request
from .fields import validate_generated_length as validate_generated_length
from .fields import validate_model_kwargs as validate_model_kwargs
from .prompt import check_prompt as check_prompt
from .ranks import check_ranks as check_ranks
