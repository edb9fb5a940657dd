"""Views of a model: modules that share its parameters, with some of them replaced."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from .row_states import is_of

#: Where a module keeps its forward hooks.
HOOKS = ("_forward_pre_hooks", "_forward_hooks")

#: Attributes that are bound to their module, and made anew where they are missing.
COMPILED = ("_compiled_call", "_last_compile_config", "_compiled_call_impl")


def view_of(module: Any) -> Any:
    """A copy of ``module`` that shares all that it holds, but its table of children."""
    view = object.__new__(type(module))  # FSDP's classes construct their modules anew when copied
    view.__dict__.update(vars(module))
    for key, value in vars(module).items():
        if key in COMPILED:
            del view.__dict__[key]
        elif isinstance(value, MethodType) and value.__self__ is module:
            view.__dict__[key] = MethodType(value.__func__, view)
        elif isinstance(value, partial) and module in value.args:  # accelerate's forward
            args = (view if arg is module else arg for arg in value.args)
            view.__dict__[key] = bound = partial(value.func, *args, **value.keywords)
            bound.__dict__.update(vars(value))
    view._modules = dict(module._modules)
    return view


def without_own_hooks(module: Any) -> Any:
    """A view of ``module`` and its parts without forward hooks of no library that is known."""
    view = view_of(module)
    for name in HOOKS:
        hooks = vars(module)[name]
        view.__dict__[name] = type(hooks)((key, hook) for key, hook in hooks.items() if is_of(hook))
    for name, part in module._modules.items():
        view._modules[name] = None if part is None else without_own_hooks(part)
    return view


class Instead(nn.Module):
    """Calls ``called`` in place of ``module``, and has the module's attributes and parameters."""

    def __init__(self, module: nn.Module, called: Callable[..., Any]) -> None:
        super().__init__()
        self._modules["module"] = module
        self.__dict__["called"] = called

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.called(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "module" in self.__dict__.get("_modules", {}):  # what models leave on their parts
            setattr(self._modules["module"], name, value)
        else:
            super().__setattr__(name, value)


def replaced(model: Any, path: str, called: Callable[..., Any], is_copied: bool = False) -> Any:
    """A view of ``model`` in which ``called`` is called in place of the module at ``path``.

    Attributes that the model sets on that module stay there afterwards, unless ``is_copied``.
    """
    *parents, name = path.split(".")
    view = part = view_of(model)
    for parent in parents:
        part._modules[parent] = part = view_of(part._modules[parent])
    module = part._modules[name]
    part._modules[name] = Instead(view_of(module) if is_copied else module, called)
    return view
