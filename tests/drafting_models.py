"""Tiny targets of random weights, each with what upstream's newer kinds of speculation draft with.

Random drafts would never be accepted. So the layers of targets and drafters whisper: the next token
depends above all on the embedding of the last one, which both know. A drafter of blocks does not, but
for it a target favours a few tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from tests.parity.family import seeded
from tests.tiny import SPECIAL, VOCAB, llama

SIZES: dict[str, Any] = {
    **SPECIAL,
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.35,
    "tie_word_embeddings": False,
}

#: Tokens that the output weights favour.
FAVOURED = range(5, 11)

#: What layers add to their input.
BRANCHES = (
    "o_proj.weight",
    "down_proj",
    "down_proj.weight",
    "post_attention_layernorm.weight",
    "post_feedforward_layernorm.weight",
    "per_layer_input_norm.weight",
)


def whisper(model: Any, loudness: float) -> Any:
    """Scale what the layers add to their input."""
    for name, weight in model.named_parameters():
        if name.endswith(BRANCHES):
            weight.data *= loudness
    return model


def favour(model: Any) -> Any:
    """Let the model say one of a few tokens, nearly always."""
    head: nn.Linear = model.get_output_embeddings()
    others = [token for token in range(VOCAB) if token not in FAVOURED]
    head.weight.data[others] *= 0.2
    return model


def with_heads(folder: Path, n_heads: int) -> PreTrainedModel:
    """A GLM-4 MoE, saved to ``folder`` together with the weights of its prediction heads."""
    from transformers.modeling_layers import MtpModel

    config = transformers.Glm4MoeConfig(
        **SIZES,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        num_mtp_layers=n_heads,
    )
    model: Any = seeded(lambda: whisper(transformers.Glm4MoeForCausalLM(config), 0.1))
    model.save_pretrained(folder)
    heads, generator = seeded(lambda: MtpModel(model, n_heads)), torch.Generator().manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    for name, weight in heads.state_dict().items():
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            rest = rest.removeprefix("mtp_block.")
            if weight.ndim > 1:  # nothing has filled the experts
                is_branch = name.endswith(BRANCHES)
                deviation = 0.05 if is_branch else 0.35
                weight = torch.randn(weight.shape, generator=generator) * deviation
            if rest == "eh_proj.weight":  # of the last token and its hidden state, the token
                weight = torch.eye(32, 64)
            weights[f"model.layers.{2 + int(index)}.{rest}"] = weight.clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.name_or_path, model.config.dtype = str(folder), torch.float32
    # Which weights of a checkpoint are a head's is told by the number of layers of released models.
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.([2-9]).*"]
    return model


def with_diffusion() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A Llama, and the assistant that denoises blocks of five tokens from its hidden states."""
    target = llama(num_hidden_layers=3, initializer_range=0.35)
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        block_size=5,
        mask_token_id=96,
        target_layer_ids=[0, 2],
        initializer_range=0.35,
    )
    assistant = seeded(lambda: transformers.MuseGlimmerAssistantModel(config), seed=2)
    return favour(target), assistant


def with_single_position(n_tokens: int | None = 3) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A Gemma 4, and the assistant that attends to its keys and values."""
    shape: dict[str, Any] = SIZES | {
        "global_head_dim": 16,
        "layer_types": 2 * ["sliding_attention", "full_attention"],
        "num_hidden_layers": 4,
        "sliding_window": 12,
    }
    config = transformers.Gemma4TextConfig(
        **shape,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
    )
    target: Any = seeded(lambda: whisper(transformers.Gemma4ForCausalLM(config), 0.5))
    text = transformers.Gemma4TextConfig(
        **shape,
        num_kv_shared_layers=4,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
    )
    assistant_config = transformers.Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=32, tie_word_embeddings=False
    )
    # 5.23 looks for the layers that fill the shared cache in the assistant too, where there are none.
    modes = property(lambda self: ["reuse"] * self.num_hidden_layers)
    with mock.patch.object(transformers.Gemma4TextConfig, "kv_sharing_modes", modes, create=True):
        assistant: Any = seeded(
            lambda: transformers.Gemma4AssistantForCausalLM(assistant_config), seed=3
        )
    whisper(assistant, 0.3)
    assistant.pre_projection.weight.data.copy_(torch.eye(32, 64))
    assistant.lm_head.weight.data.copy_(target.lm_head.weight.data)
    assistant.generation_config.num_assistant_tokens = n_tokens
    return target, assistant
