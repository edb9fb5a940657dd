"""Assistants with another tokenizer (``drafters/translated.py``)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, T5Config
from transformers import T5ForConditionalGeneration as T5

import hfgen
from hfgen.drafters import Context
from hfgen.drafters.assistant import Assistant
from hfgen.drafters.translated import BySharedTokens, ByText, Reencoded, Restriction
from hfgen.vocabularies import Spelling, shared_tokens
from tests.parity.family import seeded
from tests.tiny import llama

CORPUS = sorted(Path(hfgen.__file__).parent.glob("*.py"))
#: What the trained models know by heart: indents, repetitions, characters of several bytes.
TEXT = '''def mean(values: list[float]) -> float:
    """The average, or 0.0 where there are no values — même ici."""
    total = 0.0
    for value in values:
        total = total + value
    return total / len(values) if values else 0.0
'''


def wrapped(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)


@cache
def byte_level(size: int = 400, pattern: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT-2's; pads with 0, ends with 1."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in CORPUS], trainer)
    return wrapped(tokenizer, pad_token="<pad>", eos_token="</s>")


@cache
def sentence_piece(size: int = 300) -> PreTrainedTokenizerFast:
    """BPE with ``▁`` for spaces, one before the text, and BOS, as Llama's; unknown characters occur."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    special = ["<unk>", "<s>", "<end>"]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    tokenizer.train([str(path) for path in CORPUS[5:]], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return wrapped(tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="<end>")


@cache
def words(size: int = 200) -> PreTrainedTokenizerFast:
    """Words in lower case without the spaces between them: the text cannot be had back."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[UNK]", "[EOS]"]
    trainer = trainers.WordLevelTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    tokenizer.train([str(path) for path in CORPUS], trainer)
    return wrapped(tokenizer, unk_token="[UNK]", eos_token="[EOS]")


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bytes": lambda: byte_level(330, pattern=False),
    "sentencepiece": sentence_piece,
    "words": words,
}


def untrained(tokenizer: PreTrainedTokenizerFast, **overrides: Any) -> Any:
    """A tiny model of random weights for the tokenizer."""
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    return hfgen.mix_into(llama(vocab_size=len(tokenizer), **special, **overrides))


@cache
def trained(tokenizer: PreTrainedTokenizerFast) -> Any:
    """A tiny model that knows ``TEXT`` by heart, from its beginning on."""
    model = untrained(tokenizer, initializer_range=0.05, hidden_size=64, num_hidden_layers=1)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    ids = torch.cat([ids, torch.tensor([[tokenizer.eos_token_id]])], dim=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=0.0)
    for _ in range(60):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    return model.eval()


def both(model: Any, prompt: dict[str, Tensor], assistant: Any, other: Any, **kwargs: Any) -> Any:
    """The same call without the assistant and with it."""
    tokenizer = byte_level()
    kwargs |= {"tokenizer": tokenizer, "return_dict_in_generate": True, "output_speculation": True}
    plain = model.generate(**prompt, **kwargs)
    drafted = model.generate(
        **prompt, **kwargs, assistant_model=assistant, assistant_tokenizer=other
    )
    return plain, drafted
