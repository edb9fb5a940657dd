"""hfgen: a drop-in ``GenerationMixin`` for Hugging Face transformers.

``hfgen.mix_into(model)``, and ``model.generate(...)`` runs on hfgen: same call, same tokens.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import grammar
    from .builtin import builtin_model
    from .caches.pool import free_caches
    from .cancellation import Cancellation
    from .config import GenerationConfig, SamplingParams
    from .constraints import Constraint, DisjunctiveConstraint, PhrasalConstraint
    from .drafters import Acceptance, Draft, DraftContext, Drafter, ForcedTokens
    from .engine import Engine
    from .engine.many import generate_many
    from .inspect import trace
    from .linears import optimize, optimized, restore
    from .logprobs import Logprobs, TokenLogprob
    from .mixin import GenerationMixin
    from .patching import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSeq2SeqLM,
        AutoModelForSpeechSeq2Seq,
        is_active,
        mix_into,
        patch,
        patched,
        unpatch,
    )
    from .prefix import PrefixCache
    from .ranks import RankError
    from .recipes import minimum_bayes_risk, recipe
    from .strategies.base import InvalidScoresError
    from .strategies.minimum_bayes_risk import token_f1
    from .streaming import StreamEvent

__version__ = "0.1.0"

__all__ = [
    "Acceptance",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "Cancellation",
    "Constraint",
    "DisjunctiveConstraint",
    "Draft",
    "DraftContext",
    "Drafter",
    "Engine",
    "ForcedTokens",
    "GenerationConfig",
    "GenerationMixin",
    "InvalidScoresError",
    "Logprobs",
    "PhrasalConstraint",
    "PrefixCache",
    "RankError",
    "SamplingParams",
    "StreamEvent",
    "TokenLogprob",
    "builtin_model",
    "free_caches",
    "generate_many",
    "grammar",
    "is_active",
    "minimum_bayes_risk",
    "mix_into",
    "optimize",
    "optimized",
    "patch",
    "patched",
    "recipe",
    "restore",
    "token_f1",
    "trace",
    "unpatch",
]

_HOMES = {  # the modules of the names that are not in `patching`
    "builtin": ["builtin_model"],
    "caches.pool": ["free_caches"],
    "cancellation": ["Cancellation"],
    "config": ["GenerationConfig", "SamplingParams"],
    "constraints": ["Constraint", "DisjunctiveConstraint", "PhrasalConstraint"],
    "drafters": ["Acceptance", "Draft", "DraftContext", "Drafter", "ForcedTokens"],
    "engine": ["Engine"],
    "engine.many": ["generate_many"],
    "inspect": ["trace"],
    "linears": ["optimize", "optimized", "restore"],
    "logprobs": ["Logprobs", "TokenLogprob"],
    "mixin": ["GenerationMixin"],
    "prefix": ["PrefixCache"],
    "ranks": ["RankError"],
    "recipes": ["minimum_bayes_risk", "recipe"],
    "strategies.base": ["InvalidScoresError"],
    "strategies.minimum_bayes_risk": ["token_f1"],
    "streaming": ["StreamEvent"],
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that ``hfgen --help`` does not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "grammar":  # a module of functions, of which one is called json
        return import_module(".grammar", __name__)
    home = next((module for module, names in _HOMES.items() if name in names), "patching")
    globals()[name] = value = getattr(import_module(f".{home}", __name__), name)
    return value


def __dir__() -> list[str]:
    return __all__
