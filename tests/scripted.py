"""A tiny model that writes what it is told to, so that a test knows where a row has to end."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import LogitsProcessor

import hfgen
from tests import tiny

PROMPT = "say: "


@cache
def tokenizer() -> Any:
    """One token per byte."""
    return tiny.byte_tokenizer()


@cache
def model() -> Any:
    return hfgen.mix_into(
        tiny.llama(
            vocab_size=len(tokenizer()),
            max_position_embeddings=2048,
            eos_token_id=0,
            pad_token_id=1,
        )
    )


class Script(LogitsProcessor):
    """Lets prompt ``r`` be followed by ``scripts[r]``, whatever the model says; then by its last token."""

    is_row_wise = True

    def __init__(self, scripts: list[list[int]], prompt_length: int) -> None:
        self.scripts, self.prompt_length = scripts, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place, each = input_ids.shape[1] - self.prompt_length, len(scores) // len(self.scripts)
        tokens = [
            script[min(place, len(script) - 1)] for script in self.scripts for _ in range(each)
        ]
        wanted = torch.tensor(tokens, device=scores.device)[:, None]
        return scores.scatter(1, wanted, 1000.0)


class Foresight(hfgen.Drafter):
    """Drafts what the script says, so that all of it is accepted."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def draft(self, context: Any) -> hfgen.Draft:
        scripts, place = self.script.scripts, context.start - self.script.prompt_length
        rows = [(script + script[-1:] * 99)[place : place + context.n_tokens] for script in scripts]
        return hfgen.Draft(torch.tensor(rows))

    def observe(self, verdict: Any) -> None:
        pass


def ids_of(text: str) -> list[int]:
    """``text`` as tokens; ``<eos>`` stands for itself."""
    return list(tokenizer().encode(text, add_special_tokens=False))


def write(
    *texts: str, drafts: bool = False, prompts: list[str] | None = None, **kwargs: Any
) -> Any:
    """What ``generate`` returns where the rows write ``texts``; by default, whole and with an output."""
    encoded = [ids_of(prompt) for prompt in prompts or [PROMPT] * len(texts)]
    length = max(map(len, encoded))
    ids = torch.tensor([[1] * (length - len(row)) + row for row in encoded])
    script = Script([ids_of(text) for text in texts], length)
    if drafts:
        kwargs |= {"assistant_model": Foresight(script)}
    options = {
        "max_new_tokens": 40,
        "tokenizer": tokenizer(),
        "return_dict_in_generate": True,
        "attention_mask": (ids != 1).long(),
        "logits_processor": [script],
    }
    options = {name: value for name, value in (options | kwargs).items() if value is not None}
    return model().generate(ids, **options)


def generated(output: Any, prompt_length: int = len(PROMPT)) -> list[str]:
    """The text of what each row has, padding left out."""
    return [
        tokenizer().decode([token for token in row if token != 1])
        for row in output.sequences[:, prompt_length:].tolist()
    ]
