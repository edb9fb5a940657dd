"""The dynamic cache that grows in place, beside upstream's, which concatenates."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

import hfgen
from hfgen.memory.caches import CACHES, CacheKind, CacheRequest, growing
from hfgen.memory.caches.dynamic import (
    KINDS,
    GrowingCache,
    GrowingLayer,
    as_growing,
    upstream_kind,
)
from hfgen.memory.caches.growing import SMALLEST_BLOCK, GrowableTensor, GrowthPolicy
from hfgen.tools.evaluate.live_bytes import LiveBytes
from tests import SHIPPED, tiny
from tests.parity import harness
from tests.versions import NO_COUNT, holders_are_told

HEADS, KEY_SIZE, VALUE_SIZE = 2, 4, 6
WINDOW = 5


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


# ---------------------------------------------------------------- layers beside upstream's


LAYERS: dict[str, Callable[[], Any]] = {
    "full": DynamicLayer,
    "sliding": lambda: DynamicSlidingWindowLayer(sliding_window=WINDOW),
    "window of one": lambda: DynamicSlidingWindowLayer(sliding_window=1),
    "indexed": DynamicIndexedLayer,
    "hybrid": LinearAttentionAndFullAttentionLayer,
    "hybrid sliding": lambda: LinearAttentionAndSlidingWindowAttentionLayer(sliding_window=WINDOW),
}


@dataclass
class Pair:
    """The same layer of both libraries, and what was handed out of hfgen's: view, and a copy."""

    theirs: Any
    ours: Any
    rows: int = 2
    seen: int = 0

    def __post_init__(self) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.both("activate_past_recording")

    def both(self, method: str, *arguments: Any) -> None:
        """Call a method of each; they raise the same."""
        outcomes = []
        for layer in (self.theirs, self.ours):
            if not hasattr(layer, method):
                return
            try:
                outcomes.append(getattr(layer, method)(*arguments))
            except RuntimeError as error:
                outcomes.append(type(error))
        equal(*outcomes)

    def update(self, n_tokens: int) -> None:
        keys = torch.randn(self.rows, HEADS, n_tokens, KEY_SIZE)
        values = torch.randn(self.rows, HEADS, n_tokens, VALUE_SIZE)
        equal(self.theirs.get_mask_sizes(n_tokens), self.ours.get_mask_sizes(n_tokens))
        returned = self.ours.update(keys, values)
        equal(self.theirs.update(keys, values), returned)
        self.seen += n_tokens
        if hasattr(self.theirs, "update_indexer"):
            self.both("update_indexer", torch.randn(self.rows, n_tokens, KEY_SIZE))
        if hasattr(self.theirs, "update_conv_state"):
            for layer in (self.theirs, self.ours):
                layer.update_conv_state(keys[:, 0].mT, conv_kernel_size=3)
        self.kept += [(view, view.clone()) for view in returned]

    def crop(self, n_tokens: int) -> None:
        if not self.seen or n_tokens > min(self.seen, self.theirs.keys.shape[-2]):
            return
        self.both("crop", -n_tokens)
        self.seen -= n_tokens

    def set_rows(self, method: str, argument: Any, rows: int) -> None:
        if not self.seen:
            return
        self.both(method, argument)
        self.rows = rows
        if not hasattr(self.theirs, "conv_states") or method == "reorder_cache":
            return
        for layer in (self.theirs, self.ours):  # upstream leaves these as they were
            layer.conv_states = {
                i: None if states is None else states.new_zeros(rows, *states.shape[1:])
                for i, states in layer.conv_states.items()
            }

    def check(self) -> None:
        equal(self.theirs.get_seq_length(), self.ours.get_seq_length())
        equal(self.theirs.get_max_length(), self.ours.get_max_length())
        for name in ("keys", "values", "indexer_keys", "cumulative_length", "is_initialized"):
            equal(getattr(self.theirs, name, None), getattr(self.ours, name, None))
        equal(getattr(self.theirs, "conv_states", None), getattr(self.ours, "conv_states", None))
        for view, copied in self.kept:
            assert torch.equal(view, copied), "a tensor that was handed out has changed"


def upstreams_cache(request: CacheRequest) -> DynamicCache:
    """A plain factory in place of the default cache."""
    return DynamicCache(config=request.decoder_config)


