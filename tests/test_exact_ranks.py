"""Exact rows on two processes: FSDP 2 gives the bits of one process, and divided layers are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hfgen
from tests import processes, rank_cases, tiny

SAMPLING = {
    "max_new_tokens": 8,
    "do_sample": True,
    "ignore_eos": True,
    "logprobs": 0,
    "return_dict_in_generate": True,
}


def scored(model: Any, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """What two rows of a rank get, sampled with seeds; and the trainer's log-probabilities and a gradient."""
    ids = rank_cases.prompt(rank)
    output = model.generate(ids, seed=[rank, 7], pad_token_id=0, **SAMPLING)
    logprobs = hfgen.token_logprobs(model, output.sequences)
    model.zero_grad()
    logprobs[:, -8:].sum().backward()
    trained = [logprobs.detach()[:, -8:]]
    return [output.sequences, output.logprobs.token_logprobs], trained


def exact_then_sharded(rank: int, folder: str) -> Any:
    """Two processes: exact before the layers are sharded, and after it."""
    model = hfgen.exact(hfgen.mix_into(tiny.llama()).eval())
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    sampled, trained = scored(fully_shard(model, mesh=mesh), rank)
    has_gradient = model.model.layers[0].mlp.up_proj.weight.grad is not None
    refusals = [
        rank_cases.attempted(lambda: hfgen.exact(rank_cases.sharded().eval())),
        rank_cases.attempted(lambda: hfgen.exact(rank_cases.divided(folder))),
    ]
    return [[t.tolist() for t in (*sampled, *trained)], has_gradient, refusals]


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("model"))
    tiny.llama().save_pretrained(folder)
    return processes.run(exact_then_sharded, folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_sharded_layers_give_the_bits_of_one_process(of_ranks: Any, rank: int) -> None:
    sampled, trained = scored(hfgen.exact(hfgen.mix_into(tiny.llama()).eval()), rank)
    assert torch.equal(sampled[1], trained[0])
    values, has_gradient, _ = of_ranks[rank]
    assert values == [t.tolist() for t in (*sampled, *trained)]
    assert has_gradient


def test_what_is_divided_already_is_refused_with_what_to_do(of_ranks: Any) -> None:
    for *_, refusals in of_ranks:
        assert all(text.startswith("ValueError: exact: 'model") for text in refusals)
        sharded, divided = refusals
        assert "Make the model exact before fully_shard" in sharded
        assert "tensor parallel" in divided
