"""The offloaded cache: the same tokens, with keys and values on the host or in files."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    Cache,
    EncoderDecoderCache,
    GenerationConfig,
    LlamaConfig,
    LogitsProcessorList,
)

import hfgen
from hfgen.memory import caches
from hfgen.memory.caches import dynamic, growing, offloaded
from hfgen.memory.caches.dynamic import GrowingCache, GrowingLayer, as_growing
from hfgen.memory.caches.growing import GrowableTensor, GrowthPolicy
from hfgen.memory.caches.offloaded import Folder, Offloaded, OffloadedCache
from tests import SHIPPED, tiny
from tests.parity.harness import FAMILIES
from tests.test_dynamic_cache import LAYERS, OPERATIONS, Pair, apply, equal, filled

HEADS, SIZE = 2, 4


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def _no_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of tiny models would be concatenated, in memory."""
    monkeypatch.setattr(growing, "CONCATENATED", 0)


def states(n_tokens: int, rows: int = 1, size: int = SIZE, **options: Any) -> tuple[Tensor, Tensor]:
    shape = (rows, HEADS, n_tokens, size)
    return torch.randn(shape, **options), torch.randn(shape, **options)


def config(n_layers: int = 2, **options: Any) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=n_layers,
        num_attention_heads=HEADS,
        hidden_size=HEADS * SIZE,
        **options,
    )


def mapped_files(path: Path) -> list[str]:
    """Files of the folder ``path`` that are mapped into memory, as the system names them."""
    if not sys.platform.startswith("linux"):
        pytest.skip(reason="only Linux lists what is mapped")
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if f"{path}/" in line]


# ---------------------------------------------------------------- layers beside upstream's


@pytest.mark.usefixtures("_no_small_tensors")
@pytest.mark.parametrize("kind", ["full", "indexed", "hybrid"])
@settings(max_examples=30, deadline=None)
@given(
    operations=st.lists(OPERATIONS, min_size=1, max_size=25),
    max_length=st.sampled_from([None, 3, 40]),
)
def test_a_layer_in_files_is_upstreams_after_every_operation(
    kind: str, operations: list[tuple[str, Any]], max_length: int | None
) -> None:
    torch.manual_seed(0)
    room = GrowthPolicy(max_length=max_length)
    ours = as_growing(LAYERS[kind](), room)
    for name in ours._names:
        setattr(ours, name, Offloaded(room, Folder(tempfile.gettempdir())))
    pair = Pair(LAYERS[kind](), ours)
    for name, argument in operations:
        apply(pair, name, argument)
        pair.check()


@pytest.mark.usefixtures("_no_small_tensors")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_are_chosen_within_files(tmp_path: Path, dtype: torch.dtype) -> None:
    cache = OffloadedCache(config(1), tmp_path, max_length=40)
    plain = GrowingCache(config=config(1), max_length=40)
    for name, argument in [
        ("batch_repeat_interleave", 3),
        ("reorder_cache", torch.tensor([2, 0, 1, 5, 5, 3])),
        ("batch_select_indices", torch.tensor([0, 4])),
        ("batch_select_indices", torch.tensor([False, True])),
        ("crop", -2),
    ]:
        rows = len(cache.layers[0].keys) if cache.get_seq_length() else 2
        new = states(7, rows, dtype=dtype)
        for each in (cache, plain):
            each.update(*new, 0)
            getattr(each, name)(argument)
        equal(filled(cache), filled(plain))
        assert len(mapped_files(tmp_path)) == 2  # keys and values, and no former ones


def test_what_does_not_grow_without_end_stays_in_memory(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "linear_attention", "hybrid", "hybrid_sliding"]
    cache = OffloadedCache(config(5, layer_types=kinds, sliding_window=4), tmp_path)
    growing_layers = [layer for layer in cache.layers if isinstance(layer, GrowingLayer)]
    assert [type(layer._keys) for layer in growing_layers] == [
        Offloaded,
        GrowableTensor,
        Offloaded,
        GrowableTensor,
    ]


