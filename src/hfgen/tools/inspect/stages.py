"""A list of processors that records the scores after each of them."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...logits.grammar.processor import GrammarProcessor, NoTokenLeft
from ...logits.processors.context import ProcessorsByRows
from ...logits.processors.lists import LogitsProcessorList, is_librarys, name_of
from ...logits.processors.repetition import OccurrencePenalty
from .records import Stage

#: Parts of a class's name that say what it is, and not what it does.
KIND = re.compile(r"(Logits(Warper|Processor)|Processor|PerRow|Logits)(?=$|[A-Z])")
WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z]|$)|[A-Z][a-z]+|[a-z]+|\d+")

#: Processors whose fields of the config begin in another way than their class.
NAMES = {
    "dynamic temperature": "dynatemp",
    "exclude top choices": "xtc",
    "inf nan remove": "remove invalid values",
    "logit normalization": "renormalize logits",
    "no bad words": "bad words",
    "quadratic smoothing": "smoothing",
    "unbatched classifier free guidance": "guidance",
    "encoder decoder guidance": "guidance",
}

#: Attributes that say nothing about what was asked for.
TECHNICAL = re.compile(
    r"filter_value|min_tokens_to_keep|.*(length.*|size)|vocab|hash_key|(is|of)_.*"
)

SHOWN = 8  # prompts whose settings are shown, where they differ


class Watched(LogitsProcessorList):
    """The processors of a call. What they return is as before; ``notes`` has the scores in between.

    ``notes[length]``, of the newest call with ids of that length: ``(rows, vocab)`` as they come, and
    after each processor.
    """

    def __init__(self, processors: Any) -> None:
        super().__init__(processors)
        self.kind = type(processors)
        self.notes: dict[int, list[Tensor]] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        n_rows, length = input_ids.shape
        notes = [scores[:n_rows].clone()]  # a model with guidance of its own scores each row twice
        for processor in self:
            scores = self.kind([processor])(input_ids, scores, **kwargs)
            if not isinstance(processor, NoTokenLeft):  # it only looks whether there is an error
                notes.append(scores[:n_rows].clone())
        self.notes[length] = notes
        return scores

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Without the notes: a copy is for something else, such as drafting.
        return self.kind(copy.deepcopy(list(self), memo))

    def stages(self, configs: Sequence[Any]) -> list[Stage]:
        """The stages behind the first notes."""
        return [stage_of(each, configs) for each in self if not isinstance(each, NoTokenLeft)]

    def take(self, length: int) -> list[Tensor] | None:
        """The notes of ``length``, and forget those of shorter ids."""
        notes = self.notes.get(length)
        self.notes = {n: scores for n, scores in self.notes.items() if n > length}
        return notes


def stage_of(processor: Any, configs: Sequence[Any]) -> Stage:
    """The column for a processor; ``configs`` are those of the call's prompts."""
    if isinstance(processor, ProcessorsByRows):
        parts = [stage_of(function, configs) for function, _ in processor.parts]
        name = " / ".join(dict.fromkeys(part.name for part in parts))
        return Stage(name, parts[0].settings, any(part.is_grammar for part in parts))
    name = spelled(KIND.sub("", name_of(processor))) or spelled(name_of(processor))
    if isinstance(processor, OccurrencePenalty):
        name = "presence penalty" if processor.of_presence else "frequency penalty"
    name = NAMES.get(name, name)
    settings = (is_librarys(type(processor)) and fields_of(name, configs)) or {
        name: value
        for name, value in getattr(processor, "__dict__", {}).items()
        if isinstance(value, int | float) and not name.startswith("_")
        if not TECHNICAL.fullmatch(name)
    }
    return Stage(name, settings, isinstance(processor, GrammarProcessor))


def spelled(name: str) -> str:
    """``"TopK"`` as "top k"."""
    return " ".join(WORDS.findall(name)).lower()


def fields_of(name: str, configs: Sequence[Any]) -> dict[str, Any]:
    """The fields that begin like ``name``, and their numbers; lists where prompts differ."""
    start, found = name.replace(" ", ""), {}
    for field in vars(configs[0]):
        if field.replace("_", "").startswith(start):
            values = [getattr(config, field, None) for config in configs]
            value = values[0] if all(v == values[0] for v in values) else values[:SHOWN]
            if isinstance(value, int | float | list):
                found[field] = value
    return found