UPSTREAMS = CacheKind("dynamic", upstreams_cache, loses_rows=True, rolls_back=True)


def equal(a: Any, b: Any) -> None:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, (tuple, list)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            equal(x, y)
    elif isinstance(a, dict):
        equal(list(a.values()), list(b.values()))
    else:
        assert a == b


OPERATIONS = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 9)),
    st.tuples(st.just("update"), st.just(1)),
    st.tuples(st.just("crop"), st.integers(0, 4)),
    st.tuples(st.just("forget views"), st.none()),
    st.tuples(st.just("reorder"), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
    st.tuples(st.just("select"), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
    st.tuples(st.just("mask"), st.lists(st.booleans(), min_size=9, max_size=9)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("deepcopy"), st.none()),
    st.tuples(st.just("copy"), st.none()),
    st.tuples(st.just("pickle"), st.none()),
    st.tuples(st.just("offload"), st.none()),
    st.tuples(st.just("reset"), st.none()),
    st.tuples(st.just("assign"), st.none()),
    st.tuples(st.just("assign a row"), st.none()),
    st.tuples(st.just("edit"), st.none()),
)


def apply(pair: Pair, name: str, argument: Any) -> None:
    if name in ("update", "crop"):
        getattr(pair, name)(argument)
    elif name == "forget views":
        pair.kept.clear()
    elif name in ("reorder", "select"):
        rows = torch.tensor(argument) % pair.rows
        method = {"reorder": "reorder_cache", "select": "batch_select_indices"}[name]
        pair.set_rows(method, rows, len(rows))
    elif name == "mask":
        mask = torch.tensor([True, *argument])[: pair.rows]
        pair.set_rows("batch_select_indices", mask, int(mask.sum()))
    elif name == "repeat" and pair.rows < 5:
        pair.set_rows("batch_repeat_interleave", argument, pair.rows * argument)
    elif name == "deepcopy":
        pair.ours = copy.deepcopy(pair.ours)
    elif name == "copy" and pair.seen:  # the original goes on by itself
        original, pair.ours = pair.ours, copy.copy(pair.ours)
        n_new = (pair.rows, HEADS, 3)
        original.update(torch.randn(*n_new, KEY_SIZE), torch.randn(*n_new, VALUE_SIZE))
    elif name == "pickle":
        pair.ours = pickle.loads(pickle.dumps(pair.ours))
    elif name == "offload":
        pair.both("offload")
        pair.both("prefetch")
    elif name == "reset":
        pair.both("reset")
        pair.seen = 0
        if hasattr(pair.theirs, "conv_states"):  # of another number of rows, perhaps
            for layer in (pair.theirs, pair.ours):
                layer.is_conv_states_initialized = {0: False}
    elif name == "assign" and pair.seen:
        for layer in (pair.theirs, pair.ours):
            layer.keys, layer.values = layer.keys + 1, layer.values * 2
    elif name == "assign a row" and pair.seen and not hasattr(pair.theirs, "conv_states"):
        for layer in (pair.theirs, pair.ours):
            layer.keys, layer.values = layer.keys[-1:], layer.values[-1:]
            if hasattr(layer, "indexer_keys"):
                layer.indexer_keys = layer.indexer_keys[-1:]
        pair.rows = 1
    elif name == "edit" and pair.seen and pair.theirs.keys.shape[-2]:
        pair.kept.clear()  # upstream's next tensors are copies, hfgen's are not: both are edited
        for layer in (pair.theirs, pair.ours):
            layer.keys[:, :, -1:] = layer.keys[:, :, :1]


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("records", [False, True], ids=["", "recording"])
@settings(max_examples=60, deadline=None)
@given(
    operations=st.lists(OPERATIONS, min_size=1, max_size=25),
    block=st.sampled_from([1, 4, 40]),
    concatenated=st.sampled_from([0, 100, SHIPPED]),  # 100: some begin so, and go on in place
)
def test_a_layer_is_upstreams_after_every_operation(
    kind: str, records: bool, operations: list[tuple[str, Any]], block: int, concatenated: int
) -> None:
    torch.manual_seed(0)
    with patch.object(growing, "CONCATENATED", concatenated):
        check_operations(kind, records, operations, block)


def check_operations(
    kind: str, records: bool, operations: list[tuple[str, Any]], block: int
) -> None:
    theirs = LAYERS[kind]()
    ours = as_growing(LAYERS[kind](), _Blocks(block))
    assert type(ours) is not type(theirs)
    assert isinstance(ours, type(theirs))
    pair = Pair(theirs, ours)
    if not records and hasattr(theirs, "record_past"):
        theirs.record_past = ours.record_past = False
    for name, argument in operations:
        apply(pair, name, argument)
        pair.check()


class _Blocks(GrowthPolicy):
    """GrowthPolicy of one size, so that short sequences fill buffers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.n_tensors = size

    def spare(self, length: int) -> int:
        return self.n_tensors

    behind_window = spare


# ---------------------------------------------------------------- in place


def states(n_tokens: int, rows: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    keys = torch.randn(rows, HEADS, n_tokens, KEY_SIZE, dtype=dtype)
    return keys, torch.randn(rows, HEADS, n_tokens, VALUE_SIZE, dtype=dtype)


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def layer_with(n_tokens: int, rows: int = 1, **room: Any) -> GrowingLayer:
    """A layer whose buffer has room: the first update makes none."""
    layer: GrowingLayer = as_growing(DynamicLayer(), GrowthPolicy(**room))
    layer.update(*states(n_tokens - 1, rows))
    layer.update(*states(1, rows))
    return layer


def test_a_buffer_is_written_to_until_it_is_full_and_enlarged_by_a_block() -> None:
    layer = layer_with(100, n_tensors=2)
    first = place(layer.keys)
    for _ in range(50):  # a block: half of the length
        layer.update(*states(1))
        assert place(layer.keys) == first
    layer.update(*states(1))
    assert place(layer.keys) != first
    assert layer.keys.untyped_storage().nbytes() == (151 + 75) * HEADS * KEY_SIZE * 4


def test_few_numbers_are_concatenated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "CONCATENATED", 20 * HEADS * KEY_SIZE)
    layer = as_growing(DynamicLayer(), GrowthPolicy())
    for n_tokens in range(1, 41):
        keys, values = layer.update(*states(1))
        assert keys.shape[2] == values.shape[2] == n_tokens
        has_room = keys.untyped_storage().nbytes() > keys.nbytes
        assert has_room == (n_tokens > 20)


#: What a window of five tokens holds, and what attention gets, after updates of 3, 3, 1 and 7 tokens.
WINDOWS = [
    (3, [1, 2, 3], [1, 2, 3]),
    (3, [3, 4, 5, 6], [1, 2, 3, 4, 5, 6]),
    (1, [4, 5, 6, 7], [3, 4, 5, 6, 7]),
    (7, [11, 12, 13, 14], [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]),
]


@pytest.mark.parametrize("concatenated", [0, 6, SHIPPED], ids=["in place", "both", "concatenated"])
def test_both_ways_of_growing_by_hand(concatenated: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "CONCATENATED", concatenated)
    window = as_growing(DynamicSlidingWindowLayer(sliding_window=WINDOW), GrowthPolicy())
    full = as_growing(DynamicLayer(), GrowthPolicy())
    kept, end = [], 0
    for added, held, seen in WINDOWS:
        new = torch.arange(end + 1.0, end + added + 1).view(1, 1, added, 1)
        end += added
        for layer, expected in ((window, seen), (full, list(range(1, end + 1)))):
            keys, values = layer.update(new, -new)
            assert keys.flatten().tolist() == expected
            assert values.flatten().tolist() == [-key for key in expected]
            kept.append((keys, expected))
        assert window.keys.flatten().tolist() == held
        assert window.get_seq_length() == full.get_seq_length() == end
    assert all(keys.flatten().tolist() == expected for keys, expected in kept)  # nobody's changed
    full.crop(-4)
    full.update(*2 * [torch.full((1, 1, 2, 1), 99.0)])
    assert full.keys.flatten().tolist() == [*range(1, 11), 99, 99]
    full.reorder_cache(torch.tensor([0, 0]))
    assert full.keys[:, 0, :, 0].tolist() == 2 * [[*range(1, 11), 99, 99]]


def test_no_room_is_made_beyond_the_end_of_the_call() -> None:
    layer = layer_with(100, max_length=110)
    first = place(layer.keys)
    for _ in range(10):
        layer.update(*states(1))
    assert place(layer.keys) == first
    assert layer.keys.untyped_storage().nbytes() == layer.keys.numel() * 4
    layer.update(*states(1))  # another call, of which nothing is known
    assert layer.keys.untyped_storage().nbytes() == (111 + SMALLEST_BLOCK) * HEADS * KEY_SIZE * 4


@holders_are_told
def test_drafting_crops_and_regrows_in_place() -> None:
    layer = layer_with(20)
    first = place(layer.keys)
    for _ in range(5):
        layer.update(*states(4))
        layer.crop(-3)
        assert place(layer.keys) == first
    assert layer.get_seq_length() == 25


@holders_are_told
def test_a_window_moves_through_its_buffer() -> None:
    layer = as_growing(DynamicSlidingWindowLayer(sliding_window=8), GrowthPolicy())
    layer.update(*states(500))
    assert layer.keys.untyped_storage().nbytes() <= (8 + SMALLEST_BLOCK) * HEADS * KEY_SIZE * 4
    places = []
    for _ in range(4 * SMALLEST_BLOCK):
        layer.update(*states(1))
        places.append(place(layer.keys))
    assert sum(a != b for a, b in pairwise(places)) <= 2  # else back to the start of the same
    assert layer.keys.untyped_storage().nbytes() <= (9 + SMALLEST_BLOCK) * HEADS * KEY_SIZE * 4


def test_reordered_rows_keep_their_room() -> None:
    layer = layer_with(20, rows=3)
    layer.reorder_cache(torch.tensor([2, 2, 0]))
    first = place(layer.keys)
    layer.update(*states(1, rows=3))
    assert place(layer.keys) == first


def test_views_of_earlier_tokens_do_not_make_a_layer_move() -> None:
    layer = layer_with(10)
    kept = [layer.keys]
    for _ in range(10):
        layer.update(*states(1))
        kept.append(layer.keys)
    assert len(set(map(place, kept))) == 1


def test_a_window_that_someone_kept_stays_as_it_was() -> None:
    layer = as_growing(DynamicSlidingWindowLayer(sliding_window=6), GrowthPolicy(n_tensors=2))
    layer.update(*states(1))
    for _ in range(20):
        layer.update(*states(1))
        kept, before = layer.keys, layer.keys.clone()
        for _ in range(5):
            layer.update(*states(1))
        assert torch.equal(kept, before)


@holders_are_told
@pytest.mark.parametrize("see", [lambda layer: layer.keys, lambda layer: layer.keys[:, :1, 3:].mT])
def test_a_view_that_someone_kept_stays_as_it_was(see: Callable[[Any], Tensor]) -> None:
    layer = layer_with(10)
    kept = see(layer)
    before = kept.clone()
    layer.crop(-4)
    layer.update(*states(6))
    assert torch.equal(kept, before)
    now = place(layer.keys)
    assert now != place(kept)
    layer.crop(-4)  # of the new buffer, no one else knows
    layer.update(*states(4))
    assert place(layer.keys) == now


@holders_are_told
def test_an_assigned_tensor_frees_the_buffer_and_is_never_written_to() -> None:
    layer = layer_with(10)
    storage = layer.keys.untyped_storage()
    assert torch._C._storage_Use_Count(storage._cdata) > 1
    foreign = torch.zeros(1, HEADS, 40, KEY_SIZE)
    layer.keys = foreign[:, :, :10]
    assert torch._C._storage_Use_Count(storage._cdata) == 1
    layer.update(*states(5))
    assert not foreign.any()
    assert layer.keys.shape[2] == 15
    assert not layer.keys[:, :, :10].any()


@holders_are_told
def test_nothing_is_kept_after_reset() -> None:
    layer = layer_with(10)
    storage = layer.keys.untyped_storage()
    layer.reset()
    assert torch._C._storage_Use_Count(storage._cdata) == 1
    assert layer.keys is None


def test_states_of_other_rows_or_dtypes_are_upstreams_business() -> None:
    for other in (states(1, rows=2), states(1, dtype=torch.float64)):
        pair = [layer_with(4), DynamicLayer()]
        pair[1].update(pair[0].keys, pair[0].values)
        outcomes = []
        for layer in pair:
            try:
                outcomes.append(layer.update(*other))
            except RuntimeError as error:
                outcomes.append(str(error))
        equal(*outcomes)
    assert outcomes[0][0].dtype is torch.float64


def test_gradients_flow_through_what_is_added() -> None:
    layer = layer_with(4)
    with torch.enable_grad():
        keys, values = (state.requires_grad_() for state in states(2))
        first, _ = layer.update(keys, values)
        product = (first * first).sum()
    layer.update(*states(3))  # in no_grad; must not spoil what backward needs
    product.backward()
    assert torch.allclose(keys.grad, 2 * keys)
    assert layer.keys.shape[2] == 9


def test_a_buffer_of_inference_mode_is_left_behind_outside_of_it() -> None:
    layer = as_growing(DynamicLayer(), GrowthPolicy())
    with torch.inference_mode():
        layer.update(*states(3))
        layer.update(*states(1))  # with room behind it
    before = layer.keys.clone()
    layer.update(*states(1))
    assert torch.equal(layer.keys[:, :, :4], before)
    assert not layer.keys.is_inference()
    with torch.inference_mode():
        layer.update(*states(1))
    assert layer.keys.shape[2] == 6


def test_compiled_code_may_update_a_layer() -> None:
    layer, eager = layer_with(4), DynamicLayer()
    eager.update(layer.keys, layer.values)
    new = states(1)
    torch.compile(lambda *pair: layer.update(*pair), backend="eager")(*new)
    eager.update(*new)
    assert torch.equal(layer.keys, eager.keys)
    layer.update(*new)
    assert layer.keys.shape[2] == 6


class Quantised(Tensor):
    """As quanto's activations: an operation on one alone or on all, but no copy into another tensor."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert function is not Tensor.copy_ or type(args[0]) is cls
        result = super().__torch_function__(function, types, args, kwargs)
        is_buffer = function in (Tensor.new_empty, Tensor.new_zeros)
        return result.as_subclass(Tensor) if is_buffer else result


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("length", [5, 400])
def test_quantised_values_are_upstreams_business(cache: str, length: int) -> None:
    """quanto's activations: values come from a quantised layer, and keys were rotated."""
    theirs = tiny.llama(max_position_embeddings=512)
    theirs.generation_config.eos_token_id = None
    for layer in theirs.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda m, i, out: out.as_subclass(Quantised))
    ours = hfgen.mix_into(copy.deepcopy(theirs))
    for options in ({}, {"do_sample": True}, {"num_beams": 3}):
        tokens = []
        for model in (theirs, ours):
            torch.manual_seed(0)
            options |= {"max_new_tokens": 6, "cache_implementation": cache}
            tokens.append(model.generate(tiny.prompt(length=length), **options))
        assert torch.equal(*tokens), options


