"""`hfgen.optimize`: what it changes, what it notices, and that it can be undone."""

from __future__ import annotations

import copy
import gc
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import hfgen
from hfgen.running.optimization import choice, forward, kernels, native, pages
from hfgen.running.optimization.forward import PackedForward
from tests import tiny

#: Kernels that round weights.
ROUNDING = [name for name, kernel in kernels.KERNELS.items() if kernel.weights is not None]


def need(name: str, dtype: torch.dtype = torch.float32) -> str:
    """Skip the test where this machine has no such kernel, or not for weights of ``dtype``."""
    has_dtype = name != "onednn" or dtype != torch.bfloat16 or kernels._mkldnn_has("bf16")
    if not (has_dtype and kernels.works(name)):
        pytest.skip(reason=f"this machine has no kernel {name!r} of {dtype}")
    return name


def model(**overrides):
    """Its weights are those of a checkpoint in bfloat16, in float32."""
    made = hfgen.mix_into(tiny.llama(**overrides)).eval()
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(weight.bfloat16())
    return made


def logits(of, ids) -> torch.Tensor:
    with torch.no_grad():
        return of(ids).logits


def forwards(of) -> dict[str, PackedForward]:
    found = {name: vars(module).get("forward") for name, module in of.named_modules()}
    return {name: it for name, it in found.items() if isinstance(it, PackedForward)}


def packs(of) -> int:
    """How many layers have a packed weight."""
    return sum(it._packed is not None for it in forwards(of).values())


def unpacked(of):
    """An optimised model whose weights are packed again by the kernels that run."""
    for it in forwards(of).values():
        it._packed = None
    return of


@pytest.fixture(scope="module")
def builtin():
    return hfgen.builtin_model()


# --- results ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["onednn", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_keep_values_give_the_same_logits_but_for_rounding(name, dtype):
    need(name, dtype)
    plain = model().to(dtype)
    ids = tiny.prompt(2)
    expected = logits(plain, ids)
    found = logits(hfgen.optimize(plain, kernels=name), ids)
    assert packs(plain) == 15  # seven in each of two layers, and the head
    torch.testing.assert_close(found, expected)
    assert found.dtype == dtype
    assert "rounding" in plain.optimization.tokens


@pytest.mark.parametrize("name", ["onednn", "fp16"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 4}])
def test_the_built_in_model_generates_the_same_tokens(builtin, name, options):
    need(name)
    plain, tokenizer = builtin
    inputs = tokenizer(["import os\n\ndef ", "class A:\n"], return_tensors="pt", padding=True)
    call = {**inputs, "max_new_tokens": 12, "do_sample": False, **options}
    expected = plain.generate(**call)
    with hfgen.optimized(plain, kernels=name):
        found = plain.generate(**call)
        # fp16 does not hold the smallest values of the head.
        assert packs(plain) == len(forwards(plain)) == {"onednn": 57, "fp16": 56}[name]
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"drop_finished": True},
        {"assistant_early_exit": 2},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"cache_implementation": "static", "disable_compile": True},
        {"do_sample": True, "seed": 3},
        {"dola_layers": "low"},
    ],
)
def test_every_mode_takes_an_optimised_model(builtin, options):
    plain, tokenizer = builtin
    inputs = tokenizer("import os\n\ndef ", return_tensors="pt")
    call = {**inputs, "max_new_tokens": 8, "do_sample": False, **options}
    expected = plain.generate(**call)
    with hfgen.optimized(plain, kernels="fp16"):
        assert torch.equal(plain.generate(**call), expected)


def test_stored_prefixes_are_those_of_the_same_kernels():
    plain, store = model(), hfgen.PrefixCache()
    call = {"max_new_tokens": 2, "do_sample": False, "prefix_cache": store}
    ids = tiny.prompt(1, length=12)
    plain.generate(ids, **call)
    with hfgen.optimized(plain, kernels="fp16"):
        plain.generate(ids, **call)
        assert store.stats.hits == 0
        plain.generate(ids, **call)
        assert store.stats.hits == 1
    plain.generate(ids, **call)
    assert store.stats.hits == 2


