"""Tiny models of random weights, built from configs: vocabulary of 97; pad 0, BOS 1, EOS 2."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.streamers import BaseStreamer

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 97}


def built(model_class: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return model_class(config).eval()


def llama(model_class: Any = LlamaForCausalLM, **fields: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**SPECIAL | sizes | heads | {"initializer_range": 0.3} | fields)
    return built(model_class, config)


def gpt2(**fields: Any) -> Any:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
    config = GPT2Config(**SPECIAL | sizes | fields)
    return built(GPT2LMHeadModel, config)


def bart() -> Any:
    layers = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 32, "init_std": 0.3}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    ids = {"decoder_start_token_id": 2, "forced_eos_token_id": None}
    sizes = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64}
    config = BartConfig(**SPECIAL | layers | heads | ids | sizes)
    return built(BartForConditionalGeneration, config)


def t5() -> Any:
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    config = T5Config(**SPECIAL, **sizes, decoder_start_token_id=0, initializer_factor=3.0)
    return built(T5ForConditionalGeneration, config)


def prompt(rows: int = 1, length: int = 7) -> torch.Tensor:
    """Ids ``(rows, length)``, none of them special."""
    return torch.randint(5, 97, (rows, length), generator=torch.Generator().manual_seed(0))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, from id 3 on; for a model with ``vocab_size=259``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


class Streamer(BaseStreamer):
    """Counts its calls."""

    puts = ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1

    def end(self) -> None:
        self.ends += 1
