"""A model that can be computed by hand: the next token depends on the newest one alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

import hfgen

#: Stands for a probability of 0, whose logarithm nothing can be computed with.
RARE = 1e-9


class Markov(PreTrainedModel, hfgen.GenerationMixin):
    """``chances[a][b]``: how likely ``b`` follows ``a``; rows sum to 1. Without a cache; pad 0."""

    config_class = PreTrainedConfig

    def __init__(self, chances: list[list[float]], eos: int | None = None) -> None:
        super().__init__(PreTrainedConfig(vocab_size=len(chances), num_hidden_layers=0))
        self.embedding = nn.Embedding.from_pretrained(torch.tensor(chances).clamp(min=RARE).log())
        self.generation_config.update(use_cache=False, pad_token_id=0, eos_token_id=eos)
        self.eval()

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=self.embedding(input_ids))

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding
