"""Per-row state outside the cache and the forward arguments: modules, hooks, lists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.utils import ModelOutput

from .. import buffers
from ..call import ModelKwargs

#: Packages whose hooks, of models and of modules, look at each row by itself.
LIBRARIES = ("accelerate", "torch", "transformers", __name__.partition(".")[0])

#: Tensors by module and name, each with how often it was written to.
ModuleTensors = dict[tuple[int, str], tuple[torch.Tensor, int | None]]


def counts_rows(model: Any, model_kwargs: ModelKwargs, n_rows: int) -> bool:
    """Whether a hook that is not ``is_row_wise``, or a list with an entry per row, needs all rows."""
    lists = (value for value in model_kwargs.values() if isinstance(value, list | tuple))
    return any(len(value) == n_rows for value in lists) or not all(map(_is_row_wise, _hooks(model)))


def has_own_hooks(model: Any) -> bool:
    """Whether a hook is of no library that is known: it may count forwards, say."""
    return not all(map(_is_librarys, _hooks(model)))


def _hooks(model: Any) -> Iterator[Any]:
    for module in model.modules():
        yield from (*module._forward_pre_hooks.values(), *module._forward_hooks.values())


def _is_row_wise(hook: Any) -> bool:
    if (said := getattr(hook, "is_row_wise", None)) is not None:
        return bool(said)
    return _is_librarys(hook)


def _is_librarys(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)  # of a partial
    return str(getattr(hook, "__module__", "")).partition(".")[0] in LIBRARIES


def module_tensors(model: Any) -> ModuleTensors:
    """The tensors that modules hold as plain attributes, and how often each was written to."""
    return {
        (id(module), name): (value, buffers.n_writes(value))
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def have_changed(model: Any, before: ModuleTensors) -> bool:
    """Whether a module got another tensor since ``module_tensors``, or one was written to."""
    for key, (value, version) in module_tensors(model).items():
        was, version_then = before.get(key, (None, None))
        if value is not was or version != version_then:
            return True
    return False


@contextmanager
def restored(model: Any) -> Iterator[None]:
    """After it, modules have the attributes that they had before, whatever forwards have left there."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            now = vars(module)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update({n: v for n, v in attributes.items() if now.get(n) is not v})


def has_other_caches(outputs: ModelOutput) -> bool:
    """Whether a forward returns states besides those of ``past_key_values``."""
    known = (torch.Tensor, tuple, ModelOutput, type(None))
    others = (value for name, value in outputs.items() if name != "past_key_values")
    return not all(isinstance(value, known) for value in others)
