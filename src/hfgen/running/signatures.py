"""The names of arguments that a function, a hook or a model takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from transformers.utils import TransformersKwargs

_PARAMETERS: WeakKeyDictionary[Callable[..., Any], frozenset[str]] = WeakKeyDictionary()


def parameters(function: Callable[..., Any]) -> frozenset[str]:
    """The names of a function's or method's parameters, but for ``self``; looked up once."""
    owner = getattr(function, "__func__", function)  # methods are made anew at each access
    with suppress(KeyError, TypeError):  # TypeError: nothing that a dictionary can hold
        return _PARAMETERS[owner]
    names = frozenset(inspect.signature(function).parameters) - {"self"}
    with suppress(TypeError):
        _PARAMETERS[owner] = names
    return names


def accepted_names(model: Any) -> set[str]:
    """The keyword arguments that the model takes, through its forward or a hook."""

    known = set(parameters(model.prepare_inputs_for_generation))
    if known & {"kwargs", "model_kwargs"}:  # it passes on whatever forward takes
        known |= parameters(model.forward)
    if model.config.is_encoder_decoder:
        known.add("decoder_input_ids")
        owners = model, getattr(model, model.base_model_prefix, None)
        for part, prefix in (("encoder", ""), ("decoder", "decoder_")):
            found = (getattr(owner, part, None) for owner in owners)
            if (module := next((one for one in found if one is not None), None)) is not None:
                known |= {prefix + name for name in parameters(module.forward)}
    return known | TransformersKwargs.__optional_keys__ | {"debug_io", "mm_encoder_outputs"}
