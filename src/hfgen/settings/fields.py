"""``FIELDS``: one row for each field of a generation config, transformers' and hfgen's own."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import kinds as of
from .kinds import Kind, Range, at_least, tokens_in


class FieldError(TypeError, ValueError):
    """A value that a field cannot have; upstream raises the one class or the other."""


def with_suggestions(unknown: Iterable[str], known: Iterable[str]) -> str:
    """``unknown`` names, each with the known one that it may be a slip of."""
    known = list(known)
    nearest = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.8) for name in unknown}
    return ", ".join(
        f"`{name}` (did you mean `{names[0]}`?)" if names else f"`{name}`"
        for name, names in nearest.items()
    )


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a generation config. It may always be ``None``, which is: not set."""

    kind: Kind
    range: Range | None = None
    #: The field that has to be on for this one to do anything: ``range`` holds only then.
    needs: str | None = None
    #: The error for token ids outside of the vocabulary; ``None`` if they do no harm.
    outside: type[Exception] | None = None
    #: Counts tokens of a sequence: as many as there are do as well as any more.
    within_sequence: bool = False
    #: Upstream's default holds where nobody sets the field; else an assistant's own config comes first.
    has_default: bool = True
    #: Whether it is hfgen's own, and its default then: upstream has a table of defaults.
    is_own: bool = False
    default: Any = None
    #: Values out of range that upstream takes for "off": old config files have them.
    ignores: Callable[[Any], bool] | None = None

    def check(self, name: str, value: Any, is_used: bool = True) -> None:
        """Raise ``FieldError`` for a value of another kind, ``ValueError`` for one out of range."""
        if value is None:
            return
        if not self.kind.accepts(value):
            raise FieldError(f"`{name}` has to be {self.kind.words}, but is {value!r:.80}.")
        if is_used and self.range is not None and not self.range.accepts(value):
            raise ValueError(f"`{name}` has to be {self.range.words}, but is {value!r:.80}.")


#: A field of hfgen's own.
own = partial(Field, is_own=True)

ONE_TOKEN = Range("one id at least", lambda value: any(True for _ in tokens_in(value)))