@pytest.mark.parametrize(
    ("weights", "name", "error"),
    [
        ("fp16", "fp16, rounded", 2e-3),
        ("int8", "int8", 3e-2),
        ("int4", "int4", 0.15),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_rounded_weights_are_near(weights, name, error, bias):
    need(name)
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(128, 64, bias=bias)).eval()
    x = torch.randn(3, 5, 128)
    with torch.no_grad():
        expected = layer(x)
        found = hfgen.optimize(layer, weights=weights, kernels=name)(x)
    assert 0 < (found - expected).norm() / expected.norm() < error
    assert name in layer.optimization.tokens


@pytest.mark.parametrize("kernel", kernels.KERNELS.values(), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_every_shape_that_fits_is_computed(kernel, dtype):
    need(kernel.name)
    error = {None: 1e-5, "fp16": 1e-2, "int8": 5e-2, "int4": 0.2}[kernel.weights]
    for n_out, n_in in ((32, 64), (33, 48), (64, 40), (7, 3), (1, 1), (48, 32)):
        layer = nn.Sequential(nn.Linear(n_in, n_out)).to(dtype).eval()
        with torch.no_grad():
            layer[0].weight.copy_(layer[0].weight.bfloat16())
        if kernel.misfit(layer[0].weight):
            continue  # an error, since no layer fits
        activations = {
            "one token": torch.randn(n_in),
            "rows": torch.randn(70, n_in),
            "four dimensions": torch.randn(2, 3, 2, n_in),
            "transposed": torch.randn(n_in, 5).to(dtype).t(),
            "every other": torch.randn(3, 2 * n_in).to(dtype)[:, ::2],
            "last tokens": torch.randn(3, 4, n_in).to(dtype)[:, -1],
            "one row for all": torch.randn(1, n_in).to(dtype).expand(4, n_in),
            "none": torch.randn(2, 0, n_in),
        }
        with torch.no_grad():
            for name, x in activations.items():
                expected = layer(x.to(dtype))
                with hfgen.optimized(layer, kernels=kernel.name):
                    found = layer(x.to(dtype))
                assert found.dtype == dtype, name
                assert found.shape == expected.shape, name
                off = (found.float() - expected.float()).norm()
                assert off <= max(error, torch.finfo(dtype).eps) * expected.float().norm(), name


@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_int8_without_a_compiler_has_the_same_bits(monkeypatch, dtype):
    need("bf16")
    weight, bias = torch.randn(70, 2002), torch.randn(70).to(dtype)
    x = torch.randn(500, 3, 2002).to(
        dtype
    )  # a million numbers: some are close to the middle of two steps
    x[1, 1] = 0
    expected = native.of_int8(weight)(x, bias)
    monkeypatch.setattr(native, "failure", lambda: "there is no compiler")
    assert torch.equal(native.of_int8(weight)(x, bias), expected)
    x[2, 2, 7], x[3, 0, 1] = math.nan, math.inf
    found = native.of_int8(weight)(x, bias)
    lost = found.isnan().all(dim=-1)
    assert lost.nonzero().tolist() == [[2, 2], [3, 0]]
    assert torch.equal(found[~lost], expected[~lost])
    monkeypatch.undo()
    assert torch.equal(native.of_int8(weight)(x, bias).isnan(), found.isnan())


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("/no/such/compiler", "No such file"), ("/bin/false", "the C++ compiler failed")],
)
def test_without_a_compiler_the_next_kernel_is_taken(monkeypatch, tmp_path, compiler, reason):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for function in (native.failure, kernels.works):
        function.cache_clear()
    try:
        assert reason in native.failure()
        expected = logits(model(), tiny.prompt(2))
        plain = hfgen.optimize(model())
        assert "bf16" not in plain.optimization.kernels.values()
        torch.testing.assert_close(logits(plain, tiny.prompt(2)), expected)
        assert "int8" in hfgen.optimize(model(), weights="int8").optimization.kernels.values()
    finally:
        for function in (native.failure, kernels.works):
            function.cache_clear()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler here")
@pytest.mark.skipif(torch.__version__ < "2.10", reason="no stable interface in this torch")
def test_the_operators_are_compiled_here():
    """Where they were not, most of these tests would be skipped."""
    assert native.failure() is None


