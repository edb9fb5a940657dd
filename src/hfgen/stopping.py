"""Stage 5b: the stopping criteria of a call, in one fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteria
from transformers.generation.stopping_criteria import ConfidenceCriteria

from . import validate
from .processors.by_rows import CriteriaByRows
from .processors.columns import expand
from .processors.context import Row
from .processors.lists import is_librarys, name_of
from .rows import RowParams


class StoppingCriteriaList(transformers.StoppingCriteriaList):
    """Criteria of which one suffices to end a row."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """``(rows,)`` bools for ``input_ids (rows, length)``; ``ValueError`` if a caller's returns others."""
        is_done: Any = None
        for criterion in self:
            ends = criterion(input_ids, scores, **kwargs)
            if is_done is None and type(criterion) is MaxLengthCriteria:
                is_done = ends  # bools for all rows, as are to be returned
                continue
            if is_done is None:
                is_done = input_ids.new_zeros(len(input_ids), dtype=torch.bool)
            if not is_librarys(type(criterion)):
                ends = _as_bools(criterion, ends, is_done)
            is_done = is_done | ends
        return input_ids.new_zeros(len(input_ids), dtype=torch.bool) if is_done is None else is_done

    @property
    def max_length(self) -> int | None:
        """The length at which all rows end, if there is one; upstream's is that of the first criterion."""
        return min((c.max_length for c in self if isinstance(c, MaxLengthCriteria)), default=None)

    @property
    def length_only(self) -> bool:
        """Whether the length alone decides, so that nothing has to be read off the device."""
        return bool(self) and all(type(criterion) is MaxLengthCriteria for criterion in self)


def _as_bools(criterion: Any, ends: Any, is_done: torch.Tensor) -> Any:
    """What a criterion of the caller's returned, as one bool or bools ``(rows,)``."""
    if isinstance(ends, int):  # a bool, too
        return bool(ends)
    if not isinstance(ends, torch.Tensor):
        returned = type(ends).__name__
    elif ends.shape not in ((), (1,), is_done.shape):
        returned = f"shape {tuple(ends.shape)}"
    elif ends.is_floating_point() or ends.is_complex() or ends.device != is_done.device:
        returned = f"a tensor of {ends.dtype} on {ends.device}"
    else:
        return ends.bool()
    raise ValueError(
        f"{name_of(criterion)} returned {returned}, but a stopping criterion has to return a bool for each "
        f"row: shape {tuple(is_done.shape)}, on {is_done.device}."
    )


class StopStringCriteria(transformers.StopStringCriteria):
    """Ends a row at a stop string after the first ``prompt_length`` tokens; upstream's reads these, too."""

    def __init__(self, tokenizer: Any, stop_strings: str | list[str], prompt_length: int = 0):
        super().__init__(tokenizer, stop_strings)
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """``(rows,)`` bools for ``input_ids (rows, length)``; ``scores`` are not used."""
        generated = input_ids[:, self.prompt_length :]
        if generated.shape[1] == 0:
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return super().__call__(generated, scores, **kwargs)


@dataclass(frozen=True, slots=True)
class Context:
    """What a builder of a stopping criterion may read."""

    model: Any
    config: Any
    tokenizer: Any = None
    rows: RowParams | None = None
    device: Any = None

    def values(self, name: str) -> list[Any]:
        """A field's values, one per prompt; one in all where prompts do not differ."""
        return [getattr(self.config, name)] if self.rows is None else self.rows.values(name)

    def by_rows(self, parts: list[tuple[Any, list[int]]]) -> CriteriaByRows:
        """One criterion that is each of ``parts`` for its prompts."""
        assert self.rows is not None
        return CriteriaByRows(parts, len(self.rows), self.device)

    def of_prompts(self, prompts: list[int]) -> Context:
        """The context of those prompts, which ask for the same."""
        assert self.rows is not None
        return replace(self, config=self.rows.configs[prompts[0]], rows=None)


