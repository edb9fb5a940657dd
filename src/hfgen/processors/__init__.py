"""Stage 5a: the logits processors of a call, in one fixed order.

Each row of a table builds one processor from the :class:`Context` of the call, or returns
``None``.  Adding a processor is one builder beside its family and one row here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .context import Builder, Context
from .diversity import DiversityPenalty, diversity_penalty
from .guidance import guidance
from .lengths import exponential_decay, forced_bos, forced_eos, min_length, min_new_tokens
from .lists import LogitsProcessorList, is_row_wise, merge_criteria_processor_list
from .repetition import (
    encoder_no_repeat_ngram,
    encoder_repetition_penalty,
    no_repeat_ngram,
    repetition_penalty,
)
from .sampling import (
    epsilon_cutoff,
    eta_cutoff,
    min_p,
    normalize,
    temperature,
    top_h,
    top_k,
    top_p,
    typical_p,
    watermark,
)
from .vocabulary import (
    bad_words,
    begin_suppress_tokens,
    prefix_constrained,
    remove_invalid_values,
    sequence_bias,
    suppress_tokens,
)

__all__ = [
    "FINAL",
    "PROCESSORS",
    "WARPERS",
    "Context",
    "DiversityPenalty",
    "LogitsProcessorList",
    "get_logits_processor",
    "is_row_wise",
    "merge_criteria_processor_list",
]

#: Run first; the caller's own processors come after them.
PROCESSORS: list[Builder] = [
    guidance,
    sequence_bias,
    diversity_penalty,
    encoder_repetition_penalty,
    repetition_penalty,
    no_repeat_ngram,
    encoder_no_repeat_ngram,
    bad_words,
    min_length,
    min_new_tokens,
    prefix_constrained,
    forced_bos,
    forced_eos,
    remove_invalid_values,
    exponential_decay,
    suppress_tokens,
    begin_suppress_tokens,
]

#: Run after the caller's own processors, when sampling.
WARPERS: list[Builder] = [
    temperature,
    top_h,
    top_k,
    top_p,
    min_p,
    typical_p,
    epsilon_cutoff,
    eta_cutoff,
]

#: Run at the end: a watermark has to see final scores, and nothing may follow a normalisation.
FINAL: list[Builder] = [watermark, normalize]


def get_logits_processor(
    self: Any,
    generation_config: Any,
    input_ids_seq_length: int | None = None,
    encoder_input_ids: torch.Tensor | None = None,
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None,
    logits_processor: Any = None,
    device: Any = None,
    model_kwargs: dict[str, Any] | None = None,
    negative_prompt_ids: torch.Tensor | None = None,
    negative_prompt_attention_mask: torch.Tensor | None = None,
) -> Any:
    """All processors of a call, the caller's ``logits_processor`` among them.

    The hook ``GenerationMixin._get_logits_processor``, with upstream's order and conditions.
    ``input_ids_seq_length`` is the length of the decoder's prompt, ``encoder_input_ids`` the main
    input of the call.  Raises ``ValueError`` for options outside their range.
    """
    context = Context(
        model=self,
        config=generation_config,
        prompt_length=input_ids_seq_length or 0,
        encoder_input_ids=encoder_input_ids,
        prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
        device=device,
        model_kwargs=model_kwargs or {},
        negative_prompt_ids=negative_prompt_ids,
        negative_prompt_attention_mask=negative_prompt_attention_mask,
    )
    processors = self._merge_criteria_processor_list(
        _build(PROCESSORS, context), logits_processor if logits_processor is not None else []
    )
    if generation_config.do_sample:
        processors.extend(_build(WARPERS, context))
    processors.extend(_build(FINAL, context))
    return processors


def _build(table: list[Builder], context: Context) -> LogitsProcessorList:
    built = (builder(context) for builder in table)
    return LogitsProcessorList(processor for processor in built if processor is not None)
