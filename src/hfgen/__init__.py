"""hfgen: a drop-in ``GenerationMixin`` for Hugging Face transformers.

``hfgen.mix_into(model)``, and ``model.generate(...)`` runs on hfgen: same call, same tokens.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .builtin import builtin_model
    from .caches.pool import free_caches
    from .config import GenerationConfig
    from .constraints import Constraint, DisjunctiveConstraint, PhrasalConstraint
    from .drafters import Acceptance, Draft, DraftContext, Drafter
    from .mixin import GenerationMixin
    from .patching import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSeq2SeqLM,
        AutoModelForSpeechSeq2Seq,
        mix_into,
        patch,
        patched,
        unpatch,
    )
    from .prefix import PrefixCache
    from .recipes import minimum_bayes_risk, recipe
    from .strategies.base import InvalidScoresError
    from .strategies.minimum_bayes_risk import token_f1

__version__ = "0.1.0"

__all__ = [
    "Acceptance",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "Constraint",
    "DisjunctiveConstraint",
    "Draft",
    "DraftContext",
    "Drafter",
    "GenerationConfig",
    "GenerationMixin",
    "InvalidScoresError",
    "PhrasalConstraint",
    "PrefixCache",
    "builtin_model",
    "free_caches",
    "minimum_bayes_risk",
    "mix_into",
    "patch",
    "patched",
    "recipe",
    "token_f1",
    "unpatch",
]

_HOMES = {  # names that live elsewhere than in `patching`
    "Constraint": "constraints",
    "DisjunctiveConstraint": "constraints",
    "Draft": "drafters",
    "DraftContext": "drafters",
    "Acceptance": "drafters",
    "Drafter": "drafters",
    "GenerationConfig": "config",
    "GenerationMixin": "mixin",
    "InvalidScoresError": "strategies.base",
    "PhrasalConstraint": "constraints",
    "PrefixCache": "prefix",
    "builtin_model": "builtin",
    "free_caches": "caches.pool",
    "minimum_bayes_risk": "recipes",
    "recipe": "recipes",
    "token_f1": "strategies.minimum_bayes_risk",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that ``hfgen --help`` does not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(f".{_HOMES.get(name, 'patching')}", __name__)
    globals()[name] = value = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return __all__
