"""PEFT: adapters chosen per row of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import hfgen
from tests import tiny

PAD = 3  # upstream takes 0 for none in beam search
NAMES = ["first", "second", "__base__"]


@pytest.fixture(scope="module")
def adapted() -> Any:
    """A model with two adapters that matter."""
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(tiny.llama(), config, adapter_name="first")
    model.add_adapter("second", config)
    return model.eval()


def generate(model: Any, **kwargs: Any) -> torch.Tensor:
    torch.manual_seed(0)
    ids = tiny.prompt(rows=1).repeat(len(NAMES), 1)
    mask = torch.ones_like(ids)
    return model.generate(
        input_ids=ids,
        attention_mask=mask,
        adapter_names=NAMES,
        max_new_tokens=8,
        pad_token_id=PAD,
        **kwargs,
    )


@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"do_sample": True},
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"cache_implementation": "static"},
    ],
    ids=str,
)
def test_each_row_has_its_adapter(adapted: Any, both: Callable, mode: dict[str, Any]) -> None:
    theirs, ours = both(lambda: generate(adapted, **mode))
    assert torch.equal(ours, theirs)
    assert len({tuple(row.tolist()) for row in theirs}) >= len(NAMES), "an adapter does nothing"


@pytest.mark.parametrize("n_beams", [1, 3])
def test_rows_keep_their_adapters_when_others_have_ended(adapted: Any, n_beams: int) -> None:
    plain = generate(adapted, num_beams=n_beams)
    ends = [int(row[9]) for row in plain[:1]]  # ends the first row early, and it alone
    mode = {"eos_token_id": ends, "num_beams": n_beams}
    expected = generate(adapted, **mode)
    with hfgen.patched():
        assert torch.equal(generate(adapted, **mode, drop_finished=True), expected)
    lengths = (expected[:, 7:] != PAD).sum(1)
    assert lengths.min() < lengths.max()
