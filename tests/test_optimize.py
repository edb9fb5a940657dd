"""`hfgen.optimize`: what it changes, what it notices, and that it can be undone."""

from __future__ import annotations

import copy
import json
import os
import pickle
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import hfgen
from hfgen.linears import choice, forward, kernels, known, measure, whole
from hfgen.linears.forward import ROWS, PackedForward
from tests import tiny

MEASURE_STEPS = whole.measure_steps


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hfgen"


@pytest.fixture
def prefer(monkeypatch: pytest.MonkeyPatch):
    """Let the measurement say that the named kernel is the fastest one, at the given rows.

    Whole steps are not measured.
    """

    def prefer(name: str, rows=ROWS) -> None:
        if name not in {kernel.name for kernel in kernels.candidates(kernels.named(name).weights)}:
            pytest.skip(reason=f"this machine has no kernel {name!r}")

        def times(modules, fitting):
            found = {kernel: dict.fromkeys(ROWS, 20.0) for kernel in fitting}
            if name in found:
                found[name] |= dict.fromkeys(rows, 5.0)
            return {measure.OWN: dict.fromkeys(ROWS, 10.0), **found}

        monkeypatch.setattr(choice, "measure", times)
        monkeypatch.setattr(whole, "measure_steps", lambda *_: {})

    return prefer


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


# --- results ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["onednn", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_keep_values_give_the_same_logits_but_for_rounding(prefer, name, dtype):
    prefer(name)
    plain = model().to(dtype)
    ids = tiny.prompt(2)
    expected = logits(plain, ids)
    found = logits(hfgen.optimize(plain), ids)
    assert packs(plain) == 15  # seven in each of two layers, and the head
    torch.testing.assert_close(found, expected)
    assert found.dtype == dtype
    assert "rounding" in plain.optimization.tokens


@pytest.mark.parametrize("name", ["onednn", "fp16"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 4}])
def test_the_built_in_model_generates_the_same_tokens(prefer, name, options):
    prefer(name)
    plain, tokenizer = hfgen.builtin_model()
    inputs = tokenizer(["import os\n\ndef ", "class A:\n"], return_tensors="pt", padding=True)
    call = {**inputs, "max_new_tokens": 24, "do_sample": False, **options}
    expected = plain.generate(**call)
    with hfgen.optimized(plain):
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
def test_every_mode_takes_an_optimised_model(prefer, options):
    prefer("fp16")
    plain, tokenizer = hfgen.builtin_model()
    inputs = tokenizer("import os\n\ndef ", return_tensors="pt")
    call = {**inputs, "max_new_tokens": 8, "do_sample": False, **options}
    expected = plain.generate(**call)
    with hfgen.optimized(plain):
        assert torch.equal(plain.generate(**call), expected)


def test_stored_prefixes_are_those_of_the_same_kernels(prefer):
    prefer("fp16")
    plain, store = model(), hfgen.PrefixCache()
    call = {"max_new_tokens": 2, "do_sample": False, "prefix_cache": store}
    ids = tiny.prompt(1, length=12)
    plain.generate(ids, **call)
    with hfgen.optimized(plain):
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
        ("bf16", "bf16", 2e-2),
        ("int8", "int8, dynamic", 5e-2),
        ("int8", "int8", 3e-2),
        ("int4", "int4", 0.15),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_rounded_weights_are_near(prefer, weights, name, error, bias):
    prefer(name)
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(128, 64, bias=bias)).eval()
    x = torch.randn(3, 5, 128)
    with torch.no_grad():
        expected = layer(x)
        found = hfgen.optimize(layer, weights=weights)(x)
    assert 0 < (found - expected).norm() / expected.norm() < error
    assert name in layer.optimization.tokens


