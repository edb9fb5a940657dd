"""`hfgen.optimize(model, compile=True)`: the same tokens in every mode, by few graphs, and undone."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaMLP

import hfgen
from hfgen.families import CACHE
from hfgen.memory.caches.dynamic import GrowingLayer
from hfgen.running.optimization import compiled_layers, kernels
from hfgen.running.optimization.compiled_layers import CompiledLayer, LayerGraph, find_layers
from hfgen.running.optimization.forward import PackedForward
from tests import tiny
from tests.test_length_classes import check, solo
from tests.test_threads import recording

STATIC = {"cache_implementation": "static", "disable_compile": True}


def llama() -> Any:
    return hfgen.mix_into(tiny.llama(num_hidden_layers=4)).eval()


@pytest.fixture(scope="module")
def plain() -> Any:
    return llama()


@pytest.fixture(scope="module")
def compiled() -> Iterator[Any]:
    """Graphs are made by the compiler's front end, and run operator by operator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_layers, "BACKEND", "eager")
        yield hfgen.optimize(llama(), compile=True, kernels="own")


@pytest.fixture
def graphs() -> Any:
    """How many graphs have been made since the test began."""
    before = counters["stats"]["unique_graphs"]
    return lambda: counters["stats"]["unique_graphs"] - before


def padded(*lengths: int) -> dict[str, Tensor]:
    width = max(lengths)
    ids = tiny.prompt(len(lengths), width)
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def generate(model: Any, inputs: Any, **options: Any) -> Tensor:
    given = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
    torch.manual_seed(0)
    return model.generate(**given, **({"max_new_tokens": 12, "eos_token_id": None} | options))


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "seed": {"do_sample": True, "seed": 5},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "lookup": {"prompt_lookup_num_tokens": 4},
    "early exit": {"assistant_early_exit": 2},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "chunks": {"prefill_chunk_size": 3},
    "quantised cache": {"cache_implementation": "quantized"},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_same_tokens(plain, compiled, mode):
    for inputs in (tiny.prompt(1, 9), padded(9, 4, 7)):
        if mode in ("contrastive", "early exit") and isinstance(inputs, dict):
            continue
        expected = generate(plain, inputs, **MODES[mode])
        assert torch.equal(generate(compiled, inputs, **MODES[mode]), expected)
    assert compiled.optimization.graph.failure is None


@pytest.mark.parametrize("mode", ["greedy", "beams", "lookup"])
def test_static_caches_as_well(plain, compiled, mode):
    for inputs in (tiny.prompt(1, 9), padded(9, 4, 7)):
        expected = generate(plain, inputs, **MODES[mode])
        for _ in range(2):  # the second one in the memory of the first
            assert torch.equal(generate(compiled, inputs, **MODES[mode], **STATIC), expected)
    assert compiled.optimization.graph.failure is None


def test_layers_run_compiled(compiled, monkeypatch):
    forwarded = []
    own = LayerGraph.__call__

    def noting(self: Any, layer: Any, hidden: Tensor, *args: Any) -> Any:
        forwarded.append(hidden.shape[1])
        return own(self, layer, hidden, *args)

    monkeypatch.setattr(LayerGraph, "__call__", noting)
    generate(compiled, tiny.prompt(1, 9), max_new_tokens=5)
    assert forwarded == [1] * 4 * 4  # four layers, and four steps behind the prompt
    forwarded.clear()
    generate(compiled, tiny.prompt(1, 4).repeat(1, 4), prompt_lookup_num_tokens=3)
    assert max(forwarded) > 1


@pytest.mark.parametrize("options", [{}, STATIC], ids=["dynamic", "static"])
def test_no_other_graph_for_other_rows_and_lengths(compiled, graphs, options):
    for inputs in (tiny.prompt(1, 9), tiny.prompt(2, 9), padded(9), padded(9, 4)):
        generate(compiled, inputs, **options)
    before = graphs()
    for rows, length, n in ((1, 3, 70), (5, 30, 4), (2, 100, 30)):
        generate(compiled, tiny.prompt(rows, length), max_new_tokens=n, **options)
        generate(compiled, padded(*range(2, 2 + rows)), max_new_tokens=n, **options)
    assert graphs() == before


