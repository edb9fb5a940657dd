"""The quantised cache: its arithmetic, the cache's operations, and what models make of it."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, EncoderDecoderCache, Qwen2Config, Qwen2ForCausalLM

import hfgen
from benchmarks import quantized_cache as benchmark
from hfgen.memory.caches.layers import record_past, roll_back
from hfgen.memory.caches.quantized import (
    CHANNELS,
    TOKENS,
    Grouping,
    Packed,
    QuantizedCache,
    QuantizedLayer,
    Scratch,
    States,
    pack,
    unpack,
)
from hfgen.settings.cache_settings import Settings
from hfgen.settings.logs import logger
from hfgen.tools.evaluate.live_bytes import LiveBytes
from scripts import train_builtin_model
from scripts.train_builtin_model import END, is_held_out, library_files
from tests import tiny
from tests.parity.decoder_families import Build
from tests.parity.family import seeded, sharpen

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
AXES = {"per channel": TOKENS, "per token": CHANNELS}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def restored(packed: Packed, like: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(like)
    packed.write_to(out)
    return out


# --- packing ------------------------------------------------------------------------------------


@given(bits=st.sampled_from([8, 4, 2]), data=st.data())
@settings(max_examples=60, deadline=None)
def test_codes_come_back_from_bytes(bits: int, data: Any) -> None:
    n_bytes = data.draw(st.integers(1, 5))
    shape = (2, 1, 3, n_bytes * 8 // bits, 2, 3)
    seed = data.draw(st.integers(0, 2**31))
    codes = torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(seed))
    packed = pack(codes.to(torch.uint8), bits)
    assert packed.dtype == torch.uint8
    assert packed.numel() * 8 == codes.numel() * bits
    for dtype in (torch.uint8, *DTYPES):
        out = torch.empty(shape, dtype=dtype)
        unpack(packed, bits, out)
        assert torch.equal(out.long(), codes)


@given(
    bits=st.sampled_from([8, 4, 2]),
    axis=st.sampled_from([TOKENS, CHANNELS]),
    dtype=st.sampled_from(DTYPES),
    offset=st.floats(-300, 300),
    spread=st.floats(1e-3, 100),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_no_number_is_off_by_more_than_half_a_scale(
    bits: int, axis: int, dtype: torch.dtype, offset: float, spread: float, seed: int
) -> None:
    states = (offset + spread * random(2, 2, 16, 8, seed=seed)).to(dtype)
    grouping = Grouping(bits, axis, tokens=8, channels=4)
    packed = Packed.empty(grouping, states).extended(states)
    error = (restored(packed, states).double() - states.double()).abs()
    half = packed.scale.double().expand(grouping.split(error).shape) / 2
    rounding = torch.finfo(dtype).eps * states.double().abs().max()  # of the result, to the dtype
    rounding += 2**bits * torch.finfo(dtype).tiny * torch.finfo(dtype).eps  # of a subnormal scale
    assert (grouping.split(error) <= half * 1.01 + rounding).all()


@pytest.mark.parametrize("axis", AXES.values(), ids=AXES)
def test_a_group_of_equal_numbers_is_exact(axis: int) -> None:
    states = torch.full((1, 1, 8, 4), 3.14159)
    packed = Packed.empty(Grouping(2, axis, 8, 4), states).extended(states)
    assert torch.equal(restored(packed, states), states)


def reference(group: list[float], bits: int) -> list[float]:
    """KIVI's asymmetric rounding of one group, number by number."""
    low, high = min(group), max(group)
    scale = (high - low) / (2**bits - 1)
    return [low + scale * round((number - low) / scale) for number in group]


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_groups_are_those_of_the_paper(bits: int) -> None:
    """Keys: tokens of a channel. Values: channels of a token. The newest tokens: as they are."""
    keys, values = random(1, 2, 21, 8), random(1, 2, 21, 12, seed=1)
    layer = QuantizedLayer(Settings(bits, 4, residual_length=3))
    layer.update(keys, values)
    expected_keys, expected_values = keys.clone(), values.clone()
    n_packed = 16  # 21 tokens, of which the last 3, and 2 that fill no group of 4, stay
    for head, start, channel in itertools.product(range(2), range(0, n_packed, 4), range(8)):
        group = expected_keys[0, head, start : start + 4, channel]
        group.copy_(torch.tensor(reference(group.tolist(), bits)))
    for head, token, start in itertools.product(range(2), range(n_packed), range(0, 12, 4)):
        group = expected_values[0, head, token, start : start + 4]
        group.copy_(torch.tensor(reference(group.tolist(), bits)))
    torch.testing.assert_close(layer.keys, expected_keys)
    torch.testing.assert_close(layer.values, expected_values)
    assert torch.equal(layer.keys[:, :, n_packed:], keys[:, :, n_packed:])


