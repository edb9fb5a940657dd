"""Ways to make a model generate with hfgen: one model, one class, the auto classes, or everything."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import transformers
from torch import nn
from transformers import GenerationMixin as UpstreamMixin

from .mixin import GenerationMixin

T = TypeVar("T")


def mix_into(model: T) -> T:
    """Let ``model`` generate with hfgen, and return it; or, given a class, return the mixed class.

    A model is switched in place, and so are the models inside it that generate by themselves (the
    generator of RAG, the depth decoder of speech models): weights, hooks, adapters, quantisation
    and device map stay as they are, and so do the name and the module of each class. Of a wrapper
    (PEFT, ``torch.compile``) the model inside is switched. Doing it twice changes nothing.

    Raises:
        TypeError: ``model`` cannot generate, or is not a model.
    """
    if isinstance(model, type):
        return _mixed_class(model)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"mix_into() takes a transformers model or its class, but got {type(model).__name__}."
        )
    inner = _unwrap(model)
    inner.__class__ = _mixed_class(inner.__class__)
    for part in inner.modules():
        if isinstance(part, UpstreamMixin):
            part.__class__ = _mixed_class(part.__class__)
    if inner is not model and hasattr(model, "base_model_prepare_inputs_for_generation"):
        # PEFT kept the method that the model had when it was wrapped.
        model.base_model_prepare_inputs_for_generation = inner.prepare_inputs_for_generation
    return model


def _unwrap(model: Any) -> Any:
    """The transformers model inside of wrappers that pass ``generate`` on."""
    while not isinstance(model, UpstreamMixin):
        if hasattr(model, "get_base_model"):  # PEFT
            model = model.get_base_model()
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):  # torch.compile
            model = model._orig_mod
        else:
            break
    return model


@functools.cache
def _mixed_class(cls: Any) -> Any:
    if not issubclass(cls, UpstreamMixin):
        raise TypeError(
            f"{cls.__name__} cannot generate: it is no transformers.GenerationMixin. Load the model "
            "with a class that has a language modelling head, such as AutoModelForCausalLM's."
        )
    if issubclass(cls, GenerationMixin):
        return cls
    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": _reduce,
        "_unmixed_class": cls,
    }
    return type(cls)(cls.__name__, (cls, GenerationMixin), namespace)


def _reduce(self: Any, protocol: Any) -> str | tuple:
    """Pickle by the class that can be imported; mix again on the other side."""
    if "_unmixed_class" not in vars(type(self)):  # a subclass of a mixed class, importable itself
        return object.__reduce_ex__(self, protocol)
    state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
    return _new, (type(self)._unmixed_class,), state


def _new(cls: Any) -> Any:
    mixed = _mixed_class(cls)
    return mixed.__new__(mixed)


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

#: Upstream's attributes while hfgen's stand in their place; empty when it does not.
_originals: dict[str, Any] = {}


def patch() -> None:
    """Let every transformers model generate with hfgen, whoever builds it, until ``unpatch()``.

    hfgen's stages are put into ``transformers.GenerationMixin`` itself, so that models' calls of
    ``super()`` and of the mixin by name reach them too. Doing it twice changes nothing.
    """
    if _originals:
        return
    for name, attribute in vars(GenerationMixin).items():
        if not name.startswith("__"):
            _originals[name] = vars(UpstreamMixin)[name]
            setattr(UpstreamMixin, name, attribute)


def unpatch() -> None:
    """Give every model upstream's generation back. Models that were mixed stay mixed."""
    for name, attribute in _originals.items():
        setattr(UpstreamMixin, name, attribute)
    _originals.clear()


@contextmanager
def patched() -> Iterator[None]:
    """Within, every transformers model generates with hfgen; see ``patch``."""
    was_patched = bool(_originals)
    patch()
    try:
        yield
    finally:
        if not was_patched:
            unpatch()
