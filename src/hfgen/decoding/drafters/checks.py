"""The checks of assisted decoding: models, assistants, and drafters. The first reason is raised as a ``ValueError``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torch import nn
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

from ...families import modules_of, n_scores
from ...settings.kinds import is_integer
from ...state.text import Spelling, shared_tokens
from .schedule import schedule_named

#: Classes of assistants that attend to the target's keys, and of targets that hand them out.
GEMMA_ASSISTANTS = ("Gemma4Assistant", "Gemma4UnifiedAssistant")
GEMMA_TARGETS = ("Gemma4", "Gemma3n")
#: Fields of the config of an assistant that denoises blocks of tokens.
BLOCK_FIELDS = ("target_layer_ids", "block_size", "mask_token_id")


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
        yield from _of_vocabularies(model, assistant, mode_kwargs)
        names = ("tokenizer", "assistant_tokenizer")
        if all(name in mode_kwargs for name in names):
            tokenizers = {name: mode_kwargs[name] for name in names}
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


def _of_vocabularies(model: Any, assistant: Any, mode_kwargs: dict[str, Any]) -> Iterator[str]:
    if assistant._is_stateful:
        yield f"`assistant_model` ({type(assistant).__name__}) keeps a state that cannot be rolled back."
    if model.config.is_encoder_decoder and not assistant.config.is_encoder_decoder:
        for name in ("encoder_attention_heads", "encoder_ffn_dim", "encoder_layers"):
            size = getattr(model.config, name, None)
            if getattr(assistant.config, name, size) != size:
                yield f"`assistant_model` cannot read the model's encoder: `{name}` differs. Load it as an encoder-decoder."
    size = model.config.get_text_config().vocab_size
    assistants = assistant.config.get_text_config().vocab_size
    if size == assistants and "assistant_tokenizer" in mode_kwargs:
        yield f"`assistant_tokenizer` is for assistants with another vocabulary; both have {size} tokens."
    if size != assistants and not {"tokenizer", "assistant_tokenizer"} <= mode_kwargs.keys():
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


def decoder_layers(model: Any) -> tuple[Any, nn.Module, str]:
    """The decoder, the module in it that has its list of layers, and its name there; ``ValueError`` without one."""
    decoder = model
    with suppress(AttributeError, NotImplementedError):
        decoder = model.get_decoder() or model
    n_layers = getattr(getattr(decoder, "config", None), "num_hidden_layers", None)
    lists = (
        (module, name, child)
        for module in modules_of(decoder)
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList)
    )
    module, name, layers = next(lists, (decoder, "", []))
    if len(layers) != n_layers or n_layers == 0:
        name = type(model).__name__
        raise ValueError(f"`assistant_early_exit` needs a list of decoder layers; {name} has none.")
    return decoder, module, name
