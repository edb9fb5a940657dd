"""The lengths that a call asks for."""

from __future__ import annotations

import warnings
from typing import Any

from transformers.generation.configuration_utils import GenerationConfig

from .. import constraints
from ..fields import is_zero


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
    constraints.check_room(config, config.max_length - input_ids_length)
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