def test_few_numbers_are_in_memory(tmp_path: Path) -> None:
    cache = OffloadedCache(config(1), tmp_path)
    cache.update(*states(growing.CONCATENATED // (HEADS * SIZE)), 0)
    assert not mapped_files(tmp_path)
    cache.update(*states(1), 0)
    assert len(mapped_files(tmp_path)) == 2


# ---------------------------------------------------------------- files


@pytest.mark.usefixtures("_no_small_tensors")
def test_a_file_has_room_until_the_end_of_the_call(tmp_path: Path) -> None:
    cache = OffloadedCache(config(1), tmp_path, max_length=100)
    cache.update(*states(10), 0)
    first = cache.layers[0].keys.data_ptr()
    for _ in range(90):
        cache.update(*states(1), 0)
        assert cache.layers[0].keys.data_ptr() == first
    cache.expect(150)  # the next call
    for _ in range(50):
        cache.update(*states(1), 0)
    assert cache.layers[0].keys.untyped_storage().nbytes() == 150 * HEADS * SIZE * 4
    cache.update(*states(1), 0)  # and one of which nothing is known
    assert cache.layers[0].keys.untyped_storage().nbytes() > 180 * HEADS * SIZE * 4
    assert len(mapped_files(tmp_path)) == 2


@pytest.mark.usefixtures("_no_small_tensors")
def test_files_have_no_name_and_go_with_the_cache(tmp_path: Path) -> None:
    several = [OffloadedCache(config(2), tmp_path) for _ in range(3)]
    for number, cache in enumerate(several):
        for layer in range(2):
            cache.update(*(torch.full_like(s, number) for s in states(5)), layer)
    assert len(set(mapped_files(tmp_path))) == 3 * 2 * 2
    assert not os.listdir(tmp_path)
    for number, cache in enumerate(several):
        assert all((tensor == number).all() for tensor in filled(cache))
    keys = several[0].layers[0].keys
    several[1].reset()
    assert len(mapped_files(tmp_path)) == 2 * 2 * 2
    del several, cache
    gc.collect()
    assert len(mapped_files(tmp_path)) == 1  # a tensor that someone kept
    assert (keys == 0).all()
    del keys
    assert not mapped_files(tmp_path)


@pytest.mark.usefixtures("_no_small_tensors")
def test_copies_are_in_files_and_pickles_are_not(tmp_path: Path) -> None:
    cache = OffloadedCache(config(1), tmp_path)
    cache.update(*states(20), 0)
    twin, unpickled = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    assert len(mapped_files(tmp_path)) == 4
    new = states(3)
    for each in (cache, twin, unpickled):
        each.update(*new, 0)
        equal(filled(each), filled(cache))
    assert len(mapped_files(tmp_path)) == 4
    assert len({each.layers[0].keys.data_ptr() for each in (cache, twin, unpickled)}) == 3
    assert twin.layers[0]._growth is twin.layers[0]._keys.growth


@pytest.mark.usefixtures("_no_small_tensors")
def test_files_go_after_an_exception(tmp_path: Path) -> None:
    model = hfgen.mix_into(tiny.llama())
    seen = []

    def fail(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(len(mapped_files(tmp_path)))
        if len(seen) == 3:
            raise RuntimeError("enough")
        return scores

    with pytest.raises(RuntimeError, match="enough"):
        generate(model, tmp_path, logits_processor=LogitsProcessorList([fail]))
    gc.collect()
    assert seen == [4, 4, 4]
    assert not mapped_files(tmp_path)
    assert not os.listdir(tmp_path)


@pytest.mark.usefixtures("_no_small_tensors")
def test_a_full_disk_is_an_error_and_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(offloaded, "_reserve", is_full)
    with pytest.raises(
        OSError, match=r"no place for a file of [\d,]+ bytes: No space left"
    ) as full:
        generate(hfgen.mix_into(tiny.llama()), tmp_path)
    assert full.value.errno == errno.ENOSPC
    assert not mapped_files(tmp_path)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, None])
def test_a_disk_that_cannot_reserve_space_is_used_all_the_same(
    tmp_path: Path, code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: Any) -> None:
        raise OSError(code, "Operation not supported") if code else AttributeError

    monkeypatch.setattr(os, "posix_fallocate", cannot, raising=False)
    tensor = Folder(tmp_path).empty((3, 5), torch.bfloat16)
    assert tensor.copy_(torch.ones(3, 5)).sum() == 15


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells this")
def test_files_take_no_anonymous_memory(tmp_path: Path) -> None:
    def anonymous_mb() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))

    grown, new = [], states(1024, rows=2, size=64)
    for cache in (OffloadedCache(config(2), tmp_path), GrowingCache(config=config(2))):
        before = anonymous_mb()
        for _ in range(16):
            for layer in range(2):
                cache.update(*new, layer)
        cache.reorder_cache(torch.tensor([1, 0]))
        grown.append(anonymous_mb() - before)
    assert sum(tensor.nbytes for tensor in filled(cache)) == 2**26  # 64 MB
    in_files, in_memory = grown
    assert in_files < 20
    assert in_memory > in_files + 10  # some of it was the process's already


