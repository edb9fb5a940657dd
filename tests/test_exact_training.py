"""A policy gradient on an exact model: the trainer's log-probabilities are the sampler's, bit by bit.

``HFGEN_STEPS=50 pytest tests/test_exact_training.py`` trains longer.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

import hfgen

STEPS = int(os.environ.get("HFGEN_STEPS", "2"))
PROMPTS = (
    "x",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    ",
    "class Parser:\n    def __init__(self, text):\n",
    "return ",
)
N_NEW = 8
SAMPLING = {
    "max_new_tokens": N_NEW,
    "do_sample": True,
    "temperature": 1.0,
    "top_k": 0,
    "ignore_eos": True,
    "logprobs": 0,
    "return_dict_in_generate": True,
}


def rollouts(model: Any, prompts: list[Tensor], first_seed: int) -> tuple[list[Tensor], Tensor]:
    """Sequences and log-probabilities ``(rows, N_NEW)`` from the engine; every other request drafts."""
    with hfgen.Engine(model, max_rows=3, prefill_tokens=11) as engine:
        requests = []
        for i, ids in enumerate(prompts):
            drafts = {"prompt_lookup_num_tokens": 3} if i % 2 else {}
            config = hfgen.GenerationConfig(**SAMPLING, **drafts, seed=first_seed + i)
            requests.append(engine.add(ids, generation_config=config))
            engine.step()
        while engine.has_work:
            engine.step()
        outputs = [request.result().generate_output for request in requests]
    logprobs = torch.stack([output.logprobs.token_logprobs[0] for output in outputs])
    return [output.sequences[0] for output in outputs], logprobs


def train(model: Any, tokenizer: Any, n_steps: int) -> tuple[int, int, float]:
    """REINFORCE for vowels; the tokens whose ratio is not 1, all tokens, and the worst ratio's distance from 1."""
    prompts = [tokenizer(text, return_tensors="pt").input_ids for text in PROMPTS]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    n_wrong, n_tokens, worst = 0, 0, 0.0
    for step in range(n_steps):
        sequences, old = rollouts(model, prompts, 1000 * step)
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad(sequences, batch_first=True, padding_side="left")
        mask = pad([torch.ones_like(s) for s in sequences], batch_first=True, padding_side="left")
        new = hfgen.token_logprobs(model, ids, mask)[:, -N_NEW:]
        ratio = (new - old).exp()
        n_wrong += int((ratio != 1).sum())
        n_tokens += ratio.numel()
        worst = max(worst, float((ratio.detach() - 1).abs().max()))
        texts = [tokenizer.decode(s[-N_NEW:]) for s in sequences]
        rewards = torch.tensor([sum(c in "aeiou" for c in text) / 20 for text in texts])
        loss = -(ratio * (rewards - rewards.mean())[:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return n_wrong, n_tokens, worst


def loaded(dtype: torch.dtype) -> Any:
    model, tokenizer = hfgen.builtin_model()
    return model.to(dtype).eval().requires_grad_(True), tokenizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_importance_ratio_is_one(dtype: torch.dtype) -> None:
    model, tokenizer = loaded(dtype)
    before = model.lm_head.weight.detach().clone()
    n_wrong, n_tokens, worst = train(hfgen.exact(model), tokenizer, STEPS)
    assert (n_wrong, worst) == (0, 0.0)
    assert n_tokens == STEPS * len(PROMPTS) * N_NEW
    assert not torch.equal(model.lm_head.weight, before)  # the weights have moved


def test_packed_weights_follow_the_optimizer() -> None:
    model, tokenizer = loaded(torch.float32)
    hfgen.exact(hfgen.optimize(model, kernels="onednn"))
    n_wrong, _, worst = train(model, tokenizer, STEPS)
    assert (n_wrong, worst) == (0, 0.0)


def test_without_exact_mode_ratios_differ() -> None:
    model, tokenizer = loaded(torch.bfloat16)
    n_wrong, n_tokens, worst = train(model, tokenizer, 1)
    assert n_wrong > n_tokens / 2
    assert worst > 0.001
