"""TRL: a GRPO trainer generates what it learns from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from tests import tiny
from tests.clients.conftest import model

PROMPTS = ["one", "another prompt", "def f(", "x"]


def test_grpo(tmp_path: Path, both: Callable) -> None:
    def run() -> tuple[list[str], dict[str, torch.Tensor]]:
        written: list[str] = []

        def reward(completions: list[str], **_: Any) -> list[float]:
            written.extend(completions)
            return [float(sum(map(ord, text)) % 7) for text in completions]

        settings = GRPOConfig(
            str(tmp_path),
            max_steps=2,
            num_generations=2,
            per_device_train_batch_size=4,
            max_completion_length=8,
            learning_rate=1e-2,
            seed=0,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model(),
            reward,
            settings,
            Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tiny.byte_tokenizer(),
        )
        trainer.train()
        return written, trainer.model.state_dict()

    (their_texts, their_weights), (our_texts, our_weights) = both(run)
    assert our_texts == their_texts
    assert len(our_texts) == 8
    assert all(torch.equal(our_weights[name], weight) for name, weight in their_weights.items())
    start = model().state_dict()
    assert any(not torch.equal(start[name], weight) for name, weight in their_weights.items())