def test_blocks_do_not_change_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    states = random(2, 3, 64, 8)
    grouping = Grouping(4, TOKENS, 8, 8)
    whole = Packed.empty(grouping, states).extended(states)
    monkeypatch.setattr("hfgen.memory.caches.quantized.PACKED_AT_ONCE", 1000)
    monkeypatch.setattr("hfgen.memory.caches.quantized.UNPACKED_AT_ONCE", 1000)
    in_blocks = Packed.empty(grouping, states).extended(states[:, :, :24])
    in_blocks = in_blocks.extended(states[:, :, 24:])
    for one, other in zip(whole.tensors, in_blocks.tensors, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(restored(in_blocks, states), restored(whole, states))


# --- operations of the cache --------------------------------------------------------------------

RESIDUAL, GROUP = 6, 4
OPTIONS = {"bits": 8, "group_size": GROUP, "residual_length": RESIDUAL}


def pair(rows: int = 3, length: int = 30) -> tuple[QuantizedCache, DynamicCache]:
    """A quantised cache and one in full precision, with the same states."""
    config = tiny.llama().config
    caches = QuantizedCache(config, Settings(**OPTIONS)), DynamicCache(config=config)
    grow(caches, rows, length, seed=0)
    return caches


def grow(caches: tuple[Any, Any], rows: int, length: int, seed: int) -> None:
    for layer in range(2):
        keys, values = random(2, rows, 2, length, 8, seed=10 * seed + layer)
        for cache in caches:
            cache.update(keys.clone(), values.clone(), layer)


def assert_alike(caches: tuple[QuantizedCache, DynamicCache], n_exact: int = RESIDUAL) -> None:
    """Equal lengths; states equal up to int8's rounding, the newest ones exactly."""
    ours, full = caches
    assert ours.get_seq_length() == full.get_seq_length()
    assert ours.get_mask_sizes(3, 0) == full.get_mask_sizes(3, 0)
    for (keys, values, _), layer in zip(ours, full.layers, strict=True):
        for states, exact in ((keys, layer.keys), (values, layer.values)):
            torch.testing.assert_close(states, exact, atol=0.02, rtol=0)
            first = exact.shape[2] - n_exact
            assert torch.equal(states[:, :, first:], exact[:, :, first:])


ROWS = torch.tensor([2, 0, 0])
CHANGES = {
    "reorder": lambda cache: cache.reorder_cache(ROWS),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([2, 1])),
    "select by mask": lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "crop": lambda cache: cache.crop(-3),
    "crop all that is exact": lambda cache: cache.crop(-RESIDUAL),
    "crop nothing": lambda cache: cache.crop(0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_are_those_of_a_full_cache(change: Any) -> None:
    caches = pair()
    for cache in caches:
        change(cache)
    assert_alike(caches, n_exact=caches[1].get_seq_length() + RESIDUAL - 30)
    grow(caches, caches[1].layers[0].keys.shape[0], 9, seed=1)
    assert_alike(caches)


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("grow"), st.integers(1, 12)),
            st.tuples(st.just("crop"), st.integers(0, 15)),
            st.tuples(st.just("reorder"), st.permutations(range(3))),
        ),
        max_size=12,
    )
)
@settings(max_examples=40, deadline=None)
def test_any_sequence_of_changes(steps: list[tuple[str, Any]]) -> None:
    caches = pair(length=8)
    for seed, (kind, value) in enumerate(steps, start=1):
        length = caches[1].get_seq_length()
        if kind == "grow":
            grow(caches, 3, value, seed)
        elif kind == "crop":
            for cache in caches:
                cache.crop(-min(value, length - 1))
        else:
            for cache in caches:
                cache.reorder_cache(torch.tensor(value))
    # What is unpacked by a crop is rounded a second time when it is packed again.
    ours, full = caches
    assert ours.get_seq_length() == full.get_seq_length()
    for (keys, values, _), layer in zip(ours, full.layers, strict=True):
        torch.testing.assert_close(keys, layer.keys, atol=0.08, rtol=0)
        torch.testing.assert_close(values, layer.values, atol=0.08, rtol=0)


