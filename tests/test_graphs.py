"""Recorded decoding steps give the tokens of eager ones: recorded and replayed on a simulated accelerator."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfgen
from hfgen.execution import ahead, graphs
from tests import tiny
from tests.parity.harness import FAMILIES, ours, quiet
from tests.simulated_accelerator import (
    DEVICE,
    Accelerator,
    DeviceTensor,
    Recorder,
    on_device,
    to_device,
    to_host,
)

STATIC = {"cache_implementation": "static", "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(autouse=True)
def recorders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(graphs.RECORDERS, DEVICE.type, Recorder)
    monkeypatch.setattr(Recorder, "count", 0)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """Messages of the library, each said again in this test."""
    logger = logging.getLogger("transformers.generation.utils")
    logging.Logger.warning_once.cache_clear()
    level = logger.level
    logger.setLevel(logging.WARNING)
    logger.addHandler(caplog.handler)
    yield lambda: [record.getMessage() for record in caplog.records]
    logger.removeHandler(caplog.handler)
    logger.setLevel(level)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return hfgen.mix_into(tiny.llama())


@pytest.fixture
def device_model(model: nn.Module) -> nn.Module:
    return on_device(model)


def prompt(rows: int = 2, length: int = 7) -> Tensor:
    return tiny.prompt(rows, length, seed=2)


def both(
    model: nn.Module, device_model: nn.Module, ids: Tensor | None = None, **kwargs: Any
) -> Accelerator:
    """What happened on the device in a call with graphs, which gave the tokens of the CPU's eager call."""
    ids, kwargs = prompt() if ids is None else ids, STATIC | {"max_new_tokens": 12} | kwargs
    mask = kwargs.pop("attention_mask", torch.ones_like(ids))
    torch.manual_seed(0)
    expected = model.generate(ids, attention_mask=mask, **kwargs)
    expected_state = torch.get_rng_state()
    torch.manual_seed(0)
    with Accelerator(device_model) as accelerator:
        tokens = device_model.generate(
            to_device(ids), attention_mask=to_device(mask), use_cuda_graph=True, **kwargs
        )
    assert to_host(tokens).equal(expected)
    assert torch.get_rng_state().equal(expected_state)
    return accelerator


LEFT_PADDED = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "EOS": {"eos_token_id": [4, 46]},
    "sampled": {"do_sample": True, "top_k": 20},
    "seeds": {"do_sample": True, "seed": [3, 4]},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "DoLa": {"dola_layers": "high"},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "left padding": {"attention_mask": LEFT_PADDED},
    "chunks": {"prefill_chunk_size": 3},
}


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_eager_steps(
    model: nn.Module,
    device_model: nn.Module,
    mode: str,
    is_late: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ahead, "ALWAYS", is_late)
    for _ in range(2):  # the second call replays what the first has recorded
        both(model, device_model, **MODES[mode])
    assert Recorder.count == 1


def test_a_step_is_one_launch_and_what_prepares_and_chooses(
    model: nn.Module, device_model: nn.Module
) -> None:
    """No read, no copy, the same kernels every step; less than a third of what an eager step launches."""
    both(model, device_model)
    accelerator = both(model, device_model)
    steps = accelerator.steps()[1:-1]
    assert len(steps) == 10
    names = [[event.name for event in step] for step in steps]
    assert all(each == names[0] for each in names)
    assert names[0].count("replay") == 1
    assert {event.kind for event in steps[0]} == {"kernel"}
    with Accelerator(device_model) as eager:
        kwargs = STATIC | {"max_new_tokens": 12, "disable_compile": True}
        device_model.generate(to_device(prompt()), **kwargs)
    assert 3 * len(steps[0]) < len(eager.steps()[-2])


def test_a_graph_for_each_number_of_rows_and_visible_length(
    model: nn.Module, device_model: nn.Module
) -> None:
    both(model, device_model, prompt(2), max_new_tokens=150)
    # 64, 128 and 160 of the 157 tokens are visible: two sizes for each doubling.
    assert Recorder.count == 3
    both(model, device_model, prompt(1), max_new_tokens=10)
    assert Recorder.count == 4
    both(model, device_model, prompt(2), max_new_tokens=100)
    both(model, device_model, prompt(1), max_new_tokens=20)
    assert Recorder.count == 4


def test_graphs_go_with_the_memory_of_the_cache(model: nn.Module, device_model: nn.Module) -> None:
    both(model, device_model)
    hfgen.free_caches(device_model)
    both(model, device_model)
    assert Recorder.count == 2


def test_a_cache_that_is_kept_is_not_written_to(model: nn.Module, device_model: nn.Module) -> None:
    kwargs = STATIC | {"max_new_tokens": 12, "return_dict_in_generate": True}
    with Accelerator(device_model):
        kept = device_model.generate(to_device(prompt()), use_cuda_graph=True, **kwargs)
        layer = kept.past_key_values.layers[0]
        assert int(layer.get_seq_length()) == prompt().shape[1] + 11
        before = to_host(layer.keys.clone())
    both(model, device_model, prompt(2).flip(0))
    assert Recorder.count == 2
    assert to_host(layer.keys).equal(before)


