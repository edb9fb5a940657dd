"""lm_eval: its harness generates with the model that it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from tests import tiny
from tests.clients.conftest import model

PROMPTS = ["def f(", "x", "import os, sys", "the end of a long prompt"]


@pytest.mark.parametrize(
    "asked",
    [
        {"until": ["\n"], "max_gen_toks": 12},
        {"until": ["a", "e", "\n"], "max_gen_toks": 12, "num_beams": 2},
        {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 0.7},
    ],
    ids=str,
)
def test_generate_until(both: Callable, asked: dict[str, Any]) -> None:
    harness = HFLM(pretrained=model(), tokenizer=tiny.byte_tokenizer(), batch_size=3, device="cpu")
    requests = [
        Instance("generate_until", {}, (prompt, asked), number)
        for number, prompt in enumerate(PROMPTS)
    ]

    def run() -> list[str]:
        torch.manual_seed(0)
        return harness.generate_until(requests, disable_tqdm=True)

    theirs, ours = both(run)
    assert ours == theirs
    assert any(theirs)