# ---------------------------------------------------------------- the cache


def config(n_layers: int = 3, **options: Any) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=n_layers,
        num_attention_heads=HEADS,
        hidden_size=HEADS * KEY_SIZE,
        **options,
    )


def caches(*arguments: Any, **options: Any) -> list[DynamicCache]:
    return [DynamicCache(*arguments, **options), GrowingCache(*arguments, **options)]


def contents(cache: Any) -> list[Any]:
    return [(upstream_kind(layer), layer.keys, layer.values) for layer in cache.layers]


@pytest.mark.parametrize("with_config", [True, False], ids=["layers known", "layers appended"])
def test_the_cache_is_upstreams(with_config: bool) -> None:
    pair = caches(config=config() if with_config else None)
    assert isinstance(pair[1], DynamicCache)
    for n_tokens in (7, 1, 3):
        for layer in range(3):
            new = states(n_tokens, rows=2)
            equal(*(cache.update(*new, layer) for cache in pair))
    for cache in pair:
        cache.crop(-2)
        cache.batch_repeat_interleave(2)
    equal(*map(contents, pair))
    equal(*map(list, pair))
    assert {type(layer) for layer in pair[1].layers} == {GrowingLayer}
    assert not with_config or pair[1]._growth.n_tensors == 2 * 3
    assert (pair[1].get_seq_length(), len(pair[1])) == (9, 3)
    again = GrowingCache(iter(pair[1]))  # as distributed wrappers gather caches
    equal(contents(again), contents(pair[0]))
    assert place(again.layers[0].keys) != place(pair[1].layers[0].keys)


