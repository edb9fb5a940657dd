"""Prefixes that calls have in common: computed once, kept across calls.

``begin`` is a stage of ``generate``, between the cache and decoding: it fills the call's own empty
cache with what is stored of its prompts. From there on the call is one that continues a cache.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from types import MappingProxyType
from typing import Any

from torch import Tensor

from .. import fanout, validate
from ..types import Plan, Prompt, Request
from . import prefix_files, prefix_limits
from .prefix_call import PrefixCall
from .prefix_layout import Layout
from .prefix_limits import Reason
from .radix import Forest, Match, States


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """What a ``PrefixCache`` did since it was made, and what it holds.

    ``lookups`` counts prompts, ``hits`` those of which something was reused; ``tokens`` those of all
    prompts that were looked up, ``tokens_saved`` those that were not forwarded. ``bytes`` and
    ``sequences`` (that no other goes on from) are held now; ``evictions`` counts runs of tokens.
    ``bypassed``: reason -> calls that went by without stored prefixes.
    """

    lookups: int
    hits: int
    tokens: int
    tokens_saved: int
    bytes: int
    sequences: int
    evictions: int
    bypassed: Mapping[str, int]


class PrefixCache:
    """Keys and values of prompts, for later calls whose prompts begin alike.

    Pass it to ``generate(prefix_cache=…)``, or set it once as ``model.prefix_cache``. Several models
    and several threads may use the same one.

    Args:
        max_bytes: Memory for keys, values and tokens; the least recently used go first.

    Raises:
        TypeError, ValueError: ``max_bytes`` is no positive integer.
    """

    def __init__(self, max_bytes: int = 2 * 1024**3) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int):
            raise TypeError(
                f"`max_bytes` has to be an integer, but is {max_bytes!r} "
                f"({type(max_bytes).__name__})."
            )
        if max_bytes <= 0:
            raise ValueError(f"`max_bytes` has to be positive, but is {max_bytes}.")
        self.max_bytes = max_bytes
        self._lock = Lock()
        self._forest = Forest(max_bytes)
        self._counts: Counter[str] = Counter()
        self._bypassed: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"PrefixCache(max_bytes={self.max_bytes}, bytes={self._forest.n_bytes})"

    def __deepcopy__(self, memo: dict[int, Any]) -> PrefixCache:
        return self  # copies of a model may share it: their states have other keys

    def __reduce__(self) -> tuple[type[PrefixCache], tuple[int]]:
        return PrefixCache, (self.max_bytes,)  # empty: in another process the keys say nothing

    @property
    def stats(self) -> PrefixStats:
        """Counts so far; a snapshot."""
        with self._lock:
            nodes = [n for root in self._forest.roots.values() for n in self._forest.nodes(root)]
            return PrefixStats(
                lookups=self._counts["lookups"],
                hits=self._counts["hits"],
                tokens=self._counts["tokens"],
                tokens_saved=self._counts["tokens_saved"],
                bytes=self._forest.n_bytes,
                sequences=sum(not node.children for node in nodes),
                evictions=self._forest.n_evicted,
                bypassed=MappingProxyType(dict(self._bypassed)),
            )

    def clear(self) -> None:
        """Forget all prefixes; the counts stay."""
        with self._lock:
            n_evicted, self._forest = self._forest.n_evicted, Forest(self.max_bytes)
            self._forest.n_evicted = n_evicted

    def save(self, path: str | os.PathLike[str], model: Any) -> None:
        """Write the prefixes of ``model``, as it is now, to a safetensors file.

        An existing file is replaced when the new one is complete. Raises ``ValueError`` if the model
        has forward hooks, whose effect no file can tell.
        """
        prefix_files.save(self, path, model)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], model: Any, max_bytes: int = 2 * 1024**3
    ) -> PrefixCache:
        """What ``save`` wrote. If it is larger than ``max_bytes``, the most recently used is kept.

        Raises ``FileNotFoundError``, or ``ValueError`` for a file that is damaged, not of ``save``,
        or of another model: other weights, config, dtype, adapters or kernels.
        """
        prefixes = cls(max_bytes)
        prefix_files.load(prefixes, path, model)
        return prefixes

    # ------------------------------------------------------------ for calls

    def _match(self, keys: Sequence[Hashable], rows: Sequence[Tensor]) -> list[Match]:
        with self._lock:
            return [self._forest.match(key, row) for key, row in zip(keys, rows, strict=True)]

    def _insert(
        self,
        key: Hashable,
        tokens: Tensor,
        states: Callable[[int, int], States],
        bytes_per_token: int,
    ) -> None:
        with self._lock:
            self._forest.insert(key, tokens, states, bytes_per_token)

    def _bytes_per_token(self, key: Hashable) -> int | None:
        with self._lock:
            root = self._forest.roots.get(key)
            nodes = root.children.values() if root is not None else ()
            return next((node.bytes_per_token() for node in nodes), None)

    def _count(self, rows: Sequence[Tensor], saved: Sequence[int]) -> None:
        """Count the prompts of a call, and how many tokens of each are not forwarded."""
        with self._lock:
            self._counts["lookups"] += len(rows)
            self._counts["hits"] += sum(n > 0 for n in saved)
            self._counts["tokens"] += sum(len(row) + 1 for row in rows)
            self._counts["tokens_saved"] += sum(max(n, 0) for n in saved)

    def _bypass(self, reason: str) -> None:
        with self._lock:
            self._bypassed[reason] += 1


@dataclass(frozen=True, slots=True)
class Asked:
    """The ``PrefixCache`` of a call. ``by_name``: as its argument, not as the model's attribute."""

    prefixes: PrefixCache
    by_name: bool

    def refuse(self, reason: Reason) -> None:
        """Go by without stored prefixes, or raise ``ValueError`` if two arguments contradict."""
        if self.by_name and reason.is_choice:
            raise ValueError(
                f"`prefix_cache` cannot be used: {reason.text}. Leave one of them out."
            )
        self.prefixes._bypass(reason.text)