def test_crop_into_packed_groups_unpacks_what_is_left_of_one() -> None:
    caches = pair()
    before = caches[0].layers[0].keys
    for cache in caches:
        cache.crop(-13)  # 17 are left: 4 groups, and a token of the fifth
    layer = caches[0].layers[0]
    assert layer.states["keys"].packed.length == 16
    assert layer.states["keys"].recent.shape[2] == 1
    assert torch.equal(layer.keys, before[:, :, :17])
    for cache in caches:
        cache.crop(-100)
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 0


def test_crop_takes_negative_numbers_only() -> None:
    with pytest.raises(ValueError, match=r"minus the number of tokens to remove, but was given 3"):
        pair()[0].crop(3)


def test_drafts_wider_than_the_window_roll_back_exactly() -> None:
    plain, recording = pair()[0], pair()[0]
    record_past(recording)
    kept = recording.layers[0].keys
    grow((plain, recording), 3, 20, seed=1)
    for cache in (plain, recording):
        roll_back(cache, 20)
    assert torch.equal(recording.layers[0].keys, kept)
    assert not torch.equal(plain.layers[0].keys, kept)
    grow((recording, recording), 3, 1, seed=2)
    assert recording.layers[0].states["keys"].recent.shape[2] < RESIDUAL + 1 + GROUP


def test_a_prompt_is_packed_at_once_though_drafts_may_follow() -> None:
    cache = QuantizedCache(tiny.llama().config, Settings(**OPTIONS))
    record_past(cache)
    grow((cache, cache), 1, 15, seed=0)
    assert cache.layers[0].states["keys"].packed.length > 0


def test_copies_are_independent_and_pickles_equal() -> None:
    caches = pair()
    for copied in (copy.deepcopy(caches[0]), pickle.loads(pickle.dumps(caches[0]))):
        assert_alike((copied, caches[1]))
        assert copied.n_bytes == caches[0].n_bytes
        copied.crop(-20)
        grow((copied, copied), 3, 5, seed=3)
        assert_alike(caches)


def test_reset_empties_and_takes_other_rows() -> None:
    caches = pair()
    for cache in caches:
        cache.reset()
    assert caches[0].get_seq_length() == 0
    assert caches[0].layers[0].keys is None
    grow(caches, 1, 15, seed=4)
    assert_alike(caches)


def test_what_upstream_asks_of_a_cache() -> None:
    cache = QuantizedCache(tiny.llama().config)
    assert isinstance(cache, DynamicCache)
    assert isinstance(cache, transformers.QuantizedCache)
    assert not cache.is_compileable
    assert cache.is_croppable
    assert cache.get_seq_length() == 0
    assert cache.get_max_length() == -1
    assert cache.is_sliding == [False, False]
    assert cache.get_mask_sizes(5, 0) == (5, 0)
    # Rag reorders by reading the layers; others assign to them.
    ours, _ = pair()
    layer, states = ours.layers[0], random(2, 2, 30, 8)
    assert layer.keys.shape == (3, 2, 30, 8)
    layer.keys, layer.values = states, states
    torch.testing.assert_close(layer.keys, states, atol=0.02, rtol=0)
    assert ours.get_seq_length() == 30


def test_states_are_kept_without_their_graph() -> None:
    layer = QuantizedLayer(Settings(**OPTIONS))
    new = random(1, 2, 30, 8).requires_grad_()
    layer.update(new, new)
    keys, _ = layer.update(new, new)
    keys[:, :, -1].sum().backward()
    assert new.grad is not None
    assert not any(tensor.requires_grad for tensor in tensors(layer))


# --- memory -------------------------------------------------------------------------------------