def test_the_compiled_kernels_are_kept_for_the_next_process(monkeypatch, tmp_path):
    need("bf16")
    source = tmp_path / "quick.cpp"
    source.write_text("int nothing;")
    monkeypatch.setattr(native, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = native._library()
    written = first.stat().st_mtime_ns
    assert native._library() == first
    assert first.stat().st_mtime_ns == written
    assert first.parent.stat().st_mode & 0o077 == 0
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    native.failure.cache_clear()  # another file with the same operators is not loaded besides
    assert native.failure() is None
    first.parent.chmod(0o770)  # others could replace the file
    assert native._folder() != first.parent


def test_a_bias_is_added():
    layer = nn.Sequential(nn.Linear(64, 32)).eval()
    with torch.no_grad():
        layer[0].weight.copy_(layer[0].weight.bfloat16())
        x = torch.randn(2, 64)
        expected = layer(x)
        torch.testing.assert_close(hfgen.optimize(layer, kernels="fp16")(x), expected)
        layer[0].bias.data += 1
        torch.testing.assert_close(layer(x), expected + 1)


def test_weights_are_packed_before_the_first_call():
    assert packs(hfgen.optimize(model(), kernels="onednn")) == 15


# --- the model stays what it is -----------------------------------------------------------------


def test_weights_files_and_modules_stay(tmp_path):
    plain = model(tie_word_embeddings=True)
    before = dict(plain.state_dict())
    types = [type(module) for module in plain.modules()]
    hfgen.optimize(plain, kernels="fp16")
    after = plain.state_dict()
    assert list(after) == list(before)
    assert all(after[name].data_ptr() == before[name].data_ptr() for name in before)
    assert [type(module) for module in plain.modules()] == types
    assert plain.lm_head.weight is plain.get_input_embeddings().weight
    plain.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path)
    hfgen.restore(plain)
    assert torch.equal(logits(loaded.eval(), tiny.prompt(2)), logits(plain, tiny.prompt(2)))


def test_restore_leaves_no_trace():
    plain = model()
    before = [dict(vars(module)) for module in plain.modules()]
    expected = logits(plain, tiny.prompt(2))
    assert hfgen.optimize(plain, kernels="fp16") is plain
    assert forwards(plain)
    logits(plain, tiny.prompt(2))
    assert hfgen.restore(plain) is plain
    assert [dict(vars(module)) for module in plain.modules()] == before
    assert torch.equal(logits(plain, tiny.prompt(2)), expected)


def test_the_context_manager_restores_after_an_error():
    plain = model()
    seen = []

    def fail():
        with hfgen.optimized(plain, kernels="fp16") as inside:
            seen.append((inside, len(forwards(plain))))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == [(plain, 15)]
    assert not forwards(plain)
    assert not hasattr(plain, "optimization")


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_have_kernels_of_their_own(how):
    plain = hfgen.optimize(model(), kernels="fp16")
    logits(plain, tiny.prompt(2))
    copied = copy.deepcopy(plain) if how == "deepcopy" else pickle.loads(pickle.dumps(plain))
    own = dict(copied.named_modules())
    assert forwards(copied).keys() == forwards(plain).keys()
    assert all(it.module is own[name] for name, it in forwards(copied).items())
    with torch.no_grad():
        for weight in copied.parameters():
            weight.mul_(2)
    restored = hfgen.restore(copy.deepcopy(copied))
    torch.testing.assert_close(logits(copied, tiny.prompt(2)), logits(restored, tiny.prompt(2)))
    assert forwards(plain)


def test_hooks_run():
    plain, seen = hfgen.optimize(model(), kernels="fp16"), []
    plain.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    logits(plain, tiny.prompt(2, length=5))
    assert seen == [(2, 5, tiny.VOCAB)]


def test_training_and_gradients_take_the_layers_own_forward():
    plain = unpacked(hfgen.optimize(model(), kernels="onednn"))
    plain(tiny.prompt(1), labels=tiny.prompt(1)).loss.backward()
    assert plain.lm_head.weight.grad is not None
    plain.train()
    logits(plain, tiny.prompt(1))
    assert packs(plain) == 0
    plain.eval()
    logits(plain, tiny.prompt(1))
    assert packs(plain) == 15


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT reads what transformers renames
def test_adapters_and_merges():
    peft = pytest.importorskip("peft")
    plain = hfgen.optimize(model(), kernels="fp16")
    ids = tiny.prompt(2)
    logits(plain, ids)  # packed
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(plain, config).eval()
    found = logits(adapted, ids)
    reference = hfgen.restore(copy.deepcopy(adapted))
    torch.testing.assert_close(found, logits(reference, ids))
    merged, expected = adapted.merge_and_unload(), reference.merge_and_unload()
    torch.testing.assert_close(logits(merged, ids), logits(expected, ids))


