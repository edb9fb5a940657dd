"""hfgen: a drop-in ``GenerationMixin`` for Hugging Face transformers.

``hfgen.mix_into(model)``, and ``model.generate(...)`` runs on hfgen: same call, same tokens.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decoding.activations import Record as Record
    from .decoding.card import Card as Card
    from .decoding.card import card as card
    from .decoding.constraints import Constraint as Constraint
    from .decoding.constraints import DisjunctiveConstraint as DisjunctiveConstraint
    from .decoding.constraints import PhrasalConstraint as PhrasalConstraint
    from .decoding.drafters.base import Acceptance as Acceptance
    from .decoding.drafters.base import Draft as Draft
    from .decoding.drafters.base import DraftContext as DraftContext
    from .decoding.drafters.base import Drafter as Drafter
    from .decoding.drafters.forced import ForcedTokens as ForcedTokens
    from .decoding.drafters.memory import SuffixMemory as SuffixMemory
    from .decoding.recipes import minimum_bayes_risk as minimum_bayes_risk
    from .decoding.recipes import recipe as recipe
    from .decoding.recipes import token_f1 as token_f1
    from .decoding.strategies.base import InvalidScoresError as InvalidScoresError
    from .engine import Engine as Engine
    from .engine.many import generate_many as generate_many
    from .logits.logprobs import Logprobs as Logprobs
    from .logits.logprobs import TokenLogprob as TokenLogprob
    from .logits.stopping.reasons import Cancellation as Cancellation
    from .memory.caches.pool import free_caches as free_caches
    from .mixin import GenerationMixin as GenerationMixin
    from .patching import AutoModelForCausalLM as AutoModelForCausalLM
    from .patching import AutoModelForImageTextToText as AutoModelForImageTextToText
    from .patching import AutoModelForSeq2SeqLM as AutoModelForSeq2SeqLM
    from .patching import AutoModelForSpeechSeq2Seq as AutoModelForSpeechSeq2Seq
    from .patching import is_active as is_active
    from .patching import mix_into as mix_into
    from .patching import patch as patch
    from .patching import patched as patched
    from .patching import unpatch as unpatch
    from .prepare.generation_config import GenerationConfig as GenerationConfig
    from .prepare.generation_config import SamplingParams as SamplingParams
    from .running.exact import exact as exact
    from .running.exact import restore as restore
    from .running.exact import token_logprobs as token_logprobs
    from .running.interventions import Ablate as Ablate
    from .running.interventions import Edit as Edit
    from .running.interventions import Patch as Patch
    from .running.interventions import Steer as Steer
    from .running.interventions import Where as Where
    from .running.optimization import optimize as optimize
    from .running.optimization import optimized as optimized
    from .running.prefix import PrefixCache as PrefixCache
    from .running.ranks import RankError as RankError
    from .session import Session as Session
    from .settings import grammar as grammar
    from .streaming import StreamEvent as StreamEvent
    from .tools.builtin import builtin_model as builtin_model
    from .tools.inspect import trace as trace

__version__ = "0.1.0"

#: The public names, by the modules that they are imported from at their first use.
_NAMES = {
    "tools.builtin": ["builtin_model"],
    "memory.caches.pool": ["free_caches"],
    "logits.stopping.reasons": ["Cancellation"],
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
    "running.optimization": ["optimize", "optimized"],
    "logits.logprobs": ["Logprobs", "TokenLogprob"],
    "mixin": ["GenerationMixin"],
    "patching": [
        *("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM"),
        *("AutoModelForSpeechSeq2Seq", "is_active", "mix_into", "patch", "patched", "unpatch"),
    ],
    "running.prefix": ["PrefixCache"],
    "running.ranks": ["RankError"],
    "decoding.recipes": ["minimum_bayes_risk", "recipe", "token_f1"],
    "decoding.strategies.base": ["InvalidScoresError"],
    "session": ["Session"],
    "settings": ["grammar"],
    "streaming": ["StreamEvent"],
}

__all__ = sorted(name for names in _NAMES.values() for name in names)


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that ``hfgen --help`` does not wait for torch."""
    if name == "grammar":  # a module of functions, of which one is called json
        return import_module(".settings.grammar", __name__)
    for module, names in _NAMES.items():
        if name in names:
            globals()[name] = value = getattr(import_module(f".{module}", __name__), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
