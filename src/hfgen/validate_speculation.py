"""The checks of the kinds of speculation that bring a generator object; ``validate`` calls them."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import GenerationConfig

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


def is_generator(assistant: Any) -> bool:
    """Whether ``assistant`` is a ``CandidateGenerator``, or acts as one."""
    return hasattr(assistant, "get_candidates")


def check_generator(model: Any, config: GenerationConfig, assistant: Any) -> None:
    """Raise ``ValueError`` if a kind of speculation does not go with the model or the assistant."""
    if uses_heads(config):
        _check_heads(model)
    elif assistant is None or is_generator(assistant):
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
