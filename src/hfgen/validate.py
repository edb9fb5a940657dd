"""Every check of arguments, and the errors and warnings they end in. Nothing here changes anything.

Errors name the argument, what was given and what is allowed, and come before the first forward
pass. Where upstream fails later and less clearly, the class of its exception is kept.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.utils import TransformersKwargs

from . import quirks, validate_beams, validate_contrast, vocabularies
from .types import Plan, Prompt, Request


def is_zero(value: Any) -> bool:
    """Whether ``value`` is the number zero (and not ``False``)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


def is_integer(value: Any) -> bool:
    """Whether ``value`` counts something: 8, 8.0, ``numpy.int64(8)`` and ``tensor(8)`` do."""
    try:
        return not isinstance(value, str | bytes) and float(value).is_integer()
    except (TypeError, ValueError, RuntimeError):
        return False


def is_number(value: Any) -> bool:
    """Whether ``value`` is one number of any type."""
    try:
        return not isinstance(value, str | bytes) and float(value) == float(value)
    except (TypeError, ValueError, RuntimeError):
        return False


def is_positive_float(value: Any) -> bool:
    """Whether ``value`` is what upstream's penalties take: a float above 0, or 1, which is off."""
    return (isinstance(value, float) and value > 0) or (is_number(value) and value == 1)


def is_token_ids(value: Any) -> bool:
    """Whether ``value`` is a token id or several."""
    if isinstance(value, torch.Tensor):
        return True
    return is_number(value) or (
        isinstance(value, Iterable) and not isinstance(value, str) and all(map(is_number, value))
    )


def is_stop_strings(value: Any) -> bool:
    """Whether ``value`` is a non-empty string or a non-empty collection of them."""
    if isinstance(value, str):
        return bool(value)
    return (
        isinstance(value, list | tuple | set)
        and len(value) > 0
        and all(isinstance(string, str) and string for string in value)
    )


def with_suggestions(unknown: Iterable[str], known: Iterable[str]) -> str:
    """``unknown`` names, each with the nearest known one."""
    known = list(known)
    named = []
    for name in unknown:
        nearest = difflib.get_close_matches(name, known, n=1)
        named.append(f"`{name}` (did you mean `{nearest[0]}`?)" if nearest else f"`{name}`")
    return ", ".join(named)


# --- fields of the config -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rule:
    """What a config field may be. ``None`` always may: the field is then not set."""

    field: str
    holds: Callable[[Any], bool]
    allowed: str

    def check(self, value: Any, error: type[Exception]) -> None:
        if value is not None and not self.holds(value):
            raise error(f"`{self.field}` has to be {self.allowed}, but is {value!r}.")


INTEGERS = (
    "max_length max_new_tokens min_length min_new_tokens num_beams num_return_sequences "
    "prefill_chunk_size max_cache_len num_beam_groups prompt_lookup_num_tokens "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size max_matching_ngram_size "
    "num_assistant_tokens pad_token_id bos_token_id"
).split()
NUMBERS = (
    "max_time top_p min_p top_h typical_p epsilon_cutoff eta_cutoff length_penalty guidance_scale "
    "diversity_penalty"
).split()
FLAGS = (
    "do_sample use_cache return_dict_in_generate output_scores output_logits output_attentions "
    "output_hidden_states renormalize_logits remove_invalid_values token_healing"
).split()

#: A value of another type raises ``TypeError``.
TYPES = (
    *(Rule(name, is_integer, "an integer") for name in INTEGERS),
    *(Rule(name, is_number, "a number") for name in NUMBERS),
    *(Rule(name, lambda value: not isinstance(value, str), "True or False") for name in FLAGS),
    Rule("eos_token_id", is_token_ids, "a token id or a list of them"),
    Rule("suppress_tokens", is_token_ids, "a list of token ids"),
    Rule("begin_suppress_tokens", is_token_ids, "a list of token ids"),
)

#: A value outside of the range raises ``ValueError``.
RANGES = (
    Rule("num_beams", lambda n: n >= 1, "at least 1"),
    Rule("num_return_sequences", lambda n: n >= 1, "at least 1"),
    Rule("prefill_chunk_size", lambda n: n >= 1, "at least 1"),
    Rule("min_new_tokens", lambda n: n >= 0, "at least 0"),
    Rule("stop_strings", is_stop_strings, "a non-empty string or a list of them"),
    Rule("prompt_lookup_num_tokens", lambda n: n >= 1, "at least 1"),
    Rule("max_matching_ngram_size", lambda n: n >= 0, "at least 1; 0 is the default, 2"),
    Rule("num_assistant_tokens", lambda n: n >= 1, "at least 1"),
    Rule("repetition_penalty", is_positive_float, "a float above 0; 1 is off"),
)

