"""hfgen: a drop-in ``GenerationMixin`` for Hugging Face transformers.

``hfgen.mix_into(model)``, and ``model.generate(...)`` runs on hfgen: same call, same tokens.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decoding.activations import Record
    from .decoding.card import Card, card
    from .decoding.constraints import Constraint, DisjunctiveConstraint, PhrasalConstraint
    from .decoding.drafters.base import Acceptance, Draft, DraftContext, Drafter
    from .decoding.drafters.forced import ForcedTokens
    from .decoding.drafters.memory import SuffixMemory
    from .decoding.recipes import minimum_bayes_risk, recipe, token_f1
    from .decoding.strategies.base import InvalidScoresError
    from .engine import Engine
    from .engine.many import generate_many
    from .logits.logprobs import Logprobs, TokenLogprob
    from .memory.caches.pool import free_caches
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
    from .prepare.generation_config import GenerationConfig, SamplingParams
    from .running.exact import exact, restore, token_logprobs
    from .running.interventions import Ablate, Edit, Patch, Steer, Where
    from .running.linears import optimize, optimized
    from .running.prefix import PrefixCache
    from .running.ranks import RankError
    from .session import Session
    from .settings import grammar
    from .settings.cancellation import Cancellation
    from .streaming import StreamEvent
    from .tools.builtin import builtin_model
    from .tools.inspect import trace

__version__ = "0.1.0"

__all__ = [
    "Ablate",
    "Acceptance",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "Cancellation",
    "Card",
    "Constraint",
    "DisjunctiveConstraint",
    "Draft",
    "DraftContext",
    "Drafter",
    "Edit",
    "Engine",
    "ForcedTokens",
    "GenerationConfig",
    "GenerationMixin",
    "InvalidScoresError",
    "Logprobs",
    "Patch",
    "PhrasalConstraint",
    "PrefixCache",
    "RankError",
    "Record",
    "SamplingParams",
    "Session",
    "Steer",
    "StreamEvent",
    "SuffixMemory",
    "TokenLogprob",
    "Where",
    "builtin_model",
    "card",
    "exact",
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
    "token_logprobs",
    "trace",
    "unpatch",
]

_HOMES = {  # the modules of the names that are not in `patching`
    "tools.builtin": ["builtin_model"],
    "memory.caches.pool": ["free_caches"],
    "settings.cancellation": ["Cancellation"],
    "prepare.generation_config": ["GenerationConfig", "SamplingParams"],
    "decoding.activations": ["Record"],
    "decoding.card": ["Card", "card"],
    "decoding.constraints": ["Constraint", "DisjunctiveConstraint", "PhrasalConstraint"],
    "decoding.drafters.base": ["Acceptance", "Draft", "DraftContext", "Drafter"],
    "decoding.drafters.forced": ["ForcedTokens"],
    "decoding.drafters.memory": ["SuffixMemory"],
    "engine": ["Engine"],
    "engine.many": ["generate_many"],
    "tools.inspect": ["trace"],
    "running.exact": ["exact", "restore", "token_logprobs"],
    "running.interventions": ["Ablate", "Edit", "Patch", "Steer", "Where"],
    "running.linears": ["optimize", "optimized"],
    "logits.logprobs": ["Logprobs", "TokenLogprob"],
    "mixin": ["GenerationMixin"],
    "running.prefix": ["PrefixCache"],
    "running.ranks": ["RankError"],
    "decoding.recipes": ["minimum_bayes_risk", "recipe", "token_f1"],
    "decoding.strategies.base": ["InvalidScoresError"],
    "session": ["Session"],
    "streaming": ["StreamEvent"],
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that ``hfgen --help`` does not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "grammar":  # a module of functions, of which one is called json
        return import_module(".settings.grammar", __name__)
    home = next((module for module, names in _HOMES.items() if name in names), "patching")
    globals()[name] = value = getattr(import_module(f".{home}", __name__), name)
    return value


def __dir__() -> list[str]:
    return __all__
