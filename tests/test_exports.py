"""The public names of the package."""

from __future__ import annotations

import hfgen

EXPORTS = [
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


def test_exported_names() -> None:
    assert hfgen.__all__ == EXPORTS
    assert sorted(EXPORTS) == EXPORTS


def test_exported_names_resolve() -> None:
    assert [name for name in hfgen.__all__ if not hasattr(hfgen, name)] == []


def test_nothing_else_is_public() -> None:
    assert dir(hfgen) == EXPORTS
