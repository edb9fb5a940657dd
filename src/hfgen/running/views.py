"""Views of a model: modules that share its parameters, with some of them replaced."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
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
    for key, value in tuple(vars(view).items()):  # other threads may add to the module's
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


def view_of_all(module: Any, views: dict[int, Any] | None = None) -> Any:
    """A view of ``module`` and its parts, so that a forward, ``eval()`` and hooks leave those of other threads."""
    if not isinstance(module, nn.Module):  # no part, or a class that only generates, as Optimum's
        return module
    views = {} if views is None else views
    if (view := views.get(id(module))) is None:
        view = views[id(module)] = view_of(module)
        view.__dict__ |= {name: vars(module)[name].copy() for name in ("_buffers", *HOOKS)}
        for name, part in module._modules.items():
            view._modules[name] = view_of_all(part, views)
    return view


def without_own_hooks(module: Any) -> Any:
    """A view of ``module`` and its parts without forward hooks of no library that is known."""
    view = view_of_all(module)
    for hooks in (vars(part)[name] for part in view.modules() for name in HOOKS):
        for key in [key for key, hook in hooks.items() if not is_of(hook)]:
            del hooks[key]
    return view


@cache
def _instead_of(kind: Any) -> Any:
    """A subclass of ``kind`` whose instances call what is in their slot; it takes a while to make."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.called_instead(*args, **kwargs)

    namespace = {"__slots__": ("called_instead",), "__call__": call}
    return type(kind)(kind.__name__, (kind,), namespace)


def replaced(model: Any, path: str, called: Callable[..., Any], is_copied: bool = False) -> Any:
    """A view of ``model`` in which ``called`` is called in place of the module at ``path``.

    It is not called by the module's hooks. Attributes that the model sets on that module stay there
    afterwards, unless ``is_copied``.
    """
    *parents, name = path.split(".")
    view = part = view_of(model)
    for parent in parents:
        part._modules[parent] = part = view_of(part._modules[parent])
    module: Any = part._modules[name]
    kind: Any = type(module)
    part._modules[name] = instead = object.__new__(_instead_of(kind))
    instead.__dict__ = dict(vars(module)) if is_copied else vars(module)
    instead.called_instead = called
    return view
