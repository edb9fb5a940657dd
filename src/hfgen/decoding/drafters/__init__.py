"""Drafters: they guess the next tokens, and ``decoding/strategies/assisted.py`` verifies them.

``make_drafter`` says which call drafts how, ``refusals`` which cannot. To add one, write a subclass of ``Drafter`` and
make it there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

from ...families import n_scores
from ...settings.fields import FieldError
from ...settings.kinds import is_integer
from ...state.text import Spelling, shared_tokens
from .assistant import Assistant, EarlyExit, decoder_layers
from .base import Adapted, Drafter, Setup
from .lookup import PromptLookup, n_allowed
from .schedule import DEFAULT_TOKENS, Costs, Heuristic, Schedule, schedule_named
from .translated import BySharedTokens, UniversalDrafter
from .upstream import FromGenerator, has_own_hook

#: Classes of assistants that attend to the target's keys, and of targets that hand them out.
GEMMA_ASSISTANTS = ("Gemma4Assistant", "Gemma4UnifiedAssistant")
GEMMA_TARGETS = ("Gemma4", "Gemma3n")
#: Fields of the config of an assistant that denoises blocks of tokens.
BLOCK_FIELDS = ("target_layer_ids", "block_size", "mask_token_id")


def make_drafter(setup: Setup) -> Drafter:
    config, assistant = setup.run.config, setup.assistant_model
    if has_own_hook(setup.run.model):
        return FromGenerator(setup)
    if config.assistant_early_exit is not None:
        return EarlyExit(setup, int(config.assistant_early_exit))
    if config.prompt_lookup_num_tokens is not None:
        return _prompt_lookup(setup)
    if hasattr(assistant, "get_candidates"):
        return FromGenerator(setup, assistant)
    if has_foreign_generator(config, assistant):
        return FromGenerator(setup)
    if isinstance(assistant, Drafter):
        return assistant.begin(setup.run)
    if hasattr(assistant, "draft"):
        return Adapted(assistant)
    if assistant is None:
        raise ValueError(
            "Assisted decoding needs something that drafts: `assistant_model`, "
            "`prompt_lookup_num_tokens` or `assistant_early_exit`."
        )
    if None in (setup.tokenizer, setup.assistant_tokenizer):
        return Assistant(setup)
    return BySharedTokens(setup) if config.do_sample else UniversalDrafter(setup)


def _prompt_lookup(setup: Setup) -> PromptLookup:
    """A lookup; it drafts beyond the last token where upstream's does and that shows: in draws and logits."""
    run, config, allowed = setup.run, setup.run.config, None
    model_config = run.model.config.get_text_config(decoder=True)
    if run.processors and (setup.is_exact or setup.is_streamed_row):  # draws or chunks show drafts
        allowed = partial(n_allowed, run.processors, run.model.config.get_text_config().vocab_size)
    positions = getattr(model_config, "max_position_embeddings", None) or math.inf
    fits = setup.max_length + config.prompt_lookup_num_tokens <= positions
    shows = len(run.ids) == 1 and config.return_dict_in_generate and config.output_logits
    size, overshoots = int(config.max_matching_ngram_size or 2), bool(shows and fits)
    return PromptLookup(size, config._eos_token_tensor, allowed, setup.is_exact or overshoots)


def make_schedule(setup: Setup, drafter: Drafter) -> Schedule:
    """How many tokens to draft: the drafter's own schedule, the one asked for, or a default.

    That adapts to what is accepted, and is upstream's where it shows: in draws and chunks of one row, and for lookup.
    """
    if drafter.schedule is not None:
        return drafter.schedule
    config, (rows, length) = setup.run.config, setup.run.ids.shape
    n_tokens, name = config.prompt_lookup_num_tokens, config.num_assistant_tokens_schedule
    if not (is_lookup := isinstance(drafter, PromptLookup)):
        name = setup.of_assistant("num_assistant_tokens_schedule", always=True)
    if n_tokens is None or not is_lookup:
        n_tokens = setup.of_assistant("num_assistant_tokens")
        n_tokens = DEFAULT_TOKENS if n_tokens is None else n_tokens
    is_fixed = setup.is_exact or setup.is_streamed_row or (rows == 1 and is_lookup)
    make = schedule_named(name, default="constant" if is_fixed else "adaptive")
    # Prompt lookup may overshoot, by no more than it knows.
    longest = setup.max_length if is_lookup else setup.max_length - length
    if n_tokens == 0 and make is Heuristic:
        raise FieldError(f"`num_assistant_tokens` has to be at least 1 with {name!r}, but is 0.")
    schedule = make(max(min(int(n_tokens), longest), 0), Costs(rows, drafter.cost))
    if name == "heuristic" and isinstance(schedule, Heuristic) and isinstance(drafter, Assistant):
        schedule.kept_in = drafter.model.generation_config
    return schedule