def tensors(layer: QuantizedLayer) -> list[torch.Tensor]:
    return [
        tensor
        for states in layer.states.values()
        for tensor in (*states.packed.tensors, states.recent)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_bytes_are_those_of_the_formula(bits: int, dtype: torch.dtype) -> None:
    heads, key_size, value_size, group, residual = 3, 16, 32, 8, 5
    layer = QuantizedLayer(Settings(bits, group, residual))
    states = (
        random(2, heads, 41, key_size, dtype=dtype),
        random(2, heads, 41, value_size, dtype=dtype),
    )
    layer.update(*states)
    layer.update(*(tensor[:, :, :1] for tensor in states))
    n_packed = (42 - residual) // group * group
    number = states[0].element_size()
    codes = n_packed * (key_size + value_size) * bits // 8
    scales = 2 * number * (n_packed // group * key_size + n_packed * (value_size // group))
    recent = (42 - n_packed) * (key_size + value_size) * number
    assert layer.n_bytes == 2 * heads * (codes + scales + recent)
    # Nothing is a view of something larger.
    assert layer.n_bytes == sum(t.untyped_storage().nbytes() for t in tensors(layer))


def test_int4_is_below_three_tenths_of_float16() -> None:
    """Of heads of 64, at 4,096 tokens, when the window is as long as it gets."""
    layer = QuantizedLayer(Settings())
    length = 4096 + 31
    states = random(1, 1, length, 64, dtype=torch.float16)
    layer.update(states, states)
    assert layer.states["keys"].recent.shape[2] == 32 + 63
    assert layer.n_bytes < 0.30 * 2 * states.numel() * 2


@pytest.mark.parametrize("has_gradients", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("is_first", [True, False], ids=["prompt", "a token more"])
def test_an_update_needs_one_layer_and_a_block(
    is_first: bool, has_gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hfgen.memory.caches.quantized.PACKED_AT_ONCE", 2**12)
    monkeypatch.setattr("hfgen.memory.caches.quantized.UNPACKED_AT_ONCE", 2**12)
    config = tiny.llama(num_hidden_layers=6).config
    cache = QuantizedCache(config, Settings(4, 8))
    states = random(1, 2, 4000 if is_first else 1, 8)
    if not is_first:
        for layer in range(6):
            prompt = random(1, 2, 4000, 8)
            cache.update(prompt, prompt, layer)
    before = cache.n_bytes
    with LiveBytes() as live, torch.set_grad_enabled(has_gradients):
        for layer in range(6):
            cache.update(states, states, layer)
    one_layer = 0 if is_first else 2 * 4001 * 2 * 8 * 4
    growth = cache.n_bytes - before
    longest = cache.n_bytes // 6  # a layer's packed states move when they grow
    blocks = 8 * 2**12 * 4
    assert live.peak < (1 + Scratch.SPARE) * one_layer + growth + longest + blocks
    assert live.peak >= one_layer


def test_layers_unpack_into_the_same_memory_unless_it_is_still_seen() -> None:
    cache = pair()[0]
    new = random(3, 2, 1, 8)

    def keys_of(layer: int) -> torch.Tensor:
        return cache.update(new, new, layer)[0]

    with torch.no_grad():
        first, second = keys_of(0).data_ptr(), keys_of(1).data_ptr()
        assert first == second
        seen = keys_of(0).transpose(1, 2)  # a model that keeps what it made of them
        kept = seen.clone()
        assert keys_of(1).data_ptr() != first
        assert torch.equal(seen, kept)
        values = cache.update(new, new, 0)[1]
        assert values.data_ptr() != keys_of(0).data_ptr()
    assert cache.layers[0].keys.data_ptr() != keys_of(1).data_ptr()
    with torch.inference_mode():
        keys_of(0)
    with torch.no_grad():
        keys_of(0)  # memory of inference mode cannot be written to
    twin = copy.deepcopy(cache)
    assert twin.scratch[0] is twin.layers[0].scratch[0] is twin.layers[1].scratch[0]
    assert twin.scratch[0] is not cache.scratch[0]
    assert len(pickle.dumps(cache)) == len(pickle.dumps(twin))


# --- models -------------------------------------------------------------------------------------


def calm(stem: str, seed: int = 0, **overrides: Any) -> Any:
    """A tiny model that rounding does not throw off: small weights, but a sharp choice."""
    overrides = {"initializer_range": 0.1} | overrides
    return hfgen.mix_into(Build(f"{stem}Config", f"{stem}ForCausalLM", overrides, seed, 10.0)())


MIXED = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, Any] = {
    "llama": lambda: calm("Llama"),
    "gpt2": lambda: hfgen.mix_into(
        Build("GPT2Config", "GPT2LMHeadModel", {"initializer_range": 0.1}, 0, 10.0)()
    ),
    "qwen2": lambda: calm("Qwen2", seed=1),
    "phi, heads of 8": lambda: calm("Phi"),
    "multi-query": lambda: calm("Llama", num_key_value_heads=1),
    "gemma3, sliding and full": lambda: hfgen.mix_into(
        Build("Gemma3TextConfig", "Gemma3ForCausalLM", {"layer_types": MIXED}, 0, 10.0)()
    ),
    "gemma3n, shared keys": lambda: hfgen.mix_into(
        Build(
            "Gemma3nTextConfig",
            "Gemma3nForCausalLM",
            {
                "num_hidden_layers": 4,
                "num_kv_shared_layers": 2,
                "layer_types": 2 * MIXED,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": 96,
                "laurel_rank": 8,
                "initializer_range": 0.1,
            },
            0,
            10.0,
        )()
    ),
    "deepseek_v3, latent attention": lambda: calm(
        "DeepseekV3", num_key_value_heads=4, qk_nope_head_dim=16
    ),
    "qwen3_next, linear and full": lambda: calm(
        "Qwen3Next", layer_types=["linear_attention", "full_attention"]
    ),
    "bamba, state space and full": lambda: calm("Bamba", attn_layer_indices=[1]),
}

SMALL = {"bits": 8, "group_size": 8, "residual_length": 8}


def scores_of(model: Any, ids: torch.Tensor, **options: Any) -> Any:
    return model.generate(
        ids,
        max_new_tokens=24,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_int8_writes_what_full_precision_writes(family: str) -> None:
    model = FAMILIES[family]()
    ids = tiny.prompt(2, 40) % 91 + 5
    full = scores_of(model, ids)
    ours = scores_of(model, ids, cache_implementation="quantized", cache_config=SMALL)
    assert torch.equal(ours.sequences, full.sequences)
    assert torch.equal(ours.scores[0], full.scores[0])  # the prompt attends to itself exactly
    spread = torch.stack(full.scores).std()
    error = (torch.stack(ours.scores) - torch.stack(full.scores)).abs().max()
    assert 0 < error < 0.05 * spread
    layers = [layer for layer in ours.past_key_values.layers if isinstance(layer, QuantizedLayer)]
    assert layers
    assert all(layer.states["values"].packed.length > 0 for layer in layers)


@pytest.mark.parametrize("build", [tiny.bart, tiny.t5], ids=["bart", "t5"])
def test_encoder_decoders_quantise_what_the_decoder_wrote(build: Any) -> None:
    model = hfgen.mix_into(sharpen(build(), 10.0))
    ids = tiny.prompt(2, 9, seed=1)
    full = scores_of(model, ids)
    ours = scores_of(model, ids, cache_implementation="quantized", cache_config=SMALL)
    cache = ours.past_key_values
    assert isinstance(cache, EncoderDecoderCache)
    assert isinstance(cache.self_attention_cache, QuantizedCache)
    assert cache.self_attention_cache.layers[0].states["keys"].packed.length > 0
    assert torch.equal(ours.sequences, full.sequences)
    beams = {"num_beams": 3, "max_new_tokens": 20}
    assert torch.equal(
        model.generate(ids, **beams),
        model.generate(ids, cache_implementation="quantized", cache_config=SMALL, **beams),
    )


MODES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "top_k": 5, "num_return_sequences": 2},
    "beam sampling": {"do_sample": True, "num_beams": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "contrastive": {"penalty_alpha": 0.4, "top_k": 4},
    "contrastive, one by one": {"penalty_alpha": 0.4, "top_k": 4, "low_memory": True},
    "chunks": {"prefill_chunk_size": 7},
}


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_modes(options: dict[str, Any]) -> None:
    model = calm("Llama", seed=1)
    ids = tiny.prompt(2, 30) % 91 + 5
    outputs = []
    for cache in ({}, {"cache_implementation": "quantized", "cache_config": SMALL}):
        torch.manual_seed(0)
        outputs.append(scores_of(model, ids, **options, **cache))
    full, ours = outputs
    assert torch.equal(ours.sequences, full.sequences)
    if "num_beams" in options:  # beams that lose may be others
        error = (ours.sequences_scores - full.sequences_scores).abs()
    else:
        error = (torch.stack(ours.scores) - torch.stack(full.scores)).abs()
        error = error[error.isfinite()]
    assert 0 < error.max() < 0.5


def test_an_assistant_with_a_quantised_cache_and_for_one() -> None:
    model, assistant = calm("Llama", seed=1), calm("Llama", seed=1, num_hidden_layers=1)
    ids = tiny.prompt(2, 30) % 91 + 5
    options = {"cache_implementation": "quantized", "cache_config": SMALL}
    expected = scores_of(model, ids).sequences
    assert torch.equal(
        scores_of(model, ids, assistant_model=assistant, **options).sequences, expected
    )
    assistant.generation_config.update(**options)
    assert torch.equal(scores_of(model, ids, assistant_model=assistant).sequences, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    model = calm("Llama").to(dtype)
    ids = tiny.prompt(2, 40) % 91 + 5
    full = scores_of(model, ids)
    ours = scores_of(model, ids, cache_implementation="quantized", cache_config=SMALL)
    layer = ours.past_key_values.layers[0]
    assert layer.keys.dtype == layer.states["keys"].packed.scale.dtype == dtype
    error = (ours.scores[5] - full.scores[5]).abs().max()
    assert error < 0.1 * full.scores[5].std()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    model = calm("Llama")
    ids = tiny.prompt(2, 40) % 91 + 5
    options = {"cache_implementation": "quantized", "cache_config": SMALL}
    expected = scores_of(model, ids, **options).sequences
    model.to("cuda")
    for more in ({}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}):
        ours = scores_of(model, ids.to("cuda"), **options, **more)
        assert ours.past_key_values.layers[0].states["keys"].packed.codes.is_cuda
        assert more or torch.equal(ours.sequences.cpu(), expected)


def test_a_conversation_goes_on_with_beams() -> None:
    model = calm("Llama", seed=1)
    first = tiny.prompt(1, 30) % 91 + 5
    cache = QuantizedCache(model.config, Settings(**SMALL))
    answer = model.generate(first, past_key_values=cache, max_new_tokens=10, eos_token_id=None)
    more = torch.cat([answer, tiny.prompt(1, 5) % 91 + 5], dim=1)
    n_cached = cache.get_seq_length()
    options = {"max_new_tokens": 10, "num_beams": 3, "eos_token_id": None}
    ours = model.generate(more, past_key_values=cache, **options)
    assert torch.equal(ours, model.generate(more, **options))
    assert cache.get_seq_length() == n_cached  # the beams had a copy


# --- outliers and padding -----------------------------------------------------------------------


def outlier_model() -> Any:
    """A tiny Qwen2 with biases of keys as large as Qwen2.5's: some channels lie hundreds from zero."""
    config = Qwen2Config(
        **tiny.SPECIAL,
        vocab_size=tiny.VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.1,
    )
    model = seeded(lambda: sharpen(Qwen2ForCausalLM(config), 10.0))
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias.data
        bias.zero_()
        # The slowest frequencies of the rotary positions, which hardly turn: as in Qwen2.5.
        bias[[14, 15, 30, 31]] = torch.tensor([120.0, -80.0, 60.0, 200.0])
    return hfgen.mix_into(model)


@pytest.mark.parametrize("bits", [8, 4])
def test_outlier_keys_stay_accurate(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = outlier_model(), tiny.prompt(2, 60)
    full = model(ids).logits.detach()[:, 50:]

    def error_and_choices() -> tuple[float, torch.Tensor]:
        cache = QuantizedCache(model.config, Settings(bits, 16, residual_length=8))
        with torch.no_grad():
            model(ids[:, :50], past_key_values=cache)
            ours = model(ids[:, 50:], past_key_values=cache).logits
            return float((ours - full).abs().max()), ours.argmax(dim=-1)

    ours, choices = error_and_choices()
    per_channel = QuantizedLayer._grouping
    monkeypatch.setattr(
        QuantizedLayer,
        "_grouping",
        lambda self, name, size: (
            Grouping(bits, CHANNELS, 16, 16) if name == "keys" else per_channel(self, name, size)
        ),
    )
    per_token, their_choices = error_and_choices()
    assert ours < per_token / 5
    assert ours < (0.3 if bits == 4 else 0.03) * full.std()
    assert torch.equal(choices, full.argmax(dim=-1))
    if bits == 4:
        assert (their_choices == full.argmax(dim=-1)).float().mean() < 0.5


def test_a_model_that_puts_tokens_before_the_prompt() -> None:
    """CPM-Ant does, so its cache has other positions than the mask."""
    overrides = {"dim_head": 8, "dim_ff": 48, "prompt_length": 4, "prompt_types": 4}
    overrides |= {"segment_types": 4, "init_std": 0.2}
    model = hfgen.mix_into(Build("CpmAntConfig", "CpmAntForCausalLM", overrides, 3, 10.0)())
    ids = tiny.prompt(2, 20) % 91 + 5
    mask = torch.ones_like(ids)
    ids[1, :6] = mask[1, :6] = 0
    full = scores_of(model, ids, attention_mask=mask)
    options = {"cache_implementation": "quantized", "cache_config": SMALL}
    ours = scores_of(model, ids, attention_mask=mask, **options)
    assert ours.past_key_values.layers[0].states["keys"].packed.length > 8
    error = (ours.scores[1] - full.scores[1]).abs().max()
    assert 0 < error < 0.05 * full.scores[1].std()


# --- which layers, and bad input ----------------------------------------------------------------


def test_windows_and_states_are_left_alone() -> None:
    cache = QuantizedCache(FAMILIES["gemma3, sliding and full"]().config)
    kinds = [isinstance(layer, QuantizedLayer) for layer in cache.layers]
    assert kinds == [False, True]
    assert cache.layers[0].is_sliding


def test_group_sizes_that_are_chosen() -> None:
    sizes = {64: 64, 128: 64, 256: 64, 80: 80, 96: 48, 72: 72, 8: 8, 97: 97, 192: 64}
    assert {size: Settings().channels(size) for size in sizes} == sizes


def test_upstreams_names_of_options() -> None:
    config = tiny.llama().config
    assert Settings.of({"nbits": 2, "q_group_size": 8}, config) == Settings(2, 8)
    assert Settings.of({"backend": "hfgen", "residual_length": 9}, config).residual_length == 9
    assert Settings.of(None, config) == Settings(4, None, 32)


BAD: list[tuple[Any, str]] = [
    ({"bits": 3}, "`bits` has to be one of [8, 4, 2], but is 3."),
    ({"nbits": 16}, "`bits` has to be one of [8, 4, 2], but is 16."),
    ({"bits": True}, "`bits` has to be one of"),
    ({"group_size": 6}, "`group_size`=6 does not divide the head size 8 of the values"),
    ({"group_size": 16}, "`group_size`=16 does not divide the head size 8 of the values"),
    ({"bits": 2, "group_size": 2}, "`group_size`=2 does not fit `bits`=2: 4 codes share a byte"),
    ({"group_size": 0}, "`group_size` has to be an integer above 0, but is 0."),
    ({"residual_length": 0}, "`residual_length` has to be an integer above 0, but is 0."),
    ({"residual_length": "64"}, "`residual_length` has to be an integer above 0, but is '64'."),
    ({"grup_size": 8}, "unknown key `grup_size` (did you mean `group_size`?)."),
    ({"nbit": 8}, "unknown key `nbit` (did you mean `nbits`?)."),
    ({"colour": 8}, "unknown key `colour`."),
    ({"bits": 4, "nbits": 4}, "`cache_config` has both `bits` and `nbits`"),
    ({"axis_key": 0}, "`axis_key`=0, but keys are always grouped per channel"),
    ({"backend": "quonto"}, "`backend` in `cache_config` has to be one of ['hfgen', 'quanto', "),
    (4, "`cache_config` has to be a dict, but is 4."),
]


@pytest.mark.parametrize(("config", "message"), BAD, ids=[str(config) for config, _ in BAD])
@pytest.mark.parametrize("build", [tiny.llama, tiny.bart], ids=["llama", "bart"])
def test_bad_input(build: Any, config: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hfgen.mix_into(build())
    forward = "model.encoder.forward" if model.config.is_encoder_decoder else "forward"
    owner = model.model.encoder if model.config.is_encoder_decoder else model
    monkeypatch.setattr(owner, "forward", lambda *_, **__: pytest.fail(f"{forward} ran"))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        model.generate(tiny.prompt(), cache_implementation="quantized", cache_config=config)
    assert message in str(caught.value)


def test_upstreams_backends_are_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    class Upstream(DynamicCache):
        def __init__(self, **options: Any) -> None:
            made.append(options)
            super().__init__()

    monkeypatch.setattr("hfgen.memory.caches.quantized.UpstreamQuantizedCache", Upstream)
    model = hfgen.mix_into(tiny.llama())
    config = {"backend": "quanto", "nbits": 4, "axis_key": 0}
    options = {"cache_implementation": "quantized", "cache_config": config}
    model.generate(tiny.prompt(), max_new_tokens=2, **options)
    assert made == [{"backend": "quanto", "nbits": 4, "axis_key": 0, "config": model.config}]
    assert "config" not in config
    bart = hfgen.mix_into(tiny.bart())
    with pytest.raises(ValueError, match="'quanto' of `cache_implementation='quantized'` does not"):
        bart.generate(tiny.prompt(), max_new_tokens=2, **options)


def test_a_model_without_full_attention_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(logger, "warning_once", told.append)
    QuantizedCache(tiny.llama().config)
    assert not told
    config = transformers.MistralConfig(num_hidden_layers=2, sliding_window=16)
    QuantizedCache(config)
    assert "'full_attention', and this model has none" in told[0]
    assert "sliding_attention" in told[0]


def test_states_read_before_anything_is_cached() -> None:
    layer = QuantizedLayer(Settings())
    assert layer.keys is None
    assert layer.values is None
    assert layer.get_seq_length() == 0
    layer.crop(-3)
    empty = random(1, 2, 0, 8)
    layer.lazy_initialization(empty, empty)
    assert layer.keys.shape == (1, 2, 0, 8)
    assert len(States(Grouping(4, TOKENS, 8, 8), empty)) == 0


# --- the benchmark ------------------------------------------------------------------------------


def test_the_benchmark_measures_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"full precision": None, "int8": Settings(8, 16, 8), "int2": Settings(2, 16, 8)}
    monkeypatch.setattr(benchmark, "SETTINGS", settings)
    monkeypatch.setattr(benchmark, "TARGET_CONTEXT", 200)
    monkeypatch.setattr(
        benchmark, "held_out_rows", lambda rows, length: tiny.prompt(rows, length) + 100
    )
    full, int8, int2 = benchmark.measure_quality(1, 48)
    assert full.in_one_go == pytest.approx(full.token_by_token, rel=1e-4)
    assert full.bytes_per_token == 8 * 2 * 2 * 64 * 4  # layers, keys and values, heads, size
    assert int2.bytes_per_token < int8.bytes_per_token < full.bytes_per_token
    assert int8.in_one_go == pytest.approx(full.in_one_go, rel=0.05)
    assert int8.in_one_go != full.in_one_go
    costs = benchmark.measure_costs("small", torch.bfloat16, 200, 2)
    upstream, ours, *quantized = costs.costs
    assert upstream.n_bytes == ours.n_bytes == costs.numbers * 2
    assert [cost.name for cost in quantized] == ["int8", "int4", "int2"]
    assert all(cost.n_bytes < cost.peak < upstream.peak for cost in quantized)
    assert all(len(cost.seconds) == 2 for cost in costs.costs)
    text = benchmark.write([full, int8, int2], [costs], benchmark.machine(), (1, 48), tmp_path)
    assert "int8, perplexity" in text
    assert "of the speed of upstream's dynamic cache" in text
    names = {f"quantized_cache.{kind}" for kind in ("md", "json", "png")}
    assert {path.name for path in tmp_path.iterdir()} == names


@torch.no_grad()
def test_memory_is_not_used_again_where_torch_does_not_count_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count", raising=False)
    scratch, like = Scratch(), torch.zeros(8)
    address = scratch.empty((8,), like).data_ptr()
    assert scratch.empty((8,), like).data_ptr() == address  # it was looked up before
    monkeypatch.setattr("hfgen.memory.caches.quantized.use_count", lambda storage: 4)
    kept = scratch.buffer
    assert scratch.empty((8,), like).data_ptr() != address
    assert kept is not scratch.buffer


def test_quality_is_measured_on_rows_of_held_out_text(monkeypatch: pytest.MonkeyPatch) -> None:
    held_out = {name: path for name, path in library_files().items() if is_held_out(name)}
    monkeypatch.setattr(train_builtin_model, "library_files", lambda: held_out)  # read no others
    rows = benchmark.held_out_rows(16, 1024)
    assert rows.shape == (16, 1024)
    text = "".join(END + path.read_text(encoding="utf-8") for path in held_out.values())
    assert all(row in text for row in hfgen.builtin_model()[1].batch_decode(rows))