@pytest.mark.parametrize("kernel", kernels.KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_shape_is_computed_or_left_alone(prefer, kernel, dtype):
    prefer(kernel.name)
    error = {None: 1e-5, "fp16": 1e-2, "bf16": 2e-2, "int8": 5e-2, "int4": 0.2}[kernel.weights]
    for n_out, n_in in ((32, 64), (33, 48), (64, 40), (7, 3), (1, 1), (48, 32)):
        layer = nn.Sequential(nn.Linear(n_in, n_out)).to(dtype).eval()
        with torch.no_grad():
            layer[0].weight.copy_(layer[0].weight.bfloat16())
        if kernel.weights == "int4" and kernel.misfit(layer[0].weight):
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
                with hfgen.optimized(layer, weights=kernel.weights):
                    found = layer(x.to(dtype))
                assert found.dtype == dtype, name
                assert found.shape == expected.shape, name
                off = (found.float() - expected.float()).norm()
                assert off <= max(error, torch.finfo(dtype).eps) * expected.float().norm(), name


def test_a_bias_is_added(prefer):
    prefer("fp16")
    layer = nn.Sequential(nn.Linear(64, 32)).eval()
    with torch.no_grad():
        layer[0].weight.copy_(layer[0].weight.bfloat16())
        x = torch.randn(2, 64)
        expected = layer(x)
        torch.testing.assert_close(hfgen.optimize(layer)(x), expected)
        layer[0].bias.data += 1
        torch.testing.assert_close(layer(x), expected + 1)


def test_nothing_changes_where_nothing_is_faster(prefer):
    prefer("fp16", rows=())
    plain = model()
    before = logits(plain, tiny.prompt(2))
    assert torch.equal(logits(hfgen.optimize(plain), tiny.prompt(2)), before)
    assert not forwards(plain)
    report = plain.optimization
    assert not report.has_changed
    assert report.extra_bytes == 0
    assert report.tokens.startswith("the same")
    assert "nothing is faster" in str(report)


def test_weights_are_packed_before_the_first_call(prefer):
    prefer("onednn")
    assert packs(hfgen.optimize(model())) == 15


def test_a_kernel_runs_only_at_the_rows_at_which_it_wins(prefer):
    prefer("onednn", rows=(4,))
    plain = unpacked(hfgen.optimize(model()))
    for rows in (1, 2, 5, 16, 40):
        logits(plain, tiny.prompt(rows, length=1))
        assert packs(plain) == 0
    logits(plain, tiny.prompt(3, length=1))
    assert packs(plain) == 15


def test_buckets():
    sizes = {n: forward.bucket(n) for n in (0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 5000)}
    assert list(sizes.values()) == [1, 1, 2, 4, 4, 8, 8, 16, 16, 128, 128]


# --- the model stays what it is -----------------------------------------------------------------


def test_weights_files_and_modules_stay(prefer, tmp_path):
    prefer("fp16")
    plain = model(tie_word_embeddings=True)
    before = dict(plain.state_dict())
    types = [type(module) for module in plain.modules()]
    hfgen.optimize(plain)
    after = plain.state_dict()
    assert list(after) == list(before)
    assert all(after[name].data_ptr() == before[name].data_ptr() for name in before)
    assert [type(module) for module in plain.modules()] == types
    assert plain.lm_head.weight is plain.get_input_embeddings().weight
    plain.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path)
    hfgen.restore(plain)
    assert torch.equal(logits(loaded.eval(), tiny.prompt(2)), logits(plain, tiny.prompt(2)))


def test_restore_leaves_no_trace(prefer):
    prefer("fp16")
    plain = model()
    before = [dict(vars(module)) for module in plain.modules()]
    expected = logits(plain, tiny.prompt(2))
    assert hfgen.optimize(plain) is plain
    assert forwards(plain)
    logits(plain, tiny.prompt(2))
    assert hfgen.restore(plain) is plain
    assert [dict(vars(module)) for module in plain.modules()] == before
    assert torch.equal(logits(plain, tiny.prompt(2)), expected)


def test_the_context_manager_restores_after_an_error(prefer):
    prefer("fp16")
    plain = model()
    seen = []

    def fail():
        with hfgen.optimized(plain) as inside:
            seen.append((inside, len(forwards(plain))))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == [(plain, 15)]
    assert not forwards(plain)
    assert not hasattr(plain, "optimization")


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_have_kernels_of_their_own(prefer, how):
    prefer("fp16")
    plain = hfgen.optimize(model())
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


def test_hooks_run(prefer):
    prefer("fp16")
    plain, seen = hfgen.optimize(model()), []
    plain.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    logits(plain, tiny.prompt(2, length=5))
    assert seen == [(2, 5, tiny.VOCAB)]


