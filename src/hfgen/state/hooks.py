"""Hooks of one call on modules that other threads forward at the same time."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any


def of_thread(hook: Callable[..., Any]) -> Any:
    """``hook`` of a module, which is called in this thread alone.

    torch lists hooks when a forward begins. Without its kwargs, it also calls one that was removed since.
    """
    thread = get_ident()

    def call(*args: Any) -> Any:
        return hook(*args) if get_ident() == thread else None

    call.of_thread = thread  # type: ignore[attr-defined]
    return call


def is_idle(hook: Any) -> bool:
    """Whether ``hook`` is of another thread, and does nothing in this one."""
    return getattr(hook, "of_thread", None) not in (None, get_ident())