@pytest.mark.parametrize("weights", ["int8", None])
def test_weights_can_lie_in_files(tmp_path, weights):
    layer = nn.Sequential(nn.Linear(256, 128)).eval()
    x, values = torch.randn(3, 256), layer[0].weight.detach().clone()
    hfgen.optimize(layer, weights=weights, offload=tmp_path)
    assert layer.optimization.file_bytes == values.nbytes
    with torch.no_grad():
        found = layer(x)
    assert list(tmp_path.iterdir()) == []  # they have no names
    assert torch.equal(layer.state_dict()["0.weight"], values)
    layer.train()
    layer(x).sum().backward()
    with torch.no_grad():
        layer.eval()[0].weight.mul_(2)  # in the file, and packed again
        torch.testing.assert_close(layer(x) - layer[0].bias, 2 * (found - layer[0].bias))
    assert torch.equal(hfgen.restore(layer)[0].weight, 2 * values)


RESIDENT = """
import os, sys, psutil, safetensors.torch, torch, hfgen

def held(size, folder, checkpoint):
    before = psutil.Process().memory_info().rss
    layer = torch.nn.Sequential(torch.nn.Linear(size, size)).eval()
    if checkpoint:
        safetensors.torch.save_file(layer.state_dict(), checkpoint)
        layer.load_state_dict(safetensors.torch.load_file(checkpoint), assign=True)
    hfgen.optimize(layer, weights="int8", offload=folder)
    with torch.no_grad():
        layer(torch.randn(3, size))
    return psutil.Process().memory_info().rss - before

torch.set_num_threads(1)
for checkpoint in ("", sys.argv[1] + "/model.safetensors"):
    held(64, sys.argv[1], checkpoint)  # what a first use loads, and keeps
    if os.fork() == 0:
        held(64, sys.argv[1], checkpoint)
        print(held(4096, sys.argv[1], checkpoint), flush=True)
        os._exit(0)
    os.wait()
"""


def test_weights_in_files_take_no_memory(tmp_path):
    printed = subprocess.check_output([sys.executable, "-c", RESIDENT, str(tmp_path)])
    held = [*map(int, printed.split())]  # of a weight that was made, and of one from a mapped file
    assert len(held) == 2
    # The packed weight has 2**24 bytes, and the weight 2**26.
    assert max(held) < 2**24 + 2**22, held


def test_tied_weights_lie_in_one_file(tmp_path):
    plain = model(tie_word_embeddings=True)
    expected = logits(plain, tiny.prompt(2))
    hfgen.optimize(plain, kernels="onednn", offload=tmp_path)
    torch.testing.assert_close(logits(plain, tiny.prompt(2)), expected)
    assert plain.lm_head.weight is plain.get_input_embeddings().weight
    assert torch.equal(logits(hfgen.restore(plain), tiny.prompt(2)), expected)


# --- weights that change ------------------------------------------------------------------------


