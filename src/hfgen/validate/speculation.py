"""The checks of assisted decoding: models, assistants, and what drafts."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch import nn
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

from .. import vocabularies
from ..fields import is_integer

#: Classes of assistants that attend to the target's keys, and of targets that hand them out.
GEMMA_ASSISTANTS = ("Gemma4Assistant", "Gemma4UnifiedAssistant")
GEMMA_TARGETS = ("Gemma4", "Gemma3n")

#: What an assistant's config has if it denoises blocks of tokens.
BLOCK_FIELDS = ("target_layer_ids", "block_size", "mask_token_id")


def is_gemma_assistant(assistant: Any) -> bool:
    return type(assistant).__name__.startswith(GEMMA_ASSISTANTS)


def is_dflash(config: GenerationConfig) -> bool:
    return getattr(config, "speculation_type", None) == "dflash"


def uses_heads(config: GenerationConfig) -> bool:
    """Whether the model's own heads draft: unless a kind that upstream puts first is asked for."""
    is_other = config.assistant_early_exit is not None or (
        config.prompt_lookup_num_tokens is not None
    )
    return bool(getattr(config, "use_mtp", None)) and not is_other


def has_foreign_generator(config: GenerationConfig, assistant: Any) -> bool:
    """Whether upstream's ``_get_candidate_generator`` makes an object that hfgen drafts through."""
    return uses_heads(config) or (
        assistant is not None and (is_gemma_assistant(assistant) or is_dflash(config))
    )


def is_drafter(assistant: Any) -> bool:
    """Whether ``assistant`` is no model, but a ``hfgen.Drafter`` or a ``CandidateGenerator``."""
    return hasattr(assistant, "draft") or hasattr(assistant, "get_candidates")


def check_mode(
    model: Any, mode: GenerationMode, config: GenerationConfig, mode_kwargs: dict[str, Any]
) -> None:
    """Raise ``ValueError`` or ``TypeError`` for what cannot draft, or be drafted for."""
    assistant = mode_kwargs.get("assistant_model")
    from ..drafters import SCHEDULES  # which import this module

    if mode == GenerationMode.ASSISTED_GENERATION:
        name = config.num_assistant_tokens_schedule
        if name is not None and name not in SCHEDULES:
            raise ValueError(
                f"`num_assistant_tokens_schedule` has to be one of {sorted(SCHEDULES)}, but is "
                f"{name!r}."
            )
        _check_one_drafts(config, assistant)
        _check_assisted(model, config)
        check_generator(model, config, assistant)
    if assistant is not None and not is_drafter(assistant) and not is_dflash(config):
        _check_assistant(model, assistant, mode_kwargs)
        if {"tokenizer", "assistant_tokenizer"} <= mode_kwargs.keys():
            vocabularies.check_translation(model, assistant, config, mode_kwargs)


def check_generator(model: Any, config: GenerationConfig, assistant: Any) -> None:
    """Raise ``ValueError`` if a kind of speculation does not go with the model or the assistant."""
    if uses_heads(config):
        _check_heads(model)
    elif assistant is None or is_drafter(assistant):
        return
    elif is_gemma_assistant(assistant):
        _check_gemma(model, assistant)
    elif is_dflash(config):
        _check_blocks(model, assistant)
    elif isinstance(assistant, nn.Module) and not hasattr(assistant, "generate"):
        raise TypeError(
            f"`assistant_model` has to be a model that generates, but {type(assistant).__name__} does "
            "not. If it denoises blocks of tokens, set `speculation_type='dflash'`."
        )


def _check_heads(model: Any) -> None:
    name = type(model).__name__
    if not getattr(model.config.get_text_config(), "num_mtp_layers", None):
        raise ValueError(
            f"`use_mtp=True` drafts with layers that predict further tokens, but {name} has none: its "
            "config has no `num_mtp_layers`. Leave it out."
        )
    if not model.config.name_or_path:
        raise ValueError(
            "`use_mtp=True` loads the layers that draft from the model's checkpoint, but this "
            f"{name} was not loaded from one."
        )


def _check_gemma(model: Any, assistant: Any) -> None:
    name, kind = type(model).__name__, type(assistant).__name__
    if not name.startswith(GEMMA_TARGETS):
        raise ValueError(
            f"`assistant_model` is a {kind}, which attends to the keys and values of a Gemma 4 model: "
            f"it cannot draft for {name}."
        )
    size = model.config.get_text_config().hidden_size
    expected = getattr(assistant.config, "backbone_hidden_size", size)
    if size != expected:
        raise ValueError(
            f"`assistant_model` ({kind}) was made for hidden states of size {expected}, and those of "
            f"{name} have {size}."
        )


def _check_blocks(model: Any, assistant: Any) -> None:
    config: Any = getattr(assistant, "config", None)
    kind = type(assistant).__name__
    missing = [name for name in BLOCK_FIELDS if getattr(config, name, None) is None]
    if missing:
        raise ValueError(
            "`speculation_type='dflash'` takes an `assistant_model` that denoises blocks of tokens; "
            f"{kind} does not: its config has no {', '.join(missing)}."
        )
    text = model.config.get_text_config()
    n_layers = text.num_hidden_layers
    if any(not 0 <= layer < n_layers for layer in config.target_layer_ids):
        raise ValueError(
            f"`assistant_model` ({kind}) reads the layers {config.target_layer_ids}, and "
            f"{type(model).__name__} has 0 to {n_layers - 1}."
        )
    if config.hidden_size != text.hidden_size:
        raise ValueError(
            f"`assistant_model` ({kind}) has hidden states of size {config.hidden_size}, and "
            f"{type(model).__name__} of {text.hidden_size}; they have to be the same."
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


def _check_one_drafts(config: GenerationConfig, assistant: Any) -> None:
    names = ("prompt_lookup_num_tokens", "assistant_early_exit")
    given = [f"`{name}`" for name in names if getattr(config, name) is not None]
    given += [] if assistant is None else ["`assistant_model`"]
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(given)} are given, but only one of them can draft. Leave the others out."
        )


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
