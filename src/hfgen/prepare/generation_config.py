"""``hfgen.GenerationConfig``: transformers' class, which also takes hfgen's fields and lists of values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers

from ..memory import caches
from ..settings import vllm
from ..settings.fields import FIELDS, OWN_FIELDS, with_suggestions
from ..settings.kinds import is_zero
from . import rows, validate


class GenerationConfig(transformers.GenerationConfig):
    """transformers' ``GenerationConfig``, which also takes what ``generate`` in hfgen takes.

    ``strict=True`` raises ``ValueError`` on a field that nobody knows, naming the nearest one.
    ``strict`` itself is not stored: the saved ``generation_config.json`` is upstream's.
    """

    def __init__(self, strict: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        known = transformers.GenerationConfig().__dict__ | OWN_FIELDS
        if strict and (unknown := [name for name in kwargs if name not in known]):
            raise ValueError(f"GenerationConfig does not know {with_suggestions(unknown, known)}.")

    def validate(self, strict: bool = False, **kwargs: Any) -> None:
        """Upstream's checks; ``max_new_tokens=0`` is allowed and returns the prompt."""
        validate.check_cache_implementation(self.cache_implementation)
        for value in rows.each(self.max_new_tokens):
            FIELDS["max_new_tokens"].check("max_new_tokens", value)
        with _without_own_values(self, *rows.lists_in(dict(vars(self)))):
            super().validate(strict=strict, **kwargs)

    @classmethod
    def from_vllm(cls, params: Any) -> GenerationConfig:
        """The config of an object of vLLM's ``SamplingParams``, or of a mapping with its fields."""
        return cls(**vllm.translated(vllm.fields_of(params)))


def SamplingParams(**params: Any) -> GenerationConfig:
    """A generation config of the parameters of vLLM's class of this name, with its defaults.

    They differ from transformers': sampling, of all tokens, 16 of them. docs/controls.md has the
    table. A batch takes one config per prompt: ``generate(generation_config=[config, …])``.

    Raises ``ValueError`` for a name that vLLM does not know, and for a field that hfgen does not
    take, saying what to use instead; other errors are those of the field that a parameter becomes.
    """
    return GenerationConfig(**vllm.translated(params))


for _name, _default in OWN_FIELDS.items():  # of the class: what is saved stays upstream's
    setattr(GenerationConfig, _name, _default)


@contextmanager
def _without_own_values(config: Any, *unset: str) -> Iterator[None]:
    """Within, ``unset`` fields are ``None``, and others have no value that only hfgen knows.

    These are no new tokens, and caches that were registered.
    """
    hidden = (*unset, "max_new_tokens", "cache_implementation")
    values = {name: getattr(config, name) for name in hidden}
    vars(config).update(dict.fromkeys(unset))
    if is_zero(config.max_new_tokens):
        config.max_new_tokens = None
    if not caches.is_upstreams(config.cache_implementation):
        config.cache_implementation = "dynamic"
    try:
        yield
    finally:
        vars(config).update(values)


@contextmanager
def taking_own_values(config: Any) -> Iterator[None]:
    """Within, ``config.update`` takes what only hfgen takes, whatever the class of ``config``."""

    def validate(**kwargs: Any) -> None:
        with _without_own_values(config):
            type(config).validate(config, **kwargs)

    config.validate = validate
    try:
        yield
    finally:
        del config.validate