def halved(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(0.5)


def halved_through_data(layer: nn.Linear) -> None:
    layer.weight.data *= 0.5


def replaced(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach() * 0.5)


def replaced_data(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data * 0.5


def no_longer_exact(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(1 / 3)


def too_large(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(2.0**20)


CHANGES = [halved, halved_through_data, replaced, replaced_data, no_longer_exact, too_large]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["onednn", "fp16"])
def test_a_changed_weight_is_noticed(change, name):
    need(name)
    plain = hfgen.optimize(model(), kernels=name)
    logits(plain, tiny.prompt(2))
    change(plain.lm_head)
    found = logits(plain, tiny.prompt(2))
    expected = logits(hfgen.restore(plain), tiny.prompt(2))
    scale = 2.0**20 if change is too_large else 1.0  # of the logits
    torch.testing.assert_close(found / scale, expected / scale)


def test_small_edits_of_few_values_are_noticed():
    """As of an adapter that is merged into bfloat16: one value in twenty changes."""
    layer = nn.Sequential(nn.Linear(256, 256)).bfloat16().eval()
    hfgen.optimize(layer, kernels="onednn" if kernels._mkldnn_has("bf16") else need("fp16"))
    x, noticed = torch.ones(1, 256).bfloat16(), 0
    for _ in range(50):
        with torch.no_grad():
            layer(x)
            before = layer[0].forward._packed
            layer[0].weight.data[torch.rand(256, 256) < 0.05] *= 1.01
            layer(x)
        noticed += layer[0].forward._packed is not before
    assert noticed >= 48


@pytest.mark.parametrize("size", [1, 2, 7, 15, 16, 17, 23, 24, 128, 136, 1000])
def test_the_values_that_are_compared_are_of_the_weight(size):
    weight = torch.arange(size, dtype=torch.float32)[None]
    values = forward._samples(weight).view("float32")
    assert values.min() == 0
    assert 0.9 * (size - 1) <= values.max() < size


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_pruned_layers_are_computed_as_they_are_now(name, when):
    """Pruning makes a weight or a bias a plain attribute, computed anew for each forward."""
    plain, found = (model(attention_bias=True) for _ in range(2))
    with torch.no_grad():
        for bias in (
            each.self_attn.q_proj.bias for of in (plain, found) for each in of.model.layers
        ):
            bias.copy_(torch.linspace(-1, 1, len(bias)))
    if when == "after":
        hfgen.optimize(found)
    for of in plain, found:
        prune.l1_unstructured(of.model.layers[0].self_attn.q_proj, name, 0.5)
    if when == "before":
        hfgen.optimize(found)
    torch.testing.assert_close(logits(found, tiny.prompt(2)), logits(plain, tiny.prompt(2)))


def test_exports_do_not_need_hfgen():
    layer = hfgen.optimize(nn.Sequential(nn.Linear(64, 32)).eval(), kernels="onednn")
    with torch.no_grad():
        graph = torch.export.export(layer, (torch.randn(3, 64),)).graph
    assert not any("hfgen" in str(node.target) for node in graph.nodes)


def test_another_type_is_noticed():
    plain = hfgen.optimize(model(), kernels="fp16")
    logits(plain, tiny.prompt(2))
    found = logits(plain.to(torch.bfloat16), tiny.prompt(2))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, logits(hfgen.restore(plain), tiny.prompt(2)))


def test_threads():
    plain = model()
    prompts = [tiny.prompt(1, length=4 + n) for n in range(8)]
    expected = [plain.generate(ids, max_new_tokens=8, do_sample=False) for ids in prompts]
    hfgen.optimize(plain, kernels="fp16")
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda i: plain.generate(i, max_new_tokens=8, do_sample=False), prompts)
        assert all(map(torch.equal, found, expected))


# --- the choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "dtype", "lanes", "multiplies", "chosen"),
    [
        (None, torch.float32, 8, False, ["bf16", "fp16", "fp32", "onednn"]),
        (None, torch.float32, 4, False, ["onednn"]),
        (None, torch.bfloat16, 16, True, ["bf16", "fp16", "fp32", "onednn"]),
        (None, torch.float16, 8, False, ["fp16"]),
        (None, torch.float16, 16, True, []),
        ("fp16", torch.float16, 8, False, ["fp16", "fp16, rounded", "fp16"]),
        ("int8", torch.bfloat16, 4, False, ["int8", "onednn"]),
        ("int4", torch.float32, 4, True, ["int4", "onednn"]),
    ],
)
def test_type_and_processor_decide(monkeypatch, weights, dtype, lanes, multiplies, chosen):
    """``multiplies``: oneDNN does so on this processor, in 16 bits."""
    monkeypatch.setattr(kernels, "works", lambda name: True)
    monkeypatch.setattr(kernels.native, "LANES", lanes)
    monkeypatch.setattr(kernels, "_mkldnn_has", lambda name: multiplies)
    assert [kernel.name for kernel in kernels.preferred(weights, dtype)] == chosen


def test_no_clock_decides(monkeypatch):
    """A busy machine made three processes choose three kernels, which round differently."""
    reports = []
    for seconds in ([0.0] * 10**4, [10.0**n for n in range(300)]):
        ticks = iter(seconds)
        monkeypatch.setattr("time.perf_counter", lambda ticks=ticks: next(ticks))
        reports.append(hfgen.optimize(model(), weights="int8").optimization)
    assert reports[0].kernels == reports[1].kernels


