"""Stage 5a: the logits processors of a call, in one fixed order.

Each row of a table builds one processor from the ``Context`` of the call, or ``None``. Processors take
``input_ids (rows, length)`` and ``scores (rows, vocab)``, and do not write to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ForcedBOSTokenLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TypicalLogitsWarper,
)

from ..grammar import setup as grammar
from . import lengths, repetition, sampling, vocabulary
from .context import Builder, Context, OfAll, Row
from .diversity import DiversityPenalty, diversity_penalty
from .guidance import guidance
from .lists import LogitsProcessorList, is_row_wise, merge_criteria_processor_list
from .thinking import thinking_budget

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


def _warper(kind: Callable[..., Any], name: str) -> Callable[[Any, Context], Any]:
    """Builds a warper that leaves as many tokens as beams need."""
    return lambda value, c: kind(**{name: value}, min_tokens_to_keep=c.min_tokens_to_keep)


#: What builders read besides their own field.
EOS = ("eos_token_id",)

#: Run first; the caller's own processors come after them.
PROCESSORS: list[Builder] = [
    Row("guidance_scale", guidance, lambda v: v == 1.0),
    Row("sequence_bias", lambda bias, c: vocabulary.SequenceBiasLogitsProcessor(bias)),
    Row("diversity_penalty", diversity_penalty, lambda penalty: not penalty),
    Row("encoder_repetition_penalty", repetition.encoder_repetition_penalty, lambda v: v == 1.0),
    Row("repetition_penalty", repetition.repetition_penalty, lambda v: v == 1.0),
    Row("no_repeat_ngram_size", repetition.no_repeat_ngram, lambda n: n <= 0),
    Row("encoder_no_repeat_ngram_size", repetition.encoder_no_repeat_ngram, lambda n: n <= 0),
    Row(
        "bad_words_ids",
        lambda words, c: vocabulary.NoBadWordsLogitsProcessor(words, c.eos),
        reads=EOS,
    ),
    Row("min_length", lengths.min_length, lambda n: n <= 0, reads=EOS),
    Row("min_new_tokens", lengths.min_new_tokens, lambda n: n <= 0, reads=EOS),
    vocabulary.prefix_constrained,
    OfAll("grammar", grammar.processor),
    Row("forced_bos_token_id", lambda token, c: ForcedBOSTokenLogitsProcessor(token)),
    Row("forced_eos_token_id", lengths.forced_eos, reads=("max_length",)),
    Row(
        "remove_invalid_values",
        lambda flag, c: vocabulary.InfNanRemoveLogitsProcessor(),
        lambda flag: flag is not True,
    ),
    Row("exponential_decay_length_penalty", lengths.exponential_decay, reads=EOS),
    Row(
        "suppress_tokens",
        lambda tokens, c: vocabulary.SuppressTokensLogitsProcessor(tokens, device=c.device),
    ),
    Row("begin_suppress_tokens", vocabulary.begin_suppress_tokens, reads=("forced_bos_token_id",)),
    Row(
        "thinking_token_budget",
        thinking_budget,
        reads=("thinking_start", "thinking_end", "thinking_message"),
    ),
]

#: Run after the caller's own processors, when sampling.
WARPERS: list[Builder] = [
    Row("temperature", lambda value, c: TemperatureLogitsWarper(value), lambda v: v == 1.0),
    Row("top_h", lambda share, c: TopHLogitsWarper(top_h=share)),
    Row("top_k", _warper(TopKLogitsWarper, "top_k"), lambda count: count == 0, keeps_tokens=True),
    Row(
        "top_p",
        _warper(sampling.TopPLogitsWarper, "top_p"),
        lambda mass: mass >= 1.0,
        keeps_tokens=True,
    ),
    Row("min_p", _warper(MinPLogitsWarper, "min_p"), keeps_tokens=True),
    Row(
        "typical_p",
        _warper(TypicalLogitsWarper, "mass"),
        lambda mass: mass >= 1.0,
        keeps_tokens=True,
    ),
    Row(
        "epsilon_cutoff",
        _warper(EpsilonLogitsWarper, "epsilon"),
        lambda v: not 0.0 < v < 1.0,
        keeps_tokens=True,
    ),
    Row(
        "eta_cutoff",
        lambda v, c: EtaLogitsWarper(v, min_tokens_to_keep=c.min_tokens_to_keep, device=c.device),
        lambda v: not 0.0 < v < 1.0,
        keeps_tokens=True,
    ),
]

#: Run at the end: a watermark has to see final scores, and nothing may follow a normalisation.
FINAL: list[Builder] = [
    OfAll("grammar", grammar.no_token_left),
    Row("watermarking_config", sampling.watermark),
    Row("renormalize_logits", lambda flag, c: LogitNormalization(), lambda flag: flag is not True),
]


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

    ``input_ids_seq_length`` is the length of the decoder's prompt, ``encoder_input_ids`` the main
    input of the call. Raises ``ValueError`` for options outside their range.
    """
    call = getattr(generation_config, "_call", None)
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
        rows=getattr(call, "rows", None),
        seeds=getattr(call, "row_keys_of_beams", None),
        tokenizer=None if call is None else call.mode_kwargs.get("tokenizer"),
    )
    processors = self._merge_criteria_processor_list(
        _build(PROCESSORS, context), logits_processor if logits_processor is not None else []
    )
    if generation_config.do_sample:
        processors.extend(_build(WARPERS, replace(context, of_sampling=True)))
    processors.extend(_build(FINAL, context))
    return processors


def _build(table: list[Builder], context: Context) -> LogitsProcessorList:
    built = (builder(context) for builder in table)
    return LogitsProcessorList(processor for processor in built if processor is not None)