def test_a_short_cache_is_written_in_place() -> None:
    layer = GrowingLayer()
    layer.update(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8))
    addresses = set()
    for n in range(6, 30):
        keys, values, start = layer.reserve(1)
        keys[:, :, start:], values[:, :, start:] = n, -n
        addresses.add(keys.data_ptr())
    assert len(addresses) == 1
    expected = torch.cat([torch.zeros(5), torch.arange(6.0, 30)]).expand(1, 2, 29)
    assert torch.equal(layer.keys[..., 3], expected)
    assert torch.equal(layer.values[..., 7], -expected)


def test_one_graph_is_for_all_layers(graphs, monkeypatch):
    monkeypatch.setattr(compiled_layers, "BACKEND", "eager")
    model = hfgen.optimize(llama(), compile=True, kernels="own")
    generate(model, tiny.prompt(1, 9))
    assert graphs() == 1
    generate(model, tiny.prompt(3, 5))
    generate(model, tiny.prompt(2, 15))
    assert graphs() == 2  # a single row has one of its own


def test_a_single_row_in_a_static_cache_has_the_graph_that_was_prepared(monkeypatch, graphs):
    """Another one, which a call compiled, had the sizes of that call."""
    monkeypatch.setattr(compiled_layers, "BACKEND", "eager")
    model = hfgen.optimize(llama(), compile=True, kernels="own")
    for length, n in ((9, 12), (5, 20), (30, 40)):
        generate(model, padded(length), **MODES["lookup"], **STATIC, max_new_tokens=n)
    assert graphs() == 2  # one new token, or more


def test_drafts_of_any_length_are_verified_by_one_graph(compiled, graphs):
    ids = tiny.prompt(2, 4).repeat(1, 5)
    generate(compiled, ids, prompt_lookup_num_tokens=3)
    generate(compiled, ids[:1], prompt_lookup_num_tokens=3)
    before = graphs()
    for n in (2, 5, 9):
        generate(compiled, ids, prompt_lookup_num_tokens=n, max_new_tokens=20)
        generate(compiled, ids[:1], prompt_lookup_num_tokens=n, max_new_tokens=20)
    assert graphs() == before


def test_an_assistant_is_compiled_by_itself(plain, compiled):
    draft = hfgen.optimize(
        hfgen.mix_into(tiny.llama(num_hidden_layers=1)).eval(), compile=True, kernels="own"
    )
    expected = generate(plain, padded(9, 5))
    found = generate(compiled, padded(9, 5), assistant_model=draft)
    assert torch.equal(found, expected)
    assert draft.optimization.graph.failure is None


def test_a_prefix_cache(plain, compiled):
    prefixes = hfgen.PrefixCache()
    ids = tiny.prompt(1, 40)
    for inputs in (ids, torch.cat([ids, tiny.prompt(1, 3, seed=4)], dim=1)):
        expected = generate(plain, inputs)
        assert torch.equal(generate(compiled, inputs, prefix_cache=prefixes), expected)
    assert prefixes.stats.tokens_saved > 30
    assert compiled.optimization.graph.failure is None


def test_the_engine(plain, compiled):
    prompts = [tiny.prompt(1, length, seed=length) for length in (3, 9, 5, 17, 4)]
    engine = hfgen.Engine(compiled)
    requests = [engine.add(ids, max_new_tokens=12, eos_token_id=None) for ids in prompts]
    for _ in engine.events():
        pass
    for request, ids in zip(requests, prompts, strict=True):
        check(request.result(), solo(plain, ids, {"max_new_tokens": 12, "eos_token_id": None}))
    assert compiled.optimization.graph.failure is None


@pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning"
)  # of what torch's compiler imports
def test_the_compilers_own_code_gives_the_same_tokens(plain, monkeypatch):
    monkeypatch.setattr(compiled_layers, "BACKEND", "inductor")
    with hfgen.optimized(llama(), compile=True, kernels="own") as model:
        for inputs in (tiny.prompt(1, 9), padded(9, 4, 7)):
            assert torch.equal(generate(model, inputs), generate(plain, inputs))
        assert model.optimization.graph.failure is None
        assert "4 of 4 decoder layers compiled so far\n" in str(model.optimization)
        known = model.model.layers[3].forward.known.checked.values()
        assert {graph.graph.run.__self__.__class__.__name__ for graph in known} == {"Runner"}
        versions: list[int] = []

        def note(_: Any, args: Any, kwargs: Any) -> None:
            versions.append(kwargs[CACHE].layers[0].keys._version)

        model.model.layers[3].register_forward_pre_hook(note, with_kwargs=True)
        generate(model, tiny.prompt(1, 40), max_new_tokens=6)
        assert max(versions) >= 5  # each write of a step is counted


@pytest.mark.parametrize(
    "length", [9, 40]
)  # short caches are concatenated, longer ones grow in place
def test_a_forward_that_ends_early_leaves_the_cache_of_later_layers(plain, compiled, length):
    ids = tiny.prompt(2, length)
    expected = generate(plain, ids, max_new_tokens=30)

    n_calls = itertools.count()

    def fail_in_fifth_forward(*_: Any) -> None:
        if next(n_calls) == 4:
            raise LookupError

    cache = DynamicCache(config=compiled.config)
    hook = compiled.model.layers[2].register_forward_pre_hook(fail_in_fifth_forward)
    with pytest.raises(LookupError):
        generate(compiled, ids[:1], past_key_values=cache, max_new_tokens=30)
    hook.remove()
    assert [len(layer.keys[0, 0]) for layer in cache.layers] == [length + 4] * 2 + [length + 3] * 2
    for layer in cache.layers[:2]:
        layer.crop(-1)
    found = generate(compiled, expected[:1, : length + 4], past_key_values=cache, max_new_tokens=26)
    assert torch.equal(found, expected[:1])
    assert torch.equal(generate(compiled, ids, max_new_tokens=30), expected)


def test_a_second_look_within_a_forward_hides_no_change_of_earlier_layers(monkeypatch):
    """As where a layer runs twice: what is found then is no news of earlier layers for the next step."""
    name, texts, own = packing(monkeypatch, "int8"), [], LayerGraph.__call__

    def clear(graph: Any, layer: Any, *args: Any) -> Any:
        if layer.index == 1:
            graph._forward.prepared.clear()
        return own(graph, layer, *args)

    monkeypatch.setattr(LayerGraph, "__call__", clear)
    for compile in (False, True):
        model = hfgen.optimize(llama(), compile=compile, weights=name)
        text: list[int] = []
        stream = model.stream(tiny.prompt(1, 9), max_new_tokens=12, eos_token_id=None)
        for number, event in enumerate(stream):
            text += event.token_ids
            if number == 5:
                model.model.layers[0].mlp.down_proj.weight.data.neg_()  # moves no count of writes
        texts.append(text)
    assert texts[0] == texts[1]


@pytest.fixture
def guarded(compiled, monkeypatch) -> list[Any]:
    """The layers that have been called with a look at the compiler's guards."""
    generate(compiled, tiny.prompt(1, 9))
    graph = compiled.optimization.graph
    function, layers = graph._function, []
    monkeypatch.setattr(
        graph,
        "_function",
        lambda layer, **kwargs: layers.append(layer) or function(layer, **kwargs),
    )
    return layers


def test_threads_decode_at_once(plain, compiled):
    """Each with masks, positions and guards of its own, though another thread runs after each line."""

    def give_way(frame, event, value):
        if frame.f_code.co_filename != compiled_layers.__file__:
            return None
        time.sleep(1e-6)
        return give_way

    inputs = [padded(9, 4), padded(12, 5, 7), {"input_ids": tiny.prompt(1, 6)}, padded(23, 2)]
    expected = [generate(plain, each) for each in inputs]
    for each in inputs:
        generate(compiled, each)
    threading.settrace(give_way)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda each: generate(compiled, each), inputs))
    finally:
        threading.settrace(None)
    assert all(map(torch.equal, found, expected))
    assert compiled.optimization.graph.failure is None