def test_training_and_gradients_take_the_layers_own_forward(prefer):
    prefer("onednn")
    plain = unpacked(hfgen.optimize(model()))
    plain(tiny.prompt(1), labels=tiny.prompt(1)).loss.backward()
    assert plain.lm_head.weight.grad is not None
    plain.train()
    logits(plain, tiny.prompt(1))
    assert packs(plain) == 0
    plain.eval()
    logits(plain, tiny.prompt(1))
    assert packs(plain) == 15


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT reads what transformers renames
def test_adapters_and_merges(prefer):
    peft = pytest.importorskip("peft")
    prefer("fp16")
    plain = hfgen.optimize(model())
    ids = tiny.prompt(2)
    logits(plain, ids)  # packed
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(plain, config).eval()
    found = logits(adapted, ids)
    reference = hfgen.restore(copy.deepcopy(adapted))
    torch.testing.assert_close(found, logits(reference, ids))
    merged, expected = adapted.merge_and_unload(), reference.merge_and_unload()
    torch.testing.assert_close(logits(merged, ids), logits(expected, ids))


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
def test_a_changed_weight_is_noticed(prefer, change, name):
    prefer(name)
    plain = hfgen.optimize(model())
    logits(plain, tiny.prompt(2))
    change(plain.lm_head)
    found = logits(plain, tiny.prompt(2))
    torch.testing.assert_close(found, logits(hfgen.restore(plain), tiny.prompt(2)))


def test_small_edits_of_few_values_are_noticed(prefer):
    """As of an adapter that is merged into bfloat16: one value in twenty changes."""
    prefer("onednn")
    layer = hfgen.optimize(nn.Sequential(nn.Linear(256, 256)).bfloat16().eval())
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


def test_exports_do_not_need_hfgen(prefer):
    prefer("onednn")
    layer = hfgen.optimize(nn.Sequential(nn.Linear(64, 32)).eval())
    with torch.no_grad():
        graph = torch.export.export(layer, (torch.randn(3, 64),)).graph
    assert not any("hfgen" in str(node.target) for node in graph.nodes)


def test_another_type_is_noticed(prefer):
    prefer("fp16")
    plain = hfgen.optimize(model())
    logits(plain, tiny.prompt(2))
    found = logits(plain.to(torch.bfloat16), tiny.prompt(2))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, logits(hfgen.restore(plain), tiny.prompt(2)))


def test_threads(prefer):
    prefer("fp16")
    plain = model()
    prompts = [tiny.prompt(1, length=4 + n) for n in range(8)]
    expected = [plain.generate(ids, max_new_tokens=8, do_sample=False) for ids in prompts]
    hfgen.optimize(plain)
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda i: plain.generate(i, max_new_tokens=8, do_sample=False), prompts)
        assert all(map(torch.equal, found, expected))


# --- the measurement, and its file --------------------------------------------------------------


def test_it_measures_once_and_keeps_the_times(cache_folder, monkeypatch):
    monkeypatch.setattr(measure, "SECONDS", 0)
    first = hfgen.optimize(model()).optimization
    file = cache_folder / "linears.json"
    if os.name == "posix":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(cache_folder.stat().st_mode) == 0o700
    assert [path.name for path in cache_folder.iterdir()] == ["linears.json"]
    monkeypatch.setattr(choice, "measure", None)  # not called
    assert hfgen.optimize(model()).optimization.choices == first.choices
    assert {shape.shape for shape in first.choices} >= {(tiny.VOCAB, 32), (64, 32)}
    assert all(shape.times[measure.OWN].keys() == set(ROWS) for shape in first.choices)