#: Fields that may differ between the prompts of a batch; those that others need come first.
PER_ROW: dict[str, Field] = {
    # Mode
    "do_sample": Field(of.FLAG),
    # Length
    "max_length": Field(of.INTEGER),
    "max_new_tokens": Field(of.INTEGER, at_least(0)),
    "min_length": Field(of.INTEGER),
    "min_new_tokens": Field(of.INTEGER, at_least(0)),
    "min_tokens": own(of.SIZE, of.INT64),
    "max_time": Field(of.NUMBER),
    # Stopping and texts
    "stop_strings": Field(of.STRINGS),
    "stop_regex": own(of.STRINGS),
    "stop_token_ids": own(of.TOKENS),
    "ignore_eos": own(of.FLAG),
    "include_stop_str_in_output": own(of.FLAG, default=False),
    "skip_special_tokens": own(of.FLAG, default=True),
    "repetition_detection": own(of.REPETITION),
    # Special tokens
    "eos_token_id": Field(of.TOKENS),
    # Sampling
    "seed": own(of.SIZE, of.INT64),
    "temperature": Field(of.NUMBER, of.TEMPERATURE, "do_sample"),
    "top_k": Field(of.SIZE, of.COUNT, "do_sample"),
    "top_p": Field(of.NUMBER, of.MASS, "do_sample", ignores=lambda x: x > 1),
    "min_p": Field(of.NUMBER, of.UNIT, "do_sample"),
    "top_h": Field(of.NUMBER, Range("above 0 and at most 1", lambda x: 0 < x <= 1), "do_sample"),
    "typical_p": Field(of.NUMBER, of.TYPICAL, "do_sample", ignores=lambda x: x > 1),
    "epsilon_cutoff": Field(of.NUMBER, of.CUTOFF, "do_sample", ignores=lambda x: not 0 <= x < 1),
    "eta_cutoff": Field(of.NUMBER, of.CUTOFF, "do_sample", ignores=lambda x: not 0 <= x < 1),
    "top_n_sigma": own(of.NUMBER, of.POSITIVE, "do_sample"),
    "top_a": own(of.NUMBER, of.SHARE, "do_sample"),
    "p_less": own(of.FLAG, None, "do_sample"),
    "xtc_probability": own(of.NUMBER, of.SHARE, "do_sample"),
    "xtc_threshold": own(of.NUMBER, of.SHARE, "do_sample", default=0.1),
    "dynatemp_range": own(of.NUMBER, of.POSITIVE, "do_sample"),
    "dynatemp_exponent": own(of.NUMBER, of.POSITIVE, "do_sample", default=1.0),
    "smoothing_factor": own(of.NUMBER, of.POSITIVE, "do_sample"),
    "mirostat": own(of.SIZE, Range("1 or 2; 0 is off", lambda n: n in (0, 1, 2)), "do_sample"),
    "mirostat_tau": own(of.NUMBER, of.POSITIVE, "do_sample", default=5.0),
    "mirostat_eta": own(of.NUMBER, of.POSITIVE, "do_sample", default=0.1),
    "adaptive_target": own(of.NUMBER, of.UNIT, "do_sample"),
    "adaptive_decay": own(of.NUMBER, of.CUTOFF, "do_sample", default=0.9),
    # Scores
    "guidance_scale": Field(of.NUMBER, of.FINITE),
    "repetition_penalty": Field(of.NUMBER, of.PENALTY),
    "encoder_repetition_penalty": Field(of.NUMBER, of.PENALTY),
    "no_repeat_ngram_size": Field(of.SIZE),
    "encoder_no_repeat_ngram_size": Field(of.INTEGER),
    "bad_words_ids": Field(of.WORDS, outside=ValueError),
    "sequence_bias": Field(of.BIASES, outside=ValueError),
    "renormalize_logits": Field(of.FLAG),
    "remove_invalid_values": Field(of.FLAG),
    "forced_bos_token_id": Field(of.TOKENS, ONE_TOKEN, outside=IndexError),
    "forced_eos_token_id": Field(
        of.TOKENS,
        Range("ids from 0", lambda value: min(tokens_in(value), default=-1) >= 0),
        outside=IndexError,
    ),
    "exponential_decay_length_penalty": Field(of.PAIR),
    "suppress_tokens": Field(of.TOKEN_LIST),
    "begin_suppress_tokens": Field(of.TOKEN_LIST),
    "watermarking_config": Field(of.WATERMARK),
    "bad_words": own(of.STRINGS),
    "allowed_token_ids": own(of.TOKEN_LIST, ONE_TOKEN, outside=ValueError),
    "grammar": own(of.GRAMMAR),
    # Penalties
    "frequency_penalty": own(of.NUMBER, of.FINITE),
    "presence_penalty": own(of.NUMBER, of.FINITE),
    "penalty_window": own(of.SIZE, at_least(1), within_sequence=True),
    "penalty_exclude_ids": own(of.TOKENS),
    "dry_multiplier": own(of.NUMBER, of.POSITIVE),
    "dry_base": own(
        of.NUMBER, Range("at least 1, and finite", lambda x: 1 <= x < math.inf), default=1.75
    ),
    "dry_allowed_length": own(of.SIZE, at_least(1), default=2),
    "dry_penalty_last_n": own(
        of.SIZE, Range("at least -1; -1 is the whole text, 0 is off", lambda n: n >= -1)
    ),
    "dry_sequence_breakers": own(of.BREAKERS),
    # Thinking
    "thinking_token_budget": own(of.SIZE, of.INT64),
    "thinking_start": own(of.MARKER, default="<think>"),
    "thinking_end": own(of.MARKER, default="</think>"),
    "thinking_message": own(of.MARKER),
    # Log-probabilities
    "logprobs": own(of.SIZE, of.N_BEST),
    "logprob_token_ids": own(of.TOKEN_LIST, outside=ValueError),
    "prompt_logprobs": own(of.SIZE, of.N_BEST),
}

#: Fields that hold for all rows of a call: what decodes, the cache, what is recorded.
PER_CALL: dict[str, Field] = {
    # Mode
    "num_beams": Field(of.INTEGER, of.SEQUENCES),
    "use_mtp": Field(of.FLAG),
    "num_return_sequences": Field(of.INTEGER, of.SEQUENCES),
    # Length
    "early_stopping": Field(of.FLAG_OR_NEVER, needs="num_beams"),
    # Scores
    # Scores of two tokens and more, divided by a power above, are zeros in float32.
    "length_penalty": Field(
        of.FLOAT, Range("between -128 and 128", lambda x: -128 <= x <= 128), "num_beams"
    ),
    "token_healing": Field(of.FLAG),
    # Special tokens
    "pad_token_id": Field(of.TOKEN),
    "bos_token_id": Field(of.TOKENS),
    "decoder_start_token_id": Field(of.TOKENS, outside=IndexError),
    # Cache
    "use_cache": Field(of.FLAG),
    "cache_implementation": Field(of.ANY),
    "cache_config": Field(of.ANY),
    "max_cache_len": Field(of.INTEGER),
    "prefill_chunk_size": Field(of.SIZE, Range("at least 1", lambda n: 1 <= int(n) < 2**63)),
    # Output
    "output_attentions": Field(of.FLAG_OR_LAYERS),
    "output_hidden_states": Field(of.FLAG_OR_LAYERS),
    "output_scores": Field(of.FLAG),
    "output_logits": Field(of.FLAG),
    "return_dict_in_generate": Field(of.FLAG),
    # Drafting
    "is_assistant": Field(of.FLAG),
    "num_assistant_tokens": Field(of.INTEGER, at_least(0), within_sequence=True, has_default=False),
    "num_assistant_tokens_schedule": Field(of.NAME, has_default=False),
    "assistant_confidence_threshold": Field(of.NUMBER, has_default=False),
    "prompt_lookup_num_tokens": Field(of.INTEGER, at_least(1), within_sequence=True),
    "max_matching_ngram_size": Field(
        of.INTEGER, Range("at least 1; 0 is the default, 2", lambda n: n >= 0), within_sequence=True
    ),
    "assistant_early_exit": Field(of.INTEGER),
    "assistant_lookbehind": Field(of.INTEGER),
    "target_lookbehind": Field(of.INTEGER),
    "assistant_ensemble_weight": Field(
        of.NUMBER, Range("above 0 and below 1; None is off", lambda x: 0 < x < 1)
    ),
    "speculation_type": Field(of.DFLASH),
    # Compilation
    "compile_config": Field(of.ANY),
    "disable_compile": Field(of.FLAG),
    "use_cuda_graph": own(of.FLAG, default=False),
    # Modes that upstream has moved to repositories
    "low_memory": Field(of.FLAG),
    "penalty_alpha": Field(of.NUMBER),
    "dola_layers": Field(of.ANY),
    "diversity_penalty": Field(of.NUMBER, of.FINITE),
    "num_beam_groups": Field(of.INTEGER),
    "constraints": Field(of.OBJECT),
    "force_words_ids": Field(of.ANY),
    "continuous_batching_config": Field(of.OBJECT),
    "transformers_version": Field(of.OBJECT),
    # hfgen's own
    "sampler_order": own(of.NAMES),
    "output_speculation": own(of.FLAG, default=False),
    "output_metrics": own(of.FLAG, default=False),
    "output_card": own(of.FLAG_OR_PROMPT, default=False),
    "drop_finished": own(of.FLAG, default=False),
    "logprobs_support": own(of.FLAG),
    "logprobs_mode": own(of.NAME, default="raw_logprobs"),
}