# ---------------------------------------------------------------- models


def generate(model: Any, path: Path | None = None, **options: Any) -> Any:
    """Twelve tokens; with ``path``, of a cache in files there."""
    if path is not None:
        options = {"cache_implementation": "offloaded", "cache_config": {"path": path}} | options
    defaults = {
        "max_new_tokens": 12,
        "eos_token_id": None,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    if "input_ids" not in options and model.config.model_type == "llama":
        options["input_ids"] = tiny.prompt()
    torch.manual_seed(0)
    return model.generate(**defaults | options)


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "chunked": {"prefill_chunk_size": 3},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3},
    "drafted": {"prompt_lookup_num_tokens": 3},
}

#: Full attention, windows, both, experts, latent attention, indexers, linear attention, shared keys.
DECODERS = """llama gpt2 bloom falcon qwen3 gemma2 gemma3_text cohere2 gpt_oss deepseek_v3
    deepseek_v32 qwen3_next bamba gemma3n_text""".split()
ENCODER_DECODERS = ["t5", "bart", "whisper", "t5gemma"]


@pytest.mark.usefixtures("_no_small_tensors")
@pytest.mark.parametrize("name", DECODERS + ENCODER_DECODERS)
def test_the_same_numbers_in_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    empty = Folder.empty
    monkeypatch.setattr(Folder, "empty", lambda *args: made.append(args) or empty(*args))
    family = FAMILIES[name]
    model: Any = hfgen.mix_into(family.build())
    inputs = family.inputs(model, 2, "padding" not in family.unsupported, 0)
    modes = ["greedy", "sampled"]
    modes += ["beams"] if "beam_search" in family.modes else []
    modes += ["drafted"] if "assisted_generation" in family.modes else []
    modes += ["chunked"] if family.kind == "decoder" and "chunked" not in family.unsupported else []
    for mode in modes:
        options = inputs | MODES[mode]
        expected = generate(model, **options)
        result = generate(model, tmp_path, **options)
        assert torch.equal(result.sequences, expected.sequences), mode
        if mode == "drafted":  # how many tokens are drafted depends on the time that they take
            torch.testing.assert_close(result.logits, expected.logits, rtol=1e-4, atol=1e-4)
        else:
            equal(result.logits, expected.logits)
        assert made, "nothing was in files"
        made.clear()


@pytest.mark.usefixtures("_no_small_tensors")
@pytest.mark.parametrize("mode", MODES)
def test_on_the_host_it_is_the_dynamic_cache(mode: str) -> None:
    model, options = hfgen.mix_into(tiny.llama()), MODES[mode]
    for implementation in ("offloaded", "offloaded_static"):
        if implementation == "offloaded_static" and mode == "contrastive":
            continue  # which no static cache can do
        result = generate(model, cache_implementation=implementation, **options)
        assert torch.equal(result.sequences, generate(model, **options).sequences)


def test_offloaded_static_of_a_model_that_makes_its_own_cross_attention() -> None:
    model: Any = hfgen.mix_into(FAMILIES["t5gemma"].build())
    inputs = FAMILIES["t5gemma"].inputs(model, 2, True, 0)
    result = generate(model, cache_implementation="offloaded_static", **inputs)
    assert torch.equal(result.sequences, generate(model, **inputs).sequences)


