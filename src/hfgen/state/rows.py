"""The parameters of each prompt of a batch, where they differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers


@dataclass(slots=True)
class RowParams:
    """The resolved config of each prompt. Row ``r`` of ``n`` belongs to prompt ``r // (n // len)``."""

    configs: list[transformers.GenerationConfig]
    #: Of each prompt, two bools: ``max_length`` is unset; ``min_length`` is unset.
    has_defaults: list[tuple[bool, bool]]
    given: tuple[str, ...] = ()  # the arguments that came as lists

    def __len__(self) -> int:
        return len(self.configs)

    def values(self, name: str) -> list[Any]:
        """A field's values, one per prompt."""
        return [getattr(config, name, None) for config in self.configs]

    def differ_in(self, *names: str) -> bool:
        """Whether the prompts have different values of any of these fields."""
        return any(not all_equal(self.values(name)) for name in names)


def all_equal(values: list[Any]) -> bool:
    """Whether all values of a field are the same, of the same type."""
    return all(_is_equal(value, values[0]) for value in values[1:])


def _is_equal(one: Any, two: Any) -> bool:
    if isinstance(one, tuple) and isinstance(two, tuple):
        return len(one) == len(two) and all(map(_is_equal, one, two))
    if isinstance(one, torch.Tensor) or isinstance(two, torch.Tensor):
        return type(one) is type(two) and torch.equal(one, two)
    return one is two or bool(one == two)
