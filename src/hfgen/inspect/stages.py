"""What processors do to the scores: their names, and a list of them that notes the scores after each."""

from __future__ import annotations

import copy
import re
from typing import Any

from torch import Tensor

from ..grammar.processor import GrammarProcessor, NoTokenLeft
from ..processors import LogitsProcessorList
from ..processors.by_rows import ProcessorsByRows
from ..processors.lists import name_of
from .records import Stage

#: Parts of a class's name that say what it is, and not what it does.
KIND = re.compile(r"(Logits(Warper|Processor)|Processor|PerRow|Logits)(?=$|[A-Z])")
WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z]|$)|[A-Z][a-z]+|[a-z]+|\d+")

#: Settings that say nothing about the call.
TECHNICAL = ("filter_value", "min_tokens_to_keep", "prompt_length", "n_rows", "is_search")

#: Numbers of a setting that are shown: one for each prompt, at most.
SHOWN = 8

#: A token is ruled out below this score; grammars give it to beams that have ended.
LOWEST = -1e29


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
        """Without the notes: a copy is for something else, such as drafting."""
        return self.kind(copy.deepcopy(list(self), memo))

    def stages(self) -> list[Stage]:
        """The stages behind the first notes."""
        return [stage_of(each) for each in self if not isinstance(each, NoTokenLeft)]

    def take(self, length: int) -> list[Tensor] | None:
        """The notes of ``length``, and forget those of shorter ids."""
        found = self.notes.get(length)
        self.notes = {n: notes for n, notes in self.notes.items() if n > length}
        return found


def stage_of(processor: Any) -> Stage:
    """How a processor is shown."""
    if isinstance(processor, ProcessorsByRows):
        parts = [stage_of(function) for function, _ in processor.parts]
        name = " / ".join(dict.fromkeys(part.name for part in parts))
        return Stage(name, {}, any(part.is_grammar for part in parts))
    name = spelled(KIND.sub("", name_of(processor))) or spelled(name_of(processor))
    is_grammar = isinstance(processor, GrammarProcessor)
    return Stage(name, settings_of(processor), is_grammar)


def spelled(name: str) -> str:
    """``"TopK"`` as "top k"."""
    return " ".join(WORDS.findall(name)).lower()


def settings_of(processor: Any) -> dict[str, Any]:
    """The numbers among the attributes of a processor."""
    found = {}
    for name, value in getattr(processor, "__dict__", {}).items():
        if name.startswith("_") or name in TECHNICAL:
            continue
        if isinstance(value, Tensor) and value.numel() <= SHOWN and not value.is_complex():
            value = value.flatten().tolist()
            value = value[0] if len(value) == 1 else value
        if isinstance(value, bool | int | float) or (isinstance(value, list) and is_short(value)):
            found[name] = value
    return found


def is_short(values: list[Any]) -> bool:
    """Whether a list has a few numbers and nothing else."""
    return 0 < len(values) <= SHOWN and all(isinstance(v, bool | int | float) for v in values)


def share_and_left(scores: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens ``scores (rows, vocab)`` leave, and their share of ``probabilities``: ``(rows,)``."""
    is_left = scores > LOWEST
    return is_left.sum(dim=1), probabilities.masked_fill(~is_left, 0.0).sum(dim=1)