def test_records_of_another_thread_leave_layers_compiled(plain, compiled, guarded, monkeypatch):
    ids, options = tiny.prompt(1, 9), {"max_new_tokens": 3}
    with recording(compiled, monkeypatch):
        guarded.clear()
        found = generate(compiled, ids, **options)
    assert len(guarded) == 4
    assert torch.equal(found, generate(plain, ids, **options))


@pytest.mark.parametrize("options", [{}, STATIC], ids=["dynamic", "static"])
def test_guards_are_checked_once_per_call(plain, compiled, guarded, options):
    for inputs, n in ((tiny.prompt(1, 9), 90), (padded(9, 4, 7), 20)):
        generate(compiled, inputs, max_new_tokens=3, **options)  # compiles
        guarded.clear()
        found = generate(compiled, inputs, max_new_tokens=n, **options)
        assert len(guarded) == 4  # of four layers, at the first step
        assert torch.equal(found, generate(plain, inputs, max_new_tokens=n, **options))


def test_guards_are_checked_again_for_other_kinds_of_steps(plain, compiled, guarded):
    ids = tiny.prompt(3, 4).repeat(1, 4)
    ends = generate(plain, ids, max_new_tokens=30)[:2, 16 + 9].tolist()  # two rows end, one goes on
    for options in ({"prompt_lookup_num_tokens": 4}, {"eos_token_id": ends, "pad_token_id": 0}):
        options |= {"max_new_tokens": 60}
        generate(compiled, ids, **options)
        guarded.clear()
        assert torch.equal(generate(compiled, ids, **options), generate(plain, ids, **options))
        assert 4 <= len(guarded) <= 4 * 4


@pytest.mark.parametrize("change", ["weight", "module", "constant"])
def test_a_change_between_calls_with_one_cache_is_seen(monkeypatch, change):
    monkeypatch.setattr(compiled_layers, "BACKEND", "eager")
    model, other = hfgen.optimize(llama(), compile=True, kernels="own"), llama()
    ids = tiny.prompt(1, 9)
    texts = []
    for each in (model, other):
        cache = DynamicCache(config=each.config)
        text = generate(each, ids, past_key_values=cache)
        attention = each.model.layers[2].self_attn
        if change == "weight":
            attention.q_proj.weight = torch.nn.Parameter(-attention.q_proj.weight)
        elif change == "module":
            attention.o_proj = copy.deepcopy(each.model.layers[1].self_attn.o_proj)
        else:
            attention.scaling = -3.0
        texts.append(generate(each, text, past_key_values=cache, max_new_tokens=20))
    assert torch.equal(*texts)


def packing(monkeypatch: pytest.MonkeyPatch, name: str = "onednn") -> str:
    """A kernel that this machine has, and a quick compiler."""
    monkeypatch.setattr(compiled_layers, "BACKEND", "eager")
    if not kernels.works(name):
        pytest.skip(reason="this machine has no such kernel")
    return name


@pytest.fixture
def used(monkeypatch) -> list[str]:
    """The kernel of each product."""
    names: list[str] = []
    own = PackedForward.compute
    monkeypatch.setattr(
        PackedForward, "compute", lambda self, x: names.append(self.kernel.name) or own(self, x)
    )
    return names


def test_packed_weights_stay_packed(plain, monkeypatch, used):
    kernel = packing(monkeypatch)
    model = hfgen.optimize(llama(), compile=True, kernels=kernel)
    found = generate(model, tiny.prompt(1, 9), max_new_tokens=4)
    used.clear()
    assert torch.equal(generate(model, tiny.prompt(1, 9), max_new_tokens=4), found)
    assert used == ["onednn"] * 4 * (4 * 7 + 1)
    assert torch.equal(found, generate(plain, tiny.prompt(1, 9), max_new_tokens=4))
    assert model.optimization.graph.failure is None


