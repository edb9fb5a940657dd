"""Switching one model, one class, the auto classes, or every model to hfgen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import transformers
from torch import nn
from transformers import GenerationMixin as UpstreamMixin

from .mixin import OWN, GenerationMixin, mixed_class, mixed_view
from .running.row_states import is_replaced
from .settings.versions import warn_if_untested

T = TypeVar("T")


def mix_into(model: T) -> T:
    """Let ``model`` generate with hfgen, and return it; or, given a class, return the mixed class.

    A model is switched in place: weights, hooks, adapters, quantisation and device map stay, and so
    do the name and the module of its class. Models inside of it that generate are switched too, as
    in PEFT's wrapper or in RAG. Raises ``TypeError`` for what is no model, or cannot generate.
    """
    if isinstance(model, type):
        return mixed_class(model)
    parts = _parts("mix_into", model)
    for part in parts or [model]:  # a model without such parts is refused by its class
        object.__setattr__(part, "__class__", mixed_class(part.__class__))  # past its own
    wrapper: Any = model
    if hasattr(model, "base_model_prepare_inputs_for_generation"):  # kept by PEFT as it was before
        method = wrapper.get_base_model().prepare_inputs_for_generation
        wrapper.base_model_prepare_inputs_for_generation = method
    if hasattr(model, "active_peft_config"):  # PEFT looks these up in the model within
        for name in ("stream", "astream", "session", "generate_batch"):
            vars(model)[name] = partial(_call_within, model, name)
    return model


def is_active(model: Any) -> bool:
    """Whether ``generate`` of ``model``, or of the models of a class, runs on hfgen.

    It does for what ``mix_into`` or an auto class has mixed, for subclasses of ``GenerationMixin``, and
    for every model that generates while ``patch()`` holds. Of a wrapper, all models inside of it have to.
    Raises ``TypeError`` for what is neither a model nor a class.
    """
    mixin = UpstreamMixin if _patches else GenerationMixin
    if isinstance(model, type):
        return issubclass(model, mixin)
    parts = _parts("is_active", model)
    return bool(parts) and all(isinstance(part, mixin) for part in parts)


def _parts(function: str, model: Any) -> list[Any]:
    """The models in ``model`` that generate; ``TypeError`` for what is neither a module nor a model."""
    if isinstance(model, UpstreamMixin) and not isinstance(model, nn.Module):
        return [model]
    if not isinstance(model, nn.Module):
        inner = isinstance(getattr(model, "model", None), nn.Module)  # a pipeline, a trainer, …
        given = type(model).__name__ + (": pass its `.model`." if inner else ".")
        raise TypeError(f"{function}() takes a transformers model or its class, but got {given}")
    return [module for module in model.modules() if isinstance(module, UpstreamMixin)]


def _call_within(wrapper: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(mixed_view(wrapper), name)(*args, **kwargs)


class _AutoMixed:
    """``from_pretrained`` and ``from_config`` of a transformers auto class, mixed."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; the model generates with hfgen."""
        loaded = super().from_pretrained(*args, **kwargs)  # type: ignore[misc]
        mix_into(loaded[0] if isinstance(loaded, tuple) else loaded)  # output_loading_info=True
        return loaded

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; the model generates with hfgen."""
        return mix_into(super().from_config(*args, **kwargs))  # type: ignore[misc]


class AutoModelForCausalLM(_AutoMixed, transformers.AutoModelForCausalLM):
    """``transformers.AutoModelForCausalLM``, generating with hfgen."""


class AutoModelForSeq2SeqLM(_AutoMixed, transformers.AutoModelForSeq2SeqLM):
    """``transformers.AutoModelForSeq2SeqLM``, generating with hfgen."""


class AutoModelForSpeechSeq2Seq(_AutoMixed, transformers.AutoModelForSpeechSeq2Seq):
    """``transformers.AutoModelForSpeechSeq2Seq``, generating with hfgen."""


class AutoModelForImageTextToText(_AutoMixed, transformers.AutoModelForImageTextToText):
    """``transformers.AutoModelForImageTextToText``, generating with hfgen."""


_originals: dict[str, Any] = {}  # upstream's attributes, None for those that it lacks
_patches = 0  # calls of patch() without an unpatch() yet, in all threads
_lock = threading.RLock()


def _refuse_arguments(function: str, given: tuple[object, ...]) -> None:
    if given:
        raise TypeError(
            f"{function}() takes no arguments, but got {type(given[0]).__name__}: it concerns all models of "
            "transformers. To switch one model, call hfgen.mix_into(model)."
        )


def patch(*given: object) -> None:
    """Let every transformers model generate with hfgen until ``unpatch()``, one for each call.

    hfgen's stages are put into ``transformers.GenerationMixin``, also for calls of ``super()``; a method that
    somebody else has put there stays. Raises ``TypeError`` for a model: ``mix_into`` takes one.
    """
    global _patches
    _refuse_arguments("patch", given)
    with _lock:
        _patches += 1
        if _patches > 1:
            return
        try:
            warn_if_untested()
            for name, own in OWN.items():
                if not (hasattr(UpstreamMixin, name) and is_replaced(name)):
                    _originals[name] = vars(UpstreamMixin).get(name)
                    setattr(UpstreamMixin, name, own)
        except BaseException:
            unpatch()
            raise


def unpatch(*given: object) -> None:
    """Undo one ``patch()``, if there was one; models that were mixed stay mixed. Calls that run then may fail."""
    global _patches
    _refuse_arguments("unpatch", given)
    with _lock:
        _patches = max(0, _patches - 1)
        while _originals and _patches == 0:
            name, attribute = _originals.popitem()
            if vars(UpstreamMixin).get(name) is not OWN[name]:
                continue  # somebody has replaced it since
            if attribute is not None:
                setattr(UpstreamMixin, name, attribute)
            else:
                delattr(UpstreamMixin, name)


@contextmanager
def patched(*given: object) -> Iterator[None]:
    """``patch()`` within; may be nested, and entered by several threads."""
    _refuse_arguments("patched", given)
    patch()
    try:
        yield
    finally:
        unpatch()
