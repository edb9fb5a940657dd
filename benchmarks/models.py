"""The models that are measured, and what they are given to continue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hfgen

PROMPT_LENGTH = 16

#: Rows of a padded batch have these shares of the prompt.
BATCH_LENGTHS = (1.0, 0.75, 0.5, 0.25)

CODE = '''\
def read_lines(path, encoding="utf-8"):
    """Return the lines of a text file."""
    with open(path, encoding=encoding) as file:
'''


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that hfgen is mixed into, and a prompt ``(1, PROMPT_LENGTH)`` for it."""

    name: str
    title: str
    model: Any
    prompt: torch.Tensor

    @property
    def n_parameters(self) -> int:
        """Numbers in the weights; tied ones count once."""
        return sum(int(weight.numel()) for weight in self.model.parameters())

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights that decoding one token of one sequence has to read.

        All of them, but for an input embedding that is not tied to the output: of it, one row.
        """
        total: int = sum(
            weight.numel() * weight.element_size() for weight in self.model.parameters()
        )
        table = self.model.get_input_embeddings().weight
        if table is self.model.get_output_embeddings().weight:
            return total
        return total - int(table[1:].numel() * table.element_size())

    def alone(self) -> dict[str, torch.Tensor]:
        """The prompt with its mask."""
        return {"input_ids": self.prompt, "attention_mask": torch.ones_like(self.prompt)}

    def batch(self) -> dict[str, torch.Tensor]:
        """The prompt and shorter ends of it as one batch, padded on the left, with its mask."""
        length = self.prompt.shape[1]
        ids = self.prompt.repeat(len(BATCH_LENGTHS), 1)
        kept = torch.tensor([max(1, round(share * length)) for share in BATCH_LENGTHS])
        mask = (torch.arange(length) >= length - kept[:, None]).long()
        pad = self.model.generation_config.pad_token_id or 0
        return {"input_ids": ids.masked_fill(mask == 0, pad), "attention_mask": mask}


def small() -> Subject:
    """The built-in model, continuing Python code."""
    model, tokenizer = hfgen.builtin_model()
    ids = torch.tensor([tokenizer(CODE).input_ids])
    return Subject("small", "Built-in model", model, ids[:, :PROMPT_LENGTH])


def random_135m() -> Subject:
    """A Llama of SmolLM-135M's shape with random weights, float32, continuing random ids."""
    return random(
        "135m",
        "Random Llama of SmolLM-135M's shape",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
    )


def random_1b(layers: int = 16) -> Subject:
    """A Llama of Llama-3.2-1B's shape with random weights: 4.9 GB in float32, 3.0 GB with 8 layers."""
    return random(
        "1b",
        "Random Llama of Llama-3.2-1B's shape" + f", {layers} of its 16 layers" * (layers < 16),
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
    )


def random(name: str, title: str, **sizes: Any) -> Subject:
    """A Llama of the ``sizes`` of its config, with the same random weights each time."""
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(tie_word_embeddings=True, max_position_embeddings=2048, **tokens, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).float().eval()
        prompt = torch.randint(5, config.vocab_size, (1, PROMPT_LENGTH))
    return Subject(name, title, hfgen.mix_into(model), prompt)


SUBJECTS: dict[str, Callable[[], Subject]] = {"small": small, "135m": random_135m}
