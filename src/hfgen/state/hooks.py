"""Hooks of one call on modules that other threads forward at the same time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from threading import get_ident
from typing import Any

from transformers.utils import output_capturing


def add(
    stack: ExitStack, register: Callable[..., Any], hook: Callable[..., Any], **options: Any
) -> None:
    """Register ``hook`` of a module, which is called in this thread alone, until ``stack`` is closed.

    torch lists hooks when a forward begins. Without its kwargs, it also calls one that was removed since; one that is
    registered as an interrupt comes may stay.
    """

    def call(*args: Any) -> Any:
        return hook(*args) if get_ident() == call.of_thread else None  # type: ignore[attr-defined]

    call.of_thread = get_ident()  # type: ignore[attr-defined]
    stack.callback(setattr, call, "of_thread", 0)
    stack.callback(register(call, **options).remove)


def is_idle(hook: Any) -> bool:
    """Whether ``hook`` is of another thread, and does nothing in this one."""
    return getattr(hook, "of_thread", None) not in (None, get_ident())


def do_something(held: list[dict[int, Any]]) -> bool:
    """Whether one of these hooks does something in this forward."""
    if not any(held):
        return False
    # Other threads may add theirs now.
    hooks = (hook for each in held for hook in tuple(each.values()))
    return bool(output_capturing._active_collector.get()) or any(
        getattr(hook, "__module__", None) != output_capturing.__name__ and not is_idle(hook)
        for hook in hooks
    )
