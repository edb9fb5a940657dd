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
from transformers import EtaLogitsWarper, GenerationMixin
from transformers.generation import logits_process as upstream

from ... import families
from ...settings.fields import sampler_fields
from ..grammar import processor as grammar
from ..thinking import thinking_budget
from . import dry, per_row, repetition, samplers, vocabulary
from .context import Builder, Context, Row, built
from .guidance import guidance
from .lists import LogitsProcessorList, public_type, reads_replaced
from .lists import merge_criteria_processor_list as merge_criteria_processor_list

#: Called where a library has replaced a class that it reads.
_upstreams = GenerationMixin._get_logits_processor

_warper = partial(Row, of_sampling=True)  # not for greedy prompts


def _keeping(
    field: str, kind: Callable[..., Any], of_column: Callable[..., Any] | None = None, **facts: Any
) -> Row:
    """A warper of a class that leaves as many tokens as beams need; of a column, one of ``of_column``."""

    def build(value: Any, context: Context) -> Any:
        make: Any = of_column if isinstance(value, torch.Tensor) else kind
        return make(value, min_tokens_to_keep=context.min_tokens_to_keep)

    return _warper(field, build, keeps_tokens=True, **facts)


def _not_true(flag: Any) -> bool:
    return flag is not True


_presence = partial(repetition.occurrence_penalty, of_presence=True)

#: Fields that builders read besides their own.
EOS = ("eos_token_id",)
ENDING = ("eos_token_id", "stop_token_ids")
COUNTED = ("penalty_window", "penalty_exclude_ids")
DRY = ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers")
DYNATEMP = ("temperature", "dynatemp_exponent")
XTC = ("xtc_threshold",)
THINKING = ("thinking_start", "thinking_end", "thinking_message")


def _prefix_constraint(context: Context) -> Any:
    if not (function := context.prefix_allowed_tokens_fn):
        return None
    n_rows = context.config.num_beams
    if families.IS_5_24:
        n_rows = max(n_rows or 1, context.config.num_return_sequences or 1)
    return upstream.PrefixConstrainedLogitsProcessor(function, n_rows)


#: Run first; the caller's own processors come after them.
PROCESSORS: list[Builder] = [
    Row("guidance_scale", guidance, 1.0, neutral=1.0),
    Row("sequence_bias", lambda bias, c: upstream.SequenceBiasLogitsProcessor(bias)),
    Row("diversity_penalty", repetition.diversity_penalty, 0.0),
    Row("encoder_repetition_penalty", repetition.encoder_repetition_penalty, 1.0),
    Row("repetition_penalty", repetition.repetition_penalty, 1.0, neutral=1.0, reads=COUNTED),
    Row("frequency_penalty", repetition.occurrence_penalty, 0.0, neutral=0.0, reads=COUNTED),
    Row("presence_penalty", _presence, 0.0, neutral=0.0, reads=COUNTED),
    Row("dry_multiplier", dry.dry, 0.0, reads=DRY),
    Row("no_repeat_ngram_size", repetition.no_repeat_ngram, 0, lambda n: n < 0),
    Row("encoder_no_repeat_ngram_size", repetition.encoder_no_repeat_ngram, 0, lambda n: n < 0),
    Row("bad_words_ids", lambda ids, c: upstream.NoBadWordsLogitsProcessor(ids, c.eos), reads=EOS),
    Row("bad_words", vocabulary.bad_words, reads=EOS),
    Row("allowed_token_ids", lambda tokens, c: vocabulary.AllowedTokens(list(tokens), c.device)),
    Row("min_length", vocabulary.min_length, 0, lambda n: n < 0, neutral=0, reads=ENDING),
    Row("min_new_tokens", vocabulary.min_new_tokens, 0, lambda n: n < 0, neutral=0, reads=ENDING),
    Row("min_tokens", vocabulary.min_new_tokens, 0, lambda n: n < 0, neutral=0, reads=ENDING),
    _prefix_constraint,
    Row("grammar", grammar.grammar, of_all=True),
    Row("forced_bos_token_id", lambda token, c: upstream.ForcedBOSTokenLogitsProcessor(token)),
    Row(
        "forced_eos_token_id",
        lambda t, c: upstream.ForcedEOSTokenLogitsProcessor(c.config.max_length, t, c.device),
        reads=("max_length",),
    ),
    Row(
        "remove_invalid_values",
        lambda _, c: upstream.InfNanRemoveLogitsProcessor(),
        False,
        _not_true,
    ),
    Row("exponential_decay_length_penalty", vocabulary.exponential_decay, reads=EOS),
    Row(
        "suppress_tokens",
        lambda tokens, c: vocabulary.SuppressTokensLogitsProcessor(tokens, device=c.device),
    ),
    Row("begin_suppress_tokens", vocabulary.begin_suppress_tokens, reads=("forced_bos_token_id",)),
]

