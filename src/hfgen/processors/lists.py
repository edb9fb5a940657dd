"""The list of processors: how it is called, and how the caller's objects are merged into it."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
import transformers
from transformers.generation.stopping_criteria import StoppingCriteria

from ..logs import logger


class LogitsProcessorList(transformers.LogitsProcessorList):
    """Processors, applied in order.

    Processors whose ``__call__`` takes more than ids and scores get the keyword arguments of the
    call, all of which have to be there.
    """

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Processed scores ``(rows, vocab)`` of ``input_ids (rows, length)``.

        ``scores`` may come with a multiple of the rows, for guidance to fold.  Raises
        ``ValueError`` if a processor lacks an argument, or returns anything but scores for the
        rows it got, or for the rows of the ids, over the same vocabulary.
        """
        given = scores.shape
        wanted = (*input_ids.shape[:1], *given[1:])
        for processor in self:
            kind: Any = type(processor)
            extra = extra_arguments(kind)
            if not extra:
                scores = processor(input_ids, scores)
            elif all(name in kwargs for name in extra):
                scores = processor(input_ids, scores, **kwargs)
            else:
                missing = [name for name in extra if name not in kwargs]
                raise ValueError(f"{kind.__name__} needs the arguments {missing}.")
            shape = getattr(scores, "shape", None)
            if shape != given and shape != wanted:
                returned = type(scores).__name__ if shape is None else f"shape {tuple(shape)}"
                raise ValueError(
                    f"{kind.__name__} returned {returned}, but scores have to have the "
                    f"shape (rows, vocabulary) = {wanted}."
                )
        return scores


@lru_cache(maxsize=256)
def extra_arguments(processor_type: type) -> tuple[str, ...]:
    """Names of the parameters of ``__call__`` beyond self, ids and scores."""
    return tuple(inspect.signature(processor_type.__call__).parameters)[3:]


def merge_criteria_processor_list(self: Any, default_list: Any, custom_list: Any) -> Any:
    """The defaults, with the caller's objects in the place of defaults of the same public type.

    The caller's other objects follow in their order.  Lists of processors and of stopping
    criteria alike; the result has the type of ``default_list``.
    """
    if len(custom_list) == 0:
        return default_list
    merged = type(default_list)()
    for default in default_list:
        kind = public_type(default)
        custom = next((item for item in custom_list if public_type(item) is kind), None)
        if custom is not None:
            what = (
                "stopping criteria" if isinstance(custom, StoppingCriteria) else "logits processor"
            )
            logger.warning_once(
                f"A custom {what} of type {type(custom)} has been passed to `.generate()`, but it was "
                "also created in `.generate()`: the custom one is used."
            )
        merged.append(default if custom is None else custom)
    for custom in custom_list:
        if custom not in merged:
            merged.append(custom)
    return merged


def public_type(item: Any) -> type:
    """The class that a caller knows ``item`` by: hfgen's own subclasses count as upstream's."""
    package = __name__.partition(".")[0]
    return next(kind for kind in type(item).__mro__ if kind.__module__.partition(".")[0] != package)


#: Upstream's that remember what they were called with, or call a function of the caller's.
_WITH_STATE = (
    "AlternatingCodebooksLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor",
    "DiaEOSDelayPatternLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
)


def is_row_wise(function: Any) -> bool:
    """Whether a processor or criterion looks at each row by itself, and remembers nothing.

    Known of the libraries' own. One of the caller's may say so by an attribute ``is_row_wise``;
    otherwise it is called once for every length, with all rows, as in plain decoding.
    """
    if (said := getattr(function, "is_row_wise", None)) is not None:
        return bool(said)
    kind = public_type(function)
    is_known = kind.__module__.partition(".")[0] == "transformers"
    return is_known and kind.__name__ not in _WITH_STATE