@pytest.mark.usefixtures("_no_small_tensors")
def test_a_returned_cache_goes_on_in_files(tmp_path: Path) -> None:
    model = hfgen.mix_into(tiny.llama())
    first = generate(model, tmp_path)
    cache = first.past_key_values
    assert isinstance(cache, OffloadedCache)
    assert cache._growth.max_length == 7 + 12 - 1
    turn = torch.cat([first.sequences, tiny.prompt(length=3, seed=1)], dim=1)
    for options in ({}, {"num_beams": 2}):  # beams: of a copy
        second = generate(model, input_ids=turn, past_key_values=copy.deepcopy(cache), **options)
        expected = generate(model, input_ids=turn, **options)
        assert torch.equal(second.sequences, expected.sequences)
        assert len(mapped_files(tmp_path)) >= 8
    with torch.inference_mode():
        again = generate(model, input_ids=turn, past_key_values=cache)
    assert torch.equal(again.sequences, generate(model, input_ids=turn).sequences)


def test_the_decoders_part_is_offloaded_and_cross_attention_is_not(tmp_path: Path) -> None:
    result = generate(hfgen.mix_into(tiny.t5()), tmp_path, input_ids=tiny.prompt())
    cache = result.past_key_values
    assert isinstance(cache, EncoderDecoderCache)
    assert isinstance(cache.self_attention_cache, OffloadedCache)
    assert not isinstance(cache.cross_attention_cache, OffloadedCache)


# ---------------------------------------------------------------- accelerators


@pytest.mark.parametrize("concatenated", [0, SHIPPED])
def test_states_come_to_the_device_of_the_model_and_stay_on_the_host(
    monkeypatch: pytest.MonkeyPatch, concatenated: int
) -> None:
    """Tensors without numbers, which know their device and refuse to be mixed."""
    monkeypatch.setattr(dynamic, "grows_in_place", lambda *states: True)
    monkeypatch.setattr(growing, "CONCATENATED", concatenated)
    cache = OffloadedCache(config(1))

    def update(n_tokens: int, rows: int) -> None:
        length = cache.get_seq_length() + n_tokens
        for tensor in cache.update(*states(n_tokens, rows, device="cuda"), 0):
            assert tensor.device.type == "cuda"
            assert tensor.shape == (rows, HEADS, length, SIZE)
        assert {tensor.device.type for tensor in filled(cache)} == {"cpu"}

    with FakeTensorMode():
        update(5, rows=2)
        update(1, rows=2)
        cache.crop(-2)
        update(3, rows=2)
        cache.reorder_cache(torch.tensor([1, 0], device="cuda"))
        cache.batch_repeat_interleave(2)
        update(1, rows=4)
        layer = cache.layers[0]
        layer.keys, layer.values = states(7, rows=3, device="cuda")  # as models may
        update(1, rows=3)
        cache.reset()
        update(2, rows=3)


def request(device: str, options: dict[str, Any] | None = None, **attributes: Any) -> Any:
    model = SimpleNamespace(device=torch.device(device), dtype=torch.float32, **attributes)
    return caches.CacheRequest(
        model=SimpleNamespace(config=config(), **vars(model)),
        config=GenerationConfig(cache_implementation="offloaded", cache_config=options),
        model_kwargs={},
        rows=2,
        max_length=30,
    )