#: Run after the caller's own processors, when sampling.
WARPERS: list[Row] = [
    _warper("dynatemp_range", samplers.dynamic_temperature, 0.0, reads=DYNATEMP),
    _warper("temperature", per_row.temperature, 1.0, neutral=1.0, reads=("dynatemp_range",)),
    _warper("smoothing_factor", lambda v, c: samplers.QuadraticSmoothing(v), 0.0),
    _keeping("top_n_sigma", samplers.TopNSigma, idle=0.0),
    _warper("top_h", lambda v, c: upstream.TopHLogitsWarper(v)),
    _keeping("top_k", upstream.TopKLogitsWarper, per_row.TopKPerRow, idle=0, neutral=0),
    _warper("top_p", per_row.top_p, 1.0, lambda mass: mass >= 1.0, neutral=1.0, keeps_tokens=True),
    _keeping("min_p", upstream.MinPLogitsWarper, per_row.MinPPerRow, neutral=0.0),
    _keeping("top_a", samplers.TopA, idle=0.0),
    _keeping("typical_p", upstream.TypicalLogitsWarper, idle=1.0, is_off=lambda mass: mass >= 1.0),
    _keeping(
        "epsilon_cutoff", upstream.EpsilonLogitsWarper, idle=0.0, is_off=lambda v: not 0 < v < 1
    ),
    _warper(
        "eta_cutoff",
        lambda v, c: EtaLogitsWarper(v, min_tokens_to_keep=c.min_tokens_to_keep, device=c.device),
        0.0,
        lambda v: not 0 < v < 1,
        keeps_tokens=True,
    ),
    _keeping("p_less", samplers.PLess, idle=False),
    _warper("xtc_probability", samplers.exclude_top_choices, 0.0, reads=XTC, keeps_tokens=True),
    _warper(
        "mirostat",
        lambda v, c: samplers.Mirostat(v, c.own("mirostat_tau"), c.own("mirostat_eta")),
        0,
        reads=("mirostat_tau", "mirostat_eta"),
    ),
    _warper(
        "adaptive_target",
        lambda v, c: samplers.AdaptiveP(v, c.own("adaptive_decay")),
        reads=("adaptive_decay",),
    ),
]

#: Run at the end: a watermark has to see final scores, and nothing may follow a normalisation.
FINAL: list[Builder] = [
    Row("thinking_token_budget", thinking_budget, reads=THINKING),
    Row("grammar", lambda _, c: grammar.NoTokenLeft(c.config.num_beams or 1), of_all=True),
    Row("watermarking_config", vocabulary.watermark),
    Row("renormalize_logits", lambda _, c: upstream.LogitNormalization(), False, _not_true),
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

    ``input_ids_seq_length``: the decoder's prompt; ``encoder_input_ids``: the main input of the call.
    """
    if reads_replaced(_upstreams):
        prompt = input_ids_seq_length, encoder_input_ids, prefix_allowed_tokens_fn
        others = logits_processor, device, model_kwargs
        negative = negative_prompt_ids, negative_prompt_attention_mask
        return _upstreams(self, generation_config, *prompt, *others, *negative)
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
    named = () if order is None else sampler_fields(order)
    if order == "llama.cpp":
        context = _with_mirostat_alone(context, named)
    callers = [] if logits_processor is None else logits_processor
    early, late = PROCESSORS, WARPERS
    if named:
        rows = {row.field: row for row in (*PROCESSORS, *WARPERS) if isinstance(row, Row)}
        early = [row for row in PROCESSORS if getattr(row, "field", None) not in named]
        late = [rows[field] for field in named] + [row for row in WARPERS if row.field not in named]
    processors = LogitsProcessorList(built(early, context))
    processors = self._merge_criteria_processor_list(processors, callers)
    if named:  # penalties may be among them, whose place a caller's processor of that class takes
        kinds = {public_type(processor) for processor in callers}
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
