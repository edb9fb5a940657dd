"""accelerate: weights that are on disk or in another place between forwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

import hfgen
from tests import tiny

IDS = tiny.prompt(rows=1, length=24)


@pytest.fixture(params=["cpu", "disk"])
def offloaded(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    model = tiny.llama()
    device = torch.device("cpu")
    if request.param == "cpu":
        return accelerate.cpu_offload(model, execution_device=device)
    return accelerate.disk_offload(model, tmp_path, execution_device=device)


@pytest.mark.parametrize(
    "mode", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str
)
def test_offloaded_weights(offloaded: Any, both: Callable, mode: dict[str, Any]) -> None:
    theirs, ours = both(lambda: offloaded.generate(IDS, max_new_tokens=8, **mode))
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, tiny.llama().generate(IDS, max_new_tokens=8, **mode))


def test_offloaded_weights_go_by_without_a_prefix_cache(offloaded: Any) -> None:
    model = hfgen.mix_into(offloaded)
    prefixes = hfgen.PrefixCache()
    first = model.generate(IDS, max_new_tokens=8, prefix_cache=prefixes)
    again = model.generate(first, max_new_tokens=8, prefix_cache=prefixes)
    assert torch.equal(again, tiny.llama().generate(first, max_new_tokens=8))
    assert prefixes.stats.hits == 0
    assert any("offloaded" in reason for reason in prefixes.stats.bypassed)
