"""``PrefixCache``: keys and values of prompts, kept across calls."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ...memory import fingerprint
from ...settings.fields import FieldError
from . import files
from .radix import Forest, KeyValues, Match


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """What a ``PrefixCache`` did since it was made, and what it holds.

    ``lookups`` and ``tokens`` count prompts and their tokens; ``hits`` and ``tokens_saved``, what was
    reused. ``bytes`` and ``sequences`` (which no other continues) are held now; ``evictions`` counts
    runs of tokens. ``bypassed``: calls by the reason why they used no stored prefixes.
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

    Pass it to ``generate(prefix_cache=…)``, or set it once as ``model.prefix_cache``. Models and
    threads may share one. ``max_bytes`` limits keys, values and tokens; the least recently used go
    first. Raises ``TypeError`` or ``ValueError`` if it is no positive integer.
    """

    def __init__(self, max_bytes: int = 2 * 1024**3) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes <= 0:
            value = f"{max_bytes!r} ({type(max_bytes).__name__})"
            raise FieldError(f"`max_bytes` has to be a positive integer, but is {value}.")
        self.max_bytes = max_bytes
        self._lock = Lock()
        self._forest = Forest(max_bytes)
        self._counts = dict.fromkeys(("lookups", "hits", "tokens", "tokens_saved"), 0)
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
            return PrefixStats(
                **self._counts,
                bytes=self._forest.n_bytes,
                sequences=sum(not node.children for node in self._forest.nodes),
                evictions=self._forest.n_evicted,
                bypassed=MappingProxyType(dict(self._bypassed)),
            )

    def clear(self) -> None:
        """Remove all prefixes; the counts stay."""
        with self._lock:
            self._forest = Forest(self.max_bytes, self._forest.n_evicted)

    def save(self, path: str | os.PathLike[str], model: Any) -> None:
        """Write the prefixes of ``model``, as it is now, to a safetensors file.

        An existing file is replaced when the new one is complete; only this user may read it. Raises
        ``ValueError`` if the model has forward hooks or offloaded weights, which no file can tell.
        """
        content, identity = fingerprint.content(model), fingerprint.identity(model)
        with self._lock:  # splitting a node changes the parents of others
            items = reversed(self._forest.nodes.items())
            nodes = [(node, node.parent, key[1]) for node, key in items if key[0] == identity]
        files.save(nodes, path, content)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], model: Any, max_bytes: int = 2 * 1024**3
    ) -> PrefixCache:
        """Read a file of ``save``; if it is larger than ``max_bytes``, the most recently used prefixes.

        Raises ``FileNotFoundError``, or ``ValueError`` for a file that is damaged, not of ``save``,
        or of another model: other weights, config, dtype, adapters or kernels.
        """
        prefixes = cls(max_bytes)
        files.load(prefixes._forest, path, model)
        return prefixes

    def _match(self, keys: Sequence[Hashable], rows: Sequence[Tensor]) -> list[Match]:
        with self._lock:
            return [self._forest.match(key, row) for key, row in zip(keys, rows, strict=True)]

    def _insert(self, key: Hashable, tokens: Tensor, states: KeyValues) -> None:
        with self._lock:
            self._forest.insert(key, tokens, states)

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
