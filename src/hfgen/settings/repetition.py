"""Detecting a row that repeats itself, for ``repetition_detection``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """A row ends when its generated tokens end in a pattern, ``min_count`` times in a row.

    The pattern has ``min_pattern_size`` to ``max_pattern_size`` tokens. Names and meaning are those of
    vLLM's ``RepetitionDetectionParams``; a ``max_pattern_size`` of 0 is off.
    """

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        """Raise ``ValueError`` or ``TypeError`` for sizes that no pattern has."""
        for name, value in asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"`{name}` has to be an integer, but is {value!r}.")
        if self.max_pattern_size == 0:
            return
        if not 0 <= self.min_pattern_size <= self.max_pattern_size:
            raise ValueError(
                f"`min_pattern_size` ({self.min_pattern_size}) has to be between 0 and "
                f"`max_pattern_size` ({self.max_pattern_size})."
            )
        if self.min_count < 2:
            raise ValueError(f"`min_count` has to be at least 2, but is {self.min_count}.")

    @classmethod
    def of(cls, value: Any) -> RepetitionDetection:
        """The settings of a dict, or of any object with the same attributes; raises as the class does."""
        if not isinstance(value, dict):
            value = {field.name: getattr(value, field.name) for field in fields(cls)}
        try:
            return cls(**value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"`repetition_detection`: {error}") from None
