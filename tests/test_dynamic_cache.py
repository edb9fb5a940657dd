"""The dynamic cache that grows in place, beside upstream's, which concatenates."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from hfgen.caches.dynamic import as_growing
from hfgen.caches.growing import Room

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
        self.both(method, argument)
        if self.seen:
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
    elif name == "edit" and pair.seen and pair.theirs.keys.shape[-2]:
        pair.kept.clear()  # upstream's next tensors are copies, hfgen's are not: both are edited
        for layer in (pair.theirs, pair.ours):
            layer.keys[:, :, -1:] = layer.keys[:, :, :1]


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("records", [False, True], ids=["", "recording"])
@settings(max_examples=60, deadline=None)
@given(operations=st.lists(OPERATIONS, min_size=1, max_size=25), block=st.sampled_from([1, 4, 40]))
def test_a_layer_is_upstreams_after_every_operation(
    kind: str, records: bool, operations: list[tuple[str, Any]], block: int
) -> None:
    torch.manual_seed(0)
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


class _Blocks(Room):
    """Room of one size, so that short sequences fill buffers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.n_tensors = size

    def block(self, length: int) -> int:
        return self.n_tensors
