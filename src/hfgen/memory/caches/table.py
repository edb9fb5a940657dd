"""``CACHES``: the cache for each ``cache_implementation``, and what each kind of cache supports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import (
    ALL_CACHE_IMPLEMENTATIONS,
    DEPRECATED_STATIC_CACHE_IMPLEMENTATIONS,
)

from ...settings import cache_settings
from ...state.call import ModelKwargs
from . import offloaded, quantized, static
from .dynamic import GrowingCache


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """What a factory is told about the call."""

    model: Any
    config: GenerationConfig
    model_kwargs: ModelKwargs
    rows: int  # sequences that the cache will hold
    max_length: int  # tokens per sequence, at most

    @property
    def decoder_config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)


def make_dynamic(request: CacheRequest) -> Cache:
    """Grows with the sequences; sliding-window and linear-attention layers keep only their state."""
    return GrowingCache(config=request.decoder_config, max_length=request.max_length)


def make_cross_attention(request: CacheRequest) -> Cache:
    """The encoder's keys and values, which come once and do not grow."""
    return DynamicCache(config=request.decoder_config)


@dataclass(frozen=True, slots=True)
class CacheKind:
    """A kind of cache. What it does not declare is not assumed: calls that need it are refused.

    Args:
        name: Its ``cache_implementation``.
        factory: Makes the cache of a call.
        settings: Raises ``ValueError`` for a ``cache_config`` and a decoder's config that do not fit.
        make_cross_attention: Makes the encoder's part, unless ``factory`` returns both.
        compiles: Keys have fixed shapes, so decoding steps may be compiled.
        loses_rows: ``reorder_cache(rows)`` of its layers takes fewer rows (for ``drop_finished``).
        rolls_back: ``crop(-n)`` takes the newest tokens out (for drafting and contrastive search).
        may_hold_prefix: A ``PrefixCache`` may fill it.
    """

    name: str
    factory: Callable[[CacheRequest], Cache]
    settings: Callable[[Any, Any], None] | None = None
    make_cross_attention: Callable[[CacheRequest], Cache] = make_cross_attention
    compiles: bool = False
    loses_rows: bool = False
    rolls_back: bool = False
    may_hold_prefix: bool = False


def _dynamic(name: str, may_hold_prefix: bool = True) -> CacheKind:
    return CacheKind(
        name, make_dynamic, loses_rows=True, rolls_back=True, may_hold_prefix=may_hold_prefix
    )


#: The kinds by name. To add one, assign a ``CacheKind``, or only its factory.
CACHES: dict[str, CacheKind | Callable[[CacheRequest], Cache]] = {
    "dynamic": _dynamic("dynamic"),
    "offloaded": CacheKind(
        "offloaded",
        offloaded.make_offloaded,
        offloaded.check_settings,
        offloaded.make_cross_attention,
        loses_rows=True,
        rolls_back=True,
    ),
    "static": CacheKind(
        "static", static.make_static, compiles=True, rolls_back=True, may_hold_prefix=True
    ),
    "offloaded_static": CacheKind(
        "offloaded_static", static.make_static, cache_settings.check_none, rolls_back=True
    ),
    "quantized": CacheKind(
        "quantized",
        quantized.make_quantized,
        cache_settings.check_quantized,
        loses_rows=True,
        rolls_back=True,
    ),
    # Of a config; as an argument, it means continuous batching.
    "paged": _dynamic("paged", may_hold_prefix=False),
    **{
        name: CacheKind(name, static.make_deprecated_static, rolls_back=True)
        for name in DEPRECATED_STATIC_CACHE_IMPLEMENTATIONS
    },
}


def cache_kind(name: str | None) -> CacheKind:
    """The kind of that name, ``None`` being the default; a plain factory declares nothing."""
    kind = CACHES["dynamic" if name is None else name]
    return kind if isinstance(kind, CacheKind) else CacheKind(str(name), kind)


def is_upstreams(name: str | None) -> bool:
    """Whether transformers' own ``GenerationConfig`` takes that name."""
    return name is None or name in (*ALL_CACHE_IMPLEMENTATIONS, "paged")


def names() -> list[str]:
    """The names that error messages offer."""
    return sorted({*CACHES} - {*DEPRECATED_STATIC_CACHE_IMPLEMENTATIONS} - {"paged"})
