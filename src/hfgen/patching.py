"""Ways to make a model generate with hfgen: one model, one class, the auto classes, or everything."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import transformers
from torch import nn
from transformers import GenerationMixin as UpstreamMixin

from .mixin import GenerationMixin, mixed_class

T = TypeVar("T")


def mix_into(model: T) -> T:
    """Let ``model`` generate with hfgen, and return it; or, given a class, return the mixed class.

    A model is switched in place: weights, hooks, adapters, quantisation and device map stay as they
    are, and so do the name and the module of its class. Models inside of it that generate as well
    are switched too: the one that a wrapper holds (PEFT, ``torch.compile``), the generator of RAG,
    the depth decoder of a speech model. Doing it twice changes nothing.

    Raises:
        TypeError: ``model`` cannot generate, or is not a model.
    """
    if isinstance(model, type):
        return mixed_class(model)
    if not isinstance(model, nn.Module):
        inner = isinstance(getattr(model, "model", None), nn.Module)  # a pipeline, a trainer, …
        raise TypeError(
            f"mix_into() takes a transformers model or its class, but got {type(model).__name__}"
            + (": pass its `.model`." if inner else ".")
        )
    parts = [module for module in model.modules() if isinstance(module, UpstreamMixin)]
    for part in parts or [model]:  # a model without such parts is refused by its class
        part.__class__ = mixed_class(part.__class__)
    if hasattr(model, "base_model_prepare_inputs_for_generation"):
        # PEFT kept the method that the model had when it was wrapped.
        wrapper: Any = model
        base = wrapper.get_base_model()
        wrapper.base_model_prepare_inputs_for_generation = base.prepare_inputs_for_generation
    return model


# --- auto classes -------------------------------------------------------------------------------


class _AutoMixed:
    """``from_pretrained`` and ``from_config`` of a transformers auto class, mixed."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; what comes back generates with hfgen."""
        loaded = super().from_pretrained(*args, **kwargs)  # type: ignore[misc]
        if isinstance(loaded, tuple):  # output_loading_info=True
            return (mix_into(loaded[0]), *loaded[1:])
        return mix_into(loaded)

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; what comes back generates with hfgen."""
        return mix_into(super().from_config(*args, **kwargs))  # type: ignore[misc]


class AutoModelForCausalLM(_AutoMixed, transformers.AutoModelForCausalLM):
    """``transformers.AutoModelForCausalLM``, generating with hfgen."""


class AutoModelForSeq2SeqLM(_AutoMixed, transformers.AutoModelForSeq2SeqLM):
    """``transformers.AutoModelForSeq2SeqLM``, generating with hfgen."""


class AutoModelForSpeechSeq2Seq(_AutoMixed, transformers.AutoModelForSpeechSeq2Seq):
    """``transformers.AutoModelForSpeechSeq2Seq``, generating with hfgen."""


class AutoModelForImageTextToText(_AutoMixed, transformers.AutoModelForImageTextToText):
    """``transformers.AutoModelForImageTextToText``, generating with hfgen."""


# --- everything ---------------------------------------------------------------------------------

#: Upstream's attributes while hfgen's stand in their place, ``None`` for those that it has not.
_originals: dict[str, Any] = {}
#: Calls of ``patch()`` that no ``unpatch()`` has followed yet, in all threads.
_patches = 0
_lock = threading.RLock()


def patch() -> None:
    """Let every transformers model generate with hfgen, whoever builds it, until ``unpatch()``.

    hfgen's stages are put into ``transformers.GenerationMixin`` itself, so that models' calls of
    ``super()`` and of the mixin by name reach them too. Each call takes an ``unpatch()`` of its own.
    """
    global _patches
    with _lock:
        if _patches == 0:
            try:
                for name, attribute in vars(GenerationMixin).items():
                    if not name.startswith("__"):
                        _originals[name] = vars(UpstreamMixin).get(name)
                        setattr(UpstreamMixin, name, attribute)
            except BaseException:
                _restore()
                raise
        _patches += 1


def unpatch() -> None:
    """Take back one ``patch()``; after the last one every model has upstream's generation again.

    Models that were mixed stay mixed. Without a ``patch()`` before it, nothing happens.
    """
    global _patches
    with _lock:
        _patches = max(0, _patches - 1)
        if _patches == 0:
            _restore()


def _restore() -> None:
    for name, attribute in _originals.items():
        if attribute is not None:
            setattr(UpstreamMixin, name, attribute)
        elif name in vars(UpstreamMixin):
            delattr(UpstreamMixin, name)
    _originals.clear()


@contextmanager
def patched() -> Iterator[None]:
    """Within, every transformers model generates with hfgen; see ``patch``.

    May be nested, and entered by several threads: the last one to leave takes hfgen away.
    """
    patch()
    try:
        yield
    finally:
        unpatch()
