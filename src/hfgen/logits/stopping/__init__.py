"""Stage 5b: the stopping criteria of a call, in one fixed order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import transformers
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria
from transformers.generation.stopping_criteria import ConfidenceCriteria

from ...settings.fields import require_tokenizer
from ..grammar import processor as grammar
from ..processors.context import Builder, Context, Row, built
from ..processors.lists import function_of, is_librarys, is_of_library, name_of, reads_replaced
from .reasons import FinishReason as FinishReason
from .reasons import Notes, RepetitionCriteria, RowLengthCriteria, StopTokenCriteria, is_noted
from .strings import StopRegexCriteria, StopStringCriteria

#: Called where a library has replaced a class that it reads.
_upstreams = transformers.GenerationMixin._get_stopping_criteria


class StoppingCriteriaList(transformers.StoppingCriteriaList):
    """Criteria of which one suffices to end a row."""

    #: Answers of criteria that are no functions of the ids, by place in the list; ``None``: not noted.
    notes: dict[int, Notes] | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """``(rows,)`` bools for ``input_ids (rows, length)``; ``ValueError`` if a caller's returns others."""
        if not is_of_library(super().__call__.__func__):  # somebody has replaced it
            return super().__call__(input_ids, scores, **kwargs)
        is_done: Any = None
        for place, criterion in enumerate(self):
            ends = function_of(criterion)(input_ids, scores, **kwargs)
            if is_done is None and type(criterion) is MaxLengthCriteria:
                is_done = ends  # bools for all rows, as are to be returned
                continue
            if is_done is None:
                is_done = input_ids.new_zeros(len(input_ids), dtype=torch.bool)
            if not is_librarys(type(criterion)):
                ends = _as_bools(criterion, ends, is_done)
            is_done = is_done | ends
            if self.notes is not None and place in self.notes:
                own = torch.zeros_like(is_done) | ends
                self.notes[place].add(input_ids.shape[1], own)
        return input_ids.new_zeros(len(input_ids), dtype=torch.bool) if is_done is None else is_done

    def take_notes(self) -> None:
        """Start to note the answers of criteria that cannot be asked again later."""
        noted = [place for place, criterion in enumerate(self) if is_noted(criterion)]
        self.notes = {place: Notes() for place in noted} or None

    @property
    def max_length(self) -> int | None:
        """The length at which all rows end, if there is one; upstream's is that of the first criterion."""
        return min((c.max_length for c in self if isinstance(c, MaxLengthCriteria)), default=None)

    @property
    def length_only(self) -> bool:
        """Whether the length alone decides, so that nothing has to be read off the device."""
        is_only = set(map(type, self)) == {MaxLengthCriteria} and is_librarys(MaxLengthCriteria)
        return is_only and is_of_library(super().__call__.__func__)

    @property
    def ids_only(self) -> bool:
        """Whether the length and the EOS tokens alone decide, and a length is given."""
        kinds = {MaxLengthCriteria, EosTokenCriteria}
        is_only = {MaxLengthCriteria} <= set(map(type, self)) <= kinds
        are_kept = all(map(is_librarys, kinds)) and is_of_library(super().__call__.__func__)
        return is_only and are_kept


def _as_bools(criterion: Any, ends: Any, is_done: torch.Tensor) -> Any:
    """``ends``, returned by a caller's ``criterion``, as one bool or bools ``(rows,)``."""
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


def max_length(length: int | torch.Tensor, context: Context) -> MaxLengthCriteria:
    limit = getattr(context.model.config, "max_position_embeddings", None)
    if isinstance(length, torch.Tensor):
        return RowLengthCriteria(length, limit)
    return MaxLengthCriteria(max_length=length, max_position_embeddings=limit)


def min_tokens(context: Context) -> int:
    """How many tokens a row gets before anything but its length may end it."""
    return context.own("min_tokens") or 0


def stop_strings(strings: Any, context: Context) -> StopStringCriteria:
    require_tokenizer(context.tokenizer, "stop_strings", strings)
    n_held = min_tokens(context)
    criterion = StopStringCriteria(context.tokenizer, strings, context.prompt_length, n_held)
    # Without an EOS, upstream lets rows run on until all have ended. A row that leaves cannot.
    criterion.ends_rows = bool(getattr(context.config, "drop_finished", False))
    return criterion


HELD = ("min_tokens",)  # fields that hold stops back
#: Rows in the order in which the criteria are asked; the caller's own follow.
CRITERIA: list[Builder] = [
    Row("max_length", max_length, neutral=0),
    Row("max_time", lambda seconds, c: MaxTimeCriteria(max_time=seconds)),
    Row("stop_strings", stop_strings, reads=HELD),
    Row("_eos_token_tensor", lambda tokens, c: EosTokenCriteria(eos_token_id=tokens)),
    Row(
        "stop_token_ids",
        lambda ids, c: StopTokenCriteria(ids if isinstance(ids, list) else [ids], c.device),
        [],
    ),
    Row(
        "stop_regex",
        lambda re, c: StopRegexCriteria(c.tokenizer, re, c.prompt_length, min_tokens(c)),
        reads=HELD,
    ),
    Row(
        "repetition_detection",
        lambda detection, c: RepetitionCriteria(detection, c.prompt_length, min_tokens(c)),
        is_off=lambda detection: detection.max_pattern_size == 0,
        reads=HELD,
    ),
    Row("grammar", grammar.criterion, of_all=True),
    Row(
        "assistant_confidence_threshold",
        lambda threshold, c: ConfidenceCriteria(threshold) if c.config.is_assistant else None,
        is_off=lambda threshold: threshold <= 0,
    ),
]


def get_stopping_criteria(
    self: Any, generation_config: Any, stopping_criteria: Any, tokenizer: Any = None
) -> Any:
    """All criteria of a call in upstream's order, the caller's ``stopping_criteria`` among them.

    Raises ``ValueError`` for stop strings without a tokenizer.
    """
    if reads_replaced(_upstreams):
        return _upstreams(self, generation_config, stopping_criteria, tokenizer)
    call: Any = getattr(generation_config, "_call", None)
    prompt = getattr(call, "prompt", None)
    context = Context(
        self,
        generation_config,
        prompt_length=0 if call is None else call.prompt_length,
        device=None if prompt is None else prompt.ids.device,
        rows=getattr(call, "rows", None),
        tokenizer=tokenizer,
    )
    criteria = StoppingCriteriaList(built(CRITERIA, context))
    return self._merge_criteria_processor_list(criteria, stopping_criteria)


def may_end_rows(criteria: Iterable[Any]) -> bool:
    """Whether a row may end before the others, and is padded then; ``ends_rows`` of a criterion says so."""
    return any(hasattr(c, "eos_token_id") or getattr(c, "ends_rows", False) for c in criteria)


def may_begin(criteria: Iterable[Any], ids: torch.Tensor) -> torch.Tensor:
    """Bools ``(rows,)``: the row has room for a token after ``ids (rows, length)``."""
    is_open = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    for criterion in criteria:
        if isinstance(criterion, RowLengthCriteria):
            is_open = ~criterion.reached(ids)
    return is_open