def test_a_choice_is_saved_and_given_back(tmp_path):
    plain = hfgen.optimize(
        model(), kernels={"lm_head": "onednn", "model.layers.1.mlp.up_proj": "own"}
    )
    expected, report = logits(plain, tiny.prompt(2)), plain.optimization
    assert report.kernels.keys() == report.layers.keys()
    first = kernels.preferred(None, torch.float32)[0].name
    assert report.kernels["model.layers.0.mlp.up_proj"] == first
    assert f"3 x 64 x 32 float32: {first}\n1 x 32 x 64" in str(report).replace(
        "2 x 32 x 64", "1 x 32 x 64"
    )
    (tmp_path / "kernels.json").write_text(json.dumps(report.kernels))
    hfgen.restore(plain)
    saved = json.loads((tmp_path / "kernels.json").read_text())
    assert hfgen.optimize(plain, kernels=saved, weights="int4").optimization.kernels == saved
    assert torch.equal(logits(plain, tiny.prompt(2)), expected)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_product_depends_on_no_other(name, dtype):
    """Nor on the number of threads, to the bit, also where sizes are no multiples of anything."""
    torch.manual_seed(0)
    for n_out, n_in in (
        (48, 64),
        (576, 1536),
        *([(131, 502), (93, 512)] if name != "int4" else []),
    ):
        weight = torch.randn(n_out, n_in).bfloat16().to(dtype)
        product = kernels.KERNELS[need(name)].prepare(weight)
        x = (torch.randn(70, n_in) * 10 ** torch.randn(70, 1)).to(dtype)
        x[66, 5], x[68, 7] = torch.nan, torch.inf
        together = product(x, None)
        for n_rows in (1, 2, 3, 5, 6, 8, 11, 15, 17, 31, 32, 33, 66):
            for start in (0, 66 - n_rows):
                rows = slice(start, start + n_rows)
                assert torch.equal(product(x[rows], None), together[rows]), (n_rows, start)
        assert together[66].isnan().all()
        assert together[[67, 69]].isfinite().all()
        threads = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            assert torch.equal(product(x[:66], None), together[:66])
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("seeds", [None, [5, 6, 7, 8]], ids=["greedy", "seeds"])
def test_a_row_does_not_depend_on_its_neighbours(name, seeds):
    """One scale for the activations of all rows made none of them that of its solo call."""
    plain = hfgen.optimize(model(vocab_size=96), kernels=need(name))
    call = {"max_new_tokens": 6, "eos_token_id": None, "do_sample": seeds is not None}
    lengths = (40, 3, 17, 1)
    prompts = [3 + ids[:n] % 93 for ids, n in zip(tiny.prompt(4, length=40), lengths, strict=True)]
    calls = [call | ({"seed": seed} if seed else {}) for seed in seeds or [None] * 4]
    pairs = list(zip(prompts, calls, strict=True))
    solo = [plain.generate(ids[None], **each)[0, len(ids) :].tolist() for ids, each in pairs]
    padded = torch.stack([nn.functional.pad(ids, (40 - len(ids), 0)) for ids in prompts])
    mask = (torch.arange(40) >= 40 - torch.tensor(lengths)[:, None]).long()
    together = plain.generate(padded, attention_mask=mask, **call, seed=seeds)[:, 40:].tolist()
    engine = hfgen.Engine(plain, max_rows=3)
    requests = [engine.add(ids, **each) for ids, each in pairs]
    served = [request.result().generate_output.sequences[0] for request in requests]
    assert together == solo
    assert [ids[-6:].tolist() for ids in served] == solo


# --- what is left alone, and errors --------------------------------------------------------------


def test_other_classes_weights_and_forwards_are_left_alone():

    class Mine(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    class Bits(torch.Tensor):
        """Weights as a library of quantisation has them."""

    layers = [nn.Linear(32, 32, bias=False) for _ in range(2)] + [Mine(32, 32)]
    layers[0].weight = nn.Parameter(torch.ones(32, 32).as_subclass(Bits))
    layers[1].forward = lambda x: x
    whole = hfgen.optimize(nn.Sequential(*layers).eval(), kernels="fp16")
    assert not forwards(whole)
    left = whole.optimization.left_alone
    assert left.keys() == {"0", "1", "2"}
    assert "Bits" in left["0"]
    assert "already" in left["1"]
    assert "class" in left["2"]


def test_errors_by_name(monkeypatch):
    plain = model()
    with pytest.raises(TypeError, match="takes a model, but got str"):
        hfgen.optimize("gpt2")
    with pytest.raises(ValueError, match=r"weights must be None or one of 'fp16'.*'int3'"):
        hfgen.optimize(plain, weights="int3")
    with pytest.raises(TypeError, match="compile must be True or False"):
        hfgen.optimize(plain, compile=1)
    with pytest.raises(ValueError, match="not optimised"):
        hfgen.restore(plain)
    with pytest.raises(TypeError, match="takes a model"):
        hfgen.restore(None)
    with pytest.raises(ValueError, match="offload must be a folder, but '/no/such' is none"):
        hfgen.optimize(plain, offload="/no/such")
    with pytest.raises(TypeError, match="offload must be a folder, got 3"):
        hfgen.optimize(plain, offload=3)
    with pytest.raises(TypeError, match="kernels must be a name, or names by layer, got 3"):
        hfgen.optimize(plain, kernels=3)
    for kernel in ("dynamic", {"lm_head": "dynamic"}, {"lm_head": None}):
        with pytest.raises(ValueError, match=r"is none of 'own', 'onednn', 'fp32', "):
            hfgen.optimize(plain, kernels=kernel)
    with pytest.raises(ValueError, match="'lm_haed' cannot have one, the model has no such"):
        hfgen.optimize(plain, kernels={"lm_haed": "fp16"})
    with pytest.raises(ValueError, match=r"'lm_head\.weight' does not fit, int4: its 97 rows"):
        hfgen.optimize(plain, kernels={"lm_head": "int4"})
    with pytest.raises(ValueError, match=r"no layer fits; of '0\.weight', int4: its rows of 33"):
        hfgen.optimize(nn.Sequential(nn.Linear(33, 64)), kernels="int4")
    monkeypatch.setattr(kernels, "works", lambda name: name != "int8")
    monkeypatch.setattr(choice, "works", kernels.works)
    with pytest.raises(ValueError, match="this machine, or this torch, has no 'int8'"):
        hfgen.optimize(plain, kernels="int8")
    assert not forwards(plain)
    hfgen.optimize(plain, kernels="fp16")
    with pytest.raises(ValueError, match="optimised already"):
        hfgen.optimize(plain, kernels="fp16")
    with torch.device("meta"):
        absent = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"'0\.weight' is on the meta device"):
        hfgen.optimize(absent)