def _uses_heads(config: GenerationConfig) -> bool:
    """Whether the model's own heads draft: unless a kind that upstream puts first is asked for."""
    first = (config.assistant_early_exit, config.prompt_lookup_num_tokens)
    return bool(config.use_mtp) and first == (None, None)


def has_foreign_generator(config: GenerationConfig, assistant: Any) -> bool:
    """Whether upstream's ``_get_candidate_generator`` makes an object that hfgen drafts through."""
    is_dflash = config.speculation_type == "dflash" and assistant is not None
    is_gemma = type(assistant).__name__.startswith(GEMMA_ASSISTANTS)
    return _uses_heads(config) or is_dflash or is_gemma


def refusals(
    model: Any, mode: GenerationMode, config: GenerationConfig, mode_kwargs: dict[str, Any]
) -> Iterator[str]:
    """Why something cannot draft, or be drafted for. Raises ``TypeError`` for what is no model."""
    assistant = mode_kwargs.get("assistant_model")
    is_drafter = hasattr(assistant, "draft") or hasattr(assistant, "get_candidates")
    if mode == GenerationMode.ASSISTED_GENERATION:
        yield from _of_fields(model, config, assistant)
        if not (assistant is None or is_drafter or _uses_heads(config)):
            yield from _of_kind(model, config, assistant)
    if not (assistant is None or is_drafter or config.speculation_type == "dflash"):
        names = ("tokenizer", "assistant_tokenizer")
        tokenizers = {name: mode_kwargs[name] for name in names if name in mode_kwargs}
        yield from _of_vocabularies(model, assistant, tokenizers)
        if len(tokenizers) == 2:
            yield from _of_translation(model, assistant, config, tokenizers)


def _of_fields(model: Any, config: GenerationConfig, assistant: Any) -> Iterator[str]:
    schedule_named(config.num_assistant_tokens_schedule, default="constant")
    fields = ("prompt_lookup_num_tokens", "assistant_early_exit")
    names = [f"`{name}`" for name in fields if getattr(config, name) is not None]
    names += [] if assistant is None else ["`assistant_model`"]
    if len(names) > 1:
        yield f"{' and '.join(names)} are given, but only one of them can draft. Leave the others out."
    if config.use_cache is False:
        yield "Assisted generation keeps what is verified in a cache: leave out `use_cache=False`."
    if config.assistant_ensemble_weight is not None and config.prompt_lookup_num_tokens is not None:
        yield "`assistant_ensemble_weight` mixes scores of two models, and `prompt_lookup_num_tokens` has none."
    if model._is_stateful:
        yield f"{type(model).__name__} keeps a state that cannot be rolled back to reject drafted tokens."
    if (n := config.assistant_early_exit) is not None:
        n_all = decoder_layers(model)[0].config.num_hidden_layers
        if not (is_integer(n) and 1 <= n <= n_all):
            yield f"`assistant_early_exit` has to be a layer of the model, 1 to {n_all}, but is {n}."
    if _uses_heads(config) and not getattr(model.config.get_text_config(), "num_mtp_layers", None):
        yield f"`use_mtp=True` drafts with further layers, but {type(model).__name__} has no `num_mtp_layers`."
    if _uses_heads(config) and not model.config.name_or_path:
        yield f"`use_mtp=True` loads layers from the checkpoint; {type(model).__name__} was not loaded from one."


