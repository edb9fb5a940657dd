"""Tiny models of random weights that several tests share. Vocabulary of 97; pad 0, bos 1, eos 2."""

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
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.parity.family import seeded

VOCAB = 97
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llama(**overrides: Any) -> PreTrainedModel:
    """Rotary positions, grouped-query attention; 256 positions."""
    config = LlamaConfig(
        **SPECIAL,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    config.update(overrides)
    return seeded(lambda: LlamaForCausalLM(config))


def gpt2() -> PreTrainedModel:
    """Learned positions: 64 of them."""
    config = GPT2Config(
        **SPECIAL,
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        initializer_range=0.3,
    )
    return seeded(lambda: GPT2LMHeadModel(config))


def t5() -> PreTrainedModel:
    """An encoder-decoder that does not derive its decoder's inputs from the encoder's."""
    config = T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_ff=64,
        d_kv=8,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
        initializer_factor=3.0,
    )
    return seeded(lambda: T5ForConditionalGeneration(config))


def bart() -> PreTrainedModel:
    """An encoder-decoder with learned positions: 64 of them."""
    config = BartConfig(
        **SPECIAL,
        vocab_size=VOCAB,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
        init_std=0.3,
    )
    return seeded(lambda: BartForConditionalGeneration(config))


def byte_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """One token per byte, from id 2 on; ends with 0, pads with 1. ``template`` is for chats."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<eos>", "<pad>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", chat_template=template
    )


def ascii_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character that can be seen, and the space: as many as the models have."""
    characters = [chr(code) for code in range(33, 126)]  # a space is Ġ
    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", "Ġ", *characters])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def prompt(rows: int = 2, length: int = 7, seed: int = 0) -> torch.Tensor:
    """Ids ``(rows, length)``, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCAB, (rows, length), generator=generator)
