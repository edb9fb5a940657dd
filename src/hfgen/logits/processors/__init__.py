"""Stage 5a: the logits processors of a call, in order.

Each row of a table builds one processor from the ``Context`` of the call, or ``None``. Processors take
``input_ids (rows, length)`` and ``scores (rows, vocab)``, and do not write to them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TypicalLogitsWarper,
)

from ...settings.sampler_order import fields_of
from ..grammar import setup as grammar
from ..grammar.processor import NoTokenLeft
from . import dry, feedback, lengths, ngrams, per_row, repetition, samplers, vocabulary
from .context import Builder, Context, Row, built
from .guidance import guidance
from .lists import (
    LogitsProcessorList,
    for_drafts,
    is_row_wise,
    merge_criteria_processor_list,
    public_type,
)
from .repetition import DiversityPenalty
from .thinking import thinking_budget

__all__ = [
    "FINAL",
    "PROCESSORS",
    "WARPERS",
    "Context",
    "DiversityPenalty",
    "LogitsProcessorList",
    "for_drafts",
    "get_logits_processor",
    "is_row_wise",
    "merge_criteria_processor_list",
]


#: Not for greedy prompts.
_warper = partial(Row, of_sampling=True)


def _keeping(
    field: str, kind: Callable[..., Any], of_column: Callable[..., Any] | None = None, **facts: Any
) -> Row:
    """A warper of a class that leaves as many tokens as beams need; of a column, one of ``of_column``."""

    def build(value: Any, context: Context) -> Any:
        make: Any = of_column if isinstance(value, torch.Tensor) else kind
        return make(value, min_tokens_to_keep=context.min_tokens_to_keep)

    return _warper(field, build, keeps_tokens=True, **facts)


def _is_negative(count: int) -> bool:
    return count < 0


def _is_all(mass: float) -> bool:
    return mass >= 1.0


def _is_no_cutoff(value: float) -> bool:
    return not 0.0 < value < 1.0


def _is_not_true(flag: Any) -> bool:
    return flag is not True


#: Fields that builders read besides their own.
EOS = ("eos_token_id",)
ENDING = ("eos_token_id", "stop_token_ids")
COUNTED = ("penalty_window", "penalty_exclude_ids")
DRY = ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers")
SPAN = ("dynatemp_range",)
DYNATEMP = ("temperature", "dynatemp_exponent")
XTC = ("xtc_threshold",)
THINKING = ("thinking_start", "thinking_end", "thinking_message")

#: Run first; the caller's own processors come after them.
PROCESSORS: list[Builder] = [
    Row("guidance_scale", guidance, 1.0, neutral=1.0),
    Row("sequence_bias", lambda bias, c: SequenceBiasLogitsProcessor(bias)),
    Row("diversity_penalty", repetition.diversity_penalty, 0.0),
    Row("encoder_repetition_penalty", repetition.encoder_repetition_penalty, 1.0),
    Row("repetition_penalty", repetition.repetition_penalty, 1.0, neutral=1.0, reads=COUNTED),
    Row("frequency_penalty", repetition.frequency_penalty, 0.0, neutral=0.0, reads=COUNTED),
    Row("presence_penalty", repetition.presence_penalty, 0.0, neutral=0.0, reads=COUNTED),
    Row("dry_multiplier", dry.dry, 0.0, reads=DRY),
    Row("no_repeat_ngram_size", ngrams.no_repeat_ngram, 0, _is_negative),
    Row("encoder_no_repeat_ngram_size", ngrams.encoder_no_repeat_ngram, 0, _is_negative),
    Row("bad_words_ids", lambda words, c: NoBadWordsLogitsProcessor(words, c.eos), reads=EOS),
    Row("bad_words", vocabulary.bad_words, reads=EOS),
    Row("allowed_token_ids", lambda tokens, c: vocabulary.AllowedTokens(list(tokens), c.device)),
    Row("min_length", lengths.min_length, 0, _is_negative, neutral=0, reads=ENDING),
    Row("min_new_tokens", lengths.min_new_tokens, 0, _is_negative, neutral=0, reads=ENDING),
    Row("min_tokens", lengths.min_new_tokens, 0, _is_negative, neutral=0, reads=ENDING),
    lambda c: (
        PrefixConstrainedLogitsProcessor(c.prefix_allowed_tokens_fn, c.config.num_beams)
        if c.prefix_allowed_tokens_fn
        else None
    ),
    Row("grammar", grammar.processor, of_all=True),
    Row("forced_bos_token_id", lambda token, c: ForcedBOSTokenLogitsProcessor(token)),
    Row(
        "forced_eos_token_id",
        lambda t, c: ForcedEOSTokenLogitsProcessor(c.config.max_length, t, device=c.device),
        reads=("max_length",),
    ),
    Row("remove_invalid_values", lambda _, c: InfNanRemoveLogitsProcessor(), False, _is_not_true),
    Row("exponential_decay_length_penalty", lengths.exponential_decay, reads=EOS),
    Row(
        "suppress_tokens",
        lambda tokens, c: vocabulary.SuppressTokensLogitsProcessor(tokens, device=c.device),
    ),
    Row("begin_suppress_tokens", vocabulary.begin_suppress_tokens, reads=("forced_bos_token_id",)),
]

#: Run after the caller's own processors, when sampling.
WARPERS: list[Row] = [
    _warper("dynatemp_range", samplers.dynamic_temperature, 0.0, reads=DYNATEMP),
    _warper("temperature", per_row.temperature, 1.0, neutral=1.0, reads=SPAN),
    _warper("smoothing_factor", lambda v, c: samplers.QuadraticSmoothing(v), 0.0),
    _keeping("top_n_sigma", samplers.TopNSigma, idle=0.0),
    _warper("top_h", lambda v, c: TopHLogitsWarper(v)),
    _keeping("top_k", TopKLogitsWarper, per_row.TopKPerRow, idle=0, neutral=0),
    _warper("top_p", per_row.top_p, 1.0, _is_all, neutral=1.0, keeps_tokens=True),
    _keeping("min_p", MinPLogitsWarper, per_row.MinPPerRow, neutral=0.0),
    _keeping("top_a", samplers.TopA, idle=0.0),
    _keeping("typical_p", TypicalLogitsWarper, idle=1.0, is_off=_is_all),
    _keeping("epsilon_cutoff", EpsilonLogitsWarper, idle=0.0, is_off=_is_no_cutoff),
    _warper(
        "eta_cutoff",
        lambda v, c: EtaLogitsWarper(v, min_tokens_to_keep=c.min_tokens_to_keep, device=c.device),
        0.0,
        _is_no_cutoff,
        keeps_tokens=True,
    ),
    _keeping("p_less", samplers.PLess, idle=False),
    _warper("xtc_probability", samplers.exclude_top_choices, 0.0, reads=XTC, keeps_tokens=True),
    _warper(
        "mirostat",
        lambda v, c: feedback.Mirostat(v, c.own("mirostat_tau"), c.own("mirostat_eta")),
        0,
        reads=("mirostat_tau", "mirostat_eta"),
    ),
    _warper(
        "adaptive_target",
        lambda v, c: feedback.AdaptiveP(v, c.own("adaptive_decay")),
        reads=("adaptive_decay",),
    ),
]

#: Run at the end: a watermark has to see final scores, and nothing may follow a normalisation.
FINAL: list[Builder] = [
    Row("thinking_token_budget", thinking_budget, reads=THINKING),
    Row("grammar", lambda _, c: NoTokenLeft(c.config.num_beams or 1), of_all=True),
    Row("watermarking_config", vocabulary.watermark),
    Row("renormalize_logits", lambda flag, c: LogitNormalization(), False, _is_not_true),
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
    order = getattr(generation_config, "sampler_order", None)
    named = () if order is None else fields_of(order)
    if order == "llama.cpp":
        context = _with_mirostat_alone(context, named)
    caller_processors = logits_processor if logits_processor is not None else []
    early, late = PROCESSORS, WARPERS
    if named:
        rows = {row.field: row for row in (*PROCESSORS, *WARPERS) if isinstance(row, Row)}
        early = [builder for builder in PROCESSORS if getattr(builder, "field", None) not in named]
        late = [rows[field] for field in named] + [row for row in WARPERS if row.field not in named]
    processors = LogitsProcessorList(built(early, context))
    processors = self._merge_criteria_processor_list(processors, caller_processors)
    if named:  # penalties may be among them, whose place a caller's processor of that class takes
        kinds = {public_type(processor) for processor in caller_processors}
        processors.extend(
            processor
            for row in late
            for processor in built([row], context)
            if row.of_sampling or public_type(processor) not in kinds
        )
    elif generation_config.do_sample:
        processors.extend(built(late, context))
    processors.extend(built(FINAL, context))
    return processors


def _with_mirostat_alone(context: Context, named: tuple[str, ...]) -> Context:
    """``context`` in which a config with mirostat has no other sampler but a temperature, as in llama.cpp."""

    def alone(config: Any) -> Any:
        if not (config.do_sample and getattr(config, "mirostat", None)):
            return config
        config = copy.copy(config)
        vars(config).update(dict.fromkeys(set(named) - {"temperature"}))
        return config

    rows = context.rows
    if rows is not None:
        rows = replace(rows, configs=[alone(config) for config in rows.configs])
    return replace(context, config=alone(context.config), rows=rows)
