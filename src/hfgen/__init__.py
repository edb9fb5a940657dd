"""hfgen: a drop-in ``GenerationMixin`` for Hugging Face transformers.

``hfgen.mix_into(model)``, and ``model.generate(...)`` runs on hfgen: same call, same tokens.
"""

from .builtin import builtin_model
from .config import GenerationConfig
from .mixin import GenerationMixin
from .mixing import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    mix_into,
    patch,
    patched,
    unpatch,
)
from .strategies.base import InvalidScoresError

__version__ = "0.1.0"

__all__ = [
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "GenerationConfig",
    "GenerationMixin",
    "InvalidScoresError",
    "builtin_model",
    "mix_into",
    "patch",
    "patched",
    "unpatch",
]
