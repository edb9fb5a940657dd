"""The prefix cache: common beginnings of prompts, computed once and kept across calls.

``begin`` fills the call's own empty cache before decoding; the call then continues a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...settings.kinds import is_zero
from ...state.call import Call, ModelKwargs, Prompt, Request
from .. import prompts
from . import eligibility
from .cache import PrefixCache, PrefixStats
from .eligibility import Reason
from .session import Layout, PrefixSession

__all__ = ["PrefixCache", "PrefixStats", "begin", "check", "take_argument"]


@dataclass(frozen=True, slots=True)
class PrefixRequest:
    """The ``PrefixCache`` of a call. ``by_name``: it is an argument, not the model's attribute."""

    prefixes: PrefixCache
    by_name: bool

    def refuse(self, reason: Reason) -> None:
        """Count a call without stored prefixes. Raises ``ValueError`` if two arguments contradict."""
        if self.by_name and reason.is_choice:
            raise ValueError(f"`prefix_cache` cannot be used: {reason.text}. Leave one out.")
        self.prefixes._bypass(reason.text)


def take_argument(model: Any, request: Request, default: Any = None) -> PrefixRequest | None:
    """The call's ``prefix_cache`` if it has one, else ``default``, else the model's."""
    by_name = "prefix_cache" in request.kwargs
    prefixes = request.kwargs.get("prefix_cache", default or getattr(model, "prefix_cache", None))
    if prefixes is None:
        return None
    if not isinstance(prefixes, PrefixCache):
        name = "prefix_cache" if by_name else "model.prefix_cache"
        value = f"{type(prefixes).__name__} ({str(prefixes)[:60]})"
        raise TypeError(f"`{name}` has to be a hfgen.PrefixCache, but is {value}.")
    prefix_request = PrefixRequest(prefixes, by_name)
    if request.kwargs.get("cache_implementation") == "paged":
        prefix_request.refuse(Reason("`cache_implementation` is 'paged'"))
        return None
    return prefix_request


def check(
    prefix_request: PrefixRequest, model: Any, call: Call, model_kwargs: ModelKwargs
) -> PrefixRequest | None:
    """``prefix_request``, or ``None`` if the call's arguments rule it out. Raises as ``refuse``."""
    if call.config.is_assistant or is_zero(call.config.max_new_tokens):
        return None
    if (reason := eligibility.of_arguments(model, call, model_kwargs)) is None:
        return prefix_request
    prefix_request.refuse(reason)
    return None


def begin(model: Any, call: Call, prompt: Prompt) -> None:
    """Fill the call's cache with stored prefixes, and set ``call.prefix_session``; or ``refuse``."""
    prefix_request: PrefixRequest | None = call.prefixes
    if prefix_request is None:
        return
    rows: Any = call.shared_prompt if prompts.will_share_prefill(model, call, prompt) else prompt
    layout = eligibility.of_prompt(model, call, prompt) or Layout.of(rows.ids, rows.model_kwargs)
    if isinstance(layout, Reason):
        prefix_request.refuse(layout)
        return
    cache = prompt.model_kwargs["past_key_values"]
    session = PrefixSession(prefix_request.prefixes, model, call.config, cache, rows, layout)
    session.fill()
    call.prefix_session = session
