"""What a builder of a logits processor may read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from transformers import GenerationConfig, LogitsProcessor

PrefixFunction: TypeAlias = Callable[[int, torch.Tensor], list[int]]


@dataclass(frozen=True, slots=True)
class Context:
    """The facts of one ``generate`` call that decide which processors it needs.

    ``prompt_length`` counts the ids that the decoder starts from, pads included; 0 if there are only
    embeddings. ``encoder_input_ids`` is the main input of the call, of any shape.
    """

    model: Any
    config: GenerationConfig
    prompt_length: int = 0
    encoder_input_ids: torch.Tensor | None = None
    prefix_allowed_tokens_fn: PrefixFunction | None = None
    device: Any = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    negative_prompt_ids: torch.Tensor | None = None
    negative_prompt_attention_mask: torch.Tensor | None = None

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)

    @property
    def eos(self) -> torch.Tensor | None:
        """EOS ids ``(n,)``, or ``None`` where generation has no EOS token."""
        return getattr(self.config, "_eos_token_tensor", None)

    @property
    def encoder_ids(self) -> torch.Tensor | None:
        """The main input ``(rows, length)`` if it is token ids; some models fill in -100 for none."""
        ids = self.encoder_input_ids
        return ids if ids is not None and ids.dim() == 2 and not (ids < 0).any() else None

    @property
    def min_tokens_to_keep(self) -> int:
        """Tokens that a warper has to leave: beams need one that is not EOS to go on with."""
        if self.config.num_beams is None or self.config.num_beams <= 1:
            return 1
        return 2 if self.eos is None else len(self.eos) + 1


Builder: TypeAlias = Callable[[Context], LogitsProcessor | None]


@dataclass(frozen=True, slots=True)
class Row:
    """Builds a processor or criterion from a config's ``field`` that is neither ``None`` nor off."""

    field: str
    build: Callable[[Any, Any], Any]
    is_off: Callable[[Any], bool] = lambda value: False

    def __call__(self, context: Any) -> Any:
        value = getattr(context.config, self.field)
        return None if value is None or self.is_off(value) else self.build(value, context)
