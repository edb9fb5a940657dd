"""The decoding mode and the lengths: what model and arguments rule out."""

from __future__ import annotations

import warnings
from typing import Any

from transformers.generation.configuration_utils import GenerationConfig, GenerationMode

from . import beams, contrast, speculation
from .fields import is_zero

#: The modes in which rows that have ended may leave the batch.
DROPPING = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.DOLA_GENERATION,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
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
    _check_drop_finished(self, generation_mode, generation_config)
    beams.check_mode(self, generation_mode, generation_config)
    contrast.check_mode(self, generation_mode, generation_config)
    speculation.check_mode(self, generation_mode, generation_config, generation_mode_kwargs)


def _check_drop_finished(model: Any, mode: GenerationMode, config: GenerationConfig) -> None:
    """Raise ``ValueError`` where rows cannot leave the batch."""
    if not getattr(config, "drop_finished", False):
        return
    if mode not in DROPPING:
        names = ", ".join(m.value.replace("_", " ") for m in DROPPING)
        raise ValueError(
            f"`drop_finished=True` works with {names}, but the arguments ask for "
            f"{mode.value.replace('_', ' ')}. Leave it out."
        )
    if "static" in (config.cache_implementation or ""):
        raise ValueError(
            "`drop_finished=True` takes rows out of the cache, and "
            f"`cache_implementation={config.cache_implementation!r}` has a fixed number of them. "
            "Leave one of the two out."
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
    beams.check_room(config, config.max_length - input_ids_length)
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