def test_weights_too_large_for_fp16_are_named():
    need("fp16, rounded")
    plain = model()
    with torch.no_grad():
        plain.lm_head.weight[3, 4] = 1e6
    with pytest.raises(ValueError, match=r"'lm_head\.weight' does not fit.*1e\+06.*65504"):
        hfgen.optimize(plain, weights="fp16")
    assert not forwards(plain)
    assert not hasattr(plain, "optimization")


def test_fp16_holds_checkpoints_in_bfloat16():
    generator = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(1024, 576, generator=generator)
    misfit = kernels.KERNELS["fp16"].misfit
    assert misfit(weight.bfloat16().float()) is None  # though some values of it are below 2**-17
    assert not torch.equal(weight.bfloat16().half().float(), weight.bfloat16().float())
    assert "not those of fp16" in misfit(weight)
    assert "not those of fp16" in misfit(weight.bfloat16().float() * 2**-14)
    assert "65504" in misfit(weight.bfloat16().float() * 2**24)


def test_shapes_that_int4_does_not_take():
    need("int4")
    odd = nn.Sequential(nn.Linear(33, 64), nn.Linear(64, 32))
    hfgen.optimize(odd, weights="int4")
    assert odd.optimization.kernels["1"] == "int4"
    assert odd.optimization.kernels["0"] in ("fp32", "onednn")  # by the processor
    with pytest.raises(ValueError, match=r"int4' fits no layer: of '0\.weight'.*groups of 32"):
        hfgen.optimize(nn.Sequential(nn.Linear(33, 64)), weights="int4")


def test_importing_hfgen_imports_none_of_it():
    code = (
        "import sys, hfgen; sys.exit(any('running.optimization' in name for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_int8_weights_of_a_model_in_float16():
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 32).half(), torch.randn(3, 64).half()
    product = kernels.KERNELS["int8"].prepare(layer.weight)
    with torch.no_grad():
        result = product(x, layer.bias)
        assert result.dtype == torch.float16
        assert (result - layer(x)).abs().max() < 0.1


