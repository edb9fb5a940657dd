"""vLLM's ``SamplingParams`` as a generation config, field by field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from . import grammar
from .fields import FIELDS, with_suggestions

#: ``max_new_tokens`` of a row that ends at the model's positions: vLLM's ``max_tokens=None``. No
#: other call has a reason to pass this number.
TO_LAST_POSITION = 2**40


@dataclass(frozen=True, slots=True)
class Param:
    """One field of vLLM's class: its default there, and the fields that it becomes here.

    With a ``reason``, values other than the default are refused, unless both mean "off".
    """

    default: Any
    becomes: Callable[[Any], dict[str, Any]] = lambda value: {}
    reason: str | None = None


def _named(name: str, of_true: int = True) -> Callable[[Any], dict[str, Any]]:
    return lambda v: {} if v is None else {name: of_true if v is True else v}


def _temperature(value: float) -> dict[str, Any]:
    # vLLM raises lower temperatures to 0.01.
    return {"do_sample": True, "temperature": max(value, 0.01)} if value else {"do_sample": False}


def _stop(value: str | list[str] | None) -> dict[str, Any]:
    return {"stop_strings": [value] if isinstance(value, str) else value} if value else {}


def _repetition(params: Any) -> dict[str, Any]:
    """vLLM's ``RepetitionDetectionParams``, or its fields in a mapping; a size of 0 is off."""
    names = ("max_pattern_size", "min_pattern_size", "min_count")
    values = {name: int(value) for name, value in fields_of(params).items() if name in names}
    return {"repetition_detection": values} if values.get("max_pattern_size") else {}


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a mapping, a ``msgspec.Struct``, or an object with attributes."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    names = getattr(value, "__struct_fields__", None) or vars(value)
    return {name: getattr(value, name) for name in names if not name.startswith("_")}


#: The kinds of grammar in vLLM's ``StructuredOutputsParams``.
GRAMMARS = ("choice", "grammar", "json", "json_object", "regex")


def _structured(params: Any) -> dict[str, Any]:
    options = {name: value for name, value in fields_of(params).items() if value}
    if not options:
        return {}
    is_compact = options.pop("disable_any_whitespace", False)
    if len(options) != 1 or (name := next(iter(options))) not in GRAMMARS:
        raise ValueError(
            f"`structured_outputs` has to have one of {[*GRAMMARS]}, and beside it only "
            f"`disable_any_whitespace`, but has {sorted(options)}."
        )
    make: Any = grammar.lark if name == "grammar" else getattr(grammar, name)
    made = make() if name == "json_object" else make(options[name])
    return {"grammar": replace(made, whitespace=False) if is_compact else made}


#: Every field of vLLM's class, in its order.
PARAMS: dict[str, Param] = {
    "n": Param(1, _named("num_return_sequences")),
    "presence_penalty": Param(0.0, _named("presence_penalty")),
    "frequency_penalty": Param(0.0, _named("frequency_penalty")),
    "repetition_penalty": Param(1.0, lambda value: {"repetition_penalty": float(value)}),
    "temperature": Param(1.0, _temperature),
    "watermarking": Param(
        None, reason="pass transformers' `watermarking_config`: an engine of vLLM holds its own"
    ),
    "top_p": Param(1.0, _named("top_p")),
    "top_k": Param(0, _named("top_k")),
    "min_p": Param(0.0, _named("min_p")),
    "seed": Param(None, lambda value: {} if value in (None, -1) else {"seed": value}),
    "stop": Param(None, _stop),
    "stop_token_ids": Param(None, lambda value: {"stop_token_ids": value} if value else {}),
    "ignore_eos": Param(False, lambda value: {"ignore_eos": True} if value else {}),
    "max_tokens": Param(16, lambda n: {"max_new_tokens": TO_LAST_POSITION if n is None else n}),
    "min_tokens": Param(0, lambda value: {"min_tokens": value} if value else {}),
    "logprobs": Param(None, _named("logprobs", of_true=1)),
    "prompt_logprobs": Param(None, _named("prompt_logprobs", of_true=1)),
    "prompt_logprob_token_ids": Param(None, reason="`prompt_logprobs=-1` has all tokens"),
    "prompt_logprob_start": Param(None, reason="`prompt_logprobs` begin at the second token"),
    "logprob_token_ids": Param(None, _named("logprob_token_ids")),
    "flat_logprobs": Param(False),  # `output.logprobs` always has flat tensors
    "detokenize": Param(True),  # texts are returned only if `generate` gets a `tokenizer`
    "skip_special_tokens": Param(True, _named("skip_special_tokens")),
    "spaces_between_special_tokens": Param(
        True, reason="the tokenizer decides about spaces between special tokens"
    ),
    "include_stop_str_in_output": Param(False, _named("include_stop_str_in_output")),
    "output_kind": Param(None),  # `generate` returns the final output, `stream` the new tokens
    "stream_interval": Param(None, reason="`stream` has an event for every step"),
    "skip_clone": Param(False),  # configs are copied where it matters
    "output_text_buffer_length": Param(0),  # vLLM computes it from `stop`
    "structured_outputs": Param(None, _structured),
    "logit_bias": Param(
        None, lambda v: {"sequence_bias": {(int(t),): float(b) for t, b in v.items()}} if v else {}
    ),
    "allowed_token_ids": Param(None, _named("allowed_token_ids")),
    "extra_args": Param(None, reason="pass your own `logits_processor` to `generate`"),
    "bad_words": Param(None, lambda value: {"bad_words": value} if value else {}),
    "skip_reading_prefix_cache": Param(None),  # only calls with `prefix_cache` read one
    "thinking_token_budget": Param(
        None, lambda value: {} if value in (None, -1) else {"thinking_token_budget": value}
    ),
    "repetition_detection": Param(None, _repetition),
    "routed_experts_prompt_start": Param(0, reason="routed experts are not returned"),
    "trace_decode_token_ids": Param(None, reason="use `prefix_allowed_tokens_fn` to force tokens"),
    # Of earlier versions
    "best_of": Param(None, reason="use `n` and choose by `output.logprobs`, or use `num_beams`"),
    "logits_processors": Param(None, reason="pass `logits_processor` to `generate`"),
    "truncate_prompt_tokens": Param(None, reason="truncate with the tokenizer"),
    "guided_decoding": Param(None, _structured),
    "use_beam_search": Param(False, reason="set `num_beams` on the config"),
}


def translated(params: dict[str, Any]) -> dict[str, Any]:
    """The fields of a generation config that say what ``params``, by vLLM's names, say there.

    Greedy ones are without those of sampling, which transformers would warn of.
    """
    if unknown := [name for name in params if name not in PARAMS]:
        raise ValueError(f"SamplingParams does not know {with_suggestions(unknown, PARAMS)}.")
    fields: dict[str, Any] = {}
    for name, param in PARAMS.items():
        value = params.get(name, param.default)
        if value is None and name != "max_tokens":
            value = param.default
        if param.reason is not None and value != param.default and (value or param.default):
            raise ValueError(f"`{name}` (={value!r}) is not supported: {param.reason}.")
        fields |= param.becomes(value)
    if fields["do_sample"]:
        return fields
    return {name: value for name, value in fields.items() if FIELDS[name].needs != "do_sample"}