def test_the_call_goes_on_from_a_returned_cache(model: nn.Module, device_model: nn.Module) -> None:
    """Eagerly: its counters are what they would be without graphs."""
    whole = model.generate(prompt(), **STATIC, max_new_tokens=9)
    with Accelerator(device_model):
        part = device_model.generate(
            to_device(prompt()),
            **STATIC,
            use_cuda_graph=True,
            max_new_tokens=4,
            max_cache_len=40,
            return_dict_in_generate=True,
        )
        rest = device_model.generate(
            part.sequences,
            past_key_values=part.past_key_values,
            eos_token_id=None,
            use_cuda_graph=True,
            max_new_tokens=5,
        )
    assert to_host(rest).equal(whole)


@pytest.mark.parametrize("is_in_place", [True, False])
def test_weights_that_change_are_seen(model: nn.Module, is_in_place: bool) -> None:
    model = hfgen.mix_into(tiny.llama())
    device_model = on_device(model)
    both(model, device_model)
    for each in (model, device_model):
        head = each.lm_head
        weight = head.weight.data.flip(0)
        if is_in_place:
            with torch.no_grad():
                head.weight.copy_(weight)
        else:
            head.weight = nn.Parameter(weight.clone(), requires_grad=False)
    both(model, device_model)


def test_hooks_and_adapters_that_come_later_are_seen(
    model: nn.Module, device_model: nn.Module, warned: Any
) -> None:
    both(model, device_model)
    handles = [
        each.model.norm.register_forward_hook(lambda module, args, out: -out)
        for each in (model, device_model)
    ]
    try:
        both(model, device_model)
    finally:
        for handle in handles:
            handle.remove()
    assert any("hooks" in message for message in warned())
    assert Recorder.count == 1


# ---------------------------------------------------------------- where nothing can be recorded


def test_a_forward_that_reads_the_device_is_run_eagerly(
    model: nn.Module, device_model: nn.Module, warned: Any
) -> None:
    norm = device_model.model.norm

    class Reads(nn.Module):
        def forward(self, states: Tensor) -> Tensor:
            assert bool(states.isfinite().all())
            return norm(states)

    device_model.model.norm = Reads()
    both(model, device_model)
    (message,) = {message for message in warned() if "use_cuda_graph" in message}
    assert "_local_scalar_dense is not permitted while a graph is recorded" in message
    assert Recorder.active is None


@pytest.mark.parametrize(
    ("kwargs", "why"),
    [
        ({"cache_implementation": None}, "cache_implementation='static'"),
        (
            {"return_dict_in_generate": True, "output_hidden_states": True},
            "hidden states are returned",
        ),
    ],
    ids=["dynamic", "outputs"],
)
def test_what_stands_in_the_way_is_said(
    device_model: nn.Module, warned: Any, kwargs: dict[str, Any], why: str
) -> None:
    kwargs = STATIC | {"max_new_tokens": 3, "use_cuda_graph": True} | kwargs
    with Accelerator(device_model):
        device_model.generate(to_device(prompt()), **kwargs)
    assert any(why in message for message in warned())
    assert Recorder.count == 0


def test_a_cpu_has_no_graphs(model: nn.Module, warned: Any) -> None:
    tokens = model.generate(prompt(), **STATIC, max_new_tokens=5, use_cuda_graph=True)
    assert tokens.equal(model.generate(prompt(), **STATIC, max_new_tokens=5))
    assert any("a device of type 'cpu' has no graphs" in message for message in warned())


def test_models_with_windows_and_encoders_are_run_eagerly(warned: Any) -> None:
    for name in ("mistral", "t5", "flaubert"):
        model = ours(name) if name != "t5" else hfgen.mix_into(tiny.t5())
        with quiet():
            both(model, on_device(model), max_new_tokens=4)
    assert Recorder.count == 0


def test_the_field_is_checked(model: nn.Module) -> None:
    with pytest.raises(TypeError, match="use_cuda_graph"):
        model.generate(prompt(), use_cuda_graph="yes", max_new_tokens=2)


# ---------------------------------------------------------------- families


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "gpt_neox", "qwen3", "phi", "olmo2", "granite", "cohere", "stablelm"]
)
def test_family(name: str) -> None:
    model = ours(name)
    with quiet(), torch.no_grad():
        both(model, on_device(model), FAMILIES[name].inputs(model, 2, False, 1)["input_ids"])
    assert Recorder.count == 1


# ---------------------------------------------------------------- the recorders


def test_the_simulated_recorder_repeats_operations_on_the_same_addresses() -> None:
    with Accelerator():
        x, weights = to_device(torch.ones(3)), [to_device(torch.full((3,), 2.0))]
        recorder = Recorder(DEVICE)
        total = to_device(torch.zeros(3))

        def function() -> Tensor:
            total.add_(x)
            return (x * weights[0])[1:] + 1

        result = recorder.record(function, total.zero_)
        address = result.data_ptr()
        x.fill_(5.0)
        recorder.replay()
        assert (result.tolist(), result.data_ptr()) == ([11.0, 11.0], address)
        assert total.tolist() == [6.0] * 3
        with pytest.raises(RuntimeError, match="not permitted"):
            Recorder(DEVICE).record(lambda: x.sum().item(), lambda: None)
        assert isinstance(weights[0], DeviceTensor)
        weights.clear()
        with pytest.raises(RuntimeError, match="memory which is free"):
            recorder.replay()


def test_torch_has_what_the_recorder_of_cuda_calls() -> None:
    assert "capture_error_mode" in inspect.signature(torch.cuda.graph).parameters
    assert callable(torch.cuda.CUDAGraph.replay)
    assert callable(torch.cuda.Stream.wait_stream)
