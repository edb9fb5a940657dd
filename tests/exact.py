"""A model that computes with whole numbers: neither padding nor other rows can change a bit of its logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

import hfgen
from hfgen.families import CACHE
from tests.parity.family import seeded
from tests.tiny import SPECIAL, VOCAB
from tests.versions import with_cache

#: A prime: how many states there are.
STATES = 1009


class Exact(PreTrainedModel, hfgen.GenerationMixin):
    """The next token depends on every token before and on its position, which are in the cache.

    A row's state is the sum of a number for each visible token and position, modulo ``STATES``; it
    decides the logits. A token that is hidden, seen twice, or at another position makes other logits.
    """

    #: Of no library that is known, so it has to say so.
    is_row_wise = True

    config_class = PreTrainedConfig

    def __init__(self) -> None:
        sizes = dict.fromkeys(
            ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1
        )
        super().__init__(
            PreTrainedConfig(vocab_size=VOCAB, hidden_size=1, head_dim=1, **sizes, **SPECIAL)
        )
        self.logits_of = nn.Embedding.from_pretrained(3 * torch.randn(STATES, VOCAB))
        self.generation_config.update(**SPECIAL)
        self.eval()

    def get_input_embeddings(self) -> nn.Module:
        return self.logits_of

    @with_cache
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        cache = DynamicCache(config=self.config) if past_key_values is None else past_key_values
        rows, n = input_ids.shape
        start = int(cache.get_seq_length())
        if attention_mask is None:
            attention_mask = input_ids.new_ones(rows, start + n)
        if position_ids is None:
            position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, start:]
        numbers = (input_ids + 1) * (7 * position_ids + 3) * 31 % STATES
        states = numbers.float()[:, None, :, None]
        keys, _ = cache.update(states, states, 0)
        is_visible = torch.ones(n, start + n, dtype=torch.bool).tril(start) & (
            attention_mask[:, None, : start + n] > 0
        )
        sums = (keys[:, :, :, 0] * is_visible).sum(-1)  # (rows, n)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.logits_of(sums[:, keep].long() % STATES)
        return CausalLMOutputWithPast(
            logits=logits, **{CACHE: None if use_cache is False else cache}
        )


def model() -> Any:
    """One of random logits, the same on every call."""
    return seeded(Exact)