FIELDS: dict[str, Field] = PER_ROW | PER_CALL

#: hfgen's own fields, and their defaults.
OWN_FIELDS = {name: row.default for name, row in FIELDS.items() if row.is_own}


def require_tokenizer(tokenizer: Any, field: str, value: Any) -> None:
    """Raise ``ValueError`` if a config field that works on text has no tokenizer to do it with."""
    if tokenizer is None:
        raise ValueError(
            f"`{field}` (={value!r}) needs text: pass the model's tokenizer to `generate` as "
            "`tokenizer`."
        )


def require_eos(eos: Any, penalty: Any) -> None:
    """Raise ``ValueError`` if there is no EOS for ``exponential_decay_length_penalty`` to raise."""
    if eos is None:
        raise ValueError(
            f"`exponential_decay_length_penalty` (={penalty}) raises the score of the EOS token, "
            "but there is none: set `eos_token_id`."
        )


def is_on(name: str, value: Any) -> bool:
    """Whether the field ``name`` has a value that others need: it samples, it has several beams."""
    return value is not None and bool(value > 1 if name == "num_beams" else value)


#: The name of a sampler, and the fields that turn it on.
SAMPLERS: dict[str, tuple[str, ...]] = {
    "penalties": ("repetition_penalty", "frequency_penalty", "presence_penalty"),
    "dry": ("dry_multiplier",),
    "temperature": ("dynatemp_range", "temperature"),
    "smoothing": ("smoothing_factor",),
    **{name: (name,) for name in ("top_n_sigma", "top_h", "top_k", "top_p", "min_p", "top_a")},
    **{name: (name,) for name in ("typical_p", "epsilon_cutoff", "eta_cutoff", "p_less")},
    "xtc": ("xtc_probability",),
    "mirostat": ("mirostat",),
    "adaptive_p": ("adaptive_target",),
}

#: The order of other libraries. ``"hf"`` is that of ``logits/processors/__init__.py``, which transformers has, too.
PRESETS: dict[str, tuple[str, ...]] = {
    "hf": (),
    "vllm": ("penalties", "temperature", "min_p", "top_k", "top_p"),
    "llama.cpp": (
        *("penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p"),
        *("xtc", "temperature"),
    ),
}


def sampler_fields(order: str | list[str] | None) -> tuple[str, ...]:
    """The fields of the samplers that ``order`` names, in that order: a preset, or a list of names.

    Raises ``ValueError`` for names that there are none of, and for a sampler that is named twice.
    """
    names: Any = [] if order is None else order
    if isinstance(names, str):
        if names not in PRESETS:
            presets = ", ".join(map(repr, PRESETS))
            raise ValueError(
                f"`sampler_order` has to be one of {presets}, or a list of samplers, but is "
                f"{with_suggestions([names], PRESETS)}."
            )
        names = PRESETS[names]
    if unknown := [name for name in names if name not in SAMPLERS]:
        raise ValueError(
            f"`sampler_order` names what is no sampler: {with_suggestions(unknown, SAMPLERS)}. There "
            f"are {', '.join(SAMPLERS)}."
        )
    if twice := {name for name in names if list(names).count(name) > 1}:
        raise ValueError(f"`sampler_order` names {', '.join(sorted(twice))} more than once.")
    return tuple(field for name in names for field in SAMPLERS[name])