def _of_kind(model: Any, config: GenerationConfig, assistant: Any) -> Iterator[str]:
    """Whether the class of an assistant goes with the model and the kind of speculation."""
    name, kind = type(model).__name__, type(assistant).__name__
    text = model.config.get_text_config()
    if kind.startswith(GEMMA_ASSISTANTS):
        if not name.startswith(GEMMA_TARGETS):
            yield f"`assistant_model` is a {kind}, which reads the cache of a Gemma 4 model: it cannot draft for {name}."
        expected = getattr(assistant.config, "backbone_hidden_size", text.hidden_size)
        if text.hidden_size != expected:
            yield f"`assistant_model` ({kind}) reads hidden states of size {expected}; {name} has {text.hidden_size}."
    elif config.speculation_type == "dflash":
        own: Any = getattr(assistant, "config", None)
        if missing := [field for field in BLOCK_FIELDS if getattr(own, field, None) is None]:
            yield f"`speculation_type='dflash'`: {kind} denoises no blocks: its config has no {', '.join(missing)}."
        if any(not 0 <= layer < text.num_hidden_layers for layer in own.target_layer_ids):
            last = text.num_hidden_layers - 1
            yield f"`assistant_model` ({kind}) reads the layers {own.target_layer_ids}; {name} has 0 to {last}."
        if own.hidden_size != text.hidden_size:
            yield f"`assistant_model` ({kind}) reads hidden states of size {own.hidden_size}; {name} has {text.hidden_size}."
    elif isinstance(assistant, nn.Module) and not hasattr(assistant, "generate"):
        raise TypeError(
            f"`assistant_model` has to be a model that generates, but {kind} does not. If it denoises "
            "blocks of tokens, set `speculation_type='dflash'`."
        )


def _of_vocabularies(model: Any, assistant: Any, tokenizers: dict[str, Any]) -> Iterator[str]:
    if assistant._is_stateful:
        yield f"`assistant_model` ({type(assistant).__name__}) keeps a state that cannot be rolled back."
    if model.config.is_encoder_decoder and not assistant.config.is_encoder_decoder:
        for name in ("encoder_attention_heads", "encoder_ffn_dim", "encoder_layers"):
            size = getattr(model.config, name, None)
            if getattr(assistant.config, name, size) != size:
                yield f"`assistant_model` cannot read the model's encoder: `{name}` differs. Load it as an encoder-decoder."
    size = model.config.get_text_config().vocab_size
    assistants = assistant.config.get_text_config().vocab_size
    if size == assistants and "assistant_tokenizer" in tokenizers:
        yield f"`assistant_tokenizer` is for assistants with another vocabulary; both have {size} tokens."
    if size != assistants and len(tokenizers) < 2:
        yield f"The model has {size} tokens, `assistant_model` {assistants}: pass both `tokenizer` and `assistant_tokenizer`."


def _of_translation(
    model: Any, assistant: Any, config: GenerationConfig, tokenizers: dict[str, Any]
) -> Iterator[str]:
    """Why the assistant's tokens cannot be translated. Raises ``TypeError`` for what is no tokenizer."""
    sampling = ["get_vocab", "convert_ids_to_tokens"] if config.do_sample else []
    for name, tokenizer in tokenizers.items():
        methods = ["decode", "encode", *sampling]
        if missing := [f"{method}()" for method in methods if not hasattr(tokenizer, method)]:
            raise TypeError(
                f"`{name}` has to be a tokenizer, but is {type(tokenizer).__name__}, which has no "
                f"{' and no '.join(missing)}."
            )
    if model.config.is_encoder_decoder and not assistant.config.is_encoder_decoder:
        yield (
            f"`assistant_model` ({type(assistant).__name__}) is decoder-only and has another "
            "vocabulary than the encoder-decoder that it drafts for. Choose one with an encoder."
        )
    pairs = zip(tokenizers.values(), (model, assistant), strict=True)
    if config.do_sample and not shared_tokens(*(Spelling(t, n_scores(m)) for t, m in pairs)):
        yield (
            "`tokenizer` and `assistant_tokenizer` have no token in common, so the assistant cannot "
            "sample for the model. Choose an assistant with a related tokenizer, or decode greedily."
        )