def test_every_growing_kind_is_found_by_the_layer_types_of_a_config() -> None:
    kinds = ["full_attention", "sliding_attention", "chunked_attention", "indexed_attention"]
    kinds += ["linear_attention", "hybrid", "hybrid_sliding"]
    options = {"layer_types": kinds, "sliding_window": 4, "attention_chunk_size": 4}
    pair = caches(config=config(len(kinds), **options))
    for theirs, ours in zip(*(cache.layers for cache in pair), strict=True):
        assert type(ours) is KINDS.get(type(theirs), type(theirs))
    assert {type(layer) for layer in pair[1].layers} > set(KINDS.values())


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_holds_what_is_filled_and_nothing_else(how: str) -> None:
    cache = GrowingCache(config=config(2))
    for layer in range(2):
        cache.update(*states(300), layer)
    if how == "deepcopy":
        twin = copy.deepcopy(cache)
    elif how == "pickle":
        pickled = pickle.dumps(cache)
        assert len(pickled) < 2 * 300 * HEADS * (KEY_SIZE + VALUE_SIZE) * 4 + 6000
        twin = pickle.loads(pickled)
    else:
        file = io.BytesIO()
        torch.save(cache, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    equal(contents(twin), contents(cache))
    assert twin.layers[0].keys.untyped_storage().nbytes() == 300 * HEADS * KEY_SIZE * 4
    new = states(1)
    twin.update(*new, 0)
    assert (twin.get_seq_length(), cache.get_seq_length()) == (301, 300)
    twin.expect(310)
    assert twin.layers[1]._growth is twin._growth
    assert cache._growth.max_length is None


def decode(cache: Any, n_layers: int, prompt: int, end: int, rows: int, reorders: bool) -> None:
    while (length := int(cache.get_seq_length())) < end:
        for layer in range(n_layers):
            cache.update(*states(1 if length else prompt, rows), layer)
        if reorders:
            cache.reorder_cache(torch.randint(rows, (rows,)))


LAYER_TYPES = {
    "full": ["full_attention"] * 4,
    "window": ["sliding_attention"] * 4,
    "mixed": ["sliding_attention", "full_attention"] * 2,
}


@pytest.mark.parametrize("reorders", [False, True], ids=["", "beams"])
@pytest.mark.parametrize("prompt", [1, 170])
@pytest.mark.parametrize(
    ("kind", "window"), [("full", 16), ("window", 16), ("window", 150), ("mixed", 16)]
)
def test_memory_is_never_above_upstreams_peak(
    kind: str, window: int, prompt: int, reorders: bool
) -> None:
    """If a call goes on to its end. If it stops before, each layer has at most a block more.

    Where windows are beside full attention, reordered or copied, their room counts: one tensor of a window.
    """
    rows, end = 2, 200
    layer_types = LAYER_TYPES[kind]
    options = {"config": config(4, layer_types=layer_types, sliding_window=window)}
    peaks = []
    for make in (DynamicCache, partial(GrowingCache, max_length=end), GrowingCache):
        cache = make(**options)
        with LiveBytes() as counted:
            decode(cache, 4, prompt, end, rows, reorders)
        peaks.append(counted.peak)
    upstream, ours, without_end = peaks
    token = rows * HEADS * 4
    moves_in_place = kind == "window" and not reorders and not NO_COUNT
    extra = 0 if kind == "full" or moves_in_place else window * VALUE_SIZE
    assert ours <= upstream + extra * token
    block = max(SMALLEST_BLOCK, end // 8) * (8 + reorders) * VALUE_SIZE
    assert without_end <= upstream + (extra + block) * token


# ---------------------------------------------------------------- generate()


def filled(cache: Any) -> list[Tensor]:
    """Keys and values of all layers."""
    return [states for layer in cache.layers for states in (layer.keys, layer.values)]


def test_generate_decodes_with_it_unless_told_otherwise() -> None:
    model, ids = hfgen.mix_into(tiny.llama()), torch.tensor([[5, 6, 7]])
    for name in (None, "dynamic"):
        result = model.generate(
            ids, max_new_tokens=3, cache_implementation=name, return_dict_in_generate=True
        )
        assert type(result.past_key_values) is GrowingCache
        assert result.past_key_values._growth.max_length == 5


@pytest.mark.parametrize("kind", [DynamicLayer, DynamicSlidingWindowLayer])
@pytest.mark.parametrize(
    "mode", [{}, {"num_beams": 3}, {"do_sample": True, "num_beams": 2}], ids=str
)
def test_a_method_of_a_layer_that_a_library_replaces_is_called(
    kind: Any, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    upstreams, calls = kind.update, []

    def update(self: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(keys.shape)
        return upstreams(self, 1.5 * keys, values / 2, *args, **kwargs)

    family = "mistral" if kind is DynamicSlidingWindowLayer else "llama"
    inputs = harness.FAMILIES[family].inputs(harness.upstream(family), 2, False, 0)

    def results() -> list[Any]:
        found = []
        for model in (harness.upstream(family), harness.ours(family)):
            torch.manual_seed(0)
            calls.clear()
            found.append((model.generate(**inputs, max_new_tokens=6, **mode).tolist(), [*calls]))
        return found

    plain, _ = results()
    monkeypatch.setattr(kind, "update", update)
    theirs, mine = results()
    assert mine == theirs
    assert theirs[1]
    assert theirs[0] != plain[0]


def test_the_cross_attention_of_encoder_decoders_does_not_grow() -> None:
    model = hfgen.mix_into(tiny.t5())
    result = model.generate(tiny.prompt(), max_new_tokens=3, return_dict_in_generate=True)
    cache = result.past_key_values
    assert isinstance(cache, EncoderDecoderCache)
    assert type(cache.self_attention_cache) is GrowingCache
    assert type(cache.cross_attention_cache) is DynamicCache


def test_a_returned_cache_goes_on_twice() -> None:
    model, ids = hfgen.mix_into(tiny.llama()), tiny.prompt()
    options: dict[str, Any] = {"return_dict_in_generate": True, "eos_token_id": None}
    first = model.generate(ids, max_new_tokens=6, **options)
    views = [(states, states.clone()) for states in filled(first.past_key_values)]
    answers = []
    for question in (tiny.prompt(length=3, seed=1), tiny.prompt(length=3, seed=2)):
        turn = torch.cat([first.sequences, question], dim=1)
        cache = copy.deepcopy(first.past_key_values)
        answers.append(model.generate(turn, past_key_values=cache, max_new_tokens=50, **options))
        assert torch.equal(
            answers[-1].sequences, model.generate(turn, max_new_tokens=50, **options).sequences
        )
        assert answers[-1].past_key_values is cache
        assert cache._growth.max_length == turn.shape[1] + 49
    cache = first.past_key_values  # and at last itself, cropped to all but the prompt's last
    cache.crop(-6)
    again = model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=True, **options)
    assert again.past_key_values is cache
    for view, before in views:
        assert torch.equal(view, before)


def test_fewer_copies_than_tokens() -> None:
    """Of the cache: none while a block lasts."""
    model = hfgen.mix_into(tiny.llama())
    moves = []
    with patched(GrowableTensor, "_move", lambda self, *args: moves.append(len(args))):
        model.generate(tiny.prompt(), max_new_tokens=3 * SMALLEST_BLOCK, eos_token_id=None)
    assert len(moves) == 2 * 2 * 3 or len(moves) == 2 * 2 * 4  # layers, keys and values, blocks


@contextmanager
def patched(owner: Any, name: str, before: Callable[..., Any]) -> Iterator[None]:
    """Within, ``before`` is called ahead of the method ``name``."""
    original = getattr(owner, name)

    def call(*args: Any) -> Any:
        before(*args)
        return original(*args)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["", "grouped"])
@pytest.mark.parametrize("window", [None, 40])
def test_logits_are_bit_identical(
    dtype: torch.dtype, attention: str, heads: tuple[int, int], window: int | None
) -> None:
    """Kernels may look at strides; of a view of a larger buffer they make the same numbers."""
    kinds = ["full_attention"] if window is None else ["sliding_attention"]
    model = tiny.llama(
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        attn_implementation=attention,
        sliding_window=window,
        layer_types=2 * kinds,
    ).to(dtype)
    model.set_attn_implementation(attention)
    pair = caches(config=model.config)
    ids = tiny.prompt(rows=3, length=150)
    mask = torch.ones_like(ids)
    mask[0, :20] = mask[2, :3] = 0
    start = 0
    for n_tokens in (50, 1, 1, 7, 40, *[1] * 45):  # more than a block
        end = start + n_tokens
        theirs, ours = (
            model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache).logits
            for cache in pair
        )
        assert torch.equal(theirs, ours), f"at {start}"
        start = end


#: Families whose attention is written in another way each.
BIT_IDENTICAL = ("bloom", "falcon_40b", "gemma3_text", "gpt2", "gptj", "mpt", "t5", "whisper")


@pytest.mark.parametrize("family", BIT_IDENTICAL)
@pytest.mark.parametrize("mode", ["greedy_search", "beam_search"])
def test_scores_and_states_are_bit_identical_in_generate(
    family: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"outputs": ["scores", "logits"]}
    case = harness.settle(harness.Case(family, mode, 3, True, 5, options))
    monkeypatch.setattr(GrowthPolicy, "spare", lambda self, length: 2)
    ours = harness.run(harness.ours(family), case)
    monkeypatch.setitem(CACHES, "dynamic", UPSTREAMS)
    theirs = harness.run(harness.ours(family), case)
    assert ours.error is None, ours.message
    assert harness.compare(theirs, ours, tolerance=0.0) == []


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_lookup_num_tokens": 4, "num_assistant_tokens_schedule": "constant"},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"penalty_alpha": 0.6, "top_k": 4, "low_memory": True},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3},
        {"prefill_chunk_size": 3},
    ],
    ids=lambda options: next(iter(options)) + ("!" if "low_memory" in options else ""),
)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("concatenated", [0, SHIPPED])
def test_modes_that_change_the_cache(
    options: dict[str, Any],
    window: int | None,
    concatenated: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(growing, "CONCATENATED", concatenated)
    kinds = ["full_attention"] if window is None else ["sliding_attention"]
    model = hfgen.mix_into(tiny.llama(sliding_window=window, layer_types=2 * kinds))
    arguments: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None} | options
    monkeypatch.setattr(GrowthPolicy, "spare", lambda self, length: 3)

    def run() -> Tensor:
        torch.manual_seed(0)
        ids = tiny.prompt().repeat(1, 3)
        tokens: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
        return tokens

    ours = run()
    monkeypatch.setitem(CACHES, "dynamic", UPSTREAMS)
    assert torch.equal(ours, run())