@pytest.mark.parametrize(
    ("device", "attributes", "has_cuda", "is_upstreams"),
    [
        ("cpu", {}, True, False),
        ("cuda", {}, True, True),
        ("mps", {}, True, False),
        ("meta", {"hf_device_map": {"model": 0, "lm_head": "cpu"}}, True, True),
        ("cpu", {"hf_device_map": {"model": "cpu"}}, True, False),
        ("cuda", {}, False, False),
    ],
)
def test_upstreams_cache_is_taken_where_it_works(
    device: str,
    attributes: dict[str, Any],
    has_cuda: bool,
    is_upstreams: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []

    class Upstreams(dynamic.DynamicCache):
        def __init__(self, config: Any, offloading: bool) -> None:
            made.append(offloading)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(offloaded, "DynamicCache", Upstreams)
    cache = caches.cache_kind("offloaded").factory(request(device, **attributes))
    assert isinstance(cache, Upstreams if is_upstreams else OffloadedCache)
    made.clear()
    offloaded.make_cross_attention(request(device, **attributes))
    assert made == ([True] if is_upstreams else [])
    in_files = caches.cache_kind("offloaded").factory(
        request(device, {"path": tmp_path}, **attributes)
    )
    assert isinstance(in_files, OffloadedCache)


@pytest.mark.parametrize("build", [tiny.llama, tiny.t5])
@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
@pytest.mark.parametrize("mode", [{"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}])
def test_beams_and_samples_with_upstreams_cache(
    mode: dict[str, Any], kind: str, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream cannot be copied. Here it has one, and moves between the CPU and the CPU."""
    model, ids = hfgen.mix_into(build()), tiny.prompt()
    torch.manual_seed(0)
    expected = model.generate(ids, max_new_tokens=5, **mode)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: stream)
    monkeypatch.setattr(Cache, "prefetch", lambda *args: None)
    monkeypatch.setattr(torch, "Stream", Unpicklable)
    monkeypatch.setattr(offloaded, "is_on_cuda", lambda model: True)
    torch.manual_seed(0)
    output = model.generate(
        ids, max_new_tokens=5, cache_implementation=kind, return_dict_in_generate=True, **mode
    )
    assert torch.equal(output.sequences, expected)
    if build is tiny.llama:
        assert output.past_key_values.offloading
        ids = expected.repeat(4 // len(expected), 1)
        with pytest.raises(ValueError, match="holds 4 sequences, but the call has 4 prompts, exp"):
            model.generate(ids, max_new_tokens=5, past_key_values=output.past_key_values, **mode)


class Unpicklable:
    """What a cache calls of a stream."""

    def wait_stream(self, other: Any) -> None:
        pass

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        raise TypeError("cannot pickle 'torch.Stream' object")


# ---------------------------------------------------------------- bad input


def refused(match: str, **options: Any) -> None:
    """``generate`` raises before anything is forwarded."""
    model = hfgen.mix_into(tiny.llama())
    model.register_forward_pre_hook(lambda *_: pytest.fail("forwarded"))
    with pytest.raises(ValueError, match=match):
        model.generate(tiny.prompt(), max_new_tokens=3, **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"pth": "/tmp"}, r"unknown key `pth` \(did you mean `path`\?\)"),
        ({"nbits": 4}, r"unknown key `nbits`\. .*'offloaded'` knows \['path'\]"),
        ({"path": 3}, "has to be the path of a folder, but is 3"),
        ({"path": ""}, "has to be the path of a folder, but is ''"),
        ({"path": "/no such folder"}, "'/no such folder'.* No such file or directory"),
        ({"path": __file__}, "Not a directory"),
        (["path"], r"has to be a dict, but is \['path'\]"),
    ],
    ids=str,
)
def test_options_that_cannot_be_used(options: Any, match: str) -> None:
    refused(match, cache_implementation="offloaded", cache_config=options)


def test_the_static_cache_has_no_path() -> None:
    refused(
        r"unknown key `path`\. .*'offloaded_static'` knows none",
        cache_implementation="offloaded_static",
        cache_config={"path": "/tmp"},
    )


def test_a_folder_that_must_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any, **__: Any) -> Any:  # the tests may run as root, who may write anywhere
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", denied)
    options = {"cache_implementation": "offloaded", "cache_config": {"path": tmp_path}}
    refused("files can be made in, but: Permission denied", **options)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("dinamic", "dynamic"), ("ofloaded", "offloaded"), ("offload_static", "offloaded_static")],
)
def test_the_nearest_implementation_is_named(name: str, nearest: str) -> None:
    match = rf"is '{name}' \(did you mean '{nearest}'\?\)"
    refused(match, cache_implementation=name)
    with pytest.raises(ValueError, match=match):
        hfgen.GenerationConfig(cache_implementation=name)
    options = GenerationConfig(max_new_tokens=3)
    options.cache_implementation = name
    with pytest.raises(ValueError, match=match):
        hfgen.mix_into(tiny.llama()).generate(tiny.prompt(), generation_config=options)


def test_paged_in_a_config_is_the_dynamic_cache_as_upstreams() -> None:
    options = GenerationConfig(max_new_tokens=3, cache_implementation="paged")
    ids = tiny.prompt()
    expected = tiny.llama().generate(ids, generation_config=options)
    ours = hfgen.mix_into(tiny.llama()).generate(ids, generation_config=options)
    assert torch.equal(ours, expected)
