"""TRL's GRPO with FSDP 2 on two processes, which generate before they learn."""

from __future__ import annotations

from pathlib import Path

import torch

from tests import processes
from tests.clients import grpo_ranks


def test_grpo_with_sharded_weights(tmp_path: Path) -> None:
    """Same completions and weights as with transformers' generation; ranks end at different steps."""
    theirs, ours = (
        processes.run(grpo_ranks.train, str(tmp_path / name), name == "ours", limit=120)
        for name in ("theirs", "ours")
    )
    for rank, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        assert our["is sharded"]
        assert our["texts"] == their["texts"]
        assert len(our["texts"]) == 2
        assert (our["company"] > 0, their["company"]) == (True, 0), rank
        for name, weight in their["weights"].items():
            assert torch.equal(our["weights"][name], weight), name