def test_native_products_refuse_other_types_and_shapes():
    need("fp32")
    product = native.of_numbers(torch.randn(4, 6), torch.float32)
    for x, bias in ((torch.randn(2, 9), None), (torch.randn(2, 6), torch.randn(3))):
        with pytest.raises(RuntimeError, match="shapes that do not fit"):
            product(x, bias)
    for x in (torch.randn(2, 6).double(), torch.ones(2, 6, dtype=torch.int16)):
        with pytest.raises(RuntimeError, match="numbers of float32, bfloat16 and float16"):
            product(x, None)


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are those of Linux")
def test_weights_in_huge_pages_are_copies_with_a_storage_of_their_own(monkeypatch):
    weights = [torch.randn(40, 1000).to(dtype) for dtype in (*kernels.DTYPES, torch.int8)]
    copies = [pages.in_huge_pages(weight) for weight in weights]
    large = pages.in_huge_pages(torch.ones(pages.CHUNK // 4 + 1))
    assert large.sum() == pages.CHUNK // 4 + 1
    for weight, moved in zip(weights, copies, strict=True):
        assert torch.equal(weight, moved)
        assert moved.untyped_storage().nbytes() == weight.nbytes
        assert moved.data_ptr() % pages.LINE == 0
        assert moved.data_ptr() != weight.data_ptr()
    memory = pages._newest[0]
    assert memory() is not None
    del copies, moved, large
    gc.collect()
    assert memory() is None  # it went back to the system
    monkeypatch.delattr("mmap.MADV_HUGEPAGE")  # as on other systems
    assert pages.in_huge_pages(weights[0]) is weights[0]


@pytest.mark.skipif(not native._has_amx(), reason="this processor has no AMX")
def test_weights_that_are_used_as_they_are_move_to_huge_pages(tmp_path):
    """All but those whose memory others see as well."""
    torch.manual_seed(0)
    tied, twin, shared, of_all, alone = (nn.Linear(64, 64, bias=False).bfloat16() for _ in "12345")
    twin.weight = nn.Parameter(tied.weight.data)
    shared.weight.share_memory_()
    of_all.weight.data = torch.randn(3 * 64, 64).bfloat16()[64:128]  # as trainers keep them
    model = nn.Sequential(tied, twin, shared, of_all, alone)
    before = {name: (weight.data_ptr(), weight) for name, weight in model.named_parameters()}
    saved = {name: weight.clone() for name, weight in model.state_dict().items()}
    hfgen.optimize(model, kernels="bf16")
    after = dict(model.named_parameters())
    assert all(after[name] is weight for name, (_, weight) in before.items())
    moved = {name for name, (address, weight) in before.items() if weight.data_ptr() != address}
    assert moved == {"4.weight"}
    assert shared.weight.is_shared()
    for state in (model.state_dict(), hfgen.restore(model).state_dict()):
        assert all(torch.equal(state[name], weight) for name, weight in saved.items())
    torch.save(alone.weight, tmp_path / "weight")  # its own memory, and not all of a mapping
    assert os.path.getsize(tmp_path / "weight") < 2 * alone.weight.nbytes


@pytest.mark.skipif(not native._has_amx(), reason="this processor has no AMX")
def test_a_weight_that_is_used_as_it_is(tmp_path):
    """No copy: a bfloat16 model with AMX. Where it lies in memory changes no bits, and edits are seen."""
    torch.manual_seed(0)
    layer = nn.Linear(96, 80).bfloat16().eval()
    whole = hfgen.optimize(nn.Sequential(layer), kernels="bf16")
    assert whole.optimization.extra_bytes == 0
    x = torch.randn(300, 96).bfloat16()
    with torch.no_grad():
        before = whole(x)
        assert (
            before.float() - nn.functional.linear(x, layer.weight, layer.bias)
        ).abs().max() < 0.02
        memory = torch.zeros(81 * 96, dtype=torch.bfloat16)
        for start in (0, 1, 8):
            shifted = memory[start : start + 80 * 96].view(80, 96).copy_(layer.weight)
            assert torch.equal(native.of_numbers(shifted, torch.bfloat16)(x, layer.bias), before)
        layer.weight.data[3] = 0  # seen here, though it moves no count
        layer.weight.data[4] = 0
        assert torch.equal(whole(x)[:, 3:5], layer.bias[3:5].expand(300, 2))
    hfgen.restore(whole)
    moved = hfgen.optimize(whole, kernels="bf16", offload=tmp_path)
    assert moved.optimization.extra_bytes == moved.optimization.file_bytes == 80 * 96 * 2
    operator = torch.ops.hfgen_native.linear
    for wrong in (layer.weight[:, :64], layer.weight.T, layer.weight[:40]):
        with pytest.raises(RuntimeError, match="shapes that do not fit"):
            operator(x, None, wrong.detach(), 80)
    with pytest.raises(RuntimeError, match="weights of bfloat16"):
        operator(x, None, layer.weight.detach().half(), 80)


def test_products_of_the_same_activations_are_one_call():
    need("fp32")
    x = torch.randn(3, 96)
    for weights in (None, "int8"):
        layers = [nn.Linear(96, n, bias=n == 40) for n in (64, 40, 8)]
        of_float32 = [native.of_numbers(layer.weight, torch.float32) for layer in layers]
        products = [native.of_int8(layer.weight) for layer in layers] if weights else of_float32
        biases, n_outs = [layer.bias for layer in layers], [64, 40, 8]
        packed = [tensor for product in products for tensor in product.tensors]
        with torch.no_grad():
            found = torch.ops.hfgen_native.linears(x, biases, packed, n_outs)
            for result, product, bias in zip(found, products, biases, strict=True):
                assert torch.equal(result, product(x, bias))
            for wrong in ((biases[:2], packed, n_outs), (biases, packed[:2], n_outs)):
                with pytest.raises(RuntimeError, match="lists that do not fit"):
                    torch.ops.hfgen_native.linears(x, *wrong)
