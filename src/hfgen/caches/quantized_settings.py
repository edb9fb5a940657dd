"""What ``cache_config`` may say about the quantised cache, and the checks of it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.configuration_utils import get_head_shapes

#: What ``backend`` calls hfgen's own method, and upstream's.
OWN_BACKEND = "hfgen"
UPSTREAM_BACKENDS = ("quanto", "hqq", "fp8")

BITS = (8, 4, 2)

#: Numbers per scale, where the caller does not say.
GROUP_SIZE = 64

#: Upstream's names of what is meant.
SYNONYMS = {"nbits": "bits", "q_group_size": "group_size"}


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``cache_config`` may say.

    ``bits``: per number. ``group_size``: numbers that share a scale and a zero point: tokens of a
    key's channel, channels of a value. ``None``: 64 tokens, and as many channels as divide the head
    size and are nearest to 64. ``residual_length``: how many of the newest tokens at least stay in
    full precision.
    """

    bits: int = 4
    group_size: int | None = None
    residual_length: int = 32

    def __post_init__(self) -> None:
        if self.bits not in BITS or isinstance(self.bits, bool):
            raise ValueError(f"`bits` has to be one of {list(BITS)}, but is {self.bits!r}.")
        self._check_is_positive("residual_length")
        if self.group_size is None:
            return
        self._check_is_positive("group_size")
        n_per_byte = 8 // self.bits
        if self.group_size % n_per_byte:
            raise ValueError(
                f"`group_size`={self.group_size} does not fit `bits`={self.bits}: {n_per_byte} codes "
                f"share a byte, so it has to be a multiple of {n_per_byte}."
            )

    def _check_is_positive(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"`{name}` has to be an integer above 0, but is {value!r}.")

    @classmethod
    def of(cls, options: Mapping[str, Any] | None, config: Any) -> Settings:
        """Those of a ``cache_config``, for the layers of a decoder's ``config``.

        Raises ``ValueError`` for what is unknown, out of range, or does not fit the head size.
        """
        given: dict[str, Any] = {}
        for key, value in (options or {}).items():
            if key == "backend":
                continue
            name = SYNONYMS.get(key, key)
            if name in ("axis_key", "axis_value"):
                raise ValueError(
                    f"`cache_config` has `{key}`={value!r}, but keys are always grouped per channel "
                    "and values per token. Leave it out, or name the `backend` that it is for."
                )
            if name not in NAMES:
                raise ValueError(f"`cache_config` has an unknown key {_with_nearest(key)}.")
            if name in given:
                raise ValueError(f"`cache_config` has both `{name}` and `{key}`: give one of them.")
            given[name] = value
        settings = cls(**given)
        if config is not None:
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


#: Keys of ``cache_config``.
NAMES = tuple(field.name for field in fields(Settings))


def upstream_backend(options: Any) -> str | None:
    """Which of upstream's backends a ``cache_config`` names; ``None``: hfgen's own method.

    Raises ``ValueError`` if it names another one, or is no dict.
    """
    if not isinstance(options, Mapping | None):
        raise ValueError(f"`cache_config` has to be a dict, but is {options!r}.")
    backend = (options or {}).get("backend", OWN_BACKEND)
    if backend == OWN_BACKEND:
        return None
    if backend not in UPSTREAM_BACKENDS:
        raise ValueError(
            f"`backend` in `cache_config` has to be one of {[OWN_BACKEND, *UPSTREAM_BACKENDS]}, but is "
            f"{backend!r}."
        )
    return str(backend)


def _value_sizes(config: Any) -> Iterator[int]:
    """Head sizes of the values that are quantised, as far as the config tells."""
    kinds, _ = get_layer_types_and_kwargs(config)
    try:
        _, head_sizes = get_head_shapes(config)
    except (AttributeError, TypeError, ZeroDivisionError):
        return  # heads under other names: the first update checks
    layers = config.per_layer_config
    for index, kind in enumerate(kinds):
        size = head_sizes if isinstance(head_sizes, int) else head_sizes[index]
        if kind == "full_attention":
            yield getattr(layers[index], "v_head_dim", None) or size


def _with_nearest(key: Any) -> str:
    nearest = difflib.get_close_matches(str(key), [*NAMES, "backend", *SYNONYMS], n=1)
    return f"`{key}`" + (f" (did you mean `{nearest[0]}`?)" if nearest else "")
