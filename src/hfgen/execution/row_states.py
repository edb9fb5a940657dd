"""What remembers rows besides the cache and the arguments of forward: modules, hooks, lists."""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils import ModelOutput

from .. import buffers
from ..call import ModelKwargs

#: Packages whose hooks, of models and of modules, look at each row by itself.
LIBRARIES = ("accelerate", "torch", "transformers", __name__.partition(".")[0])


def counts_rows(model: Any, model_kwargs: ModelKwargs, n_rows: int) -> bool:
    """Whether something expects a forward of all rows: a hook on a module, or a list with one entry each.

    Hooks of the libraries do not. One of the caller's may say so by an attribute ``is_row_wise``.
    """
    hooks = (
        hook
        for module in model.modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    )
    return any(
        isinstance(value, list | tuple) and len(value) == n_rows for value in model_kwargs.values()
    ) or not all(map(_is_row_wise, hooks))


def _is_row_wise(hook: Any) -> bool:
    if (said := getattr(hook, "is_row_wise", None)) is not None:
        return bool(said)
    hook = getattr(hook, "func", hook)  # of a partial
    return str(getattr(hook, "__module__", "")).partition(".")[0] in LIBRARIES


class ModuleStates:
    """The tensors that a model's modules hold as plain attributes, as they are now."""

    def __init__(self, model: Any) -> None:
        self.model, self.held = model, _held(model)

    def have_changed(self) -> bool:
        """Whether a module has another one since, or one was written to."""
        return any(
            value is not was or version != version_then
            for key, (value, version) in _held(self.model).items()
            for was, version_then in [self.held.get(key, (None, None))]
        )


def _held(model: Any) -> dict[tuple[int, str], tuple[torch.Tensor, int | None]]:
    return {
        (id(module), name): (value, buffers.n_writes(value))
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def has_other_caches(outputs: ModelOutput) -> bool:
    """Whether a forward returns states besides those of ``past_key_values``."""
    known = (torch.Tensor, tuple, ModelOutput, type(None))
    others = (value for name, value in outputs.items() if name != "past_key_values")
    return not all(isinstance(value, known) for value in others)
