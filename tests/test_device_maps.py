"""accelerate's device maps: one process, whose weights are in several places, or on disk between forwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

import hfgen
from tests import tiny
from tests.rank_cases import MODES, generated, prompt


@pytest.fixture(scope="module")
def alone() -> Any:
    return hfgen.mix_into(tiny.llama())


@pytest.fixture(scope="module", params=["a layer on disk", "all loaded per forward"])
def mapped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model, folder = tiny.llama(), tmp_path_factory.mktemp("weights")
    if request.param == "all loaded per forward":
        return hfgen.mix_into(accelerate.cpu_offload(model, execution_device="cpu"))
    places = {"model.layers.1": "disk"}
    parts = "model.embed_tokens model.layers.0 model.norm model.rotary_emb lm_head".split()
    places |= dict.fromkeys(parts, "cpu")
    mapped = accelerate.dispatch_model(model, places, "cpu", offload_dir=str(Path(folder)))
    assert mapped.model.layers[1].mlp.up_proj.weight.is_meta
    return hfgen.mix_into(mapped)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_tokens_of_a_model_in_memory(
    mapped: Any, alone: Any, mode: str
) -> None:
    assert generated(mapped, prompt(0), 9, mode) == generated(alone, prompt(0), 9, mode)


def test_the_engine_gives_the_tokens_of_a_model_in_memory(mapped: Any, alone: Any) -> None:
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    expected = [alone.generate(torch.tensor([p]), max_new_tokens=4)[0].tolist() for p in prompts]
    found = [
        [*prompt, *output.sequences[0].token_ids]
        for prompt, output in zip(
            prompts, hfgen.generate_many(mapped, prompts, max_new_tokens=4), strict=True
        )
    ]
    assert found == expected
    results = mapped.generate_batch(prompts, max_new_tokens=4).values()
    assert [each.prompt_ids + each.generated_tokens for each in results] == expected
    start = mapped.generate(bos_token_id=1, max_new_tokens=4)
    assert torch.equal(start, alone.generate(bos_token_id=1, max_new_tokens=4))


def test_layers_that_are_loaded_per_forward_draft(mapped: Any, alone: Any) -> None:
    expected = generated(alone, prompt(0), 9, "greedy")
    assert generated(mapped, prompt(0), 9, "greedy", assistant_early_exit=1) == expected


def test_an_assistant_that_is_loaded_per_forward_drafts(alone: Any) -> None:
    assistant = accelerate.cpu_offload(tiny.llama(num_hidden_layers=1), execution_device="cpu")
    expected = generated(alone, prompt(0), 9, "greedy")
    assert generated(alone, prompt(0), 9, "greedy", assistant_model=assistant) == expected