#: Checked when the call samples; greedy and beam search ignore these fields.
SAMPLING_RANGES = (
    Rule("temperature", is_positive_float, "a float above 0; 0 decodes greedily"),
    Rule("top_k", lambda n: is_integer(n) and n >= 0, "a positive integer; 0 or -1 is off"),
    Rule("top_p", lambda x: 0 <= x <= 1, "between 0 and 1; 1 is off"),
    Rule("min_p", lambda x: 0 <= x <= 1, "between 0 and 1"),
    Rule("top_h", lambda x: 0 < x <= 1, "above 0 and at most 1"),
    Rule("typical_p", lambda x: 0 < x <= 1, "above 0 and at most 1; 1 is off"),
    Rule("epsilon_cutoff", lambda x: 0 <= x < 1, "at least 0 and below 1; 0 is off"),
    Rule("eta_cutoff", lambda x: 0 <= x < 1, "at least 0 and below 1; 0 is off"),
)


def check_field_types(fields: dict[str, Any]) -> None:
    """Raise ``TypeError`` for the first of the config ``fields`` that has a wrong type."""
    for rule in TYPES:
        rule.check(fields.get(rule.field), TypeError)


def check_config(config: GenerationConfig) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a field that cannot mean anything."""
    check_field_types(config.__dict__)
    for rule in RANGES + (SAMPLING_RANGES if config.do_sample else ()):
        rule.check(getattr(config, rule.field), ValueError)
    # These two know best what they accept; build them before anything is computed.
    if config.bad_words_ids is not None:
        NoBadWordsLogitsProcessor(config.bad_words_ids)
    if config.sequence_bias is not None:
        SequenceBiasLogitsProcessor(config.sequence_bias)


def require_tokenizer(tokenizer: Any, field: str, value: Any) -> None:
    """Raise ``ValueError`` if a config field that works on text has no tokenizer to do it with."""
    if tokenizer is None:
        raise ValueError(
            f"`{field}` (={value!r}) works on text: pass the model's tokenizer to `generate` as "
            "`tokenizer`."
        )


def require_eos(eos: Any, penalty: Any) -> None:
    """Raise ``ValueError`` if there is no EOS for ``exponential_decay_length_penalty`` to raise."""
    if eos is None:
        raise ValueError(
            f"`exponential_decay_length_penalty` (={penalty}) raises the score of the EOS token, "
            "but there is none: set `eos_token_id`."
        )


def check_plan(plan: Plan) -> None:
    """Raise ``ValueError`` for a field of the config that lacks what it works with.

    The stages that build from these fields check them too, but come after the encoder has run.
    ``heal_tokens`` alone says what healing needs: a model may override it and do without.
    """
    config = plan.config
    if config.stop_strings is not None:
        require_tokenizer(plan.mode_kwargs.get("tokenizer"), "stop_strings", config.stop_strings)
    if (penalty := config.exponential_decay_length_penalty) is not None:
        require_eos(config.eos_token_id, penalty)
    if config.output_speculation and not config.return_dict_in_generate:
        raise ValueError(
            "`output_speculation=True` puts statistics on the output object: set "
            "`return_dict_in_generate=True`, too."
        )


def check_callable(custom_generate: Any, plan: Plan) -> None:
    """Let a callable that has a method ``check_call(config, arguments)`` raise for what it lacks.

    ``arguments`` are those that ``generate`` passes it: the streamer, the tokenizer, ….
    """
    if hasattr(custom_generate, "check_call"):
        custom_generate.check_call(plan.config, plan.mode_kwargs)


# --- arguments of generate ----------------------------------------------------------------------


def check_request(request: Request) -> None:
    """Raise ``TypeError`` for an argument of ``generate`` that is of the wrong kind."""
    config = request.generation_config
    if config is not None and not isinstance(config, GenerationConfig):
        raise TypeError(
            f"`generation_config` has to be a GenerationConfig, but is {_kind(config)}. "
            "Write GenerationConfig(**fields), or pass the fields as keyword arguments."
        )
    for name in ("logits_processor", "stopping_criteria"):
        functions = getattr(request, name)
        if functions is not None and not isinstance(functions, list | tuple):
            raise TypeError(
                f"`{name}` has to be a list, but is {_kind(functions)}. Put it into a list."
            )
        for function in functions or ():
            if not callable(function):
                raise TypeError(f"`{name}` has to hold callables, but holds {_kind(function)}.")
    streamer = request.streamer
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise TypeError(
            f"`streamer` has to have the methods put() and end(), but is {_kind(streamer)}."
        )
    function = request.prefix_allowed_tokens_fn
    if function is not None and not callable(function):
        raise TypeError(f"`prefix_allowed_tokens_fn` has to be callable, but is {_kind(function)}.")
    assistant = request.assistant_model
    if assistant is not None and not (
        hasattr(assistant, "generate")
        or (hasattr(assistant, "draft") and hasattr(assistant, "observe"))
    ):
        raise TypeError(
            "`assistant_model` has to be a model that generates, or a drafter with the methods draft() "
            f"and observe(), but is {_kind(assistant)}."
        )
    custom = request.custom_generate
    if custom is not None and not (callable(custom) or isinstance(custom, str)):
        raise TypeError(
            "`custom_generate` has to be a callable or a repository's name or path, but is "
            f"{_kind(custom)}."
        )
    for name in ("inputs", "input_ids", "attention_mask", "inputs_embeds"):
        tensor = request.inputs if name == "inputs" else request.kwargs.get(name)
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            unpack = hasattr(tensor, "input_ids") or isinstance(tensor, dict)
            raise TypeError(
                f"`{name}` has to be a tensor, but is {_kind(tensor)}. "
                + ("Unpack it: generate(**inputs)." if unpack else "Use torch.tensor(...).")
            )


def _kind(value: Any) -> str:
    return f"{type(value).__name__} ({str(value)[:60]})"


def accepted_names(model: Any) -> set[str]:
    """The keyword arguments that the model takes, through its forward or a hook."""
    known = set(inspect.signature(model.prepare_inputs_for_generation).parameters)
    if known & {"kwargs", "model_kwargs"}:  # it passes on whatever forward takes
        known |= set(inspect.signature(model.forward).parameters)
    if model.config.is_encoder_decoder:
        known.add("decoder_input_ids")
        base_model = getattr(model, model.base_model_prefix, None)
        for part, prefix in (("encoder", ""), ("decoder", "decoder_")):
            module = getattr(model, part, None)
            if module is None:
                module = getattr(base_model, part, None)
            if module is not None:
                known |= {prefix + name for name in inspect.signature(module.forward).parameters}
    known |= TransformersKwargs.__optional_keys__ | {"debug_io", "mm_encoder_outputs"}
    return known


def validate_model_kwargs(self: Any, model_kwargs: dict[str, Any]) -> None:
    """Raise ``ValueError`` for keyword arguments that the model does not take; typos end here."""
    known = accepted_names(self)
    unknown = [
        name for name, value in model_kwargs.items() if value is not None and name not in known
    ]
    if unknown:
        fields = GenerationConfig().__dict__
        raise ValueError(
            f"{type(self).__name__}.generate() does not know {with_suggestions(unknown, known | set(fields))}: "
            "neither the generation config nor the model's forward takes it."
        )


def validate_generation_mode(
    self: Any,
    generation_mode: GenerationMode,
    generation_config: GenerationConfig,
    generation_mode_kwargs: dict[str, Any],
) -> None:
    """Raise ``ValueError`` for a mode that the model, or the other arguments, rule out."""
    supported = getattr(self, "_supported_generation_modes", None)
    if supported is not None and generation_mode not in supported:
        names = ", ".join(mode.value for mode in supported)
        raise ValueError(
            f"{type(self).__name__} decodes with {names}; the arguments ask for "
            f"{generation_mode.value}."
        )
    without_streamer = (
        GenerationMode.GROUP_BEAM_SEARCH,
        GenerationMode.CONSTRAINED_BEAM_SEARCH,
    )
    if generation_mode in without_streamer and "streamer" in generation_mode_kwargs:
        raise ValueError(
            f"`streamer` cannot follow {generation_mode.value.replace('_', ' ')}, whose beams do not "
            "come to agree before the end. Drop the streamer, or search without groups and "
            "constraints."
        )
    validate_beams.check_mode(self, generation_mode, generation_config)
    validate_contrast.check_mode(self, generation_mode, generation_config)
    if generation_mode == GenerationMode.ASSISTED_GENERATION:
        _check_assisted(self, generation_config)
    assistant = generation_mode_kwargs.get("assistant_model")
    is_model = isinstance(assistant, nn.Module) and not validate_speculation.is_generator(assistant)
    if generation_mode == GenerationMode.ASSISTED_GENERATION:
        validate_speculation.check_generator(self, generation_config, assistant)
    if is_model and not validate_speculation.is_dflash(generation_config):
        _check_assistant(self, assistant, generation_mode_kwargs)
        if "assistant_tokenizer" in generation_mode_kwargs and "tokenizer" in generation_mode_kwargs:
            vocabularies.check_translation(
                self, assistant, generation_config, generation_mode_kwargs
            )


def decoder_layers(model: Any) -> tuple[nn.Module, nn.Module, str]:
    """The decoder, the module in it that has its list of layers, and the list's name there.

    Raises ``ValueError`` if there is no list with as many layers as the decoder's config says.
    """
    decoder = model
    with suppress(AttributeError, NotImplementedError):
        decoder = model.get_decoder() or model
    n_layers = getattr(getattr(decoder, "config", None), "num_hidden_layers", None)
    lists = (
        (module, name, child)
        for module in decoder.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList)
    )
    module, name, layers = next(lists, (decoder, "", []))
    if len(layers) != n_layers or n_layers == 0:
        raise ValueError(
            "`assistant_early_exit` needs a decoder with a list of its layers; "
            f"{type(model).__name__} has none."
        )
    return decoder, module, name


def _check_assisted(model: Any, config: GenerationConfig) -> None:
    if model._is_stateful:
        raise ValueError(
            f"{type(model).__name__} keeps a state that cannot be rolled back, so candidate "
            "tokens cannot be rejected: assisted generation does not work with it."
        )
    if config.use_cache is False:
        raise ValueError(
            "Assisted generation keeps what is verified in a cache: leave out `use_cache=False`."
        )
    if config.assistant_ensemble_weight is not None and config.prompt_lookup_num_tokens is not None:
        raise ValueError(
            f"`assistant_ensemble_weight` (={config.assistant_ensemble_weight}) mixes the scores of "
            "two models, and prompt lookup (`prompt_lookup_num_tokens`) has none. Leave one out."
        )
    if (n_layers := config.assistant_early_exit) is not None:
        config_of_decoder: Any = decoder_layers(model)[0].config
        n_all = config_of_decoder.num_hidden_layers
        if not (is_integer(n_layers) and 1 <= n_layers <= n_all):
            raise ValueError(
                f"`assistant_early_exit` has to be a layer of the model, 1 to {n_all}, but is "
                f"{n_layers}."
            )


def _check_assistant(self: Any, assistant: Any, mode_kwargs: dict[str, Any]) -> None:
    if assistant._is_stateful:
        raise ValueError(
            f"`assistant_model` ({type(assistant).__name__}) keeps a state that cannot be rolled back "
            "to what was accepted. Choose one with attention layers."
        )
    if self.config.is_encoder_decoder and not assistant.config.is_encoder_decoder:
        for name in ("encoder_attention_heads", "encoder_ffn_dim", "encoder_layers"):
            if name in dir(assistant.config) and (
                getattr(self.config, name) != getattr(assistant.config, name)
            ):
                raise ValueError(
                    f"`assistant_model` is decoder-only and its config's `{name}` differs from the "
                    "model's, so it cannot read the model's encoder. Load the assistant as an "
                    "encoder-decoder, for example with AutoModelForSpeechSeq2Seq."
                )
    vocab_size = self.config.get_text_config().vocab_size
    assistant_vocab_size = assistant.config.get_text_config().vocab_size
    if vocab_size == assistant_vocab_size:
        if "assistant_tokenizer" in mode_kwargs:
            raise ValueError(
                f"`assistant_tokenizer` is for assistants with another vocabulary; both have "
                f"{vocab_size} tokens here. Leave it out."
            )
    elif not {"tokenizer", "assistant_tokenizer"} <= mode_kwargs.keys():
        raise ValueError(
            f"The model has {vocab_size} tokens and `assistant_model` {assistant_vocab_size}: pass "
            "both `tokenizer` and `assistant_tokenizer`, to translate between them."
        )


def validate_generated_length(
    self: Any,
    generation_config: GenerationConfig,
    input_ids_length: int,
    has_default_max_length: bool,
) -> None:
    """Raise ``ValueError`` if the prompt fills ``max_length``; warn of lengths out of reach."""
    config = generation_config
    if is_zero(config.max_new_tokens):
        return
    validate_beams.check_room(config, config.max_length - input_ids_length)
    if has_default_max_length and config.max_new_tokens is None:
        warnings.warn(
            f"No length was asked for, so up to {config.max_length} tokens are generated, the "
            "default `max_length`. Set `max_new_tokens`.",
            UserWarning,
            stacklevel=2,
        )
    name = "decoder_input_ids" if self.config.is_encoder_decoder else "input_ids"
    if input_ids_length >= config.max_length:
        raise ValueError(
            f"`{name}` has {input_ids_length} tokens and `max_length` is {config.max_length}, so "
            "there is no room to generate. Raise `max_length`, or better, set `max_new_tokens`."
        )
    wanted = []
    if config.min_length is not None:
        wanted.append(("min_length", config.min_length, config.min_length))
    if config.min_new_tokens is not None:
        wanted.append(
            ("min_new_tokens", config.min_new_tokens, config.min_new_tokens + input_ids_length)
        )
    for field, value, length in wanted:
        if length > config.max_length:
            default = " (its default)" if has_default_max_length else ""
            warnings.warn(
                f"`{field}`={value} asks for {length} tokens in all, more than `max_length`="
                f"{config.max_length}{default}: generation stops at `max_length`.",
                UserWarning,
                stacklevel=2,
            )


# --- the prompt ---------------------------------------------------------------------------------


def check_prompt(model: Any, plan: Plan, prompt: Prompt) -> None:
    """Raise for a prompt that the model cannot take.

    ``ValueError``: empty batch, empty prompt, attention mask of another shape, prompt longer than
    the rotary positions that the model was made for. ``IndexError``, as in upstream's forward: ids
    outside of the vocabulary, prompt longer than the table of learned positions.
    """
    if prompt.batch_size == 0:
        raise ValueError(
            f"`{prompt.main_input_name}` has to hold at least one row, but has shape "
            f"{tuple(prompt.main_input.shape)}."
        )
    _check_mask(model, prompt)
    ids = prompt.main_input
    if prompt.main_input_name != "input_ids" or ids.ndim != 2 or ids.is_floating_point():
        return
    is_continued = quirks.given_cache(model, prompt.model_kwargs) is not None
    if ids.shape[1] == 0:
        if not model.config.is_encoder_decoder and not is_continued:
            raise ValueError(
                f"`input_ids` has to hold at least one token per row, but has shape "
                f"{tuple(ids.shape)}. Pass a prompt, or leave `input_ids` out to start from "
                f"`bos_token_id` (which is {plan.config.bos_token_id})."
            )
        return
    are_read = prompt.model_kwargs.get("encoder_outputs") is None
    if are_read and quirks.takes_only_text(model):
        _check_vocabulary(model, ids)
        _check_positions(model, ids)


def _check_mask(model: Any, prompt: Prompt) -> None:
    mask = prompt.model_kwargs.get("attention_mask")
    is_text = prompt.main_input_name in ("input_ids", "inputs_embeds")
    if not is_text or mask is None or mask.ndim != 2 or prompt.main_input.ndim < 2:
        return
    expected, given = tuple(prompt.main_input.shape[:2]), tuple(mask.shape)
    if given == expected:
        return
    # With a cache the mask also covers what is in the cache.
    is_continued = quirks.given_cache(model, prompt.model_kwargs) is not None
    if is_continued and given[0] == expected[0] and given[1] >= expected[1]:
        return
    raise ValueError(
        f"`attention_mask` has to have the shape of `{prompt.main_input_name}`, {expected}, but has "
        f"{given}."
    )


def _check_vocabulary(model: Any, ids: torch.Tensor) -> None:
    embedding = quirks.token_embedding(model)
    if embedding is None or ids.device.type == "meta":
        return
    lowest, highest = (int(bound) for bound in ids.aminmax())
    if lowest >= 0 and highest < embedding.num_embeddings:
        return
    row, column = ((ids < 0) | (ids >= embedding.num_embeddings)).nonzero()[0].tolist()
    raise IndexError(
        f"`input_ids[{row}, {column}]` is {int(ids[row, column])}, but the model's vocabulary has "
        f"the ids 0 to {embedding.num_embeddings - 1}. Is the tokenizer this model's?"
    )


def _check_positions(model: Any, ids: torch.Tensor) -> None:
    length = ids.shape[1]
    positions = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(positions, int) or length <= positions:
        return
    message = (
        f"`input_ids` has {length} tokens per row, but {type(model).__name__} has {positions} "
        "positions (`config.max_position_embeddings`). Shorten the prompt"
    )
    for name, module in model.named_modules():
        is_table = isinstance(module, nn.Embedding) and ("pos" in name or name.endswith("wpe"))
        if is_table and module.num_embeddings - getattr(module, "offset", 0) < length:
            raise IndexError(f"{message}.")
        if getattr(module, "rope_type", None) == "default":
            raise ValueError(
                f"{message}, or raise that field or set its rotary scaling if the model can go on."
            )
