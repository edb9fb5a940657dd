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
from hfgen.decoding.strategies.sample import Sample
from hfgen.memory.caches import static_layers
from hfgen.running import ahead, graphs
from tests import tiny
from tests.drafting_models import whisper
from tests.host_recorder import Reads
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
def _recorder(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.fixture(scope="module")
def drafting() -> tuple[nn.Module, nn.Module]:
    """A model whose drafts are accepted often, and its first layer."""
    model, assistant = (hfgen.mix_into(whisper(tiny.llama(), 0.3)) for _ in range(2))
    assistant.model.layers = assistant.model.layers[:1]
    assistant.config.num_hidden_layers = 1
    return model, assistant


def prompt(rows: int = 2, length: int = 7) -> Tensor:
    return tiny.prompt(rows, length, seed=2)


def both(
    model: nn.Module, device_model: nn.Module, ids: Tensor | None = None, **kwargs: Any
) -> Accelerator:
    """What happened on the device in a call with graphs, which gave the tokens of the CPU's eager call."""
    ids, kwargs = prompt() if ids is None else ids, STATIC | {"max_new_tokens": 12} | kwargs
    mask = kwargs.pop("attention_mask", torch.ones_like(ids))
    on_its_device = {name: kwargs.pop(name) for name in ("assistant_model",) if name in kwargs}
    assistant = {name: pair[0] for name, pair in on_its_device.items()}
    torch.manual_seed(0)
    expected = model.generate(ids, attention_mask=mask, **kwargs, **assistant)
    expected_state = torch.get_rng_state()
    assistant = {name: pair[1] for name, pair in on_its_device.items()}
    torch.manual_seed(0)
    with Accelerator(device_model) as accelerator:
        tokens = device_model.generate(
            to_device(ids),
            attention_mask=to_device(mask),
            use_cuda_graph=True,
            **kwargs,
            **assistant,
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
    "beams": {"num_beams": 3},
    "beams, EOS": {"num_beams": 2, "eos_token_id": [4, 46], "length_penalty": 2.0},
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "beams, seeds": {"num_beams": 2, "do_sample": True, "seed": [3, 4]},
    "beams, left padding": {"num_beams": 2, "attention_mask": LEFT_PADDED},
    "group beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constrained beams": {"num_beams": 3, "force_words_ids": [[7, 8]]},
    "contrastive": {"penalty_alpha": 0.5, "top_k": 4},
    "contrastive, one by one": {"penalty_alpha": 0.5, "top_k": 4, "low_memory": True},
    "minimum Bayes risk": {
        "custom_generate": hfgen.minimum_bayes_risk(hfgen.token_f1, on_tokens=True),
        "do_sample": True,
        "num_return_sequences": 3,
    },
}


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_eager_steps(
    model: nn.Module, device_model: nn.Module, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With late checks in every other mode."""
    monkeypatch.setattr(ahead, "ALWAYS", list(MODES).index(mode) % 2 == 1)
    for _ in range(2):  # the second call replays what the first has recorded
        accelerator = both(model, device_model, **MODES[mode])
        assert Recorder.count == 1
    assert [event.name for event in accelerator.events].count("replay") >= 11


#: Modes whose steps ask nothing of the host, and the least share of an eager step's kernels that they save.
#: Not of contrastive search, whose list of states grows now and then.
ON_THE_DEVICE = {
    **dict.fromkeys(("greedy", "sampled", "seeds", "several", "minimum Bayes risk"), 0.55),
    **dict.fromkeys(("DoLa", "penalties", "beams", "beam sampling", "beams, seeds"), 0.4),
    "group beams": 0.3,
}


@pytest.mark.parametrize("mode", ON_THE_DEVICE)
def test_a_step_is_launches_and_what_prepares_and_chooses(
    model: nn.Module, device_model: nn.Module, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No read, no copy, the same addresses and the same kernels at every step."""
    both(model, device_model, **MODES[mode])
    places = []
    forward = graphs.Recorded.__call__

    def noted(self: Any, **inputs: Any) -> Any:
        outputs = forward(self, **inputs)
        addresses = [value.data_ptr() for value in outputs.values() if isinstance(value, Tensor)]
        places.append((addresses, [graphs._place(layer) for layer in self.layers]))
        return outputs

    monkeypatch.setattr(graphs.Recorded, "__call__", noted)
    accelerator = both(model, device_model, **MODES[mode])
    steps = [step for step in accelerator.steps() if step and step[0].name == "replay"]
    names = [[event.name for event in step] for step in steps[1:-1]]
    assert len(names) >= 9
    assert all(each == names[0] for each in names)
    assert names[0].count("replay") == 1
    assert {event.kind for step in steps[1:-1] for event in step} == {"kernel"}
    assert all(place == places[0] for place in places)
    with Accelerator(device_model) as eager:
        kwargs = STATIC | {"max_new_tokens": 12, "disable_compile": True} | MODES[mode]
        device_model.generate(to_device(prompt()), **kwargs)
    n_saved = 1 - len(names[0]) / len(eager.steps()[-2])
    assert n_saved > ON_THE_DEVICE[mode]


DRAFTED: dict[str, dict[str, Any]] = {
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "assistant": {"assistant_model": None},
    "early exit": {"assistant_early_exit": 1},
    "assistant, sampled": {"assistant_model": None, "do_sample": True, "temperature": 0.2},
    "assistant, seeds": {"assistant_model": None, "do_sample": True, "seed": [3, 4]},
}


@pytest.mark.parametrize("mode", DRAFTED)
def test_verification_and_drafts_are_recorded(
    drafting: tuple[nn.Module, nn.Module], mode: str
) -> None:
    """A graph for each number of tokens. A round reads its verdict, and nothing else."""
    model, assistant = drafting
    device_model, kwargs = on_device(model), dict(DRAFTED[mode])
    ids = torch.tensor([[11, 12, 13, 11, 12, 13, 11], [21, 22, 21, 22, 21, 22, 21]])
    if "assistant_model" in kwargs:
        kwargs["assistant_model"] = assistant, on_device(assistant)
    kwargs |= {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    for _ in range(2):
        before = Recorder.count
        accelerator = both(model, device_model, ids, max_new_tokens=14, **kwargs)
    # The view of the first layers is made for a call, and so is its cache.
    assert Recorder.count - before == (mode == "early exit")
    events = accelerator.events
    reads = [i for i, event in enumerate(events) if event.kind == "read"]
    verdicts = [i for i in reads if "verification.py" in events[i].where]
    behind = events[verdicts[0] :]  # the prompt, and the first round
    assert len(verdicts) > 3
    assert sum(event.name == "replay" for event in behind) >= len(verdicts) - 1
    assert sum(event.kind == "read" for event in behind) == len(verdicts)


def test_a_graph_for_each_number_of_rows_and_visible_length(
    model: nn.Module, device_model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_layers, "GRAIN", 8)
    both(model, device_model, prompt(2), max_new_tokens=18)
    # 8, 16 and 24 of the 24 tokens are visible: two sizes for each doubling.
    assert Recorder.count == 3
    both(model, device_model, prompt(1), max_new_tokens=8)
    assert Recorder.count == 5
    both(model, device_model, prompt(2), max_new_tokens=14)
    both(model, device_model, prompt(1), max_new_tokens=9)
    assert Recorder.count == 5


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
    device_model.model.norm = Reads(device_model.model.norm)
    both(model, device_model)
    (message,) = {message for message in warned() if "use_cuda_graph" in message}
    assert "_local_scalar_dense is not permitted while a graph is recorded" in message
    assert Recorder.active is None


def test_a_forward_that_draws_is_run_eagerly(warned: Any) -> None:
    model = hfgen.mix_into(tiny.llama(attention_dropout=0.5)).train()
    both(model, on_device(model))
    assert any("draws random numbers" in message for message in warned())


def test_a_strategy_has_to_declare_that_it_can(
    model: nn.Module, device_model: nn.Module, warned: Any
) -> None:
    """One of somebody's own may keep what a forward returned."""

    class Own(Sample):
        pass

    class Declared(Own):
        may_record = True

    def alone(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
        return ids

    both(model, device_model, custom_generate=hfgen.recipe(Own))
    assert Recorder.count == 0
    assert any("Own does not declare `may_record`" in message for message in warned())
    both(model, device_model, custom_generate=alone)
    assert any("method does not declare `may_record`" in message for message in warned())
    both(model, device_model, custom_generate=hfgen.recipe(Declared))
    assert Recorder.count == 1


def test_the_engine_says_that_it_does_not(
    model: nn.Module, device_model: nn.Module, warned: Any
) -> None:
    with Accelerator():
        engine = hfgen.Engine(device_model, memory=1e9)
        request = engine.add(to_device(prompt(1)), use_cuda_graph=True, max_new_tokens=3)
        tokens = request.result().token_ids
    expected = model.generate(prompt(1), max_new_tokens=3)[0, prompt(1).shape[1] :]
    assert tokens == expected.tolist()
    assert any("rows of an engine join and leave" in message for message in warned())


@pytest.mark.parametrize("name", ["bloom", "openai-gpt", "mpt"])
def test_no_family_is_left_out_in_silence(name: str, warned: Any) -> None:
    model = ours(name)
    with torch.no_grad():
        inputs = FAMILIES[name].inputs(model, 2, False, 1)
        both(model, on_device(model), inputs["input_ids"], max_new_tokens=3)
    assert Recorder.count == 0
    assert len({message for message in warned() if "use_cuda_graph" in message}) == 1


@pytest.mark.parametrize(
    ("kwargs", "why"),
    [
        ({"cache_implementation": None}, "cache_implementation='static'"),
        ({"cache_implementation": None, "num_beams": 2}, "cache_implementation='static'"),
        (
            {"cache_implementation": None, "prompt_lookup_num_tokens": 2},
            "cache_implementation='static'",
        ),
        (
            {"return_dict_in_generate": True, "output_hidden_states": True},
            "hidden states are returned",
        ),
    ],
    ids=["dynamic", "beams", "drafts", "outputs"],
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