def test_layers_with_packed_weights_share_graphs(plain, monkeypatch, graphs):
    kernel = packing(monkeypatch)
    model = hfgen.optimize(llama(), compile=True, kernels=kernel)
    generate(model, tiny.prompt(1, 9))
    assert graphs() == 1
    ids = tiny.prompt(2, 4).repeat(1, 5)
    for inputs in (ids[:1], ids, padded(9, 4, 7)):
        for options in ({}, {"prompt_lookup_num_tokens": 4}):
            expected = generate(plain, inputs, **options)
            assert torch.equal(generate(model, inputs, **options), expected)
    assert graphs() <= 5


def test_models_that_share_weights_keep_their_kernels(monkeypatch, used):
    model = llama()
    shared = {id(weight): weight for weight in model.parameters()}
    twins = {name: copy.deepcopy(model, dict(shared)) for name in ("onednn", "int8")}
    for name, twin in twins.items():
        hfgen.optimize(twin, compile=True, kernels=packing(monkeypatch, name))
    for _ in range(2):
        for name, twin in twins.items():
            used.clear()
            generate(twin, tiny.prompt(1, 9))
            assert set(used) == {name}


def test_a_packed_weight_is_packed_again_where_a_graph_uses_it(monkeypatch, used):
    kernel = packing(monkeypatch)
    model, other = hfgen.optimize(llama(), compile=True, kernels=kernel), llama()
    before = generate(model, tiny.prompt(1, 9))
    for each in (model, other):
        projection = each.model.layers[2].mlp.down_proj
        projection.weight = torch.nn.Parameter(-projection.weight)
    found = generate(model, tiny.prompt(1, 9))
    assert torch.equal(found, generate(other, tiny.prompt(1, 9)))
    assert not torch.equal(found, before)


def test_a_packed_layer_in_a_graph_of_the_users(monkeypatch, used):
    layers = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 16))
    model = hfgen.optimize(layers, kernels=packing(monkeypatch))
    function = torch.compile(model.eval(), backend="eager", fullgraph=True)
    x = torch.randn(2, 3, 64)
    with torch.no_grad():
        expected = model(x)
        used.clear()
        assert torch.equal(function(x), expected)
    assert used == ["onednn"] * 2


def test_a_changed_weight_is_seen(plain, monkeypatch):
    monkeypatch.setattr(compiled_layers, "BACKEND", "eager")
    model, other = hfgen.optimize(llama(), compile=True, kernels="own"), llama()
    generate(model, tiny.prompt(1, 9))
    for each in (model, other):
        with torch.no_grad():
            each.model.layers[2].mlp.down_proj.weight.neg_()
            each.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(
                -each.model.layers[1].mlp.up_proj.weight
            )
    assert torch.equal(generate(model, tiny.prompt(1, 9)), generate(other, tiny.prompt(1, 9)))
    assert not torch.equal(generate(model, tiny.prompt(1, 9)), generate(plain, tiny.prompt(1, 9)))
    hooked = model.model.layers[3].mlp.register_forward_hook(lambda m, args, out: -out)
    other.model.layers[3].mlp.register_forward_hook(lambda m, args, out: -out)
    assert torch.equal(generate(model, tiny.prompt(1, 9)), generate(other, tiny.prompt(1, 9)))
    hooked.remove()


def test_autocast_runs_the_layers_own_forward(plain, compiled):
    for inputs in (tiny.prompt(1, 9), padded(9, 4)):
        generate(compiled, inputs)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(generate(compiled, inputs), generate(plain, inputs))
        assert torch.equal(generate(compiled, inputs), generate(plain, inputs))
    assert compiled.optimization.graph.failure is None


