"""The list of processors: how it is called, and how the caller's processors are added."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import transformers
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteria

from ...running.row_states import is_of
from ...settings.logs import logger
from . import fused

LIBRARIES = ("hfgen", "transformers")


class LogitsProcessorList(transformers.LogitsProcessorList):
    """Processors, applied in order; those that take more get the keyword arguments of the call."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Processed scores ``(rows, vocab)`` of ``input_ids (rows, length)``.

        ``scores`` may have a multiple of the rows, for guidance to fold. Raises ``ValueError`` if a
        processor lacks an argument, or returns anything but scores over the same vocabulary.
        """
        if not is_of_library(super().__call__.__func__):  # somebody has replaced it
            return super().__call__(input_ids, scores, **kwargs)
        raw_scores = scores
        fusible: list[Any] = []
        for processor in self:
            kind: Any = type(processor)
            is_known = is_librarys(kind)
            if is_known and kind in fused.STEPS:
                fusible.append(processor)
                continue
            if fusible:
                scores, fusible = fused.apply(fusible, input_ids, scores), []
            call = processor if is_known else function_of(processor)
            extra = extra_arguments(getattr(call, "func", kind.__call__))
            if missing := [name for name in extra if name not in kwargs]:
                raise ValueError(f"{kind.__name__} needs the arguments {missing}.")
            scores = call(input_ids, scores, **(kwargs if extra else {}))
            if not is_known:
                _check_scores(processor, scores, raw_scores, len(input_ids))
        return fused.apply(fusible, input_ids, scores) if fusible else scores


def _check_scores(processor: Any, scores: Any, raw_scores: Tensor, n_rows: int) -> None:
    """Raise ``ValueError`` if a caller's processor returned something else than scores.

    It may return the scores of the first tokens alone; then no other token is chosen.
    """
    if not isinstance(scores, Tensor):
        returned = type(scores).__name__
    elif (
        scores.ndim != raw_scores.ndim
        or len(scores) not in (len(raw_scores), n_rows)
        or scores.shape[1:-1] != raw_scores.shape[1:-1]
        or not 0 < scores.shape[-1] <= raw_scores.shape[-1]
    ):
        returned = f"shape {tuple(scores.shape)}"
    elif not scores.is_floating_point() or scores.device != raw_scores.device:
        returned = f"a tensor of {scores.dtype} on {scores.device}"
    else:
        return
    raise ValueError(
        f"{name_of(processor)} returned {returned}, but scores have to be floating-point numbers of the "
        f"shape (rows, vocabulary) = {(n_rows, *raw_scores.shape[1:])}, on {raw_scores.device}."
    )


@lru_cache(maxsize=256)
def extra_arguments(call: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the parameters of a processor's ``__call__`` beyond self, ids and scores."""
    return tuple(inspect.signature(call).parameters)[3:]


def name_of(function: Any) -> str:
    """The name by which a caller knows a processor or criterion."""
    return str(getattr(function, "__name__", type(function).__name__))


def function_of(function: Any) -> Callable[..., Any]:
    """A processor or criterion; of a library's, what other code has put in the place of its ``__call__``."""
    replaced = _replaced_call(type(function))
    return function if replaced is None else partial(replaced, function)


def is_librarys(kind: type) -> bool:
    """Whether a class and its ``__call__``, and of hfgen's also that of the class it stands for, are a library's."""
    return kind.__module__.partition(".")[0] in LIBRARIES and _replaced_call(kind) is None


def _replaced_call(kind: type) -> Any:
    calls = (vars(each)["__call__"] for each in _callable_kinds(kind))
    return next((call for call in calls if not is_of_library(call)), None)


@lru_cache(maxsize=256)
def _callable_kinds(kind: type) -> list[type]:
    """A library's class, and those that it stands for: all that have a ``__call__`` of their own."""
    if kind.__module__.partition(".")[0] not in LIBRARIES:
        return []
    return [each for each in kind.__mro__ if "__call__" in vars(each)]


is_of_library = lru_cache(maxsize=256)(is_of)


def reads_replaced(method: Any) -> bool:
    """Whether other code has put a class or function in the place of one that a ``method`` of transformers reads."""
    return not all(map(is_of_library, map(method.__globals__.get, _names_read(method))))


@lru_cache
def _names_read(method: Any) -> list[str]:
    values = {name: method.__globals__.get(name) for name in method.__code__.co_names}
    return [name for name, value in values.items() if isinstance(value, type | FunctionType)]


def merge_criteria_processor_list(self: Any, default_list: Any, custom_list: Any) -> Any:
    """The defaults, with the caller's objects in place of those of the same public type; the others follow."""
    if len(custom_list) == 0:
        return default_list
    merged = type(default_list)()
    for default in default_list:
        kind = public_type(default)
        custom = next((item for item in custom_list if public_type(item) is kind), None)
        if custom is not None:
            is_criterion = isinstance(custom, StoppingCriteria)
            what = "stopping criteria" if is_criterion else "logits processor"
            logger.warning_once(
                f"A custom {what} of type {type(custom)} has been passed to `.generate()`, but it was "
                "also created in `.generate()`, given its parameterization: the custom one is used."
            )
        merged.append(default if custom is None else custom)
    for custom in custom_list:
        if custom not in merged:
            merged.append(custom)
    return merged


def public_type(item: Any) -> type:
    """The class that a caller knows ``item`` by: hfgen's own subclasses count as upstream's."""
    kinds = type(item).__mro__
    kind = next(kind for kind in kinds if kind.__module__.partition(".")[0] != "hfgen")
    return type(item) if kind in (transformers.LogitsProcessor, StoppingCriteria) else kind


#: Upstream's that remember what they were called with, or call a function of the caller's.
_WITH_STATE = (
    "AlternatingCodebooksLogitsProcessor ClassifierFreeGuidanceLogitsProcessor "
    "DiaEOSDelayPatternLogitsProcessor PrefixConstrainedLogitsProcessor "
    "SynthIDTextWatermarkLogitsProcessor UnbatchedClassifierFreeGuidanceLogitsProcessor"
).split()


def for_drafts(processors: Iterable[Any]) -> list[Any]:
    """The processors, for another model to draft with: what remembers rows is copied."""
    return [copy.deepcopy(p) if hasattr(p, "reorder") else p for p in processors]


#: Processors, of upstream's and ours, that look at each row of scores by itself, and at nothing else.
_OF_SCORES = (
    "EpsilonLogitsWarper InfNanRemoveLogitsProcessor LogitNormalization MinPLogitsWarper PLess "
    "QuadraticSmoothing TemperatureLogitsWarper TopA TopHLogitsWarper TopKLogitsWarper TopNSigma "
    "TopPLogitsWarper TypicalLogitsWarper"
).split()


def reads_scores_only(processor: Any) -> bool:
    """Whether a processor looks at each row of scores by itself, and not at the ids."""
    kind = type(processor)
    return is_librarys(kind) and kind.__name__ in _OF_SCORES


def is_row_wise(function: Any) -> bool:
    """Whether a processor or criterion looks at each row by itself, and remembers nothing.

    The libraries' own are known. The caller's say so by an attribute ``is_row_wise``.
    """
    if (said := getattr(function, "is_row_wise", None)) is not None:
        return bool(said)
    kind = public_type(function)
    return is_librarys(kind) and kind.__name__ not in _WITH_STATE
