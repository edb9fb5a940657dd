"""What only a GPU can show: upstream's tokens there, no waiting, and recorded steps. `make gpu` runs it.

With ``HFGEN_TEST_DEVICE=cpu`` it runs on a CPU, where operations are recorded one by one: no typing error
waits for a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfgen
from hfgen.memory.caches.pool import pool_of
from hfgen.running import ahead
from hfgen.running.row_states import generator_states
from tests import tiny
from tests.drafting_models import whisper
from tests.host_recorder import Reads, recording_on_the_cpu
from tests.parity.harness import FAMILIES, ours, quiet, upstream

DEVICE = os.environ.get("HFGEN_TEST_DEVICE", "cuda")

NO_GPU = DEVICE == "cuda" and not torch.cuda.is_available()
pytestmark = pytest.mark.skipif(NO_GPU, reason="needs a GPU")

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

#: Modes that are compared with eager steps alone: of several rows, or not upstream's.
RECORDED: dict[str, dict[str, Any]] = MODES | {
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "group beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive": {"penalty_alpha": 0.5, "top_k": 4},
    "contrastive, one by one": {"penalty_alpha": 0.5, "top_k": 4, "low_memory": True},
    "DoLa": {"dola_layers": "high"},
    "early exit": {"assistant_early_exit": 1},
}


@pytest.fixture(autouse=True)
def _recorder_of_a_cpu() -> Iterator[None]:
    with recording_on_the_cpu() if DEVICE == "cpu" else nullcontext():
        yield


@pytest.fixture(scope="module")
def models() -> tuple[nn.Module, nn.Module]:
    """Upstream's and hfgen's, of the same weights, on the GPU."""
    return tiny.llama().to(DEVICE), hfgen.mix_into(tiny.llama()).to(DEVICE)


def prompt(rows: int = 2, device: str = DEVICE) -> Tensor:
    return tiny.prompt(rows, seed=2).to(device)


def generated(
    model: nn.Module, rows: int = 2, device: str = DEVICE, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Ids, and the states of the generators afterwards."""
    torch.manual_seed(0)
    given = {"max_new_tokens": 24, "eos_token_id": EOS, "pad_token_id": 0} | kwargs
    tokens = model.generate(prompt(rows, device), **given)
    return tokens.cpu(), torch.cat(generator_states(torch.device(device)))


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


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("mode", RECORDED)
def test_recorded_steps_give_the_tokens_of_eager_ones(
    models: Any, mode: str, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models[1]
    expected, expected_state = generated(model, **STATIC, **RECORDED[mode])
    monkeypatch.setattr(ahead, "ALWAYS", is_late)
    for _ in range(3):
        tokens, state = generated(model, **GRAPHS, **RECORDED[mode])
        assert tokens.equal(expected)
        assert state.equal(expected_state)
    (buffers,) = pool_of(model).idle
    assert buffers.graphs


def test_an_assistant_with_graphs() -> None:
    model, assistant = (hfgen.mix_into(whisper(tiny.llama(), 0.3)).to(DEVICE) for _ in range(2))
    assistant.model.layers = assistant.model.layers[:1]
    assistant.config.num_hidden_layers = 1
    kwargs = {"assistant_model": assistant, "num_assistant_tokens": 3}
    for more in ({}, {"do_sample": True, "seed": [3, 4]}):
        expected, _ = generated(model, **STATIC, **kwargs, **more)
        for _ in range(2):
            assert generated(model, **GRAPHS, **kwargs, **more)[0].equal(expected)


def test_what_cannot_be_captured_runs_eagerly_and_leaves_the_device_as_it_was(models: Any) -> None:
    """The stream, the allocator and the generator: the next call draws, and records."""
    bad = hfgen.mix_into(tiny.llama()).to(DEVICE)
    bad.model.norm = Reads(bad.model.norm)
    streams = [torch.cuda.current_stream()] if DEVICE == "cuda" else []
    expected, _ = generated(models[1], **STATIC, do_sample=True)
    with quiet():
        tokens, _ = generated(bad, **GRAPHS, do_sample=True)
    assert tokens.equal(expected)
    assert streams == ([torch.cuda.current_stream()] if DEVICE == "cuda" else [])
    assert generated(models[1], **GRAPHS, do_sample=True)[0].equal(expected)


def test_graphs_outlive_those_of_other_models(models: Any) -> None:
    """What libraries allocate for the stream of a capture goes with the graphs captured on it."""
    model, expected = models[1], generated(models[1], **STATIC)[0]
    generated(model, **GRAPHS)
    for _ in range(3):
        other = hfgen.mix_into(tiny.llama()).to(DEVICE)
        generated(other, **GRAPHS)
        hfgen.free_caches(other)
        del other
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    filler = [torch.full((1 << 20,), float("nan"), device=DEVICE) for _ in range(8)]
    assert generated(model, **GRAPHS)[0].equal(expected)
    assert len(filler) == 8


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_graphs_of_a_device_that_is_not_the_current_one(models: Any) -> None:
    generated(models[1], **GRAPHS)  # torch has its stream for captures from here on
    model = hfgen.mix_into(tiny.llama()).to("cuda:1")
    expected, _ = generated(model, device="cuda:1", **STATIC)
    for _ in range(2):
        assert generated(model, device="cuda:1", **GRAPHS)[0].equal(expected)


def test_seeds_and_longer_calls_with_graphs(models: Any) -> None:
    model, kwargs = models[1], {"max_new_tokens": 150, "do_sample": True, "seed": [3, 4]}
    expected, _ = generated(model, **STATIC, **kwargs)
    assert generated(model, **GRAPHS, **kwargs)[0].equal(expected)
    assert generated(model, **GRAPHS, **kwargs)[0].equal(expected)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "qwen3", "olmo2", "granite"])
def test_families_with_graphs(name: str) -> None:
    model = ours(name).to(DEVICE)
    ids = FAMILIES[name].inputs(model, 2, False, 1)["input_ids"].to(DEVICE)
    with quiet():
        eager, recorded = (
            model.generate(ids, max_new_tokens=12, eos_token_id=None, **kwargs)
            for kwargs in (STATIC, GRAPHS)
        )
    model.to("cpu")
    assert recorded.equal(eager)


@pytest.mark.parametrize("kwargs", [{}, STATIC, GRAPHS], ids=["dynamic", "static", "graphs"])
@pytest.mark.parametrize("mode", ["greedy", "sampled", "beams"])
def test_nothing_waits_if_only_the_length_can_end_a_call(
    models: Any, kwargs: dict[str, Any], mode: str
) -> None:
    """Torch raises where the host would wait for the device."""
    start = prompt().shape[1]

    def watch(ids: Tensor, scores: Tensor) -> Tensor:
        is_decoding = start + 2 <= ids.shape[1] < start + 20
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("error" if is_decoding else "default")
        return scores

    given = {"eos_token_id": None, "max_new_tokens": 24, **MODES[mode], **kwargs}
    generated(models[1], **given)
    try:
        generated(models[1], logits_processor=[watch], **given)
    finally:
        if DEVICE == "cuda":
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
            model = build(name).to(DEVICE)
            inputs = FAMILIES[name].inputs(model, 2, False, 1)
            inputs = {n: v.to(DEVICE) if isinstance(v, Tensor) else v for n, v in inputs.items()}
            found.append(model.generate(**inputs, max_new_tokens=8, do_sample=False).cpu())
            model.to("cpu")
    assert found[0].equal(found[1])