def test_another_number_of_rows_is_an_error_that_leaves_the_cache_alone() -> None:
    model = hfgen.mix_into(tiny.llama())
    cache = GrowingCache(config=model.config)
    model(tiny.prompt(rows=3), past_key_values=cache)
    before = [states.clone() for states in filled(cache)]
    with pytest.raises(ValueError, match="3 sequences, but the call has 2 prompts"):
        model.generate(tiny.prompt(length=9), past_key_values=cache, max_new_tokens=2)
    equal(before, list(filled(cache)))


def with_a_short_decoder() -> Any:
    model = tiny.t5()
    model.config.num_decoder_layers = 1
    torch.manual_seed(0)
    return type(model)(model.config).eval()


@pytest.mark.parametrize(
    "build",
    [
        *(partial(harness.upstream, name) for name in ("gemma3n_text", "gemma4_text")),
        with_a_short_decoder,
    ],
    ids=["gemma3n_text", "gemma4_text", "t5"],
)
def test_a_cache_made_without_a_config_has_the_layers_that_are_written_to(build: Any) -> None:
    """Fewer than the config tells: the last ones may share keys, and a decoder may be shorter."""
    texts = []
    for is_ours in (False, True):
        model = copy.deepcopy(build())
        model = hfgen.mix_into(model) if is_ours else model
        cache: Any = DynamicCache()
        ids, arguments = tiny.prompt(1, 9) % 60, {"max_new_tokens": 3, "eos_token_id": None}
        if model.config.is_encoder_decoder:
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        first = model.generate(ids, past_key_values=cache, **arguments)
        text = torch.cat([first, torch.tensor([[7, 8]])], dim=1)
        if model.config.is_encoder_decoder:
            arguments |= {
                "decoder_input_ids": text,
                "decoder_attention_mask": torch.ones_like(text),
            }
        else:
            ids = text
        texts.append(model.generate(ids, past_key_values=cache, **arguments))
    assert torch.equal(*texts)
