"""What only a GPU can show: upstream's tokens there, no waiting, and recorded steps. `make gpu` runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfgen
from hfgen.caches.pool import pool_of
from hfgen.execution import ahead
from tests import tiny
from tests.parity.harness import FAMILIES, ours, quiet, upstream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

EOS = 3
GRAPHS: dict[str, Any] = {"cache_implementation": "static", "use_cuda_graph": True}
STATIC: dict[str, Any] = {"cache_implementation": "static", "disable_compile": True}

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 20, "top_p": 0.9},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.fixture(scope="module")
def models() -> tuple[nn.Module, nn.Module]:
    """Upstream's and hfgen's, of the same weights, on the GPU."""
    return tiny.llama().to("cuda"), hfgen.mix_into(tiny.llama()).to("cuda")


def prompt(rows: int = 2) -> Tensor:
    return tiny.prompt(rows, seed=2).to("cuda")


def generated(model: nn.Module, rows: int = 2, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Ids, and the state of the device's generator afterwards."""
    torch.manual_seed(0)
    given = {"max_new_tokens": 24, "eos_token_id": EOS, "pad_token_id": 0} | kwargs
    tokens = model.generate(prompt(rows), **given)
    return tokens.cpu(), torch.cuda.get_rng_state()


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_and_generator_are_upstreams(
    models: Any, mode: str, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "ALWAYS", is_late)
    rows = 1 if "prompt_lookup_num_tokens" in MODES[mode] else 2
    (theirs, their_state), (mine, state) = (generated(m, rows, **MODES[mode]) for m in models)
    assert mine.equal(theirs)
    assert state.equal(their_state)


@pytest.mark.parametrize("mode", ["greedy", "sampled", "several", "penalties"])
def test_recorded_steps_give_the_tokens_of_eager_ones(models: Any, mode: str) -> None:
    model = models[1]
    expected, expected_state = generated(model, **STATIC, **MODES[mode])
    for _ in range(3):
        tokens, state = generated(model, **GRAPHS, **MODES[mode])
        assert tokens.equal(expected)
        assert state.equal(expected_state)
    (buffers,) = pool_of(model).idle
    assert buffers.graphs


def test_seeds_and_longer_calls_with_graphs(models: Any) -> None:
    model, kwargs = models[1], {"max_new_tokens": 150, "do_sample": True, "seed": [3, 4]}
    expected, _ = generated(model, **STATIC, **kwargs)
    assert generated(model, **GRAPHS, **kwargs)[0].equal(expected)
    assert generated(model, **GRAPHS, **kwargs)[0].equal(expected)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "qwen3", "olmo2", "granite"])
def test_families_with_graphs(name: str) -> None:
    model = ours(name).to("cuda")
    ids = FAMILIES[name].inputs(model, 2, False, 1)["input_ids"].to("cuda")
    with quiet():
        eager, recorded = (
            model.generate(ids, max_new_tokens=12, eos_token_id=None, **kwargs)
            for kwargs in (STATIC, GRAPHS)
        )
    model.to("cpu")
    assert recorded.equal(eager)


@pytest.mark.parametrize("kwargs", [{}, STATIC, GRAPHS], ids=["dynamic", "static", "graphs"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_nothing_waits_if_only_the_length_can_end_a_call(
    models: Any, kwargs: dict[str, Any], do_sample: bool
) -> None:
    """Torch raises where the host would wait for the device."""
    start = prompt().shape[1]

    def watch(ids: Tensor, scores: Tensor) -> Tensor:
        is_decoding = start + 2 <= ids.shape[1] < start + 20
        torch.cuda.set_sync_debug_mode("error" if is_decoding else "default")
        return scores

    given = {"eos_token_id": None, "do_sample": do_sample, "max_new_tokens": 24, **kwargs}
    generated(models[1], **given)
    try:
        generated(models[1], logits_processor=[watch], **given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_steps_give_upstreams_tokens(models: Any) -> None:
    expected, _ = generated(models[0], **STATIC)
    assert generated(models[1], cache_implementation="static")[0].equal(expected)


def test_the_engine_gives_each_request_its_own_tokens(models: Any) -> None:
    engine = hfgen.Engine(models[1])
    ids = prompt(3)
    requests = [engine.add(row.tolist(), max_new_tokens=8 + i) for i, row in enumerate(ids)]
    for _ in engine.events():
        pass
    for i, (request, row) in enumerate(zip(requests, ids, strict=True)):
        alone = models[1].generate(row[None], max_new_tokens=8 + i)[0, len(row) :].tolist()
        assert request.result().token_ids == alone


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba", "bart"])
def test_families_beside_upstream(name: str) -> None:
    with quiet():
        found = []
        for build in (upstream, ours):
            model = build(name).to("cuda")
            inputs = FAMILIES[name].inputs(model, 2, False, 1)
            inputs = {n: v.to("cuda") if isinstance(v, Tensor) else v for n, v in inputs.items()}
            found.append(model.generate(**inputs, max_new_tokens=8, do_sample=False).cpu())
            model.to("cpu")
    assert found[0].equal(found[1])
