"""The options of ``cache_config`` for each kind of cache, and their checks, which need no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from .fields import with_suggestions

#: Names of hfgen's own method, and of upstream's, as ``backend``.
OWN_BACKEND = "hfgen"
UPSTREAM_BACKENDS = ("quanto", "hqq", "fp8")

BITS = (8, 4, 2)

#: Numbers per scale, where the caller does not say.
GROUP_SIZE = 64

#: Upstream's names of what is meant.
SYNONYMS = {"nbits": "bits", "q_group_size": "group_size"}


def as_dict(options: Any) -> dict[str, Any]:
    """A ``cache_config`` as a new dict. Raises ``ValueError`` for anything but a mapping or ``None``."""
    if not isinstance(options, Mapping | None):
        raise ValueError(f"`cache_config` has to be a dict, but is {options!r}.")
    return dict(options or {})


def check_keys(options: Mapping[str, Any], implementation: str, known: Collection[str]) -> None:
    """Raise ``ValueError`` for a key of a ``cache_config`` that is not one of ``known``."""
    for key in options:
        if key not in known:
            raise ValueError(
                f"`cache_config` has an unknown key {with_suggestions([str(key)], known)}. "
                f"`cache_implementation={implementation!r}` knows {[*known] or 'none'}."
            )


@dataclass(frozen=True, slots=True)
class Settings:
    """The fields of a ``cache_config`` for the quantised cache.

    ``bits``: per number. ``group_size``: numbers that share a scale: tokens of a key's channel, channels
    of a value. ``None``: 64 tokens, and the divisor of the head size that is nearest to 64 channels.
    ``residual_length``: how many of the newest tokens at least stay in full precision.
    """

    bits: int = 4
    group_size: int | None = None
    residual_length: int = 32

    def __post_init__(self) -> None:
        if self.bits not in BITS or isinstance(self.bits, bool):
            raise ValueError(f"`bits` has to be one of {list(BITS)}, but is {self.bits!r}.")
        for name in ("residual_length", "group_size"):
            value = getattr(self, name)
            is_default = name == "group_size" and value is None
            if not is_default and (type(value) is not int or value < 1):
                raise ValueError(f"`{name}` has to be an integer above 0, but is {value!r}.")
        n_per_byte = 8 // self.bits
        if self.tokens % n_per_byte:
            raise ValueError(
                f"`group_size`={self.group_size} does not fit `bits`={self.bits}: {n_per_byte} codes "
                f"share a byte, so it has to be a multiple of {n_per_byte}."
            )

    @classmethod
    def of(cls, options: Mapping[str, Any] | None, config: Any) -> Settings:
        """The settings of a ``cache_config``; ``ValueError`` for a field that is unknown or does not fit ``config``."""
        options = as_dict(options)
        for key in ("axis_key", "axis_value"):
            if key in options:
                raise ValueError(
                    f"`cache_config` has `{key}`={options[key]!r}, but keys are always grouped per "
                    "channel and values per token. Leave it out, or name the `backend` that it is for."
                )
        names = [field.name for field in fields(cls)]
        check_keys(options, "quantized", [*names, "backend", *SYNONYMS])
        for synonym, name in SYNONYMS.items():
            if synonym in options and name in options:
                raise ValueError(
                    f"`cache_config` has both `{name}` and `{synonym}`: give one of them."
                )
        options.pop("backend", None)
        settings = cls(**{SYNONYMS.get(key, key): value for key, value in options.items()})
        for size in _value_sizes(config):
            settings.channels(size)
        return settings

    @property
    def tokens(self) -> int:
        """How many tokens are packed together."""
        return self.group_size or GROUP_SIZE

    def channels(self, size: int) -> int:
        """How many channels of a value share a scale, with heads of ``size``."""
        if self.group_size is not None:
            if size % self.group_size:
                raise ValueError(
                    f"`group_size`={self.group_size} does not divide the head size {size} of the "
                    f"values. Give a divisor of {size}, or leave it out."
                )
            return self.group_size
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        return min(divisors, key=lambda n: abs(math.log(n / GROUP_SIZE)))


def upstream_backend(options: Any) -> str | None:
    """Upstream's backend that a ``cache_config`` names, or ``None``. ``ValueError`` for unknown ones."""
    backend = as_dict(options).get("backend", OWN_BACKEND)
    if backend not in (OWN_BACKEND, *UPSTREAM_BACKENDS):
        raise ValueError(
            f"`backend` in `cache_config` has to be one of {[OWN_BACKEND, *UPSTREAM_BACKENDS]}, but is "
            f"{backend!r}."
        )
    return None if backend == OWN_BACKEND else str(backend)


def path_of(options: Any) -> str | os.PathLike | None:
    """The folder that an offloaded cache's options name; ``ValueError`` for other keys and no paths."""
    options = as_dict(options)
    check_keys(options, "offloaded", ["path"])
    path: Any = options.get("path")
    if path is not None and not (isinstance(path, str | os.PathLike) and os.fspath(path)):
        raise ValueError(
            f"`path` in `cache_config` has to be the path of a folder, but is {path!r}."
        )
    return path


def check_quantized(options: Any, config: Any) -> None:
    """Raise ``ValueError`` for options that cannot be used with a decoder's ``config``."""
    if upstream_backend(options) is None:
        Settings.of(options, config)


def check_none(options: Any, config: Any) -> None:
    """Raise ``ValueError`` for any key in the options of ``offloaded_static``."""
    check_keys(as_dict(options), "offloaded_static", [])


def _value_sizes(config: Any) -> Iterator[int]:
    """Head sizes of the values that are quantised, as far as the config tells."""
    from transformers.cache_utils import get_layer_types_and_kwargs
    from transformers.configuration_utils import get_head_shapes

    kinds, _ = get_layer_types_and_kwargs(config)
    try:
        _, head_sizes = get_head_shapes(config)
    except (AttributeError, TypeError, ZeroDivisionError):
        return  # heads under other names: the first update checks
    for index, kind in enumerate(kinds):
        size = head_sizes if isinstance(head_sizes, int) else head_sizes[index]
        if kind == "full_attention":
            yield getattr(config.per_layer_config[index], "v_head_dim", None) or size