GARBAGE = [
    b"",
    b"\xff\xfe",
    b"[]",
    b"{" * 5000,
    b'{"format": 2}',
    b'{"format": 2, "times": [1]}',
    b'{"format": 2, "times": {"x": {"own": {"1": -1}}}}',
    b'{"format": 2, "times": {"x": {"own": {"1": 1%s}}}}' % (b"0" * 400),
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_a_file_of_garbage_is_written_anew(cache_folder, prefer, garbage):
    prefer("fp16")
    cache_folder.mkdir(parents=True)
    (cache_folder / "linears.json").write_bytes(garbage)
    assert hfgen.optimize(model()).optimization.has_changed
    assert known.read()


@pytest.mark.parametrize("took", [0, -1, "1", None, True, float("nan"), float("inf")])
def test_times_that_cannot_be_are_not_believed(cache_folder, prefer, took):
    prefer("fp16")
    hfgen.optimize(model())
    file = cache_folder / "linears.json"
    content = json.loads(file.read_text())
    n_entries = len(content["times"])
    next(iter(content["times"].values()))["own"]["1"] = took
    file.write_text(json.dumps(content))
    assert len(known.read()) == n_entries - 1


def test_a_folder_that_cannot_be_written_does_not_matter(tmp_path, prefer, monkeypatch):
    prefer("fp16")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert hfgen.optimize(model()).optimization.has_changed
    assert known.read() == {}


def test_a_user_without_a_home_can_optimise(prefer, monkeypatch):
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    prefer("fp16")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert hfgen.optimize(model()).optimization.has_changed


@pytest.mark.parametrize("calibrate", [True, False])
def test_steps_without_all_their_times_are_measured_again(prefer, monkeypatch, calibrate):
    prefer("fp16")
    steps = {way: dict.fromkeys(ROWS, took) for way, took in ((measure.OWN, 2.0), ("changed", 1.0))}
    monkeypatch.setattr(whole, "measure_steps", lambda *_: steps)
    hfgen.optimize(model())
    content = known.read()
    key = next(key for key, times in content.items() if "changed" in times)
    for spoilt in ({measure.OWN: {}, "changed": steps["changed"]}, {measure.OWN: steps["own"]}):
        known.write({key: spoilt})
        report = hfgen.optimize(model(), calibrate=calibrate).optimization
        assert report.steps == (steps if calibrate else {})


@pytest.mark.parametrize("default", ["dtype", "device"])
def test_defaults_of_torch_do_not_matter(monkeypatch, default):
    plain, expected = model(), kernels.candidates(None)
    monkeypatch.setattr(measure, "SECONDS", 0)
    kernels._works.cache_clear()
    try:
        if default == "dtype":
            torch.set_default_dtype(torch.bfloat16)
        else:
            torch.set_default_device("meta")
        hfgen.optimize(plain)
        assert kernels.candidates(None) == expected
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        kernels._works.cache_clear()
    assert plain.optimization.steps or not plain.optimization.has_changed


def test_without_calibration_only_what_is_known_changes(prefer):
    prefer("fp16")
    assert not hfgen.optimize(model(), calibrate=False).optimization.has_changed
    hfgen.optimize(model())
    again = hfgen.optimize(model(), calibrate=False)
    assert again.optimization.has_changed
    other = hfgen.optimize(model(intermediate_size=96), calibrate=False).optimization
    assert {c.shape: bool(c.kernel) for c in other.choices}[96, 32] is False


def test_measuring_leaves_the_random_state(monkeypatch):
    monkeypatch.setattr(measure, "SECONDS", 0)
    plain, before = model(), torch.get_rng_state()
    hfgen.optimize(plain)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_best_kernel_is_that_which_gains_most():
    own = dict.fromkeys(ROWS, 10.0)
    slow, fast = {**own, 1: 8.0}, {**own, 1: 12.0, 4: 4.0, 8: 3.0}
    times = {measure.OWN: own, "onednn": slow, "fp16": fast}
    assert measure.best(times, ["onednn", "fp16"]) == ("fp16", {4, 8})
    assert measure.best(times, ["onednn"]) == ("onednn", {1})
    assert measure.best({measure.OWN: own, "fp16": own}, ["fp16"]) == (None, frozenset())


def test_the_report(prefer):
    prefer("fp16", rows=(1, 8, 128))
    plain = model()
    plain.lm_head.weight.data *= 2.0**17 / plain.lm_head.weight.abs().max()
    report = hfgen.optimize(plain).optimization
    by_shape = {choice.shape: choice for choice in report.choices}
    assert by_shape[64, 32].n_modules == 4
    assert by_shape[64, 32].rows == (1, 8, 128)
    assert by_shape[tiny.VOCAB, 32].kernel is None
    assert report.extra_bytes == 2 * sum(
        p.numel() for n, p in plain.named_parameters() if "proj" in n
    )
    text = str(report)
    assert "4 x 64 x 32 float32: fp16, times as fast at rows: 1 2.00, 8 2.00, prefill 2.00" in text
    assert report.seconds > 0


# --- what is left alone, and errors --------------------------------------------------------------


def test_other_classes_weights_and_forwards_are_left_alone(prefer):
    prefer("fp16")

    class Mine(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    class Bits(torch.Tensor):
        """Weights as a library of quantisation has them."""

    layers = [nn.Linear(32, 32, bias=False) for _ in range(2)] + [Mine(32, 32)]
    layers[0].weight = nn.Parameter(torch.ones(32, 32).as_subclass(Bits))
    layers[1].forward = lambda x: x
    whole = hfgen.optimize(nn.Sequential(*layers).eval())
    assert not forwards(whole)
    left = whole.optimization.left_alone
    assert left.keys() == {"0", "1", "2"}
    assert "Bits" in left["0"]
    assert "already" in left["1"]
    assert "class" in left["2"]


def test_errors_by_name(prefer):
    prefer("fp16")
    plain = model()
    with pytest.raises(TypeError, match="takes a model, but got str"):
        hfgen.optimize("gpt2")
    with pytest.raises(ValueError, match=r"weights must be None or one of 'fp16'.*'int3'"):
        hfgen.optimize(plain, weights="int3")
    with pytest.raises(TypeError, match="calibrate must be True or False"):
        hfgen.optimize(plain, calibrate=1)
    with pytest.raises(ValueError, match="not optimised"):
        hfgen.restore(plain)
    with pytest.raises(TypeError, match="takes a model"):
        hfgen.restore(None)
    hfgen.optimize(plain)
    with pytest.raises(ValueError, match="optimised already"):
        hfgen.optimize(plain)
    with torch.device("meta"):
        absent = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"'0\.weight' is on the meta device"):
        hfgen.optimize(absent)


def test_weights_too_large_for_fp16_are_named(prefer):
    prefer("fp16, rounded")
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
    misfit = kernels.named("fp16").misfit
    assert misfit(weight.bfloat16().float()) is None  # though some values of it are below 2**-17
    assert not torch.equal(weight.bfloat16().half().float(), weight.bfloat16().float())
    assert "not those of fp16" in misfit(weight)
    assert "not those of fp16" in misfit(weight.bfloat16().float() * 2**-14)
    assert "65504" in misfit(weight.bfloat16().float() * 2**24)


def test_shapes_that_int4_does_not_take(prefer):
    prefer("int4")
    odd = nn.Sequential(nn.Linear(33, 64), nn.Linear(64, 32))
    hfgen.optimize(odd, weights="int4")
    first, second = odd.optimization.choices
    assert first.kernel is None
    assert second.kernel == "int4"
    with pytest.raises(ValueError, match=r"int4' fits no layer: of '0\.weight'.*groups of 32"):
        hfgen.optimize(nn.Sequential(nn.Linear(33, 64)), weights="int4")


def test_importing_hfgen_imports_none_of_it():
    code = "import sys, hfgen; sys.exit(any('linears' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- whole steps --------------------------------------------------------------------------------


def test_kernels_that_make_no_step_faster_are_not_used(prefer, monkeypatch):
    prefer("fp16")
    slow = {measure.OWN: dict.fromkeys(ROWS, 10.0), measure.CHANGED: dict.fromkeys(ROWS, 8.0)}
    slow[measure.CHANGED] |= {1: 11.0, 128: 10.0}
    monkeypatch.setattr(whole, "measure_steps", lambda *_: slow)
    plain = hfgen.optimize(model())
    assert {it.rows for it in forwards(plain).values()} == {frozenset({2, 4, 8, 16})}
    assert all(choice.rows == (2, 4, 8, 16) for choice in plain.optimization.choices)
    assert "a whole step, times as fast at rows: 1 0.91, 2 1.25" in str(plain.optimization)
    slow[measure.CHANGED] = dict.fromkeys(ROWS, 10.5)
    found = hfgen.optimize(model())
    # The first model's times are in the file; another combination of layers has none there.
    assert forwards(found)
    other = hfgen.optimize(model(hidden_size=64))
    assert not forwards(other)
    assert not other.optimization.has_changed
    assert other.optimization.extra_bytes == 0
    assert "no step is faster" in str(other.optimization)


def test_steps_are_measured_with_and_without_the_kernels(prefer, monkeypatch):
    prefer("fp16")
    monkeypatch.setattr(whole, "measure_steps", MEASURE_STEPS)
    plain = model().train()
    seen = []
    plain.lm_head.register_forward_hook(lambda *_: seen.append("forward" in vars(plain.lm_head)))
    hfgen.optimize(plain)
    assert seen.count(True) == seen.count(False) >= len(ROWS) * (whole.MIN_PAIRS + 1)
    assert all(module.training for module in plain.modules())


def test_a_model_that_needs_more_than_ids_keeps_what_its_layers_gain(prefer, monkeypatch):
    prefer("fp16")
    monkeypatch.setattr(whole, "measure_steps", MEASURE_STEPS)
    plain = model()

    def forward(**inputs):
        raise RuntimeError("pixel_values are missing")

    plain.forward = forward
    hfgen.optimize(plain)
    assert len(forwards(plain)) == 15
    assert plain.optimization.steps == {}