def test_hooks_of_all_modules_and_modes_see_what_they_see_without_graphs(plain, compiled):
    generate(compiled, tiny.prompt(1, 9))
    seen: list[list[str]] = []
    for model in (plain, compiled):
        called: list[str] = []
        hook = torch.nn.modules.module.register_module_forward_hook(
            lambda module, args, out, called=called: called.append(type(module).__name__)
        )
        try:
            generate(model, tiny.prompt(1, 9), max_new_tokens=3)
        finally:
            hook.remove()
        seen.append(called)
    assert seen[0] == seen[1]
    counts = []
    for model in (plain, compiled):
        with FlopCounterMode(display=False) as counter:
            generate(model, tiny.prompt(1, 9))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]
    assert compiled.optimization.graph.failure is None


def test_a_cache_of_another_type_is_converted_as_without_graphs(compiled):
    texts = []
    for model in (compiled, llama()):
        cache = DynamicCache(config=model.config)
        text = generate(model, tiny.prompt(1, 9), past_key_values=cache)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.half(), layer.values.half()
        texts.append(generate(model, text, past_key_values=cache))
    assert torch.equal(*texts)
    assert compiled.optimization.graph.failure is None


def test_restore_leaves_no_trace(plain):
    model = hfgen.optimize(llama(), compile=True, kernels="own")
    assert all(isinstance(layer.forward, CompiledLayer) for layer in model.model.layers)
    assert find_layers(model) == {}
    hfgen.restore(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert not hasattr(model, "optimization")
    assert len(find_layers(model)) == 4


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_compiled_by_themselves(plain, monkeypatch, copied):
    monkeypatch.setattr(compiled_layers, "BACKEND", "eager")
    model = hfgen.optimize(llama(), compile=True, kernels="own")
    twin = copied(model)
    forwards = [layer.forward for layer in twin.model.layers]
    assert [f.module for f in forwards] == list(twin.model.layers)
    assert len({id(f.graph) for f in forwards}) == 1
    assert forwards[0].graph is not model.optimization.graph
    assert torch.equal(generate(twin, tiny.prompt(1, 9)), generate(plain, tiny.prompt(1, 9)))


def test_training_and_gradients_run_the_layers_own_forward(compiled, graphs):
    ids = tiny.prompt(1, 9)
    compiled(ids, labels=ids).loss.backward()
    assert compiled.model.layers[0].mlp.up_proj.weight.grad is not None
    compiled.zero_grad()
    assert graphs() == 0


def test_what_cannot_be_compiled_runs_as_it_is_and_says_so(plain, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(compiled_layers.logger, "warning", said.append)

    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(compiled_layers, "BACKEND", broken)
    model = hfgen.optimize(llama(), compile=True, kernels="own")
    for _ in range(2):
        for ids in (tiny.prompt(1, 9), tiny.prompt(3, 5)):
            assert torch.equal(generate(model, ids), generate(plain, ids))
    assert len(said) == 1
    assert "No working C++ compiler" in said[0]
    assert "C++ compiler" in str(model.optimization)


def test_a_torch_that_is_too_old_compiles_no_layer_and_says_so(plain, graphs, monkeypatch):
    monkeypatch.setattr(compiled_layers, "OLDEST_TORCH", "99.1")
    monkeypatch.setattr(compiled_layers.logger, "warning", lambda text: None)
    model = hfgen.optimize(llama(), compile=True, kernels="own")
    assert torch.equal(generate(model, tiny.prompt(1, 9)), generate(plain, tiny.prompt(1, 9)))
    assert f"torch 99.1 or newer is needed, not {torch.__version__}" in str(model.optimization)
    assert graphs() == 0


def test_a_layer_that_keeps_something_runs_as_it_is(plain, monkeypatch):
    monkeypatch.setattr(compiled_layers, "BACKEND", "eager")
    monkeypatch.setattr(compiled_layers.logger, "warning", lambda text: None)
    model = llama()

    class Keeping(type(model.model.layers[0].mlp)):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = x
            return super().forward(x)

    for layer in model.model.layers:
        layer.mlp.__class__ = Keeping
    hfgen.optimize(model, compile=True, kernels="own")
    assert torch.equal(generate(model, tiny.prompt(1, 9)), generate(plain, tiny.prompt(1, 9)))
    assert model.model.layers[1].mlp.kept.shape[1] == 1
    assert "sets attributes of itself" in str(model.optimization)


def test_a_failure_behind_the_first_call_costs_no_token(plain, monkeypatch):
    monkeypatch.setattr(compiled_layers, "BACKEND", "eager")
    monkeypatch.setattr(compiled_layers.logger, "warning", lambda text: None)
    model = hfgen.optimize(llama(), compile=True, kernels="own")
    generate(model, tiny.prompt(1, 9))
    function, left = model.optimization.graph._function, [3]

    def failing(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("out of luck")
        return function(*args, **kwargs)

    model.optimization.graph._function = failing
    assert torch.equal(generate(model, tiny.prompt(2, 9)), generate(plain, tiny.prompt(2, 9)))
    assert "0 of 4 decoder layers compiled so far: RuntimeError: out of luck" in str(
        model.optimization
    )


class Doubling(LlamaMLP):
    """Writes to its input between two products of it."""

    def forward(self, x: Tensor) -> Any:
        gate = self.act_fn(self.gate_proj(x))
        x.mul_(2)
        return self.down_proj(gate * self.up_proj(x))


@pytest.mark.parametrize("change", ["input", "in a hook", "twice"])
def test_changes_within_a_step_and_in_two_steps_are_seen(monkeypatch, change):
    name, texts = packing(monkeypatch, "fp32"), []
    for compile in (False, True):
        model, text, n_calls = llama(), list[int](), itertools.count()
        mlp = model.model.layers[2].mlp
        if change == "input":
            mlp.__class__ = Doubling
        hfgen.optimize(model, compile=compile, kernels=name)

        def halve(*_: Any, mlp: Any = mlp) -> None:
            with torch.no_grad():
                mlp.up_proj.weight.mul_(-0.5)

        def halve_in_fifth_forward(*_: Any, n: Any = n_calls, halve: Any = halve) -> None:
            if next(n) == 4:
                halve()

        if change == "in a hook":
            model.model.layers[1].register_forward_pre_hook(halve_in_fifth_forward)
        stream = model.stream(tiny.prompt(1, 9), max_new_tokens=12, eos_token_id=None)
        for number, event in enumerate(stream):
            text += event.token_ids
            if change == "twice" and number in (4, 5):
                halve()
        assert not compile or model.optimization.graph.failure is None
        texts.append(text)
    assert texts[0] == texts[1]


def test_a_model_without_such_layers():
    for other in (torch.nn.Sequential(torch.nn.Linear(4, 4)), tiny.t5()):
        report = hfgen.optimize(other, compile=True, kernels="own").optimization
        assert "no decoder layer can be compiled" in str(report)


@pytest.mark.parametrize("kernel", ["bf16", "int8"])
def test_packed_tensors_are_inputs_of_the_graph_and_follow_their_weights(
    monkeypatch, graphs, used, kernel
):
    """Also while a call decodes, and where the new values are none that the kernel takes."""
    name = packing(monkeypatch, kernel)
    texts, found = [], []
    for compile in (True, False):
        model = llama()
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(weight.bfloat16())
        hfgen.optimize(model, compile=compile, kernels=name)
        layer, tokens = model.model.layers[2].mlp.down_proj, []
        stream = model.stream(tiny.prompt(2, 9), max_new_tokens=12, eos_token_id=None)
        for number, event in enumerate(stream):
            tokens += event.token_ids
            with torch.no_grad():
                if number == 5:
                    layer.weight.neg_()
                elif number == 11:
                    layer.weight = torch.nn.Parameter(layer.weight.flip(0))
                elif number == 15:
                    layer.weight.mul_(1.001)
        texts.append(tokens)
        if compile:
            found.append(used.count(kernel))
            assert graphs() <= 3
    assert texts[0] == texts[1]
    # The prompt, the head of each step, and steps whose weight is no longer one of bfloat16.
    assert 7 * 4 + 12 <= found[0] < 7 * 4 * 5