class RowLengthCriteria(MaxLengthCriteria):
    """Ends each row at a length of its own; ``max_length`` is the longest."""

    ends_rows = True

    def __init__(self, lengths: torch.Tensor, limit: int | None) -> None:
        """``lengths (prompts, 1)``, prompt included; ``limit``: the model's positions."""
        super().__init__(int(lengths.max()), limit)
        self.lengths = lengths

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        super().__call__(input_ids, scores, **kwargs)  # warns of lengths beyond the positions
        return self.reached(input_ids)

    def reached(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Which rows ``(rows,)`` have their length."""
        return input_ids.shape[1] >= expand(self.lengths, len(input_ids)).squeeze(1)


class RowEosCriteria(StoppingCriteria):
    """Ends each row at the EOS tokens of its own prompt."""

    ends_rows = is_row_wise = True

    def __init__(self, tokens: list[torch.Tensor | None]) -> None:
        """``tokens``: ``(n_eos,)`` of each prompt."""
        lists = [[] if eos is None else eos.tolist() for eos in tokens]
        widest = max(map(len, lists))
        padded = [eos + [-1] * (widest - len(eos)) for eos in lists]
        device = next(eos.device for eos in tokens if eos is not None)
        self.tokens = torch.tensor(padded, device=device)  # (prompts, n)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        tokens = expand(self.tokens, len(input_ids)).to(input_ids.device)
        return (input_ids[:, -1:] == tokens).any(dim=1)


def max_length(length: int | torch.Tensor, context: Context) -> MaxLengthCriteria:
    limit = getattr(context.model.config, "max_position_embeddings", None)
    if isinstance(length, torch.Tensor):
        return RowLengthCriteria(length, limit)
    return MaxLengthCriteria(max_length=length, max_position_embeddings=limit)


def stop_strings(strings: Any, context: Context) -> StopStringCriteria:
    validate.require_tokenizer(context.tokenizer, "stop_strings", strings)
    call = getattr(context.config, "_call", None)
    return StopStringCriteria(context.tokenizer, strings, call.prompt_length if call else 0)


def eos(context: Context) -> StoppingCriteria | None:
    if context.rows is not None and context.rows.differ_in("_eos_token_tensor"):
        return RowEosCriteria(context.rows.values("_eos_token_tensor"))
    tokens = getattr(context.config, "_eos_token_tensor", None)
    return None if tokens is None else EosTokenCriteria(eos_token_id=tokens)


def assistant_confidence(threshold: float, context: Context) -> ConfidenceCriteria | None:
    return ConfidenceCriteria(threshold) if context.config.is_assistant else None


#: Rows in the order in which the criteria are asked; the caller's own follow.
CRITERIA: list[Callable[[Any], StoppingCriteria | None]] = [
    Row("max_length", max_length, off=0),
    Row("max_time", lambda seconds, c: MaxTimeCriteria(max_time=seconds)),
    Row("stop_strings", stop_strings),
    eos,
    Row("assistant_confidence_threshold", assistant_confidence, lambda threshold: threshold <= 0),
]


def get_stopping_criteria(
    self: Any, generation_config: Any, stopping_criteria: Any, tokenizer: Any = None
) -> Any:
    """All criteria of a call in upstream's order, the caller's ``stopping_criteria`` among them.

    Raises ``ValueError`` for stop strings without a tokenizer.
    """
    call: Any = getattr(generation_config, "_call", None)
    rows = getattr(call, "rows", None)
    device = None if rows is None else call.prompt.ids.device
    context = Context(self, generation_config, tokenizer, rows, device)
    built = (builder(context) for builder in CRITERIA)
    criteria = StoppingCriteriaList(criterion for criterion in built if criterion is not None)
    return self._merge_criteria_processor_list(criteria, stopping_criteria)


def may_end_rows(criteria: Iterable[Any]) -> bool:
    """Whether a row may end before the others do, so that it has to be padded from there on.

    Criteria say so by an attribute ``ends_rows``. Upstream pads behind EOS tokens only.
    """
    return any(hasattr(c, "eos_token_id") or getattr(c, "ends_rows", False) for c in criteria)


def may_begin(criteria: Iterable[Any], ids: torch.Tensor) -> torch.Tensor:
    """Bools ``(rows,)``: which rows may get a token at all after ``ids (rows, length)``."""
    is_open = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    for criterion in criteria:
        if isinstance(criterion, RowLengthCriteria):
            is_open = ~criterion.reached(ids)
    return is_open