def take_argument(model: Any, request: Request) -> Asked | None:
    """Take ``prefix_cache`` out of the call's arguments; ``None`` there goes before the model's own.

    Raises ``TypeError`` for anything that is no ``PrefixCache``.
    """
    by_name = "prefix_cache" in request.kwargs
    prefixes = request.kwargs.pop("prefix_cache", getattr(model, "prefix_cache", None))
    if prefixes is None:
        return None
    if not isinstance(prefixes, PrefixCache):
        name = "prefix_cache" if by_name else "model.prefix_cache"
        raise TypeError(
            f"`{name}` has to be a hfgen.PrefixCache, but is {type(prefixes).__name__} "
            f"({str(prefixes)[:60]})."
        )
    asked = Asked(prefixes, by_name)
    if request.kwargs.get("cache_implementation") == "paged":
        asked.refuse(Reason("`cache_implementation` is 'paged'"))
        return None
    return asked


def check(
    asked: Asked | None, model: Any, request: Request, plan: Plan, model_kwargs: dict[str, Any]
) -> Asked | None:
    """``asked``, unless the call's arguments rule it out. Raises ``ValueError`` as ``refuse`` does."""
    if asked is None or plan.config.is_assistant or validate.is_zero(plan.config.max_new_tokens):
        return None
    reason = prefix_limits.of_arguments(model, request, plan, model_kwargs)
    if reason is not None:
        asked.refuse(reason)
        return None
    return asked


def begin(asked: Asked | None, model: Any, plan: Plan, prompt: Prompt) -> None:
    """Fill the call's cache with what is stored of its prompts, and see to what will be stored.

    Raises ``ValueError`` for a prompt that cannot be used, if ``prefix_cache`` was an argument.
    """
    if asked is None:
        return None
    if (reason := prefix_limits.of_prompt(model, plan, prompt)) is not None:
        return asked.refuse(reason)
    cache = prompt.model_kwargs["past_key_values"]
    fans_out = fanout.is_ahead(model, plan, prompt, cache)
    rows: Any = plan.config._unexpanded if fans_out else prompt
    layout = Layout.of(rows.ids, rows.model_kwargs)
    if isinstance(layout, Reason):
        return asked.refuse(layout)
    inputs = rows.ids, rows.model_kwargs, layout
    call = PrefixCall(asked.prefixes, model, plan.config, cache, *inputs, asked.by_name)
    per_token = asked.prefixes._bytes_per_token(call.keys[0])
    if per_token is not None and (too_large := call.too_large(per_token)):
        return asked.prefixes._bypass(too_large)
    call.fill(plan.config)
    plan.config._prefixes = call
    return None
