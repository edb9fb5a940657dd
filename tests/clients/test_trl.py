"""TRL: a GRPO trainer generates what it learns from, in one process, and with FSDP 2 in two."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests import processes
from tests.clients import grpo
from tests.clients.conftest import model


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_a_trainer(method: str, tmp_path: Path, both: Callable) -> None:
    def run() -> tuple[list[str], dict[str, torch.Tensor]]:
        settings = {"per_device_train_batch_size": 4, "max_completion_length": 8}
        train = partial(grpo.trained, **settings) if method == "GRPO" else grpo.trained_rloo
        texts, trainer = train(str(tmp_path))
        return texts, trainer.model.state_dict()

    (their_texts, their_weights), (our_texts, our_weights) = both(run)
    assert our_texts == their_texts
    assert len(our_texts) == 8
    assert all(torch.equal(our_weights[name], weight) for name, weight in their_weights.items())
    start = model().state_dict()
    assert any(not torch.equal(start[name], weight) for name, weight in their_weights.items())


def test_grpo_with_sharded_weights(tmp_path: Path) -> None:
    """Same completions and weights as with transformers' generation; ranks end at different steps."""
    theirs, ours = (
        processes.run(grpo.train_sharded, str(tmp_path / name), name == "ours")
        for name in ("theirs", "ours")
    )
    for rank, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        assert our["is sharded"]
        assert our["texts"] == their["texts"]
        assert len(our["texts"]) == 2
        assert (our["company"] > 0, their["company"]) == (True, 0), rank
        for name, weight in their["weights"].items():
            assert torch.equal(our["weights"][name], weight), name
